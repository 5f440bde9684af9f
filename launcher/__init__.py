"""The launcher: `dtrain run`. Start at cli.py; README.md has the map of the files.

Nothing here imports torch or ddp in the launcher's own processes; only store.py does, in a process of its own.
"""

__version__ = "0.1.0"
