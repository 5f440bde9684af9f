"""`dtrain plan`: the placement of a run without starting anything, as a table or JSON."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass

from launcher.agent.host_facts import find_resources
from launcher.errors import UsageError
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import JobSpec
from launcher.placement.placement import HostOffer, place_job
from launcher.placement.roles import DEFAULT_ROLE
from launcher.protocol import Facts

__all__ = ["PlannedWorker", "plan_as_json", "plan_as_table", "plan_workers"]


@dataclass(frozen=True)
class PlannedWorker:
    """One row. `assumed` says that the host was not asked: its GPUs are a guess and its cores not known."""

    rank: int
    role: str
    host: str
    local_rank: int
    gpus: tuple[str, ...]
    visible: str | None  # CUDA_VISIBLE_DEVICES; None: left as it is on the host
    cores: tuple[int, ...]
    threads: int | None  # OMP_NUM_THREADS, if it is not inherited
    assumed: bool


def plan_workers(spec: JobSpec) -> list[PlannedWorker]:
    """Place the workers of a run by what is known here. Raises UsageError, PlacementError."""
    hosts = spec.hosts[: spec.max_hosts]  # the others are spares
    remote = {host.name for host in hosts if host.remote}
    unknown = [host.name for host in hosts if host.name in remote and _asked_for(host, spec) is None]
    if unknown:
        by_slots = (
            "" if any(host.kind in (HostKind.JOINED, HostKind.SRUN) for host in hosts) else f"{unknown[0]}:SLOTS or "
        )
        raise UsageError(
            f"how many workers run on {', '.join(unknown)} is not known before a run asks there; "
            f"write {by_slots}--nproc-per-node N"
        )
    offers = [_assume(host, spec) if host.name in remote else _look(host) for host in hosts]
    placement = place_job(spec, offers)
    return [
        PlannedWorker(
            rank=worker.rank,
            role=worker.role,
            host=worker.host,
            local_rank=worker.local_rank,
            gpus=worker.gpus,
            visible=worker.visible,
            cores=() if worker.host in remote else worker.cores,
            threads=None if worker.host in remote else worker.threads,
            assumed=worker.host in remote,
        )
        for worker in placement.workers
    ]


def _look(host: Host) -> HostOffer:
    found = find_resources(host.part, host.parts)
    if found.problems:
        raise UsageError("; ".join(found.problems))
    return HostOffer.of(host, found)


def _asked_for(host: Host, spec: JobSpec) -> int | None:
    """Return how many workers run on a host as far as that was said; None for `gpu`, `cpu` and `auto`."""
    if spec.nproc is None:
        return host.slots
    return spec.nproc if isinstance(spec.nproc, int) else None


def _assume(host: Host, spec: JobSpec) -> HostOffer:
    count = (_asked_for(host, spec) or 0) * (spec.gpus_per_proc or 1)
    gpus = [str(place) for place in range(count if host.chosen is None else max(host.chosen) + 1)]
    variable = "CUDA_VISIBLE_DEVICES"
    return HostOffer.of(host, Facts(gpus, variable, gpus_verified=False, cores=[], cpu_limit=1, problems=[], time=0.0))


def plan_as_json(rows: list[PlannedWorker]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2)


def plan_as_table(rows: list[PlannedWorker]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    with_roles = any(row.role != DEFAULT_ROLE for row in rows)
    roles = ["role"] if with_roles else []
    for name in ("rank", *roles, "host", "local rank", "GPU", "visible to it", "cores", "threads"):
        table.add_column(name)
    for row in rows:
        mark = "?" if row.assumed else ""
        table.add_row(
            str(row.rank),
            *([row.role] if with_roles else []),
            row.host,
            str(row.local_rank),
            ",".join(row.gpus) + mark if row.gpus else "-",
            "as there" if row.visible is None else (row.visible or "none") + mark,
            _ranges(row.cores) or "?",
            "?" if row.threads is None else str(row.threads),
        )
    text = io.StringIO()
    Console(file=text, width=110, highlight=False).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
    if any(row.assumed for row in rows):
        lines.append("? the host was not asked: its GPUs are assumed to be numbered from 0, its cores are not known")
    return "\n".join(lines)


def _ranges(numbers: tuple[int, ...]) -> str:
    """Write `0-3,8` for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
