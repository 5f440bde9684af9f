"""A run whose command is typed on every node, or started there by srun: node 0 listens, the others join.

Called by run.py, with our role among them (node_role.py), and for --print-commands. A node that joins dials node 0,
starts an agent when node 0 wants one, relays between the two, and exits with the run's exit code. It decides nothing
about the run.
"""

from __future__ import annotations

import errno
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path

from launcher.cli.node_role import NodeRole
from launcher.cli.options import Options
from launcher.cli.request import listed_hosts, parse_command
from launcher.errors import NodeZeroTakenError, UsageError
from launcher.hosts.host import Host
from launcher.machine.network import addresses, is_loopback, is_own, own_address
from launcher.machine.variables import in_pod
from launcher.output.text import count
from launcher.placement.job_spec import CommandKind, JobSpec
from launcher.protocol.message import AGENT_WORKDIR
from launcher.transport.connect import agent_command
from launcher.transport.setup import first_bytes
from launcher.transport.tcp.dial import JoinError
from launcher.transport.tcp.greeting import Greeting
from launcher.transport.tcp.listener import Listener
from launcher.transport.tcp.relay import join
from launcher.transport.tcp.rendezvous import Endpoint, find_token, new_token, publish, read_endpoint

_ABOUT_SSH = {"ssh_config", "ssh_command", "accept_new_host_keys"}
_ABOUT_HOSTS = {"hosts", "hostfile", "include", "exclude", "print_commands", "node_rank", "master_addr", "command"}
_LEFT_OUT = _ABOUT_SSH | _ABOUT_HOSTS


@contextmanager
def listen_for_nodes(node_role: NodeRole, spec: JobSpec, notify: Callable[[str], None]) -> Iterator[Listener]:
    """Listen for the other nodes of a run on node 0, and publish the address to nodes that share a folder with it.

    Raises UsageError; NodeZeroTakenError if another command was first, and this one can join it.
    """
    token = _shared_token(node_role)
    secret = token or new_token()  # the others read a new one from the file
    try:
        listener = Listener(
            _resolved(node_role.address),
            node_role.port,
            secret,
            expected=_fingerprint(node_role, spec),
            nodes=[host.name for host in node_role.hosts],
            notify=notify,
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
            notify(f"node 0 waits for {count(others, 'other node')} at {listener.address}:{listener.port}")
        yield listener


def join_run(node_role: NodeRole, spec: JobSpec, notify: Callable[[str], None]) -> int:
    """Take part as another node until the run ends; return its exit code. Blocks. Raises DtrainError."""
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
            first=first_bytes(spec),
            deadline=time.monotonic() + spec.start_timeout_s,
            rejoin_s=spec.start_timeout_s,
            notify=notify,
            env={**os.environ, **dict(spec.export), **node_role.agent_environment, AGENT_WORKDIR: str(spec.workdir)},
        )
    except JoinError as error:
        if node_role.by_hand or node_role.folder is None:
            raise
        shared = f"the tasks of a step must share the folder {node_role.folder.absolute()} (--log-dir)"
        raise JoinError(f"{error}; {shared}, or set DTRAIN_TOKEN and --master-addr") from error


def _fingerprint(node_role: NodeRole, spec: JobSpec) -> dict[str, str]:
    """Return the parts of the command that must be the same on every node."""
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
    """Return the token that the user gave every node; None: node 0 makes one and writes it to the shared folder.

    Node 0 makes one in a SLURM step, and if there is no other token. Raises UsageError if there is no shared folder.
    """
    token = find_token(os.environ, node_role.token_file) if node_role.by_hand or node_role.folder is None else None
    if token is None and node_role.folder is None:
        raise UsageError(
            "there is no token; nodes started by hand authenticate each other with it. Make one with "
            "`(umask 077; mkdir -p ~/.config/dtrain; openssl rand -hex 32 > ~/.config/dtrain/token)` and copy that "
            "file to every node, or set DTRAIN_TOKEN; see dtrain run --print-commands"
        )
    return token


def _resolved(address: str) -> str:
    """Resolve a name of this machine; never to a loopback address if the name is known to other hosts."""
    if address in ("0.0.0.0", "::"):
        raise UsageError(f"--master-addr {address} means all interfaces; name one address of this machine")
    own = socket.gethostname()
    if in_pod(os.environ) and address.partition(".")[0] == own.partition(".")[0]:
        address = own  # the Service's record of us comes late, or still has the address of the pod that we replace
    try:
        found = own_address(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--master-addr: DNS lookup of {address} failed: {reason}; write an address instead"
        ) from error
    if not is_own(address):
        have = ", ".join(text for texts in addresses().values() for text in texts)
        raise UsageError(f"--master-addr {address} is not this machine, which is node 0 and has: {have}")
    return found


def _dialled(address: str) -> str:
    """Return the address to dial for --master-addr: on node 0's own machine, its name may resolve to loopback."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # dialling reports it, unless the name becomes known by then
        return address
    return own_address(address) if all(is_loopback(str(where[0])) for *_, where in found) else address


def commands_of_nodes(options: Options) -> str:
    """Return the commands to type on each node for this run. Raises UsageError."""
    parse_command(options)
    hosts = listed_hosts(options)
    nodes = options.nnodes[1] if options.nnodes else len(hosts)
    if options.sync or options.fetch:
        raise UsageError(
            "--print-commands: --sync and --fetch are not for nodes that are started by hand; leave them out"
        )
    if nodes < 2:
        raise UsageError("--print-commands needs the number of nodes, 2 or more; write --nnodes N, or --hosts")
    args = _typed_options(options)
    if not (options.nnodes and "nnodes" in options.typed):
        args = ["--nnodes", str(nodes), *args]
    address = options.master_addr or (_address_of(hosts[0], options) if hosts else "ADDRESS_OF_NODE_0")
    folder = shlex.quote(os.getcwd())
    lines = [
        "# once, on one machine: the secret that the nodes share; copy the file to every node",
        "(umask 077; mkdir -p ~/.config/dtrain; openssl rand -hex 32 > ~/.config/dtrain/token)",
    ]
    for k in range(nodes):
        host = hosts[k] if k < len(hosts) else None
        slots = host.slots if host else None
        own = [] if slots is None or options.nproc_per_node else ["--nproc-per-node", str(slots)]
        node = ["dtrain", "run", "--node-rank", str(k), "--master-addr", address]
        line = shlex.join([*node, *own, *args, *options.command])
        if host is not None and host.chosen is not None:  # by --include or --exclude, which a node does not accept
            line = f"CUDA_VISIBLE_DEVICES={','.join(map(str, host.chosen))} {line}"
        lines += [f"# on {host.name if host else f'node {k}'}", f"cd {folder} && {line}"]
    return "\n".join(lines)


def _address_of(host: Host, options: Options) -> str:
    """Return the name or address that ssh would connect to: the other nodes do not know this user's aliases."""
    from launcher.transport.ssh.config import Target, look_up

    config = Path(options.ssh_config).expanduser() if options.ssh_config else None
    try:
        found = look_up(Target(host.name, host.user, host.port), config, options.start_timeout_s)
    except TimeoutError as error:
        raise UsageError(f"{error}; write --master-addr") from error
    return found.get("hostname", [host.name])[0]


def _typed_options(options: Options) -> list[str]:
    """Return the options that were typed, except those that name the nodes."""
    args = []
    for name in (found.name for found in fields(Options) if found.name in options.typed - _LEFT_OUT):
        flag, value = f"--{name.replace('_', '-')}", getattr(options, name)
        if name == "nnodes":
            value = ":".join(map(str, dict.fromkeys(value)))
        given = value if isinstance(value, tuple) else [value]
        args += [flag] if value is True else [arg for one in given for arg in (flag, str(one))]
    return args
