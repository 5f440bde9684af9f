"""Look into ranks: rounds that ask all hosts where they are, and debuggers that commands have in them. Pure.

The report of an attempt, the watch for hangs and commands of users ask for rounds. At most one is under way; a host
that does not answer in time is not waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.job.attempt import AttemptState
from launcher.job.events import Answer, AskerSent, Command, DebuggerQuestion, PassOn, SaveEvidence, Send, StacksQuestion
from launcher.job.fleet import Fleet
from launcher.job.ranks import ENDED, RankState
from launcher.job.timers import Timer, Timers
from launcher.protocol.commands import CloseDebugger, Collect, OpenDebugger, RestClocks
from launcher.protocol.reports import Collected, DebuggerClosed, DebuggerOpened, Evidence
from launcher.protocol.two_way import ChannelData, ChannelTaken

COLLECT_S = 2.0
NATIVE_S = 30.0  # py-spy reads the symbols of all libraries of each rank, one after another
TERMINAL = 0  # the asker that is the user at the terminal, with SIGQUIT


@dataclass
class _Round:
    number: int
    waiting: set[str]
    is_look: bool
    limit_s: float
    question: StacksQuestion | None  # None: for the report of the attempt
    askers: tuple[int, ...]
    found: dict[int, Evidence] = field(default_factory=dict)


class EvidenceRounds:
    """`unanswered` are the hosts that did not answer the last round.

    Those who ask are answered by a round that begins after that; those who ask for the same meanwhile share the next.
    """

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self.unanswered: set[str] = set()
        self._number = 0
        self._current: _Round | None = None
        self._waiting: dict[int, StacksQuestion] = {}  # by asker

    @property
    def under_way(self) -> bool:
        return self._current is not None and not self._current.is_look

    @property
    def looks(self) -> bool:
        """Whether a look for ranks that hang is under way: any other round takes its place."""
        return self._current is not None and self._current.is_look

    def ask(self, asker: int, question: StacksQuestion) -> None:
        """Have `due` begin a round for a command, or for TERMINAL unless one is under way for it."""
        if self._current is None or asker not in self._current.askers:
            self._waiting[asker] = question

    def leave(self, asker: int) -> None:
        """Forget a command that has gone."""
        self._waiting.pop(asker, None)
        if self._current is not None:
            self._current.askers = tuple(each for each in self._current.askers if each != asker)

    def refuse_all(self, reason: str) -> list[Command]:
        waiting, self._waiting = self._waiting, {}
        return refuse(waiting, reason)

    def due(self, attempt: AttemptState, fleet: Fleet, now: float) -> list[Command]:
        """Begin the next round, if one is asked for and none is under way."""
        if not self._waiting or self.under_way:
            return []
        question = next(iter(self._waiting.values()))
        askers = tuple(asker for asker, other in self._waiting.items() if other == question)
        for asker in askers:
            del self._waiting[asker]
        if reason := next(filter(None, (why_not_rank(attempt, rank) for rank in question.ranks)), ""):
            return refuse(askers, reason)
        hosts = [*dict.fromkeys(map(attempt.host_of, question.ranks))] if question.ranks else attempt.members
        return self.begin(fleet.workers_of(hosts), now, question=question, askers=askers)

    def begin(
        self, hosts: Sequence[str], now: float, *, is_look: bool = False,
        question: StacksQuestion | None = None, askers: tuple[int, ...] = (),
    ) -> list[Command]:  # fmt: skip
        """Ask these hosts, for `askers` or for the report of the attempt; `is_look`: to find ranks that hang."""
        assert not self.under_way
        self._number += 1
        ranks, native = ([*question.ranks], question.native) if question is not None else ([], False)
        limit_s = NATIVE_S if native else COLLECT_S
        self._current = _Round(self._number, set(hosts), is_look, limit_s, question, askers)
        self._timers.set(Timer.EVIDENCE, now + limit_s)
        order = Collect(number=self._number, limit_s=0.75 * limit_s, ranks=ranks, native=native)
        return [Send(name, order) for name in hosts]

    def take(self, host: str, message: Evidence | Collected, attempt: AttemptState | None) -> None:
        if self._current is None or attempt is None or message.number != self._current.number:
            return
        if isinstance(message, Evidence):
            self._current.found[message.rank] = message
        else:
            attempt.devices[host] = message.devices
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
        found = tuple(evidence for _, evidence in sorted(current.found.items()))
        is_asked = current.question is not None
        commands: list[Command] = []
        if found and (not is_asked or TERMINAL in current.askers):
            commands.append(SaveEvidence(attempt.number, current.number, found, asked=is_asked))
        if current.question is None:
            attempt.evidence = found or attempt.evidence
            return commands
        value = _answer(current, current.question, found, attempt)
        return [*commands, *(Answer(asker, value) for asker in current.askers if asker != TERMINAL)]


def _answer(
    current: _Round, question: StacksQuestion, found: tuple[Evidence, ...], attempt: AttemptState
) -> Mapping[str, Any]:
    """Return what was found, and the ranks that did not answer."""
    missing: dict[str, list[int]] = {}
    rows = {row.number: row for row in attempt.ranks}
    for rank in sorted(question.ranks or rows):
        if rank not in current.found and rank in rows and rows[rank].state not in ENDED:
            missing.setdefault(rows[rank].host, []).append(rank)
    return {
        "attempt": attempt.number,
        "limit_s": current.limit_s,
        "evidence": found,
        "hosts": {str(rank): rows[rank].host for rank in current.found if rank in rows},
        "missing": missing,
    }


def why_not_rank(attempt: AttemptState, rank: int) -> str:
    """Return why a rank cannot be looked into; empty if it can."""
    row = attempt.ranks.get(rank)
    if row is None:
        numbers = [row.number for row in attempt.ranks]
        return f"there is no rank {rank}; the run has ranks {min(numbers)} to {max(numbers)}"
    if row.state in ENDED:
        return f"rank {rank} has ended"
    return f"rank {rank} has not started yet; try again in a moment" if row.state is RankState.STARTING else ""


def refuse(askers: Iterable[int], reason: str) -> list[Command]:
    return [Answer(asker, {"error": reason}) for asker in askers if asker != TERMINAL]


@dataclass(frozen=True)
class _Debugger:
    attempt: int
    rank: int
    host: str
    is_open: bool = False


class Debuggers:
    """The debuggers that commands have in ranks, by the number of the command, which is that of the channel too.

    A rank has one at most. While one is open, no silence counts as a stall. It is open once the rank has accepted it:
    until then the rank may really hang, and its clocks run. Bytes of both directions are only passed on: their sender
    limits how many may be unacknowledged.
    """

    def __init__(self) -> None:
        self._found: dict[int, _Debugger] = {}
        self._resting: set[str] = set()  # hosts whose clocks rest

    @property
    def any_open(self) -> bool:
        return any(each.is_open for each in self._found.values())

    def ask(self, asker: int, question: DebuggerQuestion, attempt: AttemptState, fleet: Fleet) -> list[Command]:
        rank = question.rank
        if why_not := why_not_rank(attempt, rank):
            return refuse([asker], why_not)
        if any(each.rank == rank for each in self._found.values()):
            return refuse([asker], f"rank {rank} is debugged already, by another command; a rank has one debugger")
        host = attempt.host_of(rank)
        if not fleet.workers_of([host]):
            return refuse([asker], f"the host of rank {rank}, {host}, is not connected")
        self._found[asker] = _Debugger(attempt.number, rank, host)
        order = OpenDebugger(channel=asker, attempt=attempt.number, rank=rank, debugger=question.debugger)
        return [Answer(asker, {"host": host}, is_last=False), Send(host, order)]

    def pass_on(self, event: AskerSent) -> list[Command]:
        """Pass on what a command sends to its debugger."""
        debugger = self._found.get(event.message.channel)
        return [] if debugger is None else [Send(debugger.host, event.message)]

    def leave(self, asker: int) -> list[Command]:
        """Close the debugger of a command that has gone; the rank goes on."""
        debugger = self._found.pop(asker, None)
        return [] if debugger is None else [Send(debugger.host, CloseDebugger(channel=asker))]

    def said(self, host: str, message: DebuggerOpened | DebuggerClosed | ChannelData | ChannelTaken) -> list[Command]:
        """Take what the agent of a rank says of its debugger."""
        debugger = self._found.get(asker := message.channel)
        if debugger is None or debugger.host != host:
            return []
        match message:
            case DebuggerOpened():
                self._found[asker] = replace(debugger, is_open=True)
                return []
            case ChannelData() | ChannelTaken():
                return [PassOn(message)]
        return self._end(asker, message.reason)

    def exited(self, rank: int, how: str) -> list[Command]:
        """Take the end of a rank; `how` is for a person."""
        return [c for asker, each in [*self._found.items()] if each.rank == rank for c in self._end(asker, how)]

    def lost(self, host: str, reason: str) -> list[Command]:
        """Take the loss of a host."""
        self._resting.discard(host)
        why = f"host {host} is lost: {reason}"
        return [c for asker, each in [*self._found.items()] if each.host == host for c in self._end(asker, why)]

    def due(self, attempt: AttemptState, fleet: Fleet, now: float) -> list[Command]:
        """End those of an attempt that is over, and tell the hosts whether the clocks of stalls rest."""
        commands = [
            command
            for asker, each in [*self._found.items()]
            if each.attempt != attempt.number
            for command in self._end(asker, f"attempt {each.attempt} has ended")
        ]
        hosts = set(fleet.workers_of(attempt.members)) if self.any_open else set()
        if self._resting and not hosts:
            attempt.made_progress(now)
        changed = hosts ^ self._resting
        commands += [Send(host, RestClocks(resting=host in hosts)) for host in sorted(changed)]
        self._resting = hosts
        return commands

    def _end(self, asker: int, reason: str) -> list[Command]:
        del self._found[asker]
        return [Answer(asker, {"ended": reason})]
