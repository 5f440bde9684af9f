"""Output of a run: the terminal, log files, the final report, JSON."""
