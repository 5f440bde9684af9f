"""The thread of this process that writes a checkpoint while training goes on; at most one at a time.

Called by `ddp.checkpoint` on the rank that writes. What goes wrong is printed at once, and kept for `finish`. The
process does not end before the file is there; if it could not be written and nobody has asked until then, the process
ends with exit code 1.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable

__all__ = ["finish", "run", "start"]

_thread: threading.Thread | None = None
_failure: Exception | None = None


def start(write: Callable[[], None]) -> None:
    """Call `write` in a thread. `finish()` comes first."""
    global _thread
    assert _thread is None
    _thread = threading.Thread(target=_run_and_say, args=(write,), name="checkpoint")
    try:
        _thread.start()
    except RuntimeError:  # the interpreter ends, or there are too many threads
        _thread = None
        run(write)


def run(write: Callable[[], None]) -> None:
    """Call `write` here and now, and keep what it raises for `finish`."""
    global _failure
    try:
        write()
    except Exception as error:
        _failure = error


def _run_and_say(write: Callable[[], None]) -> None:
    run(write)
    if _failure is not None:  # the next call may be an hour away
        print(f"ddp: {_failure}", file=sys.stderr, flush=True)


def finish() -> Exception | None:
    """Wait for what was started; return what it raised, once."""
    global _thread, _failure
    if _thread is not None:
        _thread.join()
        _thread = None
    failure, _failure = _failure, None
    return failure


def _at_exit() -> None:
    failure = finish()
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
