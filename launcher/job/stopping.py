"""The end of a run: every host is told, heard out, and looked at once more if it was lost. Pure; owned by job.py."""

from __future__ import annotations

import signal

from launcher.job.events import Close, Command, Tell
from launcher.job.fleet import Fleet
from launcher.job.host_state import HostPhase, HostState
from launcher.protocol import Stop

__all__ = ["ANSWER_S", "CHECK_S", "Stopping"]

ANSWER_S = 15.0  # how long past the grace period a host may take to say that its workers are gone
CHECK_S = 3.0  # to reach a lost host again at the end and look what is left there


class Stopping:
    """From the order to stop until all hosts are OUT, which `until` bounds."""

    def __init__(self, fleet: Fleet, *, until: float) -> None:
        self.until = until
        self._fleet = fleet
        self._hurried = False
        self._check_until: float | None = None  # when no host is left but such as were lost

    @property
    def done(self) -> bool:
        return self._fleet.count(HostPhase.OUT) == len(self._fleet)

    def begin(self, signum: int, now: float) -> list[Command]:
        """Tell the hosts that joined, give the others up; but those that may hold something of the run."""
        commands: list[Command] = []
        for state in self._fleet:
            if state.phase is HostPhase.AWAY and state.dirty:
                state.tries = 0
                self._fleet.try_again(state, now)
            elif state.phase is HostPhase.READY or (state.phase is HostPhase.CHECKING and not state.dirty):
                self._fleet.move(state, HostPhase.LEAVING)
                commands.append(Tell(state.name, Stop(signum=signum)))
            elif state.phase not in (HostPhase.LEAVING, HostPhase.OUT) and not state.dirty:
                commands += self._give_up(state)  # it has not even greeted: the end of its stream ends it
        return [*commands, *self._fleet.retries(now), *self.advance(now)]

    def hurry(self, now: float) -> list[Command]:
        """Have everything killed, and look at no host again."""
        self._hurried = True
        self.until = min(self.until, now + ANSWER_S)
        commands: list[Command] = []
        for state in self._fleet:
            if state.greeted:
                self._fleet.move(state, HostPhase.LEAVING)
                commands.append(Tell(state.name, Stop(signum=signal.SIGKILL)))
            elif state.phase is not HostPhase.OUT:
                commands += self._give_up(state)
        return commands

    def left(self, state: HostState, now: float) -> None:
        """Decide on a host whose link has ended."""
        if state.dirty and now < self.until and not self._hurried:
            self._fleet.try_again(state, now)
        else:
            self._fleet.move(state, HostPhase.OUT)

    def advance(self, now: float) -> list[Command]:
        """Give hosts up whose time is over."""
        fleet = self._fleet
        if fleet.count(HostPhase.GREETING, HostPhase.CHECKING, HostPhase.LEAVING):
            return []
        if self._check_until is None:
            self._check_until = now + CHECK_S
        if now < self._check_until:
            return []
        return [
            command
            for state in fleet
            if state.phase in (HostPhase.AWAY, HostPhase.CONNECTING)
            for command in self._give_up(state)
        ]

    def give_up_rest(self) -> list[Command]:
        """Try no host any more, once the time is over."""
        return [c for state in self._fleet if state.phase is not HostPhase.OUT for c in self._give_up(state)]

    def slept(self, seconds: float) -> None:
        """Take a time out of the reckoning in which nobody listened."""
        self.until += seconds
        if self._check_until is not None:
            self._check_until += seconds

    def deadlines(self) -> list[float]:
        return [self.until] if self._check_until is None else [self.until, self._check_until]

    def _give_up(self, state: HostState) -> list[Command]:
        away = state.phase is HostPhase.AWAY
        self._fleet.move(state, HostPhase.OUT)
        return [] if away else [Close(state.name)]
