"""What goes both ways; and what `dtrain check` asks of its examiner on a host, which says Hello as well."""

from __future__ import annotations

from typing import Any

from launcher.frozen import dataclass, field
from launcher.protocol.message import Command, Report

STEPS = 3  # after which the next ones of a worker may be expected to take as long
START = 3  # a phase beside those of ddp/monitoring/progress.py: of one that takes another's place, until then


@dataclass(frozen=True)
class Question(Command):
    ask: str
    about: dict[str, Any]


@dataclass(frozen=True)
class Answer(Report):
    """What was asked for, in the order of the questions; or why it cannot be said."""

    value: Any
    problem: str = ""


@dataclass(frozen=True)
class ChannelData(Command, Report):
    """Bytes from or for a debugger. No more than CHANNEL_BYTES are on the way before the other end has taken some."""

    channel: int
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class ChannelTaken(Command, Report):
    """So many bytes of the other direction have been passed on."""

    channel: int
    count: int


@dataclass(frozen=True)
class Heartbeat(Command, Report):
    time: float  # by the agent's clock, when it was sent; to an agent: when it was heard last, which renews its lease
    progress: int = 0  # of the host's workers: a number that changes when they write, or finish a step
    saved: int = 0  # checkpoints that they said they saved in this attempt
    steps: int = 0  # of training, that they said they made
    silent_s: float = 0.0  # since the last sign of life of that worker of the host which has shown none for longest
    silent_in: int = 0  # its phase
    # By phase, the longest silence that has ended; at START, the longest start.
    longest_s: list[float] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)  # ranks that a signal has stopped, at this look and at the last
    resilient: bool = False  # whether all of them that run have restart policy 3, so can go on with other hosts
    sent: float = 0.0  # to an agent: when, by the controller's clock, which Timings repeats
