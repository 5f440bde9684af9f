"""Processes that stay warm after a run: where they are found, what must be equal to use one, the way to them.

The process itself is workers/fork_server.py, kept by workers/keeper.py. There is none unless somebody asked for
it by --keep-warm or `dtrain warm --start`.
"""
