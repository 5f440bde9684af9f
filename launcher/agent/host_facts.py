"""Checks whether a job can start on this host, and what the host has for it: the answer to Prepare."""

from __future__ import annotations

import importlib.machinery
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import DtrainError, UsageError
from launcher.frozen import replace
from launcher.machine import processors
from launcher.machine.cgroup import folders_of
from launcher.machine.gpus.visible import Gpus, find_gpus
from launcher.machine.network import choose_address
from launcher.protocol.commands import Prepare
from launcher.protocol.message import AGENT_MACHINE, AGENT_SLOTS
from launcher.protocol.reports import Facts

FILES_EACH = 7  # held by the agent for a worker: two streams, ledger, progress, generations, state, timeline
FILES_SPARE = 64  # the agent's own, also while it starts or inspects a worker
PROCESSES_SPARE = 8  # agent, guard, store, and py-spy


def find_facts(message: Prepare, *, problems: list[str], left: list[str]) -> Facts:
    """Return the host's facts; `problems` and `left` were found before."""
    workdir = Path(message.workdir)
    slots, machine = os.environ.pop(AGENT_SLOTS, ""), os.environ.pop(AGENT_MACHINE, "")  # not for workers
    problems = [*problems]
    if not workdir.is_dir():
        problems.append(f"the working directory {workdir} does not exist; name one with --workdir")
    elif message.script is not None and not (workdir / message.script).exists():
        problems.append(
            f"the script {workdir / message.script} does not exist; send it with --sync code, or see --workdir"
        )
    if message.program is not None and workdir.is_dir():
        problems += _program_problems(message.program, workdir)
    if message.behind and workdir.is_dir():
        problems += [f"{each}; see --launch-prefix" for each in _program_problems(message.behind, workdir)]
    if message.through == "function" and importlib.machinery.PathFinder.find_spec("cloudpickle") is None:
        problems.append(
            f"cloudpickle, which functions are sent with, is not installed: {sys.executable} -m pip install cloudpickle"
        )
    if message.interfaces:
        try:
            choose_address(message.interfaces, "", None)
        except DtrainError as error:
            problems.append(str(error))
    found = find_resources(message.part, message.parts)
    count = _slots(slots, len(found.gpus), found.cpu_limit)
    if problem := not_countable(slots or message.workers, found):
        problems.append(problem)
    elif count == 0:
        problems.append(f"--nproc-per-node {slots.partition(':')[0]} was set there, but it has no GPU for a worker")
    return replace(
        found,
        problems=[*problems, *found.problems],
        left=left,
        slots=count,
        machine=machine,
    )


def find_resources(part: int, parts: int) -> Facts:
    """Return the resources of this machine for workers, or with --simulate of a part of it; fill in nothing else."""
    gpus, problems = Gpus(), []
    try:
        gpus = find_gpus(os.environ)
    except UsageError as error:
        problems.append(str(error))
    cores, limit = find_cores(part, parts)
    room, room_limit = room_for_workers(parts)
    return Facts(
        gpus=list(processors.share(gpus.ids, part, parts)),
        gpu_variable=gpus.variable,
        # GPUs that SLURM counts as allocated to us are certain, too.
        gpus_verified=gpus.verified or (bool(gpus.ids) and os.environ.get("SLURM_GPUS_ON_NODE") == str(len(gpus.ids))),
        cores=list(cores),
        cpu_limit=limit,
        problems=problems,
        time=time.monotonic(),
        room=room,
        room_limit=room_limit,
        gpu_trouble=gpus.trouble,
    )


def not_countable(said: str, facts: Facts) -> str:
    """Return why a number of workers, as Prepare gives it, cannot be taken from the GPUs here; else empty."""
    if not facts.gpu_trouble or said.partition(":")[0] not in ("", "gpu", "auto"):
        return ""
    return (
        f"the driver does not list the GPUs, so the number of workers is unknown; {facts.gpu_trouble}. See nvidia-smi; "
        "reboot the host after an upgrade of the driver, or give --nproc-per-node N"
    )


def likely_workers(said: str, facts: Facts) -> int:
    """Return how many workers this host will have, as Prepare gives it."""
    return _slots(said, len(facts.gpus), facts.cpu_limit) or len(facts.gpus) or 1


def find_cores(part: int, parts: int) -> tuple[Sequence[int], int]:
    """Return the processors of this machine, or with --simulate of a part, and how many may be busy at a time."""
    return processors.divide(processors.cores(), _cpu_limit(), part, parts)


def _slots(said: str, gpus: int, cpu_limit: int) -> int | None:
    """Parse `4:1` or `gpu:2`: the number of workers on this host, and the GPUs for each."""
    kind, _, gpus_each = said.partition(":")
    by_gpu = gpus // int(gpus_each or 1)
    counts = {"": None, "gpu": by_gpu, "cpu": cpu_limit, "auto": by_gpu if gpus else cpu_limit}
    return counts[kind] if kind in counts else int(kind)


def _program_problems(program: str, workdir: Path) -> list[str]:
    import shutil  # slow to import, rarely needed

    if os.sep in program:
        problem = f"the program {program} cannot be executed there; is it there, and executable (chmod +x)?"
        return [] if os.access(workdir / program, os.X_OK) else [problem]
    return [] if shutil.which(program) is not None else [f"the program {program} is not in PATH there"]


def _cpu_limit() -> int:
    """Return how many processors may be busy at a time, also if SLURM allocated them but does not confine processes."""
    limit = processors.cpu_limit()
    if "SLURM_CPUS_ON_NODE" not in os.environ:
        return limit
    from launcher.hosts.slurm_allocation import cpu_limit

    return min(limit, cpu_limit(os.environ) or limit)


def room_for_workers(parts: int) -> tuple[int | None, str]:
    """Return the number of workers that fit, and the limit that decides, with how to raise it; None: any number.

    A larger number would certainly fail halfway through the start; files and processes that a script needs itself are
    not counted.

    With `--simulate`, `parts` agents share the limits of the user and the container.
    """
    found = [room for room in (_files(), _processes_of_user(parts), _processes_of_group(parts)) if room is not None]
    return min(found, default=(None, ""), key=lambda room: room[0] or 0)


def _files() -> tuple[int, str] | None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the agent raises its soft limit to this
    if hard == resource.RLIM_INFINITY:
        return None
    what = f"its limit of open files, {hard} (`ulimit -Hn`; raise it in /etc/security/limits.conf or LimitNOFILE="
    return max(0, (hard - FILES_SPARE) // FILES_EACH), f"{what} of its service)"


def _processes_of_user(parts: int) -> tuple[int, str] | None:
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY or os.geteuid() == 0:  # does not apply to root
        return None
    used = _threads_of(os.getuid())
    what = f"the user's limit of processes, {limit} with {used} in use (`ulimit -u`; raise it in"
    return _left(limit, used, parts), f"{what} /etc/security/limits.conf)"


def _processes_of_group(parts: int) -> tuple[int, str] | None:
    found = []
    for folder in folders_of("pids"):
        try:
            limit, used = ((folder / name).read_text().strip() for name in ("pids.max", "pids.current"))
        except OSError:  # the root group has none
            continue
        if limit.isdigit() and used.isdigit():
            what = f"the limit of processes in its control group, {limit} with {used} in use (pids.max in"
            found.append((_left(int(limit), int(used), parts), f"{what} {folder}; in docker --pids-limit)"))
    return min(found, default=None)


def _left(limit: int, used: int, parts: int) -> int:
    return max(0, (limit - used - PROCESSES_SPARE) // parts)


def _threads_of(uid: int) -> int:
    """Count a user's threads, as the kernel counts them against the limit."""
    count = 0
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                count += len(os.listdir(Path(entry.path, "task")))
        except OSError:  # ended meanwhile
            continue
    return count
