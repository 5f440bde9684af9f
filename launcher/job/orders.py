"""The orders that make a job start on a host, and whether its agent can take them. Pure."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from launcher import __version__
from launcher.frozen import replace
from launcher.hosts.host import Host, HostKind
from launcher.job.events import Send
from launcher.job.fleet import HostState
from launcher.machine.packages import install_command
from launcher.placement.environment import (
    ecosystem_environments,
    roles_in_order,
    serving_ranks,
    shared_prefixes,
    worker_defaults,
    worker_environment,
)
from launcher.placement.job_spec import DEFAULT_PORT, CommandKind, JobSpec, WorkerCommand
from launcher.placement.placement import HostOffer, Placement, WorkerPlace, place
from launcher.protocol.commands import OpenStore, Prepare, ReservePorts, SharePrefixes, StartWorker
from launcher.protocol.message import COMPOSED, HEARTBEAT_S, PROTOCOL, STEP_TIMES
from launcher.protocol.reports import Hello, PortsReserved, StoreOpened


def mismatch(spec: JobSpec, hello: Hello) -> str | None:
    """Return why an agent cannot work with this controller, or None."""
    python = spec.python
    if hello.protocol != PROTOCOL or hello.version != __version__:
        advice = ": ".join(filter(None, ["install the same there", install_command(python)]))
        return f"has dtrain {hello.version}, here it is {__version__}; {advice}"
    here = "{}.{}.{}".format(*sys.version_info[:3])
    if spec.command.kind is not CommandKind.PROGRAM and _minor(hello.python) != _minor(here):
        return f"{python} is Python {hello.python}, here it is {here}; name a Python {_minor(here)} with --python"
    return None


def prepare(
    spec: JobSpec,
    host: Host,
    *,
    lease_s: float,
    lost_agents: Sequence[str],
    heartbeat_s: float = HEARTBEAT_S,
    step_times: int = STEP_TIMES,
) -> Prepare:
    command = spec.command
    return Prepare(
        run_id=spec.run_id,
        workdir=str(spec.workdir),
        script=command.target if command.kind is CommandKind.SCRIPT else None,
        program=command.target if command.kind is CommandKind.PROGRAM else None,
        export={} if host.kind is HostKind.JOINED else dict(spec.export),  # who typed the command there said it there
        grace_s=spec.grace_s,
        lease_s=lease_s,
        heartbeat_s=heartbeat_s,
        step_times=step_times,
        lost_agents=list(lost_agents),
        own_connection=host.has_own_connection,
        part=host.part,
        parts=host.parts,
        interfaces=list(spec.interfaces),
        through=_through(command),
        target=command.target,
        workers=likely_workers(spec, host),
        start_method=spec.start_method,
        reports_steps=spec.chaos is not None,
        names=_names(spec),
        keep_warm_s=spec.keep_warm_s,
        flight_recorder=spec.flight_recorder == "on",
        behind=spec.launch_prefix[0] if spec.launch_prefix else "",
    )


def _names(spec: JobSpec) -> list[str]:
    """Return the names of the variables that every worker of a run gets."""
    variable = "CUDA_VISIBLE_DEVICES"  # or another, which the host's agent knows
    offer = HostOffer(name="", slots=1, gpus=(), gpus_verified=True, gpu_variable=variable, cores=(), cpu_limit=1)
    placement = place([offer], nproc=1)
    store = StoreOpened(attempt=0, address="", port=0)
    env = worker_environment(spec, placement, placement.workers[0], store, roles="", run_key="")
    others = ecosystem_environments(spec.env_for, placement, {"TF_CONFIG": ""})
    return [*env, *next(others)]


def likely_workers(spec: JobSpec, host: Host) -> str:
    """Return how many workers a host will have, as Prepare says it."""
    by_gpu = f":{spec.gpus_per_proc}" if spec.gpus_per_proc and spec.nproc in ("gpu", "auto") else ""
    return f"{spec.nproc}{by_gpu}" if spec.nproc is not None else str(host.slots or "")


def _through(command: WorkerCommand) -> str:
    return "" if command.kind is CommandKind.PROGRAM else command.kind.value


def open_store(spec: JobSpec, states: Sequence[HostState], attempt: int) -> OpenStore:
    """Return the order for the first of an attempt's hosts: to listen where the others reach it."""
    address = spec.master_addr if spec.master_addr is not None else _address(spec, states[0], states)
    return OpenStore(
        attempt=attempt,
        address=address,
        towards=_another(states[0], states) if any(state.host.remote for state in states) else "",
        port=spec.master_port or DEFAULT_PORT,
        exact=spec.master_port is not None,
    )


def reserve_ports(
    spec: JobSpec, states: Sequence[HostState], placement: Placement, attempt: int
) -> dict[str, ReservePorts]:
    """Return, by host, the orders to find ports for the workers that others connect to."""
    serving = set(serving_ranks(spec.env_for, placement))
    counts = Counter(worker.host for worker in placement.workers if worker.rank in serving)
    return {
        state.name: ReservePorts(
            attempt=attempt,
            address=_address(spec, state, states),
            towards=_another(state, states),
            count=counts[state.name],
        )
        for state in states
        if counts[state.name]
    }


def _address(spec: JobSpec, state: HostState, states: Sequence[HostState]) -> str:
    """Return a host's address as the others reach it; empty: what its agent finds.

    For this machine that is the address from which the others are reached, unless all lie behind jump hosts.
    """
    if spec.interfaces:
        return ""
    if not any(other.host.remote for other in states):
        return "127.0.0.1"
    if state.host.remote:
        return ""
    return next((other.our_address for other in states if other.our_address), "")


def _another(state: HostState, states: Sequence[HostState]) -> str:
    return next((other.name for other in states if other.name != state.name), "")


def start_workers(
    spec: JobSpec,
    placement: Placement,
    store: StoreOpened,
    ports: Mapping[str, PortsReserved],
    *,
    run_key: str,
    wait_s: float,
) -> Iterator[Send]:
    """Yield the orders to start each worker, for the agent of its host, which may wait so long for imports.

    Raises PlacementError.
    """
    addresses = _addresses(spec, placement, ports)
    roles = roles_in_order(placement)
    prefixes = shared_prefixes(spec.env_for, placement, addresses)
    if prefixes:
        for host in dict.fromkeys(worker.host for worker in placement.workers):
            yield Send(host, SharePrefixes(attempt=store.attempt, prefixes=prefixes))
    others = ecosystem_environments(spec.env_for, placement, prefixes)
    for worker, for_others in zip(placement.workers, others, strict=True):
        command = spec.command_of(worker.role)
        env = worker_environment(spec, placement, worker, store, roles=roles, run_key=run_key)
        args = command.args
        if spec.pass_local_rank:
            args = (f"--local-rank={worker.local_rank}", *args)
        start = StartWorker(
            rank=worker.rank,
            attempt=store.attempt,
            through=_through(command),
            argv=[command.target, *args],
            env={**env, **for_others},
            defaults=worker_defaults(worker),
            local_rank=worker.local_rank,
            numa_binding=spec.numa_binding if worker.rank < placement.ordinary else "",
            gpu=worker.gpus[0] if worker.gpus else "",
            local_world_size=worker.local_world_size,
            wait_s=wait_s,
            input_channel=-1 - store.attempt if worker.rank == spec.stdin_rank else 0,
            prefix=_launch_prefix(spec, worker),
        )
        yield Send(worker.host, start)


def _launch_prefix(spec: JobSpec, worker: WorkerPlace) -> list[str]:
    """Return the launch prefix of a worker; other braces are the user's."""
    values = {"{rank}": str(worker.rank), "{local_rank}": str(worker.local_rank), "{host}": worker.host}
    names = re.compile("|".join(map(re.escape, values)))
    return [names.sub(lambda name: values[name[0]], word) for word in spec.launch_prefix]


def composed_workers(
    spec: JobSpec,
    placement: Placement,
    store: StoreOpened,
    fresh: Mapping[int, int],
    *,
    run_key: str,
    generation: int,
    restart_policy: int,
) -> tuple[dict[str, dict[str, dict[str, str]]], list[Send]]:
    """Return what changes for the workers that run, by host and rank, and the orders to start those that do not.

    `fresh` gives the TORCHELASTIC_RESTART_COUNT of the latter by rank. Raises PlacementError.
    """
    changes: dict[str, dict[str, dict[str, str]]] = {}
    starts = []
    for send in start_workers(spec, placement, store, {}, run_key=run_key, wait_s=0.5 * spec.start_timeout_s):
        start = send.message
        assert isinstance(start, StartWorker)  # prefixes are only for other ecosystems
        if start.rank in fresh:
            env = {**start.env, "TORCHELASTIC_RESTART_COUNT": str(fresh[start.rank])}
            start = replace(start, env=env, generation=generation, restart_policy=restart_policy)
            starts.append(Send(send.host, start))
        else:
            own = {name: start.env[name] for name in COMPOSED}
            changes.setdefault(send.host, {})[str(start.rank)] = own
    return changes, starts


def _addresses(spec: JobSpec, placement: Placement, ports: Mapping[str, PortsReserved]) -> dict[int, str]:
    """Return `host:port` by rank for the workers that others connect to."""
    left = {host: iter(reserved.ports) for host, reserved in ports.items()}
    addresses = {}
    serving = set(serving_ranks(spec.env_for, placement))
    for worker in placement.workers:
        if worker.rank in serving:
            address = ports[worker.host].address
            shown = f"[{address}]" if ":" in address else address
            addresses[worker.rank] = f"{shown}:{next(left[worker.host])}"
    return addresses


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
