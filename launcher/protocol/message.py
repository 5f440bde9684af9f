"""What a message is, and the numbers that both ends of a stream have to agree on."""

from __future__ import annotations

import re
from typing import ClassVar

PROTOCOL = 12
PREAMBLE = b"\n\x01dtrain-stream-1\n"
MAX_HEADER_BYTES = 8 << 20  # the environment of a worker is the largest thing in a header
MAX_PAYLOAD_BYTES = 1 << 20
INPUT_BYTES = 1 << 16  # of a rank's standard input that are sent and not taken yet
CHANNEL_BYTES = 256 << 10  # see ChannelData
MAX_NOISE_BYTES = 1 << 20  # what a login shell may print before the preamble
RESILIENT = 3  # of restart_policy: the process can meet others in any composition
MEETS_SUCCESSOR = (RESILIENT, 4)  # of restart_policy; the latter only among as many ranks as before
HEARTBEAT_S = 1.0
STEP_TIMES = 10  # of one worker, between two heartbeats
HEARTBEATS = 10  # at least so many in the heartbeat timeout
MACHINE_HEARTBEATS = 100  # a second, of all the agents on one machine: else they would be most of what many do
# What an agent gets through its environment from who starts it, where that is not the controller.
AGENT_SLOTS = "DTRAIN_AGENT_SLOTS"
AGENT_MACHINE = "DTRAIN_AGENT_MACHINE"
AGENT_WORKDIR = "DTRAIN_AGENT_WORKDIR"  # where the command was typed there
# The variables of a worker that may be others in another composition of its attempt.
COMPOSED = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DTRAIN_ROLES",
)  # fmt: skip


class Message:
    """Goes over a stream under its `kind`, the name of its class: `start_worker`. Command and Report say which way."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.kind = re.sub("(?<!^)([A-Z])", r"_\1", cls.__name__).lower()


class Command(Message):
    """What a controller sends."""


class Report(Message):
    """What an agent sends."""


def heartbeat_pause_s(timeout_s: float, agents: int) -> float:
    """Return how often an agent speaks, with so many on its machine; how soon its silence means something, too."""
    return min(max(HEARTBEAT_S, agents / MACHINE_HEARTBEATS), timeout_s / HEARTBEATS)
