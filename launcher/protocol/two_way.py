"""Messages in both directions; and questions of `dtrain check` to its examiner on a host, which says Hello as well."""

from __future__ import annotations

from typing import Any

from launcher.frozen import dataclass, field
from launcher.protocol.message import Command, Report

STEPS = 3  # after these, the next steps of a worker are expected to take as long
START = 3  # a phase besides those of ddp/monitoring/progress.py: of a replacement worker, for STEPS steps


@dataclass(frozen=True)
class Question(Command):
    ask: str
    about: dict[str, Any]


@dataclass(frozen=True)
class Answer(Report):
    """The answer to a question, in the order of the questions; or the reason why there is none."""

    value: Any
    problem: str = ""


@dataclass(frozen=True)
class ChannelData(Command, Report):
    """Bytes from or for a debugger, or for the standard input of a rank, whose end are no bytes.

    At most CHANNEL_BYTES are sent before the other end acknowledges some.
    """

    channel: int  # of a debugger: as in OpenDebugger, from 1; of standard input: as in StartWorker, below 0
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class ChannelTaken(Command, Report):
    """This number of bytes of the other direction was passed on."""

    channel: int
    count: int


@dataclass(frozen=True)
class Heartbeat(Command, Report):
    time: float  # by the agent's clock, when it was sent; to an agent: when it was last heard, which renews its lease
    progress: int = 0  # of the host's workers: a number that changes when they write, or finish a step
    saved: int = 0  # checkpoints that they reported in this attempt
    steps: int = 0  # training steps that they reported
    silent_s: float = 0.0  # since the last sign of life of the worker that has been silent longest
    silent_in: int = 0  # its phase
    # By phase, the longest silence that has ended; for START, the longest start.
    longest_s: list[float] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)  # ranks stopped by a signal, at this look and the last
    resilient: bool = False  # all running workers have restart policy 3, so they can continue with other hosts
    sent: float = 0.0  # to an agent: sending time by the controller's clock, repeated by Timings
