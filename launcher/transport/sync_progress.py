"""How far the sending of files to all hosts is, for the terminal and for the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

_NOTICE_S = 0.2


class Progress:
    """How far the sending to all hosts is, as one line; and notes for the user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._notes: list[str] = []
        self._say: Callable[[str], None] | None = None
        self._show: Callable[[str], None] = lambda _: None
        self._wait: Callable[[float], None] = lambda _: None
        self._shown_at = self._waited_at = 0.0

    def tell(self, *, say: Callable[[str], None], show: Callable[[str], None], wait: Callable[[float], None]) -> None:
        """Call `say` with notes, `show` with the status, and `wait` with each time that was spent on sending."""
        with self._lock:
            self._say, self._show, self._wait = say, show, wait
        self.notes(())

    def notes(self, notes: Sequence[str]) -> None:
        with self._lock:
            self._notes += notes
            said, self._notes = (self._notes, []) if self._say is not None else ([], self._notes)
        for note in said:
            assert self._say is not None
            self._say(note)

    def starts(self, host: str, size: int) -> None:
        with self._lock:
            if not self._sizes:
                self._shown_at = self._waited_at = time.monotonic()
            self._sizes[host] = self._sizes.get(host, 0) + size
            self._sent.setdefault(host, 0)

    def sent(self, host: str, size: int) -> None:
        with self._lock:
            self._sent[host] += size
            now = time.monotonic()
            if now - self._shown_at < _NOTICE_S:
                return
            self._shown_at = now
            spent_s, self._waited_at = now - self._waited_at, now
            done, total = sum(self._sent.values()), sum(self._sizes.values())
            hosts = f"{len(self._sizes)} hosts" if len(self._sizes) > 1 else next(iter(self._sizes))
            text = f"sending files to {hosts}: {done >> 20} of {total >> 20} MB"
        self._wait(spent_s)
        self._show(text)

    def ends(self, host: str) -> None:
        with self._lock:
            self._sizes.pop(host, None)
            self._sent.pop(host, None)
