"""Cleanup: finds the processes and folders of a run, and ends them even if the agent cannot."""
