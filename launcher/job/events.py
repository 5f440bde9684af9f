"""What the job takes and what it gives: events in, commands out. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from launcher.frozen import dataclass
from launcher.hosts.host import Host
from launcher.protocol.message import Command as AgentCommand
from launcher.protocol.message import Report
from launcher.protocol.reports import Evidence


@dataclass(frozen=True)
class Connected:
    """A stream to a host is open; `our_address` is this machine's address as that host sees it.

    `link` is the number of the Open that led to it, here and below: what an older link still says is ignored.
    """

    host: str
    link: int
    our_address: str | None = None


@dataclass(frozen=True)
class AgentMessage:
    """A message of a host's agent, other than output."""

    host: str
    link: int
    message: Report


@dataclass(frozen=True)
class Lost:
    """A host could not be reached, or its stream has ended; `reason` is for a person."""

    host: str
    link: int
    reason: str


@dataclass(frozen=True)
class ReaderBlocked:
    """What a host says is not read at the moment, since our output is behind: its silence means nothing."""

    host: str


@dataclass(frozen=True)
class Slept:
    """This process did not run for so long (Ctrl-Z, a suspended machine): no silence in that time means anything."""

    seconds: float


@dataclass(frozen=True)
class Discovered:
    """The hosts that there are now, all of them, says the user's discovery script."""

    hosts: tuple[Host, ...]


@dataclass(frozen=True)
class Signalled:
    """Somebody signalled dtrain."""

    signum: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class StacksQuestion:
    """Where all ranks stand, or only `ranks`; `native`: with the frames of C and C++."""

    ranks: tuple[int, ...] = ()
    native: bool = False


@dataclass(frozen=True)
class DebuggerQuestion:
    """To be a debugger of a rank: what the asker sends goes there, and back."""

    rank: int
    debugger: str


@dataclass(frozen=True)
class Asked:
    """A command of this user wants something of the run; `asker` is its number here and below."""

    asker: int
    question: StacksQuestion | DebuggerQuestion


@dataclass(frozen=True)
class AskerSent:
    """A command sends something to the debugger that it is."""

    asker: int
    data: bytes


@dataclass(frozen=True)
class AskerTook:
    """A command has taken so many of the bytes that were passed on to it."""

    asker: int
    count: int


@dataclass(frozen=True)
class AskerLeft:
    """A command has ended, or was lost."""

    asker: int


Event: TypeAlias = (
    Connected | AgentMessage | Lost | ReaderBlocked | Discovered | Slept | Signalled | Tick
    | Asked | AskerSent | AskerTook | AskerLeft
)  # fmt: skip


@dataclass(frozen=True)
class Open:
    """Connect to a host and start an agent there; what becomes of it is reported with this `link`, counted from 1."""

    host: Host
    link: int


@dataclass(frozen=True)
class Send:
    """Send a message to a host's agent, on its newest link."""

    host: str
    message: AgentCommand


@dataclass(frozen=True)
class Close:
    """Give a host's newest link up: close its stream, or stop trying to open it."""

    host: str


@dataclass(frozen=True)
class Notice:
    """Say something to the user while the run goes on; with --quiet only if it is an error."""

    text: str
    is_error: bool = False


@dataclass(frozen=True)
class SaveEvidence:
    """Keep the evidence of one collection in the run's folder; `asked`: somebody wants to see it now."""

    attempt: int
    number: int
    evidence: tuple[Evidence, ...]
    asked: bool


@dataclass(frozen=True)
class SuspendSelf:
    """Stop this process as Ctrl-Z does, once everything sent is written."""


@dataclass(frozen=True)
class Answer:
    """Tell a command something, as JSON; dataclasses in it become objects."""

    asker: int
    value: Mapping[str, Any]


@dataclass(frozen=True)
class PassOn:
    """Give a command bytes of its debugger; AskerTook says when it has them."""

    asker: int
    data: bytes


@dataclass(frozen=True)
class TookInput:
    """So many bytes that a command has sent are on their way no more: it may send as many again."""

    asker: int
    count: int


@dataclass(frozen=True)
class CloseAsker:
    """End the connection of a command once it has all that was for it."""

    asker: int


Command: TypeAlias = (
    Open | Send | Close | Notice | SaveEvidence | SuspendSelf | Answer | PassOn | TookInput | CloseAsker
)
