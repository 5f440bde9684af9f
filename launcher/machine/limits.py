"""How many workers this host can hold, by its limits of open files and processes. For the agent and `dtrain check`.

A start refused here would certainly fail halfway; files and processes that a script needs itself are not counted.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from launcher.machine.cgroup import folders_of

FILES_EACH = 6  # held by the agent for a worker: two streams, progress, generation pipe, state and timeline file
FILES_SPARE = 64  # the agent's own, also while it starts or inspects a worker
PROCESSES_SPARE = 8  # agent, guard, store, and py-spy


def room_for_workers(parts: int) -> tuple[int | None, str]:
    """Return the number of workers that fit, and the limit that decides, with how to raise it; None: any number.

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
