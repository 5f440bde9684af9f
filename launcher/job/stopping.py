"""The end of a run: every host is stopped and reports; a lost one is searched once more. Pure; owned by job.py."""

from __future__ import annotations

import signal

from launcher.job.events import Command, Notice
from launcher.job.fleet import Fleet
from launcher.job.host_state import HostPhase, HostState
from launcher.job.progress_messages import some
from launcher.job.timers import NEVER, Timer, Timers

ANSWER_S = 15.0  # how long past the grace period a host may take to say that its workers are gone
SLOW_S = 1.0  # after a Ctrl-C, until whoever typed it is told what is waited for
CHECK_S = 3.0  # to reach a lost host again at the end and look what is left there


class Stopping:
    """From the order to stop until all hosts are OUT, which Timer.STOP bounds."""

    def __init__(self, fleet: Fleet, timers: Timers, *, grace_s: float, now: float) -> None:
        timers.set(Timer.STOP, now + grace_s + ANSWER_S)
        self._timers = timers
        self._fleet = fleet
        self._hurried = False
        self._kill_at = now + grace_s

    @property
    def done(self) -> bool:
        return self._fleet.count(HostPhase.OUT) == len(self._fleet)

    def begin(self, signum: int, now: float) -> list[Command]:
        """Stop the hosts that joined, give the others up; but those that may hold something of the run."""
        commands: list[Command] = []
        if signum == signal.SIGINT:
            self._timers.set(Timer.SLOW_STOP, now + SLOW_S)
        for state in self._fleet:
            dirty = self._fleet.dirty(state)
            if state.phase is HostPhase.AWAY and dirty:
                self._fleet.try_again(state, now, afresh=True)
            elif state.phase is HostPhase.READY or (state.phase is HostPhase.CHECKING and not dirty):
                commands += self._fleet.stop(state, signum)
            elif state.phase not in (HostPhase.LEAVING, HostPhase.OUT) and not dirty:
                commands += self._fleet.give_up(state)  # it has not even greeted: the end of its stream ends it
        return [*commands, *self._fleet.retries(now), *self.advance(now)]

    def hurry(self, now: float) -> list[Command]:
        """Have everything killed, and look at no host again."""
        self._hurried = True
        self._timers.cancel(Timer.SLOW_STOP)
        self._timers.set(Timer.STOP, min(self._timers.at(Timer.STOP), now + ANSWER_S))
        commands: list[Command] = []
        for state in self._fleet:
            if state.greeted:
                commands += self._fleet.stop(state)
            elif state.phase is not HostPhase.OUT:
                commands += self._fleet.give_up(state)
        return commands

    def left(self, state: HostState, now: float) -> None:
        """Decide on a host whose link has ended."""
        if self._fleet.dirty(state) and not self._hurried and not self._timers.over(Timer.STOP, now):
            self._fleet.try_again(state, now)
        else:
            self._fleet.give_up(state)

    def advance(self, now: float) -> list[Command]:
        """Give hosts up whose time is over; say what is waited for."""
        fleet = self._fleet
        if fleet.count(HostPhase.GREETING, HostPhase.CHECKING, HostPhase.LEAVING):
            return self._waits(now)
        if self._timers.at(Timer.CHECK) == NEVER:  # no host is left but such as were lost
            self._timers.set(Timer.CHECK, now + CHECK_S)
        if not self._timers.over(Timer.CHECK, now):
            return []
        return self._give_up(HostPhase.AWAY, HostPhase.CONNECTING)

    def _waits(self, now: float) -> list[Command]:
        if not self._timers.over(Timer.SLOW_STOP, now):
            return []
        self._timers.cancel(Timer.SLOW_STOP)
        left_s = self._kill_at - now
        if left_s < SLOW_S:
            return []
        names = [state.name for state in self._fleet if state.phase is HostPhase.LEAVING]
        killed = f"what still runs in {left_s:.0f} s is killed (--grace-s); a second Ctrl-C kills at once"
        return [Notice(f"waiting for the workers on {some(names, len(names))} to end; {killed}")] if names else []

    def give_up_rest(self) -> list[Command]:
        """Try no host any more, once the time is over."""
        return self._give_up(*(phase for phase in HostPhase if phase is not HostPhase.OUT))

    def _give_up(self, *phases: HostPhase) -> list[Command]:
        return [c for state in self._fleet if state.phase in phases for c in self._fleet.give_up(state)]
