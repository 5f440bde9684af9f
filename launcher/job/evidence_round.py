"""Where the ranks stand, asked of the hosts of an attempt before anything is stopped, or when the user wants to see.

Pure; owned by job.py. At most one round is under way; who does not answer in time is not waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.job.attempt import AttemptState
from launcher.job.events import Answer, CloseAsker, Command, SaveEvidence, Send, StacksQuestion
from launcher.job.ranks import ENDED
from launcher.job.timers import Timer, Timers
from launcher.protocol.commands import Collect
from launcher.protocol.reports import Collected, Evidence

COLLECT_S = 2.0
NATIVE_S = 30.0  # py-spy reads the symbols of all libraries of each rank, one after another


@dataclass
class _Round:
    number: int
    waiting: set[str]
    asked: bool
    is_look: bool
    limit_s: float
    question: StacksQuestion | None
    askers: tuple[int, ...]
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
    def shows(self) -> bool:
        """Whether what the round under way finds is shown to the user."""
        return self._current is not None and self._current.asked

    @property
    def looks(self) -> bool:
        """Whether a look for ranks that hang is under way: any other round takes its place."""
        return self._current is not None and self._current.is_look

    def begin(
        self, hosts: Sequence[str], now: float, *, asked: bool = False, is_look: bool = False,
        question: StacksQuestion | None = None, askers: tuple[int, ...] = (),
    ) -> list[Command]:  # fmt: skip
        """Ask these hosts; `asked`: somebody wants to see it; `is_look`: it may be for nothing.

        `question` is that of the commands which get the answer, `askers`.
        """
        assert not self.under_way
        self._number += 1
        ranks, native = ([*question.ranks], question.native) if question is not None else ([], False)
        limit_s = NATIVE_S if native else COLLECT_S
        self._current = _Round(self._number, set(hosts), asked, is_look, limit_s, question, askers)
        self._timers.set(Timer.EVIDENCE, now + limit_s)
        order = Collect(number=self._number, limit_s=0.75 * limit_s, ranks=ranks, native=native)
        return [Send(name, order) for name in hosts]

    def leave(self, asker: int) -> None:
        """Forget a command that waits for the end of the round."""
        if self._current is not None:
            self._current.askers = tuple(each for each in self._current.askers if each != asker)

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
        if current.question is not None:
            return _answer(current, current.question, attempt)
        if not current.found:
            return []
        found = tuple(evidence for _, evidence in sorted(current.found.items()))
        if not current.asked:
            attempt.evidence = found
        return [SaveEvidence(attempt.number, current.number, found, current.asked)]


def _answer(current: _Round, question: StacksQuestion, attempt: AttemptState) -> list[Command]:
    """Give those who have asked what was found, and whose answer is missing."""
    missing: dict[str, list[int]] = {}
    rows = {row.number: row for row in attempt.ranks}
    for rank in sorted(question.ranks or rows):
        if rank not in current.found and rank in rows and rows[rank].state not in ENDED:
            missing.setdefault(rows[rank].host, []).append(rank)
    value = {
        "attempt": attempt.number,
        "limit_s": current.limit_s,
        "evidence": [evidence for _, evidence in sorted(current.found.items())],
        "hosts": {str(rank): rows[rank].host for rank in current.found if rank in rows},
        "missing": missing,
    }
    return [command for asker in current.askers for command in (Answer(asker, value), CloseAsker(asker))]
