"""Runs of which the command is typed on every node, or started there by srun: who is who, and where they meet.

Node 0 runs the controller and listens (transport/tcp/listener.py), the others join (run_node.py). Under
srun every task is a node of the run, so that nothing is started twice, and each keeps the GPUs that SLURM gave it.
"""

from __future__ import annotations

import errno
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import PlaceTakenError, UsageError
from launcher.hosts.host import AGENT_MACHINE, AGENT_SLOTS, AGENT_WORKDIR, Host, HostKind
from launcher.placement.job_spec import DEFAULT_PORT, CommandKind, JobSpec
from launcher.transport.tcp.token import find_token, new_token

if TYPE_CHECKING:
    from launcher.hosts.slurm_allocation import Step
    from launcher.transport.tcp.listener import Listener
    from launcher.transport.tcp.rendezvous_file import Endpoint

__all__ = ["Place", "commands", "find_place", "join_run", "open_door"]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Which of the run's commands this one is.

    `node_rank` is None where any free place will do. `lead`: it is node 0, or, with no rank, may turn out to be.
    `folder` and `name` are of the file by which the nodes find each other, where they share a folder. `address` is
    empty where that file says it. `slots` and `machine` are told this node's agent (see agent/host_facts.py).
    """

    node_rank: int | None
    nodes: tuple[int, int]
    hosts: tuple[Host, ...]
    lead: bool
    address: str
    port: int
    folder: Path | None = None
    name: str = ""
    slots: int | None = None
    machine: str = ""
    token_file: Path | None = None
    by_hand: bool = True  # somebody typed the command; otherwise srun started it everywhere

    def adapt(self, spec: JobSpec) -> JobSpec:
        """Return the job as it is seen from here: every node says for itself how many workers it takes."""
        return replace(spec, nproc=None, master_port=None, master_addr=None)

    def agent_environment(self, nproc: int | str | None, gpus_per_proc: int | None) -> dict[str, str]:
        """Return what this node's agent is told through its environment: how many workers, as it was said here."""
        slots = self.slots if self.slots is not None else nproc
        env = {} if slots is None else {AGENT_SLOTS: f"{slots}:{gpus_per_proc or 1}"}
        return env | ({AGENT_MACHINE: self.machine} if self.machine else {})


def find_place(
    options: Mapping[str, Any], environment: Mapping[str, str], *, as_torchrun: bool, has_source: bool
) -> Place | None:
    """Return who we are among several commands of one run; None if this command starts the whole run.

    Raises UsageError where that was not said completely.
    """
    node_rank: int | None = options["node_rank"]
    if has_source:
        if node_rank is not None and not as_torchrun:
            raise UsageError("--node-rank is for a command that is typed on every node; leave out the hosts, or it")
        return None
    if options["standalone"]:  # as under torchrun: a run of this node alone, however many there are
        return None
    nodes: tuple[int, int] = options["nnodes"] or (1, 1)
    step = _step(environment)
    if step is not None:
        return _place_in_step(step, options, environment)
    if node_rank is None and not (as_torchrun and nodes[1] > 1):
        return None
    if options["nnodes"] is None:
        raise UsageError("--node-rank says which node this is; say with --nnodes how many there are")
    return _place_typed(options, node_rank, nodes, as_torchrun=as_torchrun)


def _place_typed(
    options: Mapping[str, Any], node_rank: int | None, nodes: tuple[int, int], *, as_torchrun: bool
) -> Place:
    any_rank = node_rank is None and options["rdzv_backend"] == "c10d"
    if node_rank is None and not any_rank:
        node_rank = 0  # torchrun's default
    if node_rank is not None and not 0 <= node_rank < nodes[1]:
        raise UsageError(f"--node-rank is {node_rank}; with --nnodes {nodes[1]} it must be 0 to {nodes[1] - 1}")
    address = options["master_addr"] or (_LOOPBACK if as_torchrun or nodes[1] == 1 else None)
    if address is None:
        raise UsageError("where do the nodes meet? Name an address of node 0 with --master-addr, on every node")
    lead = node_rank == 0 if not any_rank else options.get("rdzv_is_host", _is_own(address))
    names = [f"node{k}" for k in range(nodes[1])]
    port = 0 if options.get("any_port") else options["master_port"] or DEFAULT_PORT
    return Place(
        node_rank=node_rank,
        nodes=nodes,
        hosts=_hosts(names),
        lead=lead,
        address=address,
        port=port,
        folder=None if not _is_loopback(address) else _local_folder(),
        name=f"port-{port}",
        token_file=_token_file(options),
    )


def _hosts(names: list[str]) -> tuple[Host, ...]:
    kinds = [HostKind.LOCAL, *[HostKind.JOINED] * (len(names) - 1)]
    return tuple(Host(name, kind) for name, kind in zip(names, kinds, strict=True))


# ---- under srun ----------------------------------------------------------------------------------------------


def _step(environment: Mapping[str, str]) -> Step | None:
    """Return the step of which this process is one of several tasks."""
    if "SLURM_STEP_ID" not in environment:
        return None
    from launcher.hosts.slurm_allocation import find_step, step_title

    step = find_step(environment, step_title())
    return step if step is not None and step.tasks > 1 and not step.interactive else None


def _place_in_step(step: Step, options: Mapping[str, Any], environment: Mapping[str, str]) -> Place:
    asked: tuple[int, int] | None = options["nnodes"]
    one_a_node = step.tasks == len(step.nodes)
    here, local = step.nodes[step.node_rank], step.tasks_per_node[step.node_rank]
    if asked is not None and not asked[0] <= len(step.nodes) <= asked[1]:
        raise UsageError(
            f"--nnodes is {asked[0]}:{asked[1]}, but srun started this step on {len(step.nodes)} nodes; leave it out"
        )
    if not one_a_node and options["nproc_per_node"] not in (None, "1", str(local)):
        raise UsageError(
            f"srun started {local} tasks here, each of which is a worker, but --nproc-per-node is "
            f"{options['nproc_per_node']}; leave it out, or have srun start one task on each node"
        )
    names = list(step.nodes) if one_a_node else _task_names(step, environment)
    others = [name for name in step.nodes if name != here]
    address: str | None = options["master_addr"]
    named = address is not None and find_token(environment, _token_file(options)) is not None  # else by a file
    return Place(
        node_rank=step.rank,
        nodes=(step.tasks, step.tasks),
        hosts=_hosts(names),
        lead=step.rank == 0,
        address=address if named and address is not None else _route(others) if step.rank == 0 else "",
        port=(options["master_port"] or DEFAULT_PORT) if named else 0,
        folder=None if named else Path(options.get("log_dir") or "runs"),
        name=f".slurm-{step.job}.{environment['SLURM_STEP_ID']}",
        slots=None if one_a_node else 1,
        machine="" if one_a_node else here,
        token_file=_token_file(options),
        by_hand=False,
    )


def _task_names(step: Step, environment: Mapping[str, str]) -> list[str]:
    """Name every task, by its node where srun fills one after the other, as it does unless told otherwise."""
    if not environment.get("SLURM_DISTRIBUTION", "block").startswith("block"):
        return [f"task{k}" for k in range(step.tasks)]
    counts = zip(step.nodes, step.tasks_per_node, strict=True)
    return [f"{node}.{local}" for node, count in counts for local in range(count)]


def _route(others: list[str]) -> str:
    from launcher.machine.network import choose_address

    return choose_address((), others[0], None) if others else _LOOPBACK


# ---- meeting -------------------------------------------------------------------------------------------------


@contextmanager
def open_door(place: Place, spec: JobSpec, tell: Callable[[str], None]) -> Iterator[Listener]:
    """Hold the door of a run open on node 0, and let the nodes that share a folder with it know.

    Raises UsageError; PlaceTakenError where another command was first, and this one can join it.
    """
    from launcher.transport.tcp.listener import Listener
    from launcher.transport.tcp.rendezvous_file import Endpoint, publish

    token = _token(place)
    names = [host.name for host in place.hosts]
    expected = _fingerprint(place, spec)
    try:
        door = Listener(
            _resolved(place.address),
            place.port,
            token,
            expected=expected,
            nodes=names,
            tell=tell,
            typed=lambda rank: f"the same command, with --node-rank {rank}",
        )
    except UsageError as error:
        taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
        if taken and place.node_rank is None:
            raise PlaceTakenError(str(error)) from error
        raise
    with door:
        if place.folder is None or not _meets_by_file(place):
            yield door
            return
        place.folder.mkdir(parents=True, exist_ok=True)
        with publish(place.folder, place.name, Endpoint(door.address, door.port, token)):
            yield door


def join_run(
    place: Place, spec: JobSpec, command: list[str], nproc: int | str | None, tell: Callable[[str], None]
) -> int:
    """Be one of the other nodes until the run is over; return its exit code. Blocks. Raises DtrainError."""
    from launcher.cli.run_node import JoinError, join
    from launcher.transport.tcp.greeting import Greeting
    from launcher.transport.tcp.rendezvous_file import Endpoint, read_endpoint

    find: Endpoint | Callable[[], Endpoint | None]
    if place.folder is not None and _meets_by_file(place):
        find = partial(read_endpoint, place.folder, place.name)
    else:
        find = Endpoint(place.address, place.port, _token(place))
    try:
        return join(
            find,
            greeting=Greeting.ours(place.node_rank, _fingerprint(place, spec), nproc=str(nproc or "")),
            agent_command=command,
            deadline=time.monotonic() + spec.start_timeout_s,
            rejoin_s=spec.start_timeout_s,
            tell=tell,
            env={
                **os.environ,
                **dict(spec.export),
                **place.agent_environment(nproc, spec.gpus_per_proc),
                AGENT_WORKDIR: str(spec.workdir),
            },
        )
    except JoinError as error:
        if place.by_hand or place.folder is None:
            raise
        shared = (
            f"the tasks of a step find each other in {place.folder.absolute()} (--log-dir), which they have to share"
        )
        raise JoinError(f"{error}; {shared}, unless there is DTRAIN_TOKEN and --master-addr") from error


def _fingerprint(place: Place, spec: JobSpec) -> dict[str, str]:
    """Return what has to be the same on every node."""
    command = spec.command
    flag = {CommandKind.MODULE: ["-m"], CommandKind.PROGRAM: ["--no-python"], CommandKind.SCRIPT: []}[command.kind]
    least, most = place.nodes
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


def _meets_by_file(place: Place) -> bool:
    """Whether the nodes learn from a file where node 0 is, and the token: in a step, else if there is no other."""
    return place.folder is not None and (not place.by_hand or _typed_token(place) is None)


def _typed_token(place: Place) -> bytes | None:
    return find_token(os.environ, place.token_file)


def _token_file(options: Mapping[str, Any]) -> Path | None:
    return Path(options["token_file"]) if options.get("token_file") else None


def _token(place: Place) -> bytes:
    if _meets_by_file(place):
        return new_token()  # which the others read there
    token = _typed_token(place)
    if token is not None:
        return token
    raise UsageError(
        "nodes that are started by hand prove to each other that they belong together, and there is no token: make one "
        "by `(umask 077; mkdir -p ~/.config/dtrain; openssl rand -hex 32 > ~/.config/dtrain/token)` and copy that file "
        "to every node, or set DTRAIN_TOKEN; see dtrain run --print-commands"
    )


def _resolved(address: str) -> str:
    """Return the address of this machine that a name stands for; never a loopback one for a name that others know."""
    import socket

    from launcher.machine.network import choose_address
    from launcher.machine.routes import addresses, is_own

    if address in ("0.0.0.0", "::"):
        raise UsageError(f"--master-addr {address} means all interfaces; name one address of this machine")

    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--master-addr {address} is not known here; write an address instead") from error
    if not is_own(address):
        have = ", ".join(text for texts in addresses().values() for text in texts)
        raise UsageError(f"--master-addr {address} is not this machine, which is node 0 and has: {have}")
    resolved = [str(where[0]) for *_, where in found]
    if not _is_loopback(address) and all(map(_is_loopback, resolved)):  # as Debian has it: 127.0.1.1
        return choose_address((), "", None)
    return resolved[0]


def _is_own(address: str) -> bool:
    from launcher.machine.routes import is_own

    return is_own(address)


def _is_loopback(address: str) -> bool:
    return address == "localhost" or address.startswith("127.") or address == "::1"


def _local_folder() -> Path:
    from launcher.transport.tcp.rendezvous_file import local_folder

    return local_folder()


# ---- what to type --------------------------------------------------------------------------------------------


def commands(words: list[list[str]], address: str, names: list[str]) -> str:
    """Return what to type on each of the nodes; `words` are their commands without --node-rank and --master-addr."""
    folder = shlex.quote(os.getcwd())
    lines = [
        "# once, on one machine: the secret that the nodes share; copy the file to every node",
        "(umask 077; mkdir -p ~/.config/dtrain; openssl rand -hex 32 > ~/.config/dtrain/token)",
    ]
    for k, own in enumerate(words):
        node = ["--node-rank", str(k), "--master-addr", address]
        lines += [f"# on {names[k]}", f"cd {folder} && {shlex.join(['dtrain', 'run', *node, *own])}"]
    return "\n".join(lines)
