"""The numbers of the run's compositions, its generations, as the launcher announces them to this process.

DTRAIN_GENERATION is the number with which this process was started: above 0, it takes the place of one that failed.
Newer ones come through the pipe that DTRAIN_GENERATION_PIPE names, eight bytes each, little-endian; a thread reads it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

__all__ = ["Announcements", "can_replace", "generation_at_start"]

_NUMBER, _PIPE = "DTRAIN_GENERATION", "DTRAIN_GENERATION_PIPE"
_BYTES = 8


def can_replace() -> bool:
    """Whether the launcher of this process announces generations."""
    return _PIPE in os.environ


def generation_at_start() -> int:
    """Return the generation that this process was started for; 0 is the first."""
    text = os.environ.get(_NUMBER, "")
    return int(text) if text.isdecimal() and can_replace() else 0


class Announcements:
    """Reads the pipe in a thread of its own until the process ends. `call` gets each newer number, in that thread."""

    def __init__(self, call: Callable[[int], None]) -> None:
        """Raises OSError if the pipe cannot be opened."""
        self.newest = generation_at_start()
        self._call = call
        self._news = threading.Condition()
        descriptor = os.open(os.environ[_PIPE], os.O_RDONLY | os.O_CLOEXEC)  # at once: the launcher has it open
        threading.Thread(target=self._read, args=(descriptor,), name="generations", daemon=True).start()

    def wait_newer(self, than: int, limit_s: float) -> bool:
        """Wait until a generation newer than `than` is announced; return whether one is, after `limit_s` at most."""
        with self._news:
            return self._news.wait_for(lambda: self.newest > than, limit_s)

    def _read(self, descriptor: int) -> None:
        while data := os.read(descriptor, _BYTES):  # numbers are written whole
            number = int.from_bytes(data, "little")
            if number > self.newest:
                with self._news:
                    self.newest = number
                    self._news.notify_all()
                try:
                    self._call(number)
                except Exception as error:  # the next number must be heard
                    print(f"ddp: generation {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
