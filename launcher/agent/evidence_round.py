"""The agent's answer to Collect: one look at where this host's workers stand (evidence.py), told when it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.agent.attempt import Attempt
from launcher.agent.stream_writer import StreamWriter
from launcher.protocol import Collect, Collected

if TYPE_CHECKING:
    from launcher.agent.evidence import Collection

__all__ = ["EvidenceRound"]


class EvidenceRound:
    """At most one look is under way: a newer order ends the one before, which is answered with what is not there."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._number = 0
        self._collection: Collection | None = None

    @property
    def pause_s(self) -> float:
        return float("inf") if self._collection is None else self._collection.pause_s

    def begin(self, order: Collect, attempt: Attempt | None) -> None:
        """Look at the workers of an attempt; without one, or without workers, there is nothing to see."""
        self.stop()
        running = [] if attempt is None else attempt.running
        if attempt is None or not running:
            self._writer.send(Collected(number=order.number))
            return
        from launcher.agent.evidence import Collection, Subject  # only where something fails, or somebody asks

        subjects = [Subject(attempt.number, worker.rank, worker.pid, worker.files.stack) for worker in running]
        self._number = order.number
        self._collection = Collection(order.number, subjects, order.limit_s)

    def step(self) -> None:
        if self._collection is None:
            return
        found = self._collection.step()
        if found is not None:
            for evidence in found:
                self._writer.send(evidence)
            self.stop()

    def stop(self) -> None:
        """End what is under way: nothing waits for it any more."""
        if self._collection is not None:
            self._collection.close()
            self._collection = None
            self._writer.send(Collected(number=self._number))

    def without_helpers(self, ended: dict[int, int]) -> dict[int, int]:
        """Return those of the reaped children (pid to wait status) that no look had started."""
        if self._collection is None:
            return ended
        helpers = {pid for pid in ended if self._collection.reaped(pid)}
        return {pid: status for pid, status in ended.items() if pid not in helpers}
