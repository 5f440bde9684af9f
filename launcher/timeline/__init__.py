"""What the ranks of a run spend their time on: recorded by themselves, sent by agents, kept with the run."""
