"""One host as the job sees it: how far it has come, what it has, when it was heard, what may still run there.

Only fleet.py changes it; everyone else reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from launcher.hosts.host import Host
from launcher.placement.placement import HostOffer
from launcher.protocol.reports import Facts

WINDOW_S = 60.0  # clocks drift apart, and stand still while a machine sleeps: old measurements are forgotten
LONG_AGO = -1e300  # a heartbeat of that time renews no lease; infinity is in no message


class HostPhase(Enum):
    AWAY = auto()  # no link: lost, or could not be reached; to be tried again
    CONNECTING = auto()
    GREETING = auto()  # connected, no word yet
    CHECKING = auto()  # asked whether the job can start there
    READY = auto()
    LEAVING = auto()  # ordered to end
    OUT = auto()  # given up for good: never used or tried again


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
    """`link` numbers its connections, `heard` is when something last came from it.

    `alive_at` is when it last sent something, as its clock says: what arrives after an outage of the network may have
    been sent before that, and the host be gone.
    `lost_agents` are the identities of those whose processes nobody has looked for yet. Without a link, workers are
    certainly gone at `fenced_at`.
    """

    host: Host
    phase: HostPhase = HostPhase.AWAY
    link: int = 0
    facts: Facts | None = None
    our_address: str | None = None
    heard: float = 0.0
    alive_at: float = 0.0
    told_heard: float = LONG_AGO  # the newest such time that it was told
    rests_until: float | None = None  # its lease rests, unless it says something after that
    clock: HostClock = field(default_factory=HostClock)
    agent_identity: str = ""
    lost_agents: list[str] = field(default_factory=list)
    fenced_at: float | None = None
    tries: int = 0  # to reach it since it was lost
    retry_at: float | None = None
    ready_at: float | None = None  # since then, or was before it was lost
    flaps: int = 0  # how often in a row it was soon lost again
    failed_attempts: int = 0  # attempts in a row that ended through it
    reason: str = ""  # why it cannot be used, in words

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def connected(self) -> bool:
        return self.phase in (HostPhase.GREETING, HostPhase.CHECKING, HostPhase.READY, HostPhase.LEAVING)

    @property
    def greeted(self) -> bool:
        """Whether its agent reads what is sent to it."""
        return self.phase in (HostPhase.CHECKING, HostPhase.READY, HostPhase.LEAVING)

    @property
    def leased(self) -> bool:
        """Whether its agent ends by itself when it hears nothing; at the end of a local pipe it always notices."""
        return self.host.remote

    def offer(self) -> HostOffer:
        """Return what it has for the job; its facts must be known."""
        assert self.facts is not None
        return HostOffer.of(self.host, self.facts)
