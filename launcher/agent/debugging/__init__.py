"""Debuggers in running workers: the agent's side, and what runs in the worker."""
