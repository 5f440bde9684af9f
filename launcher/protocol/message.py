"""The base of all messages, and constants on which both ends of a stream must agree."""

from __future__ import annotations

import re
from typing import ClassVar

PROTOCOL = 16
PREAMBLE = b"\n\x01dtrain-stream-1\n"
MAX_HEADER_BYTES = 8 << 20  # the largest part is the environment of a worker
MAX_PAYLOAD_BYTES = 1 << 20
LEDGER = 3  # stream of a worker, beside its stdout (1) and stderr (2): see worker.py
CHANNEL_BYTES = 1 << 16  # see ChannelData
MAX_NOISE_BYTES = 1 << 20  # output of a login shell before the preamble
RESILIENT = 3  # a restart_policy: the process can meet others in any composition
MEETS_SUCCESSOR = (RESILIENT, 4)  # restart policies; the latter only with the same number of ranks
HEARTBEAT_S = 1.0
STEP_TIMES = 10  # for one worker, between two heartbeats
HEARTBEATS = 10  # least number in the heartbeat timeout
MACHINE_HEARTBEATS = 100  # per second, for all agents on one machine: more would be most of the work of many agents
# Set in an agent's environment by the process that starts it, if that is not the controller.
AGENT_SLOTS = "DTRAIN_AGENT_SLOTS"
AGENT_MACHINE = "DTRAIN_AGENT_MACHINE"
AGENT_WORKDIR = "DTRAIN_AGENT_WORKDIR"  # working directory of the command on that host
AGENT_TREES = "DTRAIN_AGENT_TREES"  # folders below which sent files have their paths of the controller's machine
# Variables of a worker that depend on the composition of its attempt.
COMPOSED = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DTRAIN_ROLES",
)  # fmt: skip


class Message:
    """Sent under its `kind`, the name of its class: `start_worker`. Command and Report give the direction."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.kind = re.sub("(?<!^)([A-Z])", r"_\1", cls.__name__).lower()


class Command(Message):
    """A message from a controller."""


class Report(Message):
    """A message from an agent."""


def heartbeat_pause_s(timeout_s: float, agents: int) -> float:
    """Return the pause between heartbeats of an agent, with so many on its machine; also the unit for a silence."""
    return min(max(HEARTBEAT_S, agents / MACHINE_HEARTBEATS), timeout_s / HEARTBEATS)
