"""Text on how a run spends its time: goodput, stragglers, the status line. Pure."""

from __future__ import annotations

from launcher.output.text import count, ranges, size
from launcher.timeline.goodput import PARTS, Parts
from launcher.timeline.stragglers import Crowded, Straggler

WORTH_S = 0.05  # shorter parts are not named
_NAMES = dict(
    zip(PARTS, ("start", "training", "waiting for stragglers", "checkpoints", "failures", "rest"), strict=True)
)


def goodput_line(parts: Parts) -> str:
    """Format the part of the time spent training, and how the rest was spent, as one line."""
    names = dict(_NAMES) if parts.is_measured else {**_NAMES, "rest": "running"}
    found = {name: seconds for name in PARTS if (seconds := getattr(parts, name)) >= WORTH_S}
    listed = ", ".join(f"{names[name]} {seconds:.1f} s" for name, seconds in found.items())
    if parts.repeated >= WORTH_S:
        listed = listed.replace("failures", f"failures (with {parts.repeated:.1f} s of steps made twice)")
    if parts.goodput is None:
        return f"{parts.wall_s:.1f} s: {listed}"
    return f"goodput {100 * parts.goodput:.0f} % of {parts.wall_s:.1f} s: {listed}"


def straggler_line(found: Straggler | Crowded) -> str:
    """Format that something became slow or has recovered, or why that cannot be determined."""
    if isinstance(found, Crowded):
        return (
            f"the processors of {found.host} have more threads to run than there are: a rank waited for one for "
            f"{100 * found.part:.0f} % of the time, so no slow rank is named"
        )
    who = _who(found)
    if found.to_step is not None:
        return f"{who} is no longer slow, since step {found.to_step}, after {found.for_s or 0.0:.0f} s"
    if found.what == "network":
        longer = f"a step takes {found.times:.2g} times as long"
        return f"{who} is slow since step {found.from_step}: all ranks wait, none works longer; {longer}"
    return f"{who} is slow since step {found.from_step} ({found.what}): {found.times:.2g} times the others' work"


def _who(found: Straggler) -> str:
    if found.what == "network":
        return "the network"
    if len(found.ranks) == 1:
        return f"rank {found.ranks[0]} on {found.host}"
    return f"host {found.host} (ranks {ranges(found.ranks)})"


def status_line(
    *,
    step: int,
    per_s: float | None,
    slowest: tuple[int, str, float, str] | None,
    memory: tuple[int, int] | None,
    gpu_percent: float | None,
    workers: int,
) -> str:
    """Format the progress of training, the most important first: the terminal may be narrow. Empty if unknown.

    `slowest` is a slow rank, its host, the ratio of its work to the others' and the activity; `memory` is that of the
    fullest host: bytes in use and in total.
    """
    parts = [f"step {step}"] if step else []
    if per_s:
        parts.append(f"{per_s:.3g} step/s")
    if slowest is not None:
        rank, host, times, what = slowest
        parts.append(f"slowest rank {rank} on {host} ({times:.2g}x, {what})")
    if memory is not None:
        parts.append(f"memory {size(memory[0])} of {size(memory[1])}")
    if gpu_percent is not None:
        parts.append(f"GPU {gpu_percent:.0f} %")
    if not parts:
        return ""
    return ", ".join(parts if step else [count(workers, "worker"), *parts])
