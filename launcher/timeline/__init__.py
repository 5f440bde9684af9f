"""The time use of a run's ranks: recorded by themselves, sent by agents, kept with the run."""
