"""`dtrain top`: the ranks of a run as a refreshed table, or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.cli.runs.steer import end_of, how_it_ended
from launcher.cli.runs.table import number, percent, span
from launcher.errors import RunError
from launcher.output.text import count, ranges, size
from launcher.runs.control import ask
from launcher.runs.registry import Entry, choose, entries

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_S = 1.0
AGO_S = 5.0  # age from which the last step is shown as old
FRAME = 6  # lines beside the rows: the run (two), a blank one, the heading, what is cut, the cursor
_COLUMNS = ("host", "rank", "pid", "step", "ago", "time", "work", "wait", "memory", "GPU", "restarts", "faults")

Content = Mapping[str, Any]


def show_top(word: str, *, as_json: bool, say: Callable[[str], None]) -> int:
    """Show a run until it ends or until Ctrl-C, once if stdout is not a terminal; return the exit code."""
    entry = choose(word, entries())
    found = _look(entry)
    if found is None:
        raise RunError(f"{how_it_ended(end_of(entry))}; dtrain ps --all, dtrain logs {entry.run_id}")
    if as_json:
        print(json.dumps({"run_id": entry.run_id, **found}, indent=2))
        return 0
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.print(screen_of(entry, found, height=sys.maxsize))
        return 0
    from rich.live import Live

    try:
        with Live(console=console, auto_refresh=False, screen=False, transient=False) as live:
            while found is not None:
                live.update(screen_of(entry, found, height=console.size.height - FRAME), refresh=True)
                time.sleep(REFRESH_S)
                found = _look(entry)
    except KeyboardInterrupt:
        return 0
    say(how_it_ended(end_of(entry)))
    return 0


def _look(entry: Entry) -> Content | None:
    """Ask the controller; None if the run has ended."""
    if entry.state or entry.is_lost:
        return None
    return ask(entry, "status", in_full=True)


def screen_of(entry: Entry, found: Content, *, height: int) -> RenderableType:
    """Return the screen: the run, stragglers, and a row for each rank, or for each host if there are too many ranks."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    slow = [Text(each["line"], overflow="ellipsis", no_wrap=True) for each in found["stragglers"]]
    room = max(1, height - len(slow))
    by_host = _by_host(found)
    cells: list[Sequence[str]] = [_of_rank(rank) for rank in found["ranks"]]
    hosts: list[Sequence[str]] = [_of_host(host, by_host[host["host"]]) for host in found["hosts_used"]]
    if len(cells) + (len(hosts) if len(hosts) > 1 else 0) > room:
        rows, more = hosts[:room], len(hosts) - room
        cut = f"and {count(more, 'more host')}; all with --json" if more > 0 else ""
    else:
        rows, cut = (cells if len(hosts) <= 1 else _grouped(hosts, found, cells)), ""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in _COLUMNS:
        justify: Any = "left" if column in ("host", "rank") else "right"
        table.add_column(column, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    return Group(Text(_headline(entry, found), overflow="fold"), *slow, Text(""), table, *([Text(cut)] if cut else []))


def _headline(entry: Entry, found: Content) -> str:
    parts = [
        f"run {entry.run_id}: {found['state']}",
        count(found["hosts"], "host"),
        count(found["workers"] or 0, "worker"),
        span(time.time() - entry.began),
    ]
    if found["attempt"]:
        parts.append(f"attempt {found['attempt']}")
    if found["step"]:
        parts.append(f"step {found['step']}")
    if found["steps_per_s"]:
        parts.append(f"{found['steps_per_s']:.3g} step/s")
    if found["goodput"] is not None:
        parts.append(f"goodput {percent(found['goodput'])}")
    if found["waits_for"]:
        parts.append(found["waits_for"])
    return ", ".join(parts)


def _by_host(found: Content) -> dict[str, list[Content]]:
    ranks: dict[str, list[Content]] = {host["host"]: [] for host in found["hosts_used"]}
    for rank in found["ranks"]:
        ranks.setdefault(rank["host"], []).append(rank)
    return ranks


def _grouped(hosts: Sequence[Sequence[str]], found: Content, cells: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Put the row of each host above those of its ranks."""
    rows: list[Sequence[str]] = []
    for row, host in zip(hosts, found["hosts_used"], strict=True):
        own = [cell for cell, rank in zip(cells, found["ranks"], strict=True) if rank["host"] == host["host"]]
        rows += [row, *(["", *cell[1:]] for cell in own)]
    return rows


def _of_rank(rank: Content) -> list[str]:
    return [
        rank["host"],
        str(rank["rank"]),
        "-" if rank["pid"] is None else str(rank["pid"]),
        number(rank["step"]),
        _ago(rank["last_step_ago_s"]),
        _time(rank["step_s"]),
        _time(rank["own_s"]),
        _part(rank["wait_s"], rank["step_s"]),
        _size(rank["resident_bytes"]),
        _gpu(rank["gpu_percent"]),
        str(rank["restarts"]),
        str(rank["faults"]),
    ]


def _of_host(host: Content, ranks: Sequence[Content]) -> list[str]:
    """Summarize a host: means of its ranks' times, the memory in use there, the sums of restarts and faults."""
    step_s, wait_s = _mean(ranks, "step_s"), _mean(ranks, "wait_s")
    return [
        host["host"],
        ranges(rank["rank"] for rank in ranks),
        "",
        number(max((rank["step"] or 0 for rank in ranks), default=0) or None),
        _ago(max((rank["last_step_ago_s"] or 0.0 for rank in ranks), default=0.0)),
        _time(step_s),
        _time(_mean(ranks, "own_s")),
        _part(wait_s, step_s),
        _size(host["memory_bytes"]),
        _gpu(_mean(ranks, "gpu_percent")),
        str(sum(rank["restarts"] for rank in ranks)),
        str(sum(rank["faults"] for rank in ranks) + host["lost"]),
    ]


def _mean(ranks: Sequence[Content], name: str) -> float | None:
    known = [rank[name] for rank in ranks if rank[name] is not None]
    return sum(known) / len(known) if known else None


def _ago(seconds: float | None) -> str:
    """Format the age of the last step, if it is older than the records usually are."""
    return "" if seconds is None or seconds < AGO_S else span(seconds)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _part(of: float | None, whole: float | None) -> str:
    return percent(of / whole) if of is not None and whole else "-"


def _size(bytes_: int | None) -> str:
    return "-" if bytes_ is None else size(bytes_)


def _gpu(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"
