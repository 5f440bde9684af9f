"""Saves what a run needs to go on, and restores it."""
