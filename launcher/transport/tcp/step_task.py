"""A task of the one step of srun that starts the agents of many nodes: connects back to dtrain, and serves it.

Run by srun as `python -m launcher.transport.tcp.step_task` (transport/srun_step.py). Its standard input, which srun
passes on to every task, begins with a line that says where dtrain listens, by which token, and what an agent is; it
stays open as long as dtrain lives. A task that cannot connect says so in a line on its standard output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from launcher.decode import decode_json
from launcher.errors import ProtocolError
from launcher.hosts.ranges import expand
from launcher.transport.tcp.dial import JoinError
from launcher.transport.tcp.greeting import Greeting
from launcher.transport.tcp.join import join
from launcher.transport.tcp.rendezvous import Endpoint

__all__ = ["MODULE", "StepOrder", "node_ranks"]

MODULE = "launcher.transport.tcp.step_task"
DIAL_S = 10.0  # to connect; whoever cannot gets an srun of its own
REJOIN_S = 30.0  # after a break
MAX_ORDER_BYTES = 1 << 16
READ_BYTES = 1 << 12


@dataclass(frozen=True)
class StepOrder:
    """The first line of the standard input: where dtrain listens, and what starts an agent."""

    endpoint: Endpoint
    agent: tuple[str, ...]


def node_ranks(nodes: Iterable[str]) -> dict[str, int]:
    """Return by name which node rank each node of a step has; that of dtrain itself is 0."""
    return {name: rank for rank, name in enumerate(sorted(nodes), 1)}


def main() -> int:
    order = _read_order()
    if order is None:
        return 0  # the run ended before it began
    threading.Thread(target=_end_with_input, name="standard input", daemon=True).start()
    name = os.environ["SLURMD_NODENAME"]
    rank = node_ranks(expand(os.environ["SLURM_STEP_NODELIST"]))[name]
    try:
        return join(
            order.endpoint,
            greeting=Greeting.ours(rank, {}),
            agent_command=order.agent,
            deadline=time.monotonic() + DIAL_S,
            rejoin_s=REJOIN_S,
            tell=lambda _: None,
            others=False,  # dtrain gets them from SLURM too, and passes them on
        )
    except JoinError as error:
        os.write(1, json.dumps({"node": name, "problem": str(error)}).encode() + b"\n")
        return 0


def _read_order() -> StepOrder | None:
    said = b""
    while b"\n" not in said:
        data = os.read(0, READ_BYTES)
        if not data:
            return None
        said += data
        if len(said) > MAX_ORDER_BYTES:
            raise ProtocolError("the order to this task has no end")
    return decode_json(StepOrder, said.partition(b"\n")[0])


def _end_with_input() -> None:
    """End this task in good order when dtrain has ended, however."""
    while os.read(0, READ_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
