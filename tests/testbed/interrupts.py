"""An exception that a signal's handler raises at a chosen line of ddp's code, as the handler of torch's DataLoader."""

from __future__ import annotations

import gc
import linecache
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import ddp

_OURS = str(Path(ddp.__file__).parent)


class Died(RuntimeError, TimeoutError):
    """What the handler raises: a kind of what torch's DataLoader raises, and of what a timer does, an OSError."""


def _raise(signum: int, frame: FrameType | None) -> None:
    raise Died("a worker of the DataLoader has died")


class Interrupt:
    """Sends the signal at a line of ddp's, counted from 1; at none if `at` is 0. `seen` is the number of lines.

    `counts` returns whether the lines of a frame count. The end of a `with` statement does not: Python runs no handler
    between the last call in it and `__exit__`.
    """

    def __init__(self, at: float, counts: Callable[[FrameType], bool] = lambda frame: True) -> None:
        self._at, self._counts, self.seen = at, counts, 0
        self._lines: dict[FrameType, int] = {}  # the last line of each

    @property
    def has_come(self) -> bool:
        return self.seen >= self._at

    def __enter__(self) -> None:
        signal.signal(signal.SIGUSR2, _raise)
        gc.disable()  # in a finalizer the exception would be ignored
        if self._at:
            sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.enable()
        self._lines.clear()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line" and self._counts(frame) and not self._leaves_with(frame):
            self.seen += 1
            if self.seen == self._at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR2)
        return self._trace

    def _leaves_with(self, frame: FrameType) -> bool:
        before, self._lines[frame] = self._lines.get(frame, 0), frame.f_lineno
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return frame.f_lineno < before and line.lstrip().startswith("with ")
