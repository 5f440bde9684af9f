"""`dtrain plan`: the placement of a run without starting anything, as a table or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from launcher.agent.host_facts import find_resources, not_countable
from launcher.errors import UsageError
from launcher.hosts.host import Host, HostKind
from launcher.job.orders import likely_workers
from launcher.output.text import ranges, table
from launcher.placement.job_spec import JobSpec
from launcher.placement.placement import HostOffer, place_job
from launcher.placement.roles import DEFAULT_ROLE
from launcher.protocol.reports import Facts


def show_plan(spec: JobSpec, *, as_json: bool) -> str:
    """Return the workers of a run as far as known on this machine. Raises UsageError, PlacementError."""
    workers = _plan_workers(spec)
    return json.dumps([asdict(worker) for worker in workers], indent=2) if as_json else _as_table(workers)


@dataclass(frozen=True)
class _PlannedWorker:
    """A worker of the plan. `assumed`: the host was not asked, so its GPUs are a guess and its cores unknown."""

    rank: int
    role: str
    host: str
    local_rank: int
    gpus: tuple[str, ...]
    visible: str | None  # value of `gpu_variable`, empty for none; None: unchanged on the host
    gpu_variable: str
    cores: tuple[int, ...]
    threads: int | None  # OMP_NUM_THREADS, if it is not inherited
    assumed: bool


def _plan_workers(spec: JobSpec) -> list[_PlannedWorker]:
    hosts = spec.hosts[: spec.max_hosts]  # the others are spares
    remote = {host.name for host in hosts if host.remote}
    unknown = [host.name for host in hosts if host.remote and _asked_for(host, spec) is None]
    if unknown:
        by_slots = (
            "" if any(host.kind in (HostKind.JOINED, HostKind.SRUN) for host in hosts) else f"{unknown[0]}:SLOTS or "
        )
        raise UsageError(
            f"the number of workers on {', '.join(unknown)} is unknown until a run asks these hosts; "
            f"write {by_slots}--nproc-per-node N"
        )
    offers = [_assume(host, spec) if host.remote else _look(host, spec) for host in hosts]
    placement = place_job(spec, offers)
    return [
        _PlannedWorker(
            rank=worker.rank,
            role=worker.role,
            host=worker.host,
            local_rank=worker.local_rank,
            gpus=worker.gpus,
            visible=worker.visible,
            gpu_variable=worker.gpu_variable,
            cores=() if worker.host in remote else worker.cores,
            threads=None if worker.host in remote else worker.threads,
            assumed=worker.host in remote,
        )
        for worker in placement.workers
    ]


def _look(host: Host, spec: JobSpec) -> HostOffer:
    found = find_resources(host.part, host.parts)
    if problems := [*found.problems, *filter(None, [not_countable(likely_workers(spec, host), found)])]:
        raise UsageError("; ".join(problems))
    return HostOffer.of(host, found)


def _asked_for(host: Host, spec: JobSpec) -> int | None:
    """Return the number of workers on a host if the options give it; None for `gpu`, `cpu` and `auto`."""
    if spec.nproc is None:
        return host.slots
    return spec.nproc if isinstance(spec.nproc, int) else None


def _assume(host: Host, spec: JobSpec) -> HostOffer:
    count = (_asked_for(host, spec) or 0) * (spec.gpus_per_proc or 1)
    gpus = [str(place) for place in range(count if host.chosen is None else max(host.chosen) + 1)]
    variable = "CUDA_VISIBLE_DEVICES"
    return HostOffer.of(host, Facts(gpus, variable, gpus_verified=False, cores=[], cpu_limit=1, problems=[], time=0.0))


def _as_table(workers: list[_PlannedWorker]) -> str:
    with_roles = any(worker.role != DEFAULT_ROLE for worker in workers)
    lines = table([_cells(worker, with_roles=with_roles) for worker in workers])
    others = {worker.gpu_variable for worker in workers if worker.visible is not None} - {"CUDA_VISIBLE_DEVICES"}
    if others:
        lines.append(f"workers get their GPUs by {', '.join(sorted(others))}")
    if any(worker.assumed for worker in workers):
        lines.append("? the host was not asked: its GPUs are assumed to be numbered from 0, its cores are unknown")
    return "\n".join(lines)


def _cells(worker: _PlannedWorker, *, with_roles: bool) -> dict[str, str]:
    mark = "?" if worker.assumed else ""
    return {
        "rank": str(worker.rank),
        **({"role": worker.role} if with_roles else {}),
        "host": worker.host,
        "local rank": str(worker.local_rank),
        "GPU": ",".join(worker.gpus) + mark if worker.gpus else "-",
        "visible to it": "unchanged" if worker.visible is None else (worker.visible or "none") + mark,
        "cores": ranges(worker.cores) or "?",
        "threads": "?" if worker.threads is None else str(worker.threads),
    }
