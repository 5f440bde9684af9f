"""Closes the groups of this process before its interpreter ends, and gives them up in a forked child."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from typing import Protocol

from ddp.monitoring.interrupts import has_started

LEAVE_S = 5.0  # how long a group's `close` waits for another thread: a callback may hang


class Closing(Protocol):
    """An engine that runs the operations of a group."""

    def close(self) -> None: ...
    def leave_to_parent(self) -> None: ...


_engines: weakref.WeakValueDictionary[int, Closing] = weakref.WeakValueDictionary()  # by when they were made
_numbers = itertools.count()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def end_with_process(engine: Closing) -> None:
    """Call the engine's `close()` before the interpreter ends, and its `leave_to_parent()` in a forked child."""
    _engines[next(_numbers)] = engine


def join_at_end(thread: threading.Thread) -> None:
    """Wait for a thread, once it was started, before the interpreter ends and when all engines are closed."""
    _threads.add(thread)


def close_all() -> None:
    """Close all groups before the interpreter ends: a thread that takes its lock afterwards would abort the process.

    The newest first: one that runs operations of others was made after them.
    """
    until = time.monotonic() + LEAVE_S
    for _, engine in sorted(_engines.items(), reverse=True):
        engine.close()
    for thread in filter(has_started, list(_threads)):
        thread.join(max(0.0, until - time.monotonic()))


def _leave_all() -> None:
    for engine in list(_engines.values()):
        engine.leave_to_parent()


atexit.register(close_all)
os.register_at_fork(after_in_child=_leave_all)
