"""What the job is told and what it tells: events in, commands out. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from launcher.protocol import Command as AgentCommand
from launcher.protocol import Report

__all__ = ["Close", "Command", "Connected", "Event", "Lost", "Said", "Signalled", "Tell", "Tick", "Unread"]

# ---- events --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connected:
    """A stream to a host is open; `our_address` is this machine's address as that host sees it."""

    host: str
    our_address: str | None = None


@dataclass(frozen=True)
class Said:
    """A message of a host's agent, other than output."""

    host: str
    message: Report


@dataclass(frozen=True)
class Lost:
    """A host could not be reached, or its stream has ended; `reason` is for a person."""

    host: str
    reason: str


@dataclass(frozen=True)
class Unread:
    """What a host says is not read at the moment, since our output is behind: its silence means nothing."""

    host: str


@dataclass(frozen=True)
class Signalled:
    """Somebody signalled dtrain."""

    signum: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = Connected | Said | Lost | Unread | Signalled | Tick

# ---- commands ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tell:
    """Send a message to a host's agent."""

    host: str
    message: AgentCommand


@dataclass(frozen=True)
class Close:
    """Give a host up: close its stream, or stop trying to open it."""

    host: str


Command: TypeAlias = Tell | Close
