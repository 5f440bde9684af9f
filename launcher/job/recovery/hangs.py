"""Act on ranks that hang: notify the user, or kill them, so that they fail as any other does. Pure.

hangs/watch.py finds who hangs. A rank that is killed for it is replaced alone, or ends the attempt, as its
restart policy says (restarts.py); its failure then has a kind of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from launcher.frozen import replace
from launcher.hangs.collectives import compare
from launcher.hangs.positions import rank_position
from launcher.hangs.watch import Blame, HangPolicy, HangWatch, MeetingWatch, WaitingRanks
from launcher.job.attempt import AttemptState
from launcher.job.events import Command, Notice, SaveEvidence, Send
from launcher.job.failures.failure import FailureKind
from launcher.job.ranks import RankState
from launcher.protocol.commands import KillWorker
from launcher.protocol.reports import Evidence
from launcher.protocol.two_way import Heartbeat

NAMED = 8  # of the ranks that a message counts, and of their hosts


class Hangs:
    """`policy` is the user's; `meets`: all ranks join one process group, if they join any."""

    def __init__(self, policy: HangPolicy, *, meets: bool = True) -> None:
        self.policy = policy
        self._watch = HangWatch(policy)
        self._meeting = MeetingWatch(policy) if meets else None
        self._is_for_meeting = False  # the look that is under way
        self._reported: set[tuple[int, int]] = set()  # by rank and pid

    def begin(self) -> None:
        """Reset for a new attempt."""
        self._watch.begin()
        if self._meeting is not None:
            self._meeting.begin()
        self._reported = set()

    def heard(self, host: str, beat: Heartbeat) -> None:
        self._watch.heard(host, beat)
        if beat.steps and self._meeting is not None:
            self._meeting.end()

    def forget(self, host: str) -> None:
        """Go on without the workers of a lost host."""
        self._watch.forget(host)

    def wants_look(self, attempt: AttemptState, now: float) -> bool:
        """Return whether to look at all ranks; not while one that is killed has not ended."""
        if not self.policy.watches or attempt.ranks.count(RankState.HUNG):
            return False
        is_for_hangs = self._watch.wants_look(now)
        self._is_for_meeting = not is_for_hangs and self._meeting is not None and self._meeting.wants_look(now)
        return is_for_hangs or self._is_for_meeting

    def waiting(self, attempt: AttemptState, evidence: tuple[Evidence, ...], now: float) -> WaitingRanks | None:
        """Return which ranks wait in init_process_group for others, if the look is for that."""
        if not self._is_for_meeting or self._meeting is None:
            return None
        return self._meeting.looked(evidence, [row.number for row in attempt.ranks], now)

    def report_waiting(self, attempt: AttemptState, waiting: WaitingRanks, number: int) -> list[Command]:
        """Notify the user of ranks that wait in init_process_group; torch's own time limit ends them."""

        def line(ranks: Sequence[int], one: str, several: str) -> list[str]:
            return [f"  {_on_hosts(attempt, ranks)} {one if len(ranks) == 1 else several}"] if ranks else []

        have = "has" if len(waiting.ranks) == 1 else "have"
        lines = [
            f"{_ranks(waiting.ranks)} {have} waited in init_process_group for {waiting.waited_s:.0f} s or more",
            *line(waiting.absent, "has not called it yet", "have not called it yet"),
            *line(waiting.unknown, "has no readable stack", "have no readable stack"),
            *line(waiting.ended, "has ended", "have ended"),
        ]
        if waiting.connecting:
            lines += line(waiting.connecting, *["cannot reach the store yet; does the script set"] * 2)
            lines.append("  MASTER_ADDR or MASTER_PORT? For the network between the hosts: dtrain check")
        elif len(lines) == 1:
            lines.append("  all have called it; does the script set RANK, WORLD_SIZE or another address itself?")
        lines.append("  this is reported once; torch gives up after 30 minutes by default")
        evidence = SaveEvidence(attempt.number, number, waiting.looked_at, asked=True)
        return [Notice("\n".join(lines), is_error=True), evidence]

    def blame(self, evidence: tuple[Evidence, ...], now: float) -> Blame | None:
        """Return which ranks hang by this look, if any; it has found nothing where not all hosts have answered."""
        if self._is_for_meeting:
            return None
        if not evidence:
            self._watch.missed(now)
            return None
        return self._watch.looked(evidence, now)

    def report_circle(self, attempt: AttemptState, blame: Blame, number: int) -> list[Command]:
        """Notify the user, once, if all ranks wait for each other in different collectives."""
        lines = _disagreements(blame)
        news = {(each.rank, each.pid) for each in blame.looked_at} - self._reported
        if not lines or not news:
            return []
        self._reported |= news
        said = [f"all ranks wait, without a sign of life for {blame.silent_s:.0f} s", *(f"  {line}" for line in lines)]
        evidence = SaveEvidence(attempt.number, number, blame.looked_at, asked=True)
        return [Notice("\n".join(said), is_error=True), evidence]

    def act_on(self, attempt: AttemptState, blame: Blame, number: int, now: float) -> list[Command]:
        """Act on ranks that hang, or notify the user once; `number` is that of the look."""
        if not self.policy.acts:
            news = [each for each in blame.hung if (each.rank, each.pid) not in self._reported]
            self._reported.update((each.rank, each.pid) for each in news)
            advice = "dtrain only reports it; with --hang auto it would treat such a rank as failed"
            said = [
                Notice(f"{_who(attempt, each)} hangs: {_what(each, blame)}; {advice}", is_error=True) for each in news
            ]
            said += [Notice(line, is_error=True) for line in _disagreements(blame) if news]
            return [*said, SaveEvidence(attempt.number, number, blame.looked_at, asked=True)] if news else []
        attempt.evidence = blame.looked_at
        commands: list[Command] = [SaveEvidence(attempt.number, number, blame.looked_at, asked=False)]
        commands += [Notice(line) for line in _disagreements(blame)]
        for each in blame.hung:
            row = attempt.ranks.get(each.rank)
            if row is None or not row.is_live:  # it has ended since
                continue
            what, where = _what(each, blame), rank_position(each).where
            failure = attempt.failure(FailureKind.HUNG, row.host, what, now)
            attempt.ranks.move(row, RankState.HUNG, replace(failure, rank=each.rank, pid=each.pid, where=where))
            order = KillWorker(rank=each.rank, attempt=attempt.number, signum=signal.SIGKILL)
            commands += [
                Notice(f"{_who(attempt, each)} hangs: {what}; treated as failed"),
                Send(row.host, order),
            ]
        return commands


def _disagreements(blame: Blame) -> tuple[str, ...]:
    return compare({each.rank: each.collectives for each in blame.looked_at if each.collectives})


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({_first(ranks)})"


def _first(names: Sequence[object]) -> str:
    return ", ".join([*map(str, names[:NAMED])] + (["..."] if len(names) > NAMED else []))


def _on_hosts(attempt: AttemptState, ranks: Sequence[int]) -> str:
    hosts = [*dict.fromkeys(attempt.host_of(rank) for rank in ranks)]
    return f"{_ranks(ranks)} on {_first(hosts)}"


def _who(attempt: AttemptState, evidence: Evidence) -> str:
    return f"rank {evidence.rank} on {attempt.host_of(evidence.rank)} (pid {evidence.pid})"


def _what(evidence: Evidence, blame: Blame) -> str:
    others = f"{blame.waiting} other rank{'' if blame.waiting == 1 else 's'}"
    if blame.is_stopped:
        return f"a signal stopped it, and no SIGCONT followed, while {others} run{'s' if blame.waiting == 1 else ''}"
    position = rank_position(evidence)
    inside = f", inside {position.inside}" if position.inside else ""
    at = f" at {position.where}{inside}" if position.where else f" ({position.state})"
    wait = "waits" if blame.waiting == 1 else "wait"
    return f"no sign of life for {evidence.silent_s:.0f} s{at}, while {others} {wait} for it"
