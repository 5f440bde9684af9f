"""An exception that a signal's handler raises at a chosen line of ddp's code, as the handler of torch's DataLoader."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import ddp

_OURS = str(Path(ddp.__file__).parent)


class Died(RuntimeError):
    """What the handler raises."""


def _raise(signum: int, frame: FrameType | None) -> None:
    raise Died("a worker of the DataLoader has died")


class Interrupt:
    """Sends the signal at a line of ddp's, counted from 1; at none if `at` is 0. `seen` is the number of lines.

    `counts` returns whether the lines of a frame count.
    """

    def __init__(self, at: float, counts: Callable[[FrameType], bool] = lambda frame: True) -> None:
        self._at, self._counts, self.seen = at, counts, 0

    @property
    def has_come(self) -> bool:
        return self.seen >= self._at

    def __enter__(self) -> None:
        signal.signal(signal.SIGUSR2, _raise)
        if self._at:
            sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line" and self._counts(frame):
            self.seen += 1
            if self.seen == self._at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR2)
        return self._trace
