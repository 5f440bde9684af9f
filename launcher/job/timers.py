"""Every deadline of a run, in one table. Pure; owned by job.py, set by those whose deadline it is.

A deadline holds until it is set again or cancelled; the module that set it asks `over` at each event. So
`next_deadline` names only what no Tick has seen yet: what was over at the last one has had its effect, or waits for
something else.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TypeAlias

NEVER = float("inf")


class Timer(Enum):
    BEAT = auto()  # the next round of heartbeats
    LOOK = auto()  # for hosts that are silent
    RETRY = auto()  # of the lost host that is tried next
    FENCE = auto()  # when the next lost host's workers are certainly gone
    PAUSE = auto()  # before another attempt
    GATHER = auto()  # for enough hosts to be ready
    LAST_CALL = auto()  # for more of them
    HOPELESS = auto()  # for other reasons why a run cannot start
    SHOW = auto()  # how far a large start is
    PHASE = auto()  # for a phase between gathering and stopping
    ROOT = auto()  # for what a lost connection is the consequence of
    EVIDENCE = auto()  # for answers to the question where the ranks stand
    STALL = auto()  # since the last progress
    CHAOS = auto()  # the next fault on purpose, by its number in the plan
    RESTART = auto()  # of one worker, by rank
    GENERATION = auto()  # to announce it to the workers
    COMPOSE = auto()  # for hosts to take the place of lost ones in an attempt that goes on
    JOIN = auto()  # for the workers of hosts that have come to be ready to meet the others
    STOP = auto()  # for all hosts to be out
    SLOW_STOP = auto()  # for them to be out without a word about it
    CHECK = auto()  # for lost hosts to be reached again at the end


_Name: TypeAlias = Timer | tuple[Timer, int]
# What runs by the hosts' clocks, or is due at once after a suspension.
_RUNS_ON: set[_Name] = {Timer.BEAT, Timer.LOOK, Timer.RETRY, Timer.FENCE, Timer.PAUSE}


class Timers:
    """Named deadlines; some names go with a rank."""

    def __init__(self) -> None:
        self._at: dict[_Name, float] = {}
        self._seen = -NEVER

    def set(self, name: _Name, at: float) -> None:
        self._at[name] = at

    def cancel(self, *names: _Name) -> None:
        for name in names:
            self._at.pop(name, None)

    def at(self, name: _Name) -> float:
        """Return when it is; never, if it is not set."""
        return self._at.get(name, NEVER)

    def over(self, name: _Name, now: float) -> bool:
        return now >= self.at(name)

    def next_deadline(self) -> float:
        """Return when the next Tick matters."""
        return min((at for at in self._at.values() if at > self._seen), default=NEVER)

    def due(self, now: float) -> frozenset[_Name]:
        """Return what is over at this Tick."""
        self._seen = now
        return frozenset(name for name, at in self._at.items() if at <= now)

    def slept(self, gap_s: float) -> None:
        """Leave out a time in which this process did not listen: others have as long as before it."""
        for name in self._at.keys() - _RUNS_ON:
            self._at[name] += gap_s
