"""Ranks that wait in init_process_group for others that do not come, of which torch says nothing for 30 minutes.

Pure.
All ranks are looked at some time after the start of an attempt, then after twice that time, and so on. Who waits there
at two looks one after another is told of, once. Nobody looks any more once a step of ddp is made, or torch has given up
by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.frozen import dataclass
from launcher.hangs.positions import main_thread
from launcher.hangs.watch import HangPolicy
from launcher.protocol.reports import Evidence

__all__ = ["Apart", "MeetingWatch"]

FIRST_SHARE = 0.25  # of the least silence that is too long: 30 s
LAST_S = 1800.0
_CONNECTS = "_create_c10d_store"  # of torch.distributed.rendezvous


@dataclass(frozen=True)
class Apart:
    """Ranks that have waited in init_process_group for `waited_s` at least; `connecting`: for the store itself."""

    waiting: tuple[int, ...]
    connecting: tuple[int, ...]
    looked_at: tuple[Evidence, ...]
    waited_s: float


class MeetingWatch:
    def __init__(self, policy: HangPolicy) -> None:
        self._first_s = FIRST_SHARE * policy.quiet_s
        self.begin()

    def begin(self) -> None:
        """Begin anew, with an attempt."""
        self._began: float | None = None
        self._after_s = self._first_s
        self._before: tuple[float, set[tuple[int, int]]] = (0.0, set())
        self._is_over = False

    def end(self) -> None:
        """Look no more in this attempt."""
        self._is_over = True

    def wants_look(self, now: float) -> bool:
        """Whether all ranks are to be looked at; to be asked once all have started."""
        if self._began is None:
            self._began = now
        if self._is_over or self._after_s > LAST_S or now < self._began + self._after_s:
            return False
        while now >= self._began + self._after_s:
            self._after_s *= 2
        return True

    def looked(self, evidence: Sequence[Evidence], now: float) -> Apart | None:
        """Take a look at all ranks; return who waits, once that is certain."""
        functions = {
            each.rank: {frame.function for frame in main_thread(each.stack) if "/torch/distributed/" in frame.file}
            for each in evidence
        }
        waiting = {(each.rank, each.pid) for each in evidence if "init_process_group" in functions[each.rank]}
        (then, before), self._before = self._before, (now, waiting)
        if not waiting & before:
            return None
        self.end()
        ranks = tuple(sorted(rank for rank, _ in waiting))
        connecting = tuple(rank for rank in ranks if _CONNECTS in functions[rank])
        return Apart(ranks, connecting, tuple(evidence), now - then)
