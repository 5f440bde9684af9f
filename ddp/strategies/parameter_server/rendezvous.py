"""The roles in a run with parameter servers, and the servers' addresses: from the launcher's variables and its store.

Called by the strategy. The store only has the addresses; the run's key proves that the other end belongs to the run.
The launcher passes the key to every process, and it never goes through the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed import (
    PrefixStore,
    Store,
    TCPStore,
)

from ddp.environment import read_placement, roles_of
from ddp.errors import LaunchEnvironmentError, ParameterServerError, RendezvousError
from ddp.monitoring.interrupts import is_interrupt

Role = Literal["worker", "ps", "evaluator"]
_HOW = "dtrain run --ps 1 --nproc-per-node 2 train.py"


@dataclass(frozen=True)
class ProcessRole:
    """The role of this process, its index in the role, and the numbers of workers and servers.

    `key` is the run's, and is not in the repr. A world of one has no servers.
    """

    role: Role
    index: int
    workers: int
    servers: int
    key: bytes = field(default=b"", repr=False)

    @property
    def is_alone(self) -> bool:
        return self.servers == 0


def read_role(environ: Mapping[str, str]) -> ProcessRole:
    """Read this process's role from DTRAIN_ROLES, ROLE_NAME and RANK; without any, it is alone.

    Raises LaunchEnvironmentError if the run has workers but no servers, or servers but no workers.
    """
    roles = roles_of(environ)
    workers = _workers(roles)
    servers = roles.get("ps", 0)
    own = environ.get("ROLE_NAME", "worker")
    role: Role = "ps" if own == "ps" else "evaluator" if own == "evaluator" else "worker"
    if not servers:
        world_size = read_placement(environ).world_size
        if world_size == 1 and role == "worker":
            return ProcessRole("worker", 0, 1, 0)
        raise LaunchEnvironmentError(
            f"strategy 'parameter_server' in a world of {world_size}, but the run has no parameter servers: start it "
            f"with --ps N, for example {_HOW}"
        )
    if not workers:
        raise LaunchEnvironmentError(f"{servers} parameter servers without workers: start some, for example {_HOW}")
    key = environ.get("DTRAIN_RUN_KEY", "")
    if len(key) != 64 or not set(key) <= set("0123456789abcdef"):
        raise LaunchEnvironmentError(
            "DTRAIN_RUN_KEY is not set or malformed: dtrain run makes it, and hands it to every process of a run"
        )
    index = int(environ["RANK"]) if role == "worker" else int(environ["ROLE_RANK"])
    if role == "worker" and index >= workers:
        raise LaunchEnvironmentError(
            f"this process has role {own!r} and rank {index}, but the workers are ranks 0 to {workers - 1} "
            f"(DTRAIN_ROLES={environ['DTRAIN_ROLES']}): give a role beside them a command of its own"
        )
    return ProcessRole(role, index, workers, servers, bytes.fromhex(key))


def _workers(roles: Mapping[str, int]) -> int:
    """Return the number of workers: those of the first role, or the chief and those of the role after it."""
    names = [name for name in roles if name not in ("ps", "evaluator")]
    if not names:
        return 0
    own = names[:2] if names[0] == "chief" else names[:1]
    return sum(roles[name] for name in own)


def own_address(master: str) -> str:
    """Return the numeric address of this host on its route to `master`, where the others can reach it."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(f"no route from this host to MASTER_ADDR={master}: {error}") from error


class ServerDirectory:
    """The addresses of this attempt's servers, in the launcher's store."""

    def __init__(self, *, timeout_s: float) -> None:
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not address or not port.isdecimal():
            raise LaunchEnvironmentError("MASTER_ADDR and MASTER_PORT are not set: dtrain run sets them")
        self.host = own_address(address)
        self._timeout_s = timeout_s
        try:
            store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
        except (dist.DistError, RuntimeError) as error:
            if is_interrupt(error):
                raise
            raise RendezvousError(f"the store at {address}:{port} cannot be reached: {error}") from error
        self._store: Store = PrefixStore("dtrain/ps", store)

    def start_life(self, server: int) -> int:
        """Count one more start of a server; return its number, from 1."""
        return int(self._store.add(f"lives/{server}", 1))

    def announce(self, server: int, life: int, address: str) -> None:
        """Publish the address of a server in this life."""
        self._store.set(f"server/{server}/{life}", address)

    def find(self, server: int, life: int, *, wait_s: float = 0.0) -> str | None:
        """Return a server's address in a life, None if it was not published within `wait_s` seconds."""
        name = f"server/{server}/{life}"
        if wait_s > 0:
            with contextlib.suppress(dist.DistStoreError):
                self._store.wait([name], timedelta(seconds=wait_s))
        return self._store.get(name).decode() if self._store.check([name]) else None

    def agree_on_step(self, server: int, servers: Sequence[int], steps: Sequence[int]) -> int | None:
        """Return the last step for which all of `servers` have a snapshot, None if none of them has any.

        Each of them must call it; blocks until all have, at most `timeout_s`. Raises ParameterServerError if
        some have snapshots, but not of the same step.
        """
        self._store.set(f"snapshots/{server}", json.dumps(sorted(steps)))
        names = [f"snapshots/{other}" for other in servers]
        try:
            self._store.wait(names, timedelta(seconds=self._timeout_s))
        except dist.DistStoreError as error:
            raise RendezvousError(
                f"parameter server {server}: not all of the {len(servers)} servers have started within "
                f"{self._timeout_s:g} s"
            ) from error
        found = [json.loads(self._store.get(name)) for name in names]
        common = set.intersection(*map(set, found))
        if not common and any(found):
            have = "; ".join(f"server {other}: {steps or 'none'}" for other, steps in zip(servers, found, strict=True))
            raise ParameterServerError(
                f"the servers have no snapshot of the same step ({have}): put the folder on storage that all of their "
                "hosts share, or remove it to start again"
            )
        return max(common, default=None)
