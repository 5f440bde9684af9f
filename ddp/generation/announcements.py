"""The run's generations (the compositions of its ranks), as announced by the launcher.

DTRAIN_GENERATION is the number with which this process was started: above 0, it replaces one that failed, or joins the
others. Newer numbers arrive through the pipe in DTRAIN_GENERATION_PIPE, eight bytes each, little-endian; a thread reads
it. The file in DTRAIN_GENERATION_FILE describes the newest one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_NUMBER, _PIPE, _FILE = "DTRAIN_GENERATION", "DTRAIN_GENERATION_PIPE", "DTRAIN_GENERATION_FILE"
_BYTES = 8


def can_replace() -> bool:
    """Return whether the launcher of this process announces generations."""
    return _PIPE in os.environ


def generation_at_start() -> int:
    """Return the generation that this process was started for; 0 is the first."""
    text = os.environ.get(_NUMBER, "")
    return int(text) if text.isdecimal() and can_replace() else 0


@dataclass(frozen=True)
class Generation:
    """A generation; `when` its ranks meet: "now"; "later", under a newer number, once they are known; "at_commit".

    `variables` are this process's environment variables that may change with it.
    """

    number: int
    when: str = "now"
    variables: Mapping[str, str] = field(default_factory=dict)


class Announcements:
    """Reads the pipe in its own thread until the process ends. `call` gets each newer generation, in that thread."""

    def __init__(self, call: Callable[[Generation], None]) -> None:
        """Raises OSError if the pipe cannot be opened."""
        self.generation = _newest(generation_at_start())
        self._call = call
        self._news = threading.Condition()
        descriptor = os.open(os.environ[_PIPE], os.O_RDONLY | os.O_CLOEXEC)  # returns at once: the launcher has it open
        threading.Thread(target=self._read, args=(descriptor,), name="generations", daemon=True).start()

    @property
    def newest(self) -> int:
        """Number of the newest generation."""
        return self.generation.number

    def wait_newer(self, than: int, limit_s: float | None) -> bool:
        """Wait, at most `limit_s`, until a generation newer than `than` is announced; return whether one was."""
        with self._news:
            return self._news.wait_for(lambda: self.newest > than, limit_s)

    def _read(self, descriptor: int) -> None:
        while data := os.read(descriptor, _BYTES):  # numbers are written whole
            number = int.from_bytes(data, "little")
            if number > self.newest:
                try:
                    found = _newest(number)
                    with self._news:
                        self.generation = found
                        self._news.notify_all()
                    self._call(found)
                except Exception as error:  # the thread must still read the next number
                    print(f"ddp: generation {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _newest(number: int) -> Generation:
    """Read the launcher's description of the newest generation, which is `number` or a later one."""
    try:
        with open(os.environ.get(_FILE, os.devnull), "rb") as file:
            text = file.read()
    except FileNotFoundError:
        text = b""
    said = json.loads(text) if text else {}
    if not said or said["number"] < number:
        return Generation(number)
    return Generation(said["number"], said["when"], said["variables"])
