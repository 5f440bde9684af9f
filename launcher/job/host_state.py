"""One host as the job sees it: how far it has come, what it has, when it was heard, what may still run there."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from launcher.hosts.host import Host
from launcher.placement.placement import HostOffer
from launcher.protocol import Facts, Heartbeat, Hello, Report

__all__ = ["HostClock", "HostPhase", "HostState", "chosen"]

WINDOW_S = 60.0  # clocks drift apart, and stand still while a machine sleeps: old measurements are forgotten
LONG_AGO = -1e300  # a heartbeat of that time renews no lease; infinity is in no message


def chosen(gpus: tuple[str, ...], host: Host) -> tuple[str, ...]:
    """Return those of a host's GPUs that the user has chosen, by their places in its list."""
    return gpus if host.chosen is None else tuple(gpus[place] for place in host.chosen if place < len(gpus))


class HostPhase(Enum):
    AWAY = auto()  # no link: lost, or could not be reached; to be tried again
    CONNECTING = auto()
    GREETING = auto()  # connected, no word yet
    CHECKING = auto()  # asked whether the job can start there
    READY = auto()
    LEAVING = auto()  # told to end
    OUT = auto()  # given up for good: never told or tried again


class HostClock:
    """What is known of a host's monotonic clock: of its messages, the one with the least delay tells the most."""

    def __init__(self) -> None:
        self._offset = self._earlier = float("inf")
        self._window_until = float("-inf")

    def hear(self, time: float, now: float) -> None:
        """Take the time at which a message was sent, by the host's clock."""
        if now >= self._window_until:
            self._window_until = now + WINDOW_S
            self._earlier, self._offset = self._offset, float("inf")
        self._offset = min(self._offset, now - time)

    def corrected(self, time: float) -> float:
        """Return a time of this host on the controller's clock: late by the least delay, never early."""
        offset = min(self._offset, self._earlier)
        return time if offset == float("inf") else time + offset

    def theirs(self, now: float) -> float:
        """Return what its clock shows: early by the least delay, never late; LONG_AGO while nothing was heard of it."""
        return max(LONG_AGO, now - min(self._offset, self._earlier))


@dataclass
class HostState:
    """`link` numbers its connections, `heard` is when it last spoke.

    `attempt` is the one whose workers may live there, None when it is certain that none do. `traces` are those of
    lost agents whose processes nobody has looked for yet. Without a link, workers are certainly gone at `fenced_at`.
    """

    host: Host
    phase: HostPhase = HostPhase.AWAY
    link: int = 0
    facts: Facts | None = None
    our_address: str | None = None
    heard: float = 0.0
    rests_until: float | None = None  # its lease rests, unless it says something after that
    clock: HostClock = field(default_factory=HostClock)
    trace: str = ""
    traces: list[str] = field(default_factory=list)
    attempt: int | None = None
    fenced_at: float | None = None
    tries: int = 0  # to reach it since it was lost
    retry_at: float | None = None
    ready_at: float | None = None  # since then, or was before it was lost
    flights: int = 0  # how often in a row it was soon lost again
    strikes: int = 0  # attempts in a row that ended through it
    wanted: bool = True  # otherwise it goes OUT once it has left
    reason: str = ""  # why it cannot be used, in words

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def connected(self) -> bool:
        return self.phase in (HostPhase.GREETING, HostPhase.CHECKING, HostPhase.READY, HostPhase.LEAVING)

    @property
    def greeted(self) -> bool:
        """Whether its agent reads what it is told."""
        return self.phase in (HostPhase.CHECKING, HostPhase.READY, HostPhase.LEAVING)

    @property
    def works(self) -> bool:
        """Whether its agent was told to take part in an attempt, and has not said that it is over there."""
        return self.phase is HostPhase.READY and self.attempt is not None

    @property
    def leased(self) -> bool:
        """Whether its agent ends by itself when it hears nothing; at the end of a local pipe it always notices."""
        return self.host.remote

    @property
    def dirty(self) -> bool:
        """Whether something of the run may live there that nobody watches."""
        return bool(self.traces) or self.attempt is not None

    def hear(self, message: Report, now: float) -> None:
        """Note that it spoke, and what its clock says if the message carries the time of its sending."""
        self.heard = now
        if isinstance(message, Hello | Facts | Heartbeat):
            self.clock.hear(message.time, now)
            if self.rests_until is not None and self.clock.corrected(message.time) > self.rests_until:
                self.rests_until = None

    def offer(self) -> HostOffer:
        """Return what it has for the job; its facts must be known."""
        assert self.facts is not None
        return HostOffer(
            name=self.host.name,
            slots=self.facts.slots or self.host.slots,
            max_slots=self.host.max_slots,
            gpus=chosen(tuple(self.facts.gpus), self.host),
            gpus_verified=self.facts.gpus_verified,
            gpu_variable=self.facts.gpu_variable,
            cores=tuple(self.facts.cores),
            cpu_limit=self.facts.cpu_limit,
            machine=self.facts.machine,
        )
