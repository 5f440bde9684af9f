"""The thread of this process that writes a checkpoint while training goes on; at most one at a time.

Called by `ddp.checkpoint` on the rank that writes. What goes wrong is printed at once, and kept for `finish`. The
process does not end before the file is there; if the last one could not be written, and no caller has got that as an
error until then, the process ends with exit code 1. A process that ends with an exception, for which others may wait,
waits 5 s at most.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable

from ddp.checkpoint import failed_saves
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.process_end import end_process

__all__ = ["finish", "run", "start"]

_LONGEST_WAIT_S = 5.0  # after an exception

_thread: threading.Thread | None = None
_failure: Exception | None = None


def start(write: Callable[[], None]) -> None:
    """Call `write` in a thread. `finish()` comes first."""
    global _thread
    assert _thread is None
    # A daemon: the interpreter would wait for others without end, and before it calls what is registered at exit.
    _thread = threading.Thread(target=_run_and_say, args=(write,), name="checkpoint", daemon=True)
    try:
        _thread.start()
    except RuntimeError:  # the interpreter ends, or there are too many threads
        _thread = None
        run(write)


def run(write: Callable[[], None]) -> None:
    """Call `write` here and now, and keep what it raises for `finish`, but for what a signal's handler raises."""
    global _failure
    try:
        write()
    except Exception as error:
        if is_interrupt(error):
            raise
        _failure = error


def _run_and_say(write: Callable[[], None]) -> None:
    run(write)
    if _failure is not None:  # the next call may be an hour away
        print(f"ddp: {_failure}", file=sys.stderr, flush=True)


def finish(timeout_s: float | None = None) -> Exception | None:
    """Wait for what was started; return what it raised, once. Raises TimeoutError if it takes longer."""
    global _thread, _failure
    if _thread is not None:
        _thread.join(timeout_s)
        if _thread.is_alive():
            raise TimeoutError
        _thread = None
    failure, _failure = _failure, None
    return failure


def _at_exit() -> None:
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # a session goes on after an error
    try:
        failure = finish(None if error is None else _LONGEST_WAIT_S) or failed_saves.left()
    except (TimeoutError, KeyboardInterrupt) as cause:  # the thread may still run, and must not outlive the interpreter
        print("ddp: this process ends before its last checkpoint is written; the one before is whole", file=sys.stderr)
        end_process(error or cause)
    if failure is None:
        return
    traceback.print_exception(failure)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)  # an exception here would change nothing


def _forget() -> None:
    """The thread is the parent's."""
    global _thread, _failure
    _thread = _failure = None


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forget)
