"""The times of a run as a picture: step time by rank over time, with restarts and faults marked. Needs matplotlib."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.errors import RunError
from launcher.timeline.file import Line

__all__ = ["StepCurves", "draw"]

COLOURED = 10  # ranks; more are grey but for the slowest


class StepCurves:
    """What is drawn: by rank, times with the mean step around each in ms; and when what was restarted or failed."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.by_rank: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.restarts: list[float] = []
        self.faults: list[float] = []
        attempt = None
        started: set[tuple[int, int]] = set()
        for line in lines:
            match line:
                case ["steps", int(), int(rank), int(), int(steps), float() | int() as ended, list(phases_s)]:
                    total_s = math.fsum(phases_s)
                    self.by_rank[rank].append((ended - total_s / 2, total_s / max(1, steps) * 1e3))
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

    def runs_of(self, rank: int) -> list[list[tuple[float, float]]]:
        """Return the curve of a rank in pieces, cut at each restart: between two no steps were made."""
        pieces: list[list[tuple[float, float]]] = [[]]
        marks = sorted(self.restarts)
        for point in sorted(self.by_rank[rank]):
            while marks and marks[0] <= point[0]:
                marks.pop(0)
                pieces.append([])
            pieces[-1].append(point)
        return [piece for piece in pieces if piece]


def draw(curves: StepCurves, path: Path, title: str) -> None:
    """Write a picture, in the format of its suffix. Raises RunError where it cannot be made, OSError."""
    try:
        from matplotlib.figure import Figure  # no pyplot: it needs no window, and keeps nothing
    except ImportError as error:
        raise RunError("dtrain plot draws with matplotlib, which is not here: pip install matplotlib") from error
    if not curves.by_rank:
        raise RunError("no rank has reported a step: dtrain plot shows the steps that workers make with ddp")
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes: Any = figure.subplots()
    ranks = sorted(curves.by_rank)
    slowest = max(ranks, key=lambda rank: sum(ms for _, ms in curves.by_rank[rank]) / len(curves.by_rank[rank]))
    for rank in ranks:
        is_plain = len(ranks) > COLOURED and rank != slowest
        style = {"color": "0.7", "zorder": 1} if is_plain else {"label": f"rank {rank}", "zorder": 2}
        for piece in curves.runs_of(rank):
            (line,) = axes.plot(*zip(*piece, strict=True), linewidth=1, marker=".", markersize=3, **style)
            style = {**style, "color": line.get_color(), "label": None}
    for times, words in (
        (curves.restarts, {"color": "black", "linestyle": "--", "label": "restart"}),
        (curves.faults, {"color": "red", "linestyle": ":", "label": "fault"}),
    ):
        for number, time in enumerate(times):
            axes.axvline(time, linewidth=1, **{**words, "label": words["label"] if not number else None})
    axes.set(xlabel="seconds since the run began", ylabel="step, ms", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize="small")
    try:
        figure.savefig(path)
    except ValueError as error:  # a suffix that matplotlib does not know
        raise RunError(f"{path}: {error}") from error
