"""Detection of ranks that wait for others in init_process_group, which torch does not report for 30 minutes. Pure.

All ranks are inspected some time after the start of an attempt, then after twice that time, and so on; and once more
soon after an inspection that finds a rank newly waiting. Ranks that wait in two consecutive inspections are reported,
once per attempt. Inspections end at the first step, or when torch has given up by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from launcher.frozen import dataclass
from launcher.hangs.positions import main_thread
from launcher.hangs.watch import HangPolicy
from launcher.protocol.reports import Evidence

FIRST_SHARE = 0.25  # of HangPolicy.quiet_s; 30 s by default
LAST_S = 1800.0
_CONNECTS = "_create_c10d_store"  # of torch.distributed.rendezvous


@dataclass(frozen=True)
class WaitingRanks:
    """Ranks that have waited in init_process_group for at least `waited_s`, and the state of all others."""

    ranks: tuple[int, ...]
    connecting: tuple[int, ...]  # those of them that still connect to the store
    absent: tuple[int, ...]  # ranks that are elsewhere
    unknown: tuple[int, ...]  # ranks without a readable stack
    ended: tuple[int, ...]
    looked_at: tuple[Evidence, ...]
    waited_s: float


class MeetingWatch:
    def __init__(self, policy: HangPolicy) -> None:
        self._first_s = FIRST_SHARE * policy.quiet_s
        self.begin()

    def begin(self) -> None:
        """Reset for a new attempt."""
        self._began: float | None = None
        self._after_s = self._first_s
        self._before: tuple[float, set[tuple[int, int]]] = (0.0, set())
        self._is_over = False

    def end(self) -> None:
        """Stop inspecting in this attempt."""
        self._is_over = True

    def wants_look(self, now: float) -> bool:
        """Return whether to inspect all ranks now; call once all have started."""
        if self._began is None:
            self._began = now
        if self._is_over or self._after_s > LAST_S or now < self._began + self._after_s:
            return False
        while now >= self._began + self._after_s:
            self._after_s *= 2
        return True

    def looked(self, evidence: Sequence[Evidence], ranks: Collection[int], now: float) -> WaitingRanks | None:
        """Add an inspection of all `ranks`; those without evidence have ended. Return waiting ranks, once certain."""
        if not evidence:  # a host has not answered
            return None
        frames = {each.rank: main_thread(each.stack) for each in evidence}
        functions = {
            rank: {frame.function for frame in found if "/torch/distributed/" in frame.file}
            for rank, found in frames.items()
        }
        waiting = {(each.rank, each.pid) for each in evidence if "init_process_group" in functions[each.rank]}
        (then, before), self._before = self._before, (now, waiting)
        elsewhere = sorted({*functions} - {rank for rank, _ in waiting})
        absent = tuple(rank for rank in elsewhere if frames[rank])
        ended = tuple(sorted({*ranks} - {*functions}))
        is_new = not waiting <= before
        if is_new and self._began is not None:
            self._after_s = min(self._after_s, now - self._began + self._first_s)
        # If no rank is missing, the last one may have just arrived.
        if not waiting & before or (is_new and not absent and not ended):
            return None
        self.end()
        have_waited = tuple(sorted(rank for rank, _ in waiting & before))
        return WaitingRanks(
            ranks=have_waited,
            connecting=tuple(rank for rank in have_waited if _CONNECTS in functions[rank]),
            absent=absent,
            unknown=tuple(rank for rank in elsewhere if not frames[rank]),
            ended=ended,
            looked_at=tuple(evidence),
            waited_s=now - then,
        )
