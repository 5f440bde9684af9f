"""What an agent is told to make a job start on its host, and whether it is fit to be told. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from launcher import __version__
from launcher.environment import worker_defaults, worker_environment
from launcher.events import Tell
from launcher.hosts import Host
from launcher.hoststate import HostState
from launcher.placement import Placement
from launcher.protocol import PROTOCOL, Hello, OpenStore, Prepare, StartWorker, StoreOpened
from launcher.spec import DEFAULT_PORT, CommandKind, JobSpec

__all__ = ["mismatch", "open_store", "prepare", "start_workers"]


def mismatch(spec: JobSpec, hello: Hello) -> str | None:
    """Return why an agent cannot work with this controller, or None."""
    python = spec.python
    if hello.protocol != PROTOCOL or hello.version != __version__:
        fix = f"{python} -m pip install dtrain=={__version__}"
        return f"has dtrain {hello.version}, here it is {__version__}; install the same there: {fix}"
    here = "{}.{}.{}".format(*sys.version_info[:3])
    if spec.command.kind is not CommandKind.PROGRAM and _minor(hello.python) != _minor(here):
        return f"{python} is Python {hello.python}, here it is {here}; name a Python {_minor(here)} with --python"
    return None


def prepare(spec: JobSpec, host: Host, *, lease_s: float, clean: Sequence[str]) -> Prepare:
    command = spec.command
    return Prepare(
        run_id=spec.run_id,
        workdir=str(spec.workdir),
        script=command.target if command.kind is CommandKind.SCRIPT else None,
        program=command.target if command.kind is CommandKind.PROGRAM else None,
        export=dict(spec.export),
        grace_s=spec.grace_s,
        lease_s=lease_s,
        clean=list(clean),
        part=host.part,
        parts=host.parts,
    )


def open_store(spec: JobSpec, hosts: Sequence[HostState], attempt: int) -> OpenStore:
    """Return the order for the first of an attempt's hosts: to listen where the others reach it."""
    return OpenStore(
        attempt=attempt,
        address=_store_address(spec, hosts),
        port=spec.master_port or DEFAULT_PORT,
        exact=spec.master_port is not None,
    )


def _store_address(spec: JobSpec, hosts: Sequence[HostState]) -> str:
    """Return the first host's address as the others reach it; empty: as this machine reached it."""
    if spec.master_addr is not None:
        return spec.master_addr
    if not any(state.host.remote for state in hosts):
        return "127.0.0.1"
    if hosts[0].host.remote:
        return ""
    return next((state.our_address for state in hosts if state.our_address), "127.0.0.1")


def start_workers(spec: JobSpec, placement: Placement, store: StoreOpened, attempt: int) -> Iterator[Tell]:
    """Yield the order to start each worker, for the agent of its host."""
    command = spec.command
    for worker in placement.workers:
        env = worker_environment(
            placement,
            worker,
            run_id=spec.run_id,
            attempt=attempt,
            max_restarts=spec.max_restarts,
            elastic=spec.elastic,
            master_addr=store.address,
            master_port=store.port,
        )
        start = StartWorker(
            rank=worker.rank,
            attempt=attempt,
            through="" if command.kind is CommandKind.PROGRAM else command.kind.value,
            argv=[command.target, *command.args],
            env=env,
            defaults=worker_defaults(worker),
        )
        yield Tell(worker.host, start)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
