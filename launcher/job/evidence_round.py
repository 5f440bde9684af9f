"""Where the ranks stand, asked of the hosts of an attempt before anything is stopped, or when the user wants to see.

Pure; owned by job.py. At most one round is under way; who does not answer in time is not waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.job.attempt import AttemptState
from launcher.job.events import Command, SaveEvidence, Send
from launcher.job.timers import Timer, Timers
from launcher.protocol import Collect, Collected, Evidence

__all__ = ["COLLECT_S", "EvidenceRounds"]

COLLECT_S = 2.0


@dataclass
class _Round:
    number: int
    waiting: set[str]
    asked: bool
    is_look: bool
    found: dict[int, Evidence] = field(default_factory=dict)


class EvidenceRounds:
    """`unanswered` are the hosts that did not answer the last round."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self.unanswered: set[str] = set()
        self._number = 0
        self._current: _Round | None = None

    @property
    def under_way(self) -> bool:
        return self._current is not None and not self._current.is_look

    @property
    def looks(self) -> bool:
        """Whether a look for ranks that hang is under way: any other round takes its place."""
        return self._current is not None and self._current.is_look

    def begin(self, hosts: Sequence[str], now: float, *, asked: bool = False, is_look: bool = False) -> list[Command]:
        """Ask these hosts; `asked`: somebody wants to see it; `is_look`: it may be for nothing."""
        assert not self.under_way
        self._number += 1
        self._current = _Round(self._number, set(hosts), asked, is_look)
        self._timers.set(Timer.EVIDENCE, now + COLLECT_S)
        return [Send(name, Collect(number=self._number, limit_s=0.75 * COLLECT_S)) for name in hosts]

    def take(self, host: str, message: Evidence | Collected) -> None:
        if self._current is None or message.number != self._current.number:
            return
        if isinstance(message, Evidence):
            self._current.found[message.rank] = message
        else:
            self.forget(host)

    def forget(self, host: str) -> None:
        """Wait for a host no longer: it has answered, or is lost."""
        if self._current is not None:
            self._current.waiting.discard(host)

    def over(self, now: float) -> bool:
        return self._current is not None and (not self._current.waiting or self._timers.over(Timer.EVIDENCE, now))

    def end_look(self) -> tuple[int, tuple[Evidence, ...]]:
        """End a look; return its number and what was found, nothing if a host has not answered."""
        current, self._current = self._current, None
        assert current is not None
        self._timers.cancel(Timer.EVIDENCE)
        found = () if current.waiting else tuple(evidence for _, evidence in sorted(current.found.items()))
        return current.number, found

    def end(self, attempt: AttemptState | None) -> list[Command]:
        """End the round, if there is one, and keep what was found."""
        current, self._current = self._current, None
        self._timers.cancel(Timer.EVIDENCE)
        if current is None or attempt is None or current.is_look:
            return []
        self.unanswered = current.waiting
        if not current.found:
            return []
        found = tuple(evidence for _, evidence in sorted(current.found.items()))
        if not current.asked:
            attempt.evidence = found
        return [SaveEvidence(attempt.number, current.number, found, current.asked)]
