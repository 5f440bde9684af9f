"""The end of a process of a group: its report to the others, and how it exits while a collective hangs."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
from traceback import format_exception_only
from typing import NoReturn, Protocol

import torch.distributed as dist

from ddp.errors import CollectiveError
from ddp.monitoring.stall_text import printable
from ddp.monitoring.user_code import line_of_traceback


class Unfinished(Protocol):
    """A collective in progress."""

    def is_completed(self) -> bool: ...


def how_it_ends() -> tuple[str, bool]:
    """Describe how this process ends, while it does; return also whether another rank is the cause."""
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # an interactive session continues after an error
        return "has exited", False
    line = line_of_traceback(error.__traceback__)
    said = format_exception_only(error)[0].splitlines()[0]  # works even if str() of the error fails
    is_secondary = isinstance(error, CollectiveError | dist.DistError) or "onnection closed by peer" in said
    return f"ended with {printable(said, 250)}, at {line}", is_secondary


_pending: list[Unfinished] = []


def leave_pending(work: Unfinished) -> None:
    """Note a collective that may run until this process ends: after a stall or Ctrl-C, no code waits for it."""
    _pending[:] = [*(other for other in _pending if not other.is_completed()), work]


def _leave_at_once() -> None:
    """Exit at once after an exception or Ctrl-C if a collective still hangs.

    At the interpreter's teardown, gloo would wait for it until the group's own timeout (half an hour by default), and
    neither the launcher nor the other ranks would notice that this rank has failed.
    """
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception | KeyboardInterrupt) or hasattr(sys, "ps1"):
        return
    if not all(work.is_completed() for work in _pending):
        end_process(error)


def end_process(error: BaseException) -> NoReturn:
    """End this process as Python does after `error`, but without the rest of its teardown."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # missing or closed
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(1)


atexit.register(_leave_at_once)  # at import, so that handlers registered later have run before
