"""Leaving nothing behind: which processes and folders are a run's, and who ends them when the agent cannot."""
