"""The input and output of the job: events in, commands out. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from launcher.frozen import dataclass
from launcher.hosts.host import Host
from launcher.protocol.message import Command as AgentCommand
from launcher.protocol.message import Report
from launcher.protocol.reports import Evidence
from launcher.protocol.two_way import ChannelData, ChannelTaken


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
    """A host's messages are not read at the moment, since our output is behind: its silence means nothing."""

    host: str


@dataclass(frozen=True)
class Slept:
    """This process did not run for so long (Ctrl-Z, a suspended machine): no silence in that time means anything."""

    seconds: float


@dataclass(frozen=True)
class Sending:
    """Files were sent to hosts for so long (--sync): the first start may take that much longer."""

    seconds: float


@dataclass(frozen=True)
class Discovered:
    """All hosts that the user's discovery script has printed last."""

    hosts: tuple[Host, ...]


@dataclass(frozen=True)
class Signalled:
    """dtrain has received a signal."""

    signum: int


@dataclass(frozen=True)
class InputRead:
    """Bytes were read from the standard input of this command, or its end; controller/standard_input.py sends them."""

    data: bytes


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class StatusQuestion:
    """Asks for the progress of the run; `in_full`: of every host and rank. runs/session.py answers, after the job."""

    in_full: bool = False


@dataclass(frozen=True)
class StacksQuestion:
    """Asks where all ranks are, or only `ranks`; `native`: with the frames of C and C++."""

    ranks: tuple[int, ...] = ()
    native: bool = False


@dataclass(frozen=True)
class DebuggerQuestion:
    """Asks for a debugger in a rank, pdb or debugpy; bytes of the asker then go there, and back."""

    rank: int
    debugger: str


@dataclass(frozen=True)
class Asked:
    """A command of this user asks something of the run; `asker` is its number here and below."""

    asker: int
    question: StatusQuestion | StacksQuestion | DebuggerQuestion


@dataclass(frozen=True)
class AskerSent:
    """A command sends bytes for its debugger, or acknowledges some; `channel` is its number."""

    message: ChannelData | ChannelTaken


@dataclass(frozen=True)
class AskerLeft:
    """A command has ended, or was lost."""

    asker: int


Event: TypeAlias = (
    Connected | AgentMessage | Lost | ReaderBlocked | Sending | Discovered | Slept | Signalled | Tick
    | InputRead | Asked | AskerSent | AskerLeft
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
    """Keep the evidence of one collection in the run's folder; `asked`: the user wants to see it now."""

    attempt: int
    number: int
    evidence: tuple[Evidence, ...]
    asked: bool


@dataclass(frozen=True)
class SuspendSelf:
    """Stop this process as Ctrl-Z does, once everything sent is written."""


@dataclass(frozen=True)
class Answer:
    """Answer a command, as JSON; dataclasses in it become objects. Its connection ends then, if that `is_last`."""

    asker: int
    value: Mapping[str, Any]
    is_last: bool = True


@dataclass(frozen=True)
class PassOn:
    """Pass bytes of a debugger on to its command, or that it has taken some of the command's."""

    message: ChannelData | ChannelTaken

    @property
    def asker(self) -> int:
        return self.message.channel


Command: TypeAlias = Open | Send | Close | Notice | SaveEvidence | SuspendSelf | Answer | PassOn
