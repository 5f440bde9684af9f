"""Commands that want to see where the ranks are: each gets the answer of a round that begins after it has asked.

Rounds are made one after another (evidence_round.py); those who ask for the same meanwhile share the next one. Pure.
"""

from __future__ import annotations

from launcher.job.attempt import AttemptState
from launcher.job.events import Answer, Asked, CloseAsker, Command, StacksQuestion
from launcher.job.evidence_round import EvidenceRounds
from launcher.job.fleet import Fleet
from launcher.job.ranks import ENDED, RankState


class StackQuestions:
    """Those that wait for a round of their own."""

    def __init__(self, evidence: EvidenceRounds) -> None:
        self._evidence = evidence
        self._waiting: dict[int, StacksQuestion] = {}

    def ask(self, asked: Asked) -> None:
        assert isinstance(asked.question, StacksQuestion)
        self._waiting[asked.asker] = asked.question

    def leave(self, asker: int) -> None:
        self._waiting.pop(asker, None)
        self._evidence.leave(asker)

    def refuse_all(self, reason: str) -> list[Command]:
        waiting, self._waiting = self._waiting, {}
        return [command for asker in waiting for command in refuse(asker, reason)]

    def due(self, attempt: AttemptState, fleet: Fleet, now: float) -> list[Command]:
        """Begin the next round, if somebody wants one and none is under way."""
        if not self._waiting or self._evidence.under_way:
            return []
        question = next(iter(self._waiting.values()))
        askers = tuple(asker for asker, other in self._waiting.items() if other == question)
        for asker in askers:
            del self._waiting[asker]
        if why_not := next(filter(None, (why_not_rank(attempt, rank) for rank in question.ranks)), ""):
            return [command for asker in askers for command in refuse(asker, why_not)]
        hosts = [*dict.fromkeys(map(attempt.host_of, question.ranks))] if question.ranks else attempt.members
        return self._evidence.begin(fleet.workers_of(hosts), now, question=question, askers=askers)


def why_not_rank(attempt: AttemptState, rank: int) -> str:
    """Return why a rank cannot be looked into; empty if it can."""
    row = attempt.ranks.get(rank)
    if row is None:
        numbers = [row.number for row in attempt.ranks]
        return f"there is no rank {rank}; the run has ranks {min(numbers)} to {max(numbers)}"
    if row.state in ENDED:
        return f"rank {rank} has ended"
    return f"rank {rank} has not started yet; try again in a moment" if row.state is RankState.STARTING else ""


def refuse(asker: int, reason: str) -> list[Command]:
    return [Answer(asker, {"error": reason}), CloseAsker(asker)]
