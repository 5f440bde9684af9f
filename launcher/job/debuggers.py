"""The debuggers that commands have in ranks: one a rank. While one is open, no silence counts as a stall. Pure.

A debugger is open once the rank has accepted it. Until then the rank may really hang, and its clocks run. Bytes of both
directions are only passed on: their sender limits how many may be unacknowledged.
"""

from __future__ import annotations

from launcher.frozen import dataclass, replace
from launcher.job.attempt import AttemptState
from launcher.job.events import Answer, AskerSent, Command, DebuggerQuestion, PassOn, Send
from launcher.job.evidence_round import refuse, why_not_rank
from launcher.job.fleet import Fleet
from launcher.protocol.commands import CloseDebugger, OpenDebugger, RestClocks
from launcher.protocol.reports import DebuggerClosed, DebuggerOpened
from launcher.protocol.two_way import ChannelData, ChannelTaken


@dataclass(frozen=True)
class _Debugger:
    attempt: int
    rank: int
    host: str
    is_open: bool = False


class Debuggers:
    """By the number of the command that asked, which is that of the channel too."""

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
