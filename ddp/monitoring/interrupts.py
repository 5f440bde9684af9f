"""Distinguish an exception raised by a signal handler from one of the interrupted code.

Such an exception is this rank's own, whatever code ran: torch's DataLoader raises one in the middle of a collective
when one of its workers has died, and it is a RuntimeError, like those of a collective.
"""

from __future__ import annotations

import functools
import inspect
import signal
import threading
import traceback
from collections.abc import Callable
from types import CodeType


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether a signal handler raised `error` or its cause (`raise ... from`).

    Ctrl-C, whose handler is not Python code, always counts.
    """
    handlers = {_code_of(handler) for number in signal.valid_signals() if callable(handler := signal.getsignal(number))}
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
            return True
        error = error.__cause__
    return False


def has_started(thread: threading.Thread) -> bool:
    """Return False if an exception of a signal handler kept a thread from its start: then it can be started again."""
    return thread.ident is not None


def _code_of(handler: Callable[..., object]) -> CodeType | None:
    handler = inspect.unwrap(handler)
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not inspect.isroutine(handler):
        handler = type(handler).__call__
    return getattr(getattr(handler, "__func__", handler), "__code__", None)
