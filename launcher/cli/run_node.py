"""A run of which the command is typed on every node, or started there by srun: node 0 listens, the others join.

Called by run.py, with who we are among them (node_role.py). A node that joins dials node 0, has an agent started when
node 0 wants one, carries what they say to each other, and ends as the run ends. It decides nothing about the run.
"""

from __future__ import annotations

import errno
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from launcher.cli.node_role import NodeRole
from launcher.errors import NodeZeroTakenError, UsageError
from launcher.machine.network import addresses, choose_address, is_loopback, is_own
from launcher.output.text import count
from launcher.placement.job_spec import CommandKind, JobSpec
from launcher.protocol.message import AGENT_WORKDIR
from launcher.transport.connect import agent_command
from launcher.transport.tcp.dial import JoinError
from launcher.transport.tcp.greeting import Greeting
from launcher.transport.tcp.join import join
from launcher.transport.tcp.listener import Listener
from launcher.transport.tcp.rendezvous import Endpoint, find_token, new_token, publish, read_endpoint

__all__ = ["JoinError", "join_run", "listen_for_nodes"]


@contextmanager
def listen_for_nodes(node_role: NodeRole, spec: JobSpec, tell: Callable[[str], None]) -> Iterator[Listener]:
    """Listen for the other nodes of a run on node 0, and let those that share a folder with it know where.

    Raises UsageError; NodeZeroTakenError where another command was first, and this one can join it.
    """
    token = _shared_token(node_role)
    secret = token or new_token()  # which the others read in the file
    try:
        listener = Listener(
            _resolved(node_role.address),
            node_role.port,
            secret,
            expected=_fingerprint(node_role, spec),
            nodes=[host.name for host in node_role.hosts],
            tell=tell,
        )
    except UsageError as error:
        taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
        if taken and node_role.node_rank is None:
            raise NodeZeroTakenError(str(error)) from error
        raise
    with ExitStack() as at_end:
        at_end.callback(listener.close, 1, "dtrain on node 0 has ended")
        if token is None and node_role.folder is not None:
            node_role.folder.mkdir(parents=True, exist_ok=True)
            endpoint = Endpoint(listener.address, listener.port, os.fsdecode(secret))
            at_end.enter_context(publish(node_role.folder, node_role.name, endpoint))
        if node_role.by_hand and (others := node_role.nodes[1] - 1):
            tell(f"node 0 waits for {count(others, 'other node')} at {listener.address}:{listener.port}")
        yield listener


def join_run(node_role: NodeRole, spec: JobSpec, tell: Callable[[str], None]) -> int:
    """Be one of the other nodes until the run is over; return its exit code. Blocks. Raises DtrainError."""
    token = _shared_token(node_role)
    find: Endpoint | Callable[[], Endpoint | None]
    if token is not None:
        find = Endpoint(_dialled(node_role.address), node_role.port, os.fsdecode(token))
    else:
        assert node_role.folder is not None
        find = partial(read_endpoint, node_role.folder, node_role.name)
    try:
        return join(
            find,
            greeting=Greeting.ours(node_role.node_rank, _fingerprint(node_role, spec)),
            agent_command=agent_command(spec),
            deadline=time.monotonic() + spec.start_timeout_s,
            rejoin_s=spec.start_timeout_s,
            tell=tell,
            env={**os.environ, **dict(spec.export), **node_role.agent_environment, AGENT_WORKDIR: str(spec.workdir)},
        )
    except JoinError as error:
        if node_role.by_hand or node_role.folder is None:
            raise
        shared = f"the tasks of a step must share the folder {node_role.folder.absolute()} (--log-dir)"
        raise JoinError(f"{error}; {shared}, or have DTRAIN_TOKEN and --master-addr") from error


def _fingerprint(node_role: NodeRole, spec: JobSpec) -> dict[str, str]:
    """Return what has to be the same on every node."""
    command = spec.command
    flag = {CommandKind.MODULE: ["-m"], CommandKind.PROGRAM: ["--no-python"], CommandKind.SCRIPT: []}[command.kind]
    least, most = node_role.nodes
    roles = [f"{role.name}:{role.count}:{shlex.join(role.command)}" for role in spec.roles.others]
    return {
        "command": shlex.join([*flag, command.target, *command.args]),
        "--nnodes": str(most) if least == most else f"{least}:{most}",
        "roles": " ".join([spec.roles.first, spec.roles.worker, *roles, "until", *spec.roles.waits_for]),
        "--env-for": ",".join(spec.env_for),
        "--gpus-per-proc": str(spec.gpus_per_proc or ""),
        "--max-restarts": str(spec.max_restarts),
        "--pass-local-rank": str(spec.pass_local_rank),
        "--virtual-local-rank": str(spec.virtual_local_rank),
    }


def _shared_token(node_role: NodeRole) -> bytes | None:
    """Return the token that the user gave every node; None: node 0 makes one, and writes it where the others look.

    That is so in a step, else where there is no other token. Raises UsageError where there is no such folder.
    """
    token = find_token(os.environ, node_role.token_file) if node_role.by_hand or node_role.folder is None else None
    if token is None and node_role.folder is None:
        raise UsageError(
            "there is no token, by which nodes started by hand authenticate each other. Make one by "
            "`(umask 077; mkdir -p ~/.config/dtrain; openssl rand -hex 32 > ~/.config/dtrain/token)` and copy that "
            "file to every node, or set DTRAIN_TOKEN; see dtrain run --print-commands"
        )
    return token


def _resolved(address: str) -> str:
    """Return the address of this machine that a name stands for; never a loopback one for a name that others know."""
    if address in ("0.0.0.0", "::"):
        raise UsageError(f"--master-addr {address} means all interfaces; name one address of this machine")
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--master-addr: DNS lookup of {address} failed: {reason}; write an address instead"
        ) from error
    if not is_own(address):
        have = ", ".join(text for texts in addresses().values() for text in texts)
        raise UsageError(f"--master-addr {address} is not this machine, which is node 0 and has: {have}")
    return _beyond_loopback(address, found)


def _dialled(address: str) -> str:
    """Return what reaches node 0 at --master-addr: on its own machine a name may mean an address where it is not."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # dialling says so, unless the name becomes known until then
        return address
    return _beyond_loopback(address, found) if all(is_loopback(str(where[0])) for *_, where in found) else address


def _beyond_loopback(address: str, found: Sequence[tuple[Any, ...]]) -> str:
    """Return the address at which node 0 listens, by what getaddrinfo says of its name on its own machine.

    If the name means loopback addresses only (Debian's 127.0.1.1), it is the one of the route out of here.
    """
    resolved = [str(where[0]) for *_, where in found]
    if is_loopback(address):
        return resolved[0]
    return next((each for each in resolved if not is_loopback(each)), None) or choose_address((), "", None)
