"""A guard and an agent that a process kept warm has forked ahead (workers/keeper.py): they wait here for a run.

Each has its imports done. When a run comes, it takes over the state of the process whose place the agent takes. What
cannot be taken over (limits, umask, control group, what the interpreter read at its start) was compared before.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from launcher.frozen import dataclass

__all__ = ["Run", "await_run", "read_orders"]

_MESSAGE_BYTES = 1 << 16
_DESCRIPTORS = 6


@dataclass(frozen=True)
class Run:
    """A run for which an agent was asked. Both numbers are open files: `may_begin` has a byte as long as it is not
    given up, and at the other end of `asked_by` is the process whose place the agent takes."""

    prefix: str  # how the names of what may stay warm after it begin
    may_begin: int
    asked_by: int


def read_orders(descriptor: int) -> dict[str, Any]:
    """Read what a process kept warm has written for one that it forked, and close the file."""
    with os.fdopen(descriptor, encoding="ascii") as file:
        file.seek(0)
        orders: dict[str, Any] = json.load(file)
    return orders


def await_run(orders: Mapping[str, Any]) -> Run:
    """Wait for a run, and take on its variables, processors and standard streams.

    Does not return if the process kept warm ends before there is one.
    """
    with socket.socket(fileno=orders["runs"]) as runs:
        data, descriptors, _, _ = socket.recv_fds(runs, _MESSAGE_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(0)
    order = json.loads(data)
    environ, may_begin, stdin, stdout, stderr, asked_by = descriptors
    os.environ.clear()
    os.environ.update(json.loads(os.pread(environ, os.fstat(environ).st_size, 0)))
    os.close(environ)
    for number, stream in enumerate((stdin, stdout, stderr)):
        os.dup2(stream, number)
        os.close(stream)
    os.sched_setaffinity(0, order["cores"])
    return Run(order["prefix"], may_begin, asked_by)
