"""What is shown and kept of a run: the terminal, log files, the last screen, JSON."""
