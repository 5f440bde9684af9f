"""Reactions of a run to failures: restarts, changes of its members, hangs. Pure."""
