"""Detection of hanging ranks: how long a silence is too long, learned from the run itself, and which rank is to blame.
Pure.

Signs of life are those of launcher/agent/observation/signs_of_life.py. A silence that is too long only starts
inspections of all ranks. A rank is blamed only if

- the others wait for it: at least half of the ranks are in some communication, and it is not (positions.py), and
- two consecutive inspections find it idle: it and its children use no CPU time, none waits for a disk, and its line
  stays the same. A working rank is left alone for BUSY times as long, 30 minutes by default, which is how long torch
  itself waits in a collective. The same holds for a save, whose storage may be slow and invisible (FUSE), and for the
  first evaluation, and
- its silence is longer than FACTOR times the longest one of that phase that any rank has returned from, and than
  `quiet_s`: storage clients wait up to a minute (botocore, NFS) before they retry, and the default is twice that, and
- none of the ranks that do not wait has a debugger attached.

A stopped process (SIGSTOP) is blamed without these conditions, from its start on, if two heartbeats have found it
stopped and others still run: a user who stops the whole run, by hand or with Ctrl-Z, intends to.

A silence counts only for ranks that have made STEPS steps; if no rank has, for all, once some have shown OUTPUTS signs.
The time before that is not limited. But the others wait for a rank that replaces another one: its silence
counts from its start on, which may take FACTOR times as long as the longest start.

Ranks that wait for each other before the first step are `MeetingWatch`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from launcher.frozen import dataclass
from launcher.hangs.positions import main_thread, odd_ranks
from launcher.protocol.reports import Evidence
from launcher.protocol.two_way import START, STEPS, Heartbeat

QUIET_S = 120.0
FACTOR = 10.0
BUSY = 15.0
# Least time between two inspections; or a quarter of `quiet_s`, and up to RARER times that after some without result.
LOOK_S = 2.0
RARER = 4.0
STOPPED = ("T",)  # state of a process stopped by a signal, as in /proc/PID/stat
IDLE_CPU_S, IDLE_SHARE = 0.03, 0.01  # CPU time between two inspections: for answering them, and background threads
_STEP, _SAVE = 0, 2  # phases; see ddp/monitoring/progress.py
# Of MeetingWatch: the first inspection as a share of `quiet_s` (30 s by default), and the last one.
_FIRST_SHARE, _LAST_S = 0.25, 1800.0
_CONNECTS = "_create_c10d_store"  # of torch.distributed.rendezvous


@dataclass(frozen=True)
class HangPolicy:
    """The action on a hang: none, report it to the user, or treat the rank as failed.

    `quiet_s`: shorter silences are never too long.
    """

    watches: bool = True
    acts: bool = False
    quiet_s: float = QUIET_S


@dataclass(frozen=True)
class Blame:
    """Hanging ranks, and the newest inspection of all; if empty, all wait for each other, for `silent_s` so far."""

    hung: tuple[Evidence, ...]
    looked_at: tuple[Evidence, ...]
    silent_s: float
    waiting: int = 0  # ranks that wait for them

    @property
    def is_stopped(self) -> bool:
        return any(_is_stopped(each) for each in self.hung)


class HangWatch:
    """The watch of a run: what it learned in one attempt holds for later ones."""

    def __init__(self, policy: HangPolicy) -> None:
        self._policy = policy
        self._longest_s: dict[int, float] = {}  # longest silence of each phase that has ended
        self._suspects: dict[str, Heartbeat] = {}  # the newest of each host with ranks that may hang
        self._before: tuple[float, dict[int, Evidence]] | None = None  # the previous inspection
        self._next_look = 0.0
        self._rarer = 1.0

    def begin(self) -> None:
        """Reset for a new attempt; keep what was learned."""
        self._suspects, self._before, self._rarer = {}, None, 1.0

    def heard(self, host: str, beat: Heartbeat) -> None:
        for phase, longest_s in enumerate(beat.longest_s):
            self._longest_s[phase] = max(longest_s, self._longest_s.get(phase, 0.0))
        if beat.stopped or beat.silent_s >= self._limit_s(beat.silent_in, is_idle=True):
            self._suspects[host] = beat
        else:
            self._suspects.pop(host, None)

    def forget(self, host: str) -> None:
        """Continue without a host."""
        self._suspects.pop(host, None)

    def wants_look(self, now: float) -> bool:
        """Return whether to inspect all ranks: some are stopped, or silent for too long."""
        if not self._suspects:
            self._before, self._rarer = None, 1.0
            return False
        is_first = self._before is None and self._rarer == 1.0 and any(beat.stopped for beat in self._suspects.values())
        return is_first or now >= self._next_look

    def missed(self, now: float) -> None:
        """Record an inspection that not all hosts answered: like any other, it delays the next one."""
        self._next_look = now + max(LOOK_S, self._policy.quiet_s / 4) * self._rarer
        self._rarer = min(RARER, 1.5 * self._rarer)

    def looked(self, evidence: Sequence[Evidence], now: float) -> Blame | None:
        """Add an inspection of all ranks; return the hanging ones, once certain."""
        before, self._before = self._before, (now, {each.rank: each for each in evidence})
        self.missed(now)
        stopped = tuple(each for each in evidence if _is_stopped(each) and each.rank in self._stopped_ranks)
        if stopped and any(not _is_stopped(each) and not each.traced for each in evidence):
            silent_s = min(each.silent_s for each in stopped)
            return Blame(stopped, tuple(evidence), silent_s, waiting=len(evidence) - len(stopped))
        if before is None:
            return None
        is_early = all(each.steps < STEPS for each in evidence)
        known = [each for each in evidence if is_early or each.steps >= STEPS or each.phase == START]
        odd = odd_ranks(known)
        suspects = [each for each in known if each.rank in odd] or known
        for each in suspects:
            is_idle = _is_idle(each, before[1].get(each.rank), now - before[0])
            limit_s = self._limit_s(each.phase, is_idle=is_idle and bool(odd))
            if each.traced or _is_stopped(each) or each.silent_s < limit_s or not (odd or is_idle):
                return None
        silent_s = min((each.silent_s for each in suspects), default=0.0)
        hung = tuple(suspects) if odd else ()
        return Blame(hung, tuple(evidence), silent_s, waiting=len(known) - len(hung)) if known else None

    @property
    def _stopped_ranks(self) -> set[int]:
        return {rank for beat in self._suspects.values() for rank in beat.stopped}

    def _limit_s(self, phase: int, *, is_idle: bool) -> float:
        longest_s = self._longest_s.get(phase, 0.0)
        is_known = phase == _STEP or (phase != _SAVE and longest_s > 0)
        least_s = self._policy.quiet_s * (1.0 if is_idle and is_known else BUSY)
        return max(least_s, FACTOR * longest_s)


def _is_stopped(evidence: Evidence) -> bool:
    return evidence.state in STOPPED and not evidence.traced


def _is_idle(now: Evidence, before: Evidence | None, elapsed_s: float) -> bool:
    """Return whether a rank has done nothing visible between two inspections."""
    if before is None or before.pid != now.pid:
        return False
    used_s = abs(now.tree_cpu_s - before.tree_cpu_s)  # less, if a child has ended
    moved = main_thread(now.stack) != main_thread(before.stack)
    return not (moved or now.at_disk or before.at_disk) and used_s <= IDLE_CPU_S + IDLE_SHARE * elapsed_s


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
    """The watch for ranks that wait for others in init_process_group, which torch does not report for 30 minutes.

    All ranks are inspected some time after the start of an attempt, then after twice that time, and so on; and once
    more soon after an inspection that finds a rank newly waiting. Ranks that wait in two consecutive inspections are
    reported, once per attempt. Inspections end at the first step, or when torch has given up by itself.
    """

    def __init__(self, policy: HangPolicy) -> None:
        self._first_s = _FIRST_SHARE * policy.quiet_s
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
        if self._is_over or self._after_s > _LAST_S or now < self._began + self._after_s:
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
