"""One host as the job sees it: how far it has come, what it has, when it was heard, how its clock stands to ours."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from launcher.hosts import Host
from launcher.placement import HostOffer
from launcher.protocol import Facts, Heartbeat, Hello, Report

__all__ = ["HostPhase", "HostState"]


class HostPhase(Enum):
    CONNECTING = auto()
    GREETING = auto()  # connected, no word yet
    CHECKING = auto()  # asked whether the job can start there
    READY = auto()
    GONE = auto()


@dataclass
class HostState:
    """`heard` is when it last spoke; `said_bye`, that its workers are gone and it is swept."""

    host: Host
    phase: HostPhase = HostPhase.CONNECTING
    facts: Facts | None = None
    our_address: str | None = None
    heard: float = 0.0
    clock_offset: float | None = None  # to add to a time of that host; the smallest seen has the least delay in it
    said_bye: bool = False

    @property
    def alive(self) -> bool:
        return self.phase is not HostPhase.GONE

    @property
    def watched(self) -> bool:
        """Say whether silence means that it is lost; before its facts, the time limit of the start applies."""
        return self.alive and self.facts is not None

    def hear(self, message: Report, now: float) -> None:
        """Note that it spoke, and what its clock says if the message carries the time of its sending."""
        self.heard = now
        if isinstance(message, Hello | Facts | Heartbeat):
            offset = now - message.time
            self.clock_offset = offset if self.clock_offset is None else min(offset, self.clock_offset)

    def corrected(self, time: float) -> float:
        """Return a time of this host on the controller's clock."""
        return time + (self.clock_offset or 0.0)

    def offer(self) -> HostOffer:
        """Return what it has for the job; its facts must be known."""
        assert self.facts is not None
        return HostOffer(
            name=self.host.name,
            slots=self.host.slots,
            gpus=tuple(self.facts.gpus),
            gpus_verified=self.facts.gpus_verified,
            gpu_variable=self.facts.gpu_variable,
            cores=tuple(self.facts.cores),
            cpu_limit=self.facts.cpu_limit,
        )
