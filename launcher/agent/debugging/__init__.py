"""Debuggers in workers that run: the agent's side, and what runs in the worker."""
