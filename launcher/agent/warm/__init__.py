"""Processes that stay warm after a run: where they are found, what must match to use one, how it takes over.

The process itself is workers/fork_server.py, kept by workers/keeper.py. None exists unless a user requested it by
--keep-warm or `dtrain warm --start`.
"""
