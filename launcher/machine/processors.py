"""The processors that this host can give to workers, and how resources are divided between simulated hosts."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TypeVar

from launcher.machine.cgroup import folders_of

T = TypeVar("T")


def cores() -> tuple[int, ...]:
    """Return the processors that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def cpu_limit(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many processors may be busy at a time: the affinity, or the cgroups' quota if that is less."""
    limit = float(len(os.sched_getaffinity(0)))
    for folder in folders_of("cpu", root, membership):
        quota, period = _quota(folder)
        if quota > 0 and period > 0:
            limit = min(limit, quota / period)
    return max(1, math.floor(limit))


def _quota(folder: Path) -> tuple[float, float]:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
            return (0.0 if quota == "max" else float(quota)), float(period)
        if (folder / "cpu.cfs_quota_us").exists():
            return float((folder / "cpu.cfs_quota_us").read_text()), float((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):  # not readable from inside this container
        return 0.0, 0.0
    return 0.0, 0.0


def share(things: tuple[T, ...], part: int, parts: int) -> tuple[T, ...]:
    """Return the `part`-th of `parts` contiguous shares; if it does not divide evenly, the first ones are larger.

    >>> [share(("0", "1", "2"), part, 2) for part in range(2)]
    [('0', '1'), ('2',)]
    """
    size, more = divmod(len(things), parts)
    start = part * size + min(part, more)
    return things[start : start + size + (part < more)]


def divide(cores: tuple[int, ...], limit: int, part: int, parts: int) -> tuple[tuple[int, ...], int]:
    """Return the processors of the `part`-th of `parts` simulated hosts, and how many of them may be busy at a time.

    With fewer processors than hosts, all hosts share all of them.
    """
    own = share(cores, part, parts) or cores
    return own, min(max(1, limit // parts), len(own))
