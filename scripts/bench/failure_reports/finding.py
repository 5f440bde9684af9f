"""What a run has shown: whether, when and where cause, rank and host were named, and what is left. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from failure_reports.run import Line

SCREEN_LINES = 40  # of a terminal; the first and the last of them count
WORKERS = {"dtrain": r"\[[\w.-]+:\d+\] ", "torchrun": r"\[default\d+\]:", "mpirun": r"\[\d+,\d+\]<"}
ROOT_CAUSE = "Root Cause (first observed failure)"


@dataclass(frozen=True)
class Wanted:
    """What a launcher's own lines should name; with `by_workers`, one line of a worker with its prefix.

    `rank` and `host` are patterns; None where the failure has none.
    """

    cause: str
    rank: str | None
    host: str | None
    by_workers: bool = False


@dataclass(frozen=True)
class Finding:
    """What a run named, the seconds from the failure until it was, and its first line with the cause.

    `works`: whether what the case is about went well, with what was found; None if it is about being named.
    """

    named: dict[str, bool]
    seconds: float | None
    first: str
    code: str
    left: Sequence[str]
    works: bool | None = None
    found: str = ""

    @property
    def is_named(self) -> bool:
        return all(self.named.values())


def rank_pattern(rank: int) -> str:
    return rf"\b[Rr]anks?\s*:?\s*{rank}\b|:{rank}\]|\[rank{rank}\]|\[default{rank}\]|\[1,{rank}\]"


def find_named(
    launcher: str, lines: Sequence[Line], failed_at: float, wanted: Wanted
) -> tuple[dict[str, bool], float | None, str]:
    """Return what was named, the seconds until the last of it was, and the first line with the cause.

    The seconds are None if something was not named. A line that a worker wrote counts for the first line.
    """
    after = [line for line in lines if line.at >= failed_at]
    screens: list[Line] = []
    for command in sorted({line.command for line in after}):
        own = [line for line in after if line.command == command]
        screens += own if len(own) <= 2 * SCREEN_LINES else own[:SCREEN_LINES] + own[-SCREEN_LINES:]
    first = next((line.text for line in after if re.search(wanted.cause, line.text)), "")
    considered = _by_workers(screens, wanted) if wanted.by_workers else _by_launcher(launcher, screens)
    named, times = {}, []
    for what, pattern in (("cause", wanted.cause), ("rank", wanted.rank), ("host", wanted.host)):
        if pattern is not None:
            at = next((line.at for line in considered if re.search(pattern, line.text)), None)
            named[what] = at is not None
            times += [] if at is None else [at]
    return named, max(times) - failed_at if all(named.values()) else None, first


def _by_workers(lines: Sequence[Line], wanted: Wanted) -> list[Line]:
    return [line for line in lines if re.search(wanted.cause, line.text)]


def _by_launcher(launcher: str, lines: Sequence[Line]) -> list[Line]:
    """Return what the launcher itself says; of torchrun's report only the root cause, if it has one."""
    own = [line for line in lines if not re.match(WORKERS[launcher], line.text)]
    if launcher != "torchrun":
        return own
    found: list[Line] = []
    for command in sorted({line.command for line in own}):
        said = [line for line in own if line.command == command]
        start = next((i for i, line in enumerate(said) if ROOT_CAUSE in line.text), 0)
        found += said[start:]
    return sorted(found, key=lambda line: line.at)
