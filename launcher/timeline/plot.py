"""Plots a run's timeline: own work and waiting in each step, by rank, with restarts and faults marked.

Own work is the part of a step that was not spent waiting for other ranks. If only the length of steps is known, that is
drawn instead. Needs matplotlib.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from launcher.errors import RunError
from launcher.timeline.file import Line
from launcher.timeline.records import PHASES

COLOURED = 10  # ranks; with more, all are grey except the one with the most own work
USUAL_PART = 0.99  # of all points; longer ones may be cut off
MOST_TIMES = 2.0  # upper end of the axis, as a multiple of the longest usual point
_WAIT = PHASES.index("wait")

Point = tuple[float, float, float]


class StepCurves:
    """Data to draw: by rank, points of time, own work and waiting of a step in ms; times of restarts and faults."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.by_rank: dict[int, list[Point]] = defaultdict(list)
        self.restarts: list[float] = []
        self.faults: list[float] = []
        self.is_divided = False  # whether work and waits are known separately; not without ddp
        attempt = None
        started: set[tuple[int, int]] = set()
        for line in lines:
            match line:
                case ["steps", int(), int(rank), int(), int(steps), float() | int() as ended, list(phases_s)]:
                    total_s, wait_s = math.fsum(phases_s), math.fsum(phases_s[_WAIT : _WAIT + 1])
                    own_ms, wait_ms = ((total_s - wait_s) / max(1, steps) * 1e3, wait_s / max(1, steps) * 1e3)
                    self.is_divided |= any(phases_s[:-1])
                    self.by_rank[rank].append((ended - total_s / 2, own_ms, wait_ms))
                case ["attempt", int(number), float() | int() as time, list()]:
                    if attempt is not None and number != attempt:
                        self.restarts.append(time)
                    attempt = number
                case ["start", int(number), int(rank), float() | int() as ordered, *_]:
                    if (number, rank) in started:
                        self.restarts.append(ordered)
                    started.add((number, rank))
                case ["end", int(), int(), float() | int() as time, int(), str(text)] if text:
                    self.faults.append(time)

    def runs_of(self, rank: int) -> list[list[Point]]:
        """Return the curve of a rank, split at each restart."""
        pieces: list[list[Point]] = [[]]
        marks = sorted(self.restarts)
        for point in sorted(self.by_rank[rank]):
            while marks and marks[0] <= point[0]:
                marks.pop(0)
                pieces.append([])
            pieces[-1].append(point)
        return [piece for piece in pieces if piece]


def shown_up_to(values: Sequence[float]) -> float:
    """Return the upper end of an axis, so that a few outliers do not flatten the rest."""
    usual = sorted(values)[math.ceil(USUAL_PART * len(values)) - 1]
    return 1.05 * min(max(values), MOST_TIMES * usual) or 1.0


def draw(curves: StepCurves, path: Path, title: str) -> None:
    """Write a picture in the format of the path's suffix. Raises RunError, OSError."""
    try:
        from matplotlib.figure import Figure  # unlike pyplot, it needs no window and keeps no state
    except ImportError as error:
        raise RunError("dtrain plot needs matplotlib, which is not installed: pip install matplotlib") from error
    if not curves.by_rank:
        raise RunError(
            "no rank has reported a step: dtrain plot shows steps of ddp, torch's optimizers or launcher.step()"
        )
    panels = ["own work, ms a step", "waiting for others, ms a step"] if curves.is_divided else ["step, ms"]
    figure = Figure(figsize=(10, 3 * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for which, (axes, label) in enumerate(zip(all_axes, panels, strict=True), 1):
        _draw_panel(axes, curves, which, label)
    all_axes[0].set(title=title)
    all_axes[0].legend(loc="upper right", fontsize="small")
    all_axes[-1].set(xlabel="seconds since the run began")
    try:
        figure.savefig(path)
    except ValueError as error:  # a suffix that matplotlib does not know
        raise RunError(f"{path}: {error}") from error


def _draw_panel(axes: Any, curves: StepCurves, which: int, label: str) -> None:
    """Draw one curve for each rank: component `which` of its points."""
    ranks = sorted(curves.by_rank)
    most = max(ranks, key=lambda rank: fmean(point[1] for point in curves.by_rank[rank]))
    values = [point[which] for points in curves.by_rank.values() for point in points]
    top = shown_up_to(values)
    for rank in ranks:
        is_plain = len(ranks) > COLOURED and rank != most
        style = {"color": "0.7", "zorder": 1} if is_plain else {"label": f"rank {rank}", "zorder": 2}
        for piece in curves.runs_of(rank):
            times, shown = [point[0] for point in piece], [min(point[which], top) for point in piece]
            (line,) = axes.plot(times, shown, linewidth=1, marker=".", markersize=3, **style)
            style = {**style, "color": line.get_color(), "label": None}
    for times, words in (
        (curves.restarts, {"color": "black", "linestyle": "--", "label": "restart"}),
        (curves.faults, {"color": "red", "linestyle": ":", "label": "fault"}),
    ):
        for number, time in enumerate(times):
            axes.axvline(time, linewidth=1, **{**words, "label": words["label"] if not number else None})
    axes.set(ylabel=label, ylim=(0, top))
    if longer := sum(value > top for value in values):
        text = f"{longer} of {len(values)} cut off at the upper edge, the longest {max(values):.0f} ms"
        axes.text(0.01, 0.97, text, transform=axes.transAxes, va="top", fontsize="small")
