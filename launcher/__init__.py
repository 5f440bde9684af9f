"""The launcher: `dtrain run`. Start at cli/main.py; README.md has the map of the files.

Nothing here imports torch or ddp in the launcher's own processes; agent/store_process.py has a process of its own.
"""

__version__ = "0.1.0"
