"""`dtrain ps` and `dtrain history`: the runs of this user, as a table or JSON."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launcher.errors import RunError
from launcher.output.error_json import brief_cause
from launcher.output.text import TABLE_CHARACTERS, count, local_time, table
from launcher.runs.control import ask
from launcher.runs.record import read_manifest
from launcher.runs.registry import LOST, Entry, entries

COMMAND_CHARACTERS = 60
_ONE_LINE = 1000  # more than any row has
ASKED_AT_ONCE = 16

Row = Mapping[str, Any]


def show_runs(*, everything: bool, as_json: bool, say: Callable[[str], None]) -> int:
    """Print the active runs, with `everything` also those that have ended; return the exit code."""
    found = entries()
    chosen = [entry for entry in found if everything or not (entry.state or entry.is_lost)]
    rows = _looked_at(chosen)
    lost = [] if everything or as_json else [entry.run_id for entry in found if entry.is_lost]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        _print([_cells(row, with_cause=everything) for row in rows])
    else:
        say("you have no runs" if everything else "you have no active runs; see dtrain ps --all")
    if lost:
        say(f"{count(len(lost), 'run')} lost, {lost[0]} the newest: dtrain ps --all")
    return 0


def show_history(*, as_json: bool, say: Callable[[str], None]) -> int:
    """Print when each run started, how long it took, how it ended and where its output is."""
    rows = [_past(entry) for entry in entries()]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        _print([_past_cells(row) for row in rows])
    else:
        say("you have no runs")
    return 0


def state_of(entry: Entry) -> str:
    """Return the state of a run if its entry has it; empty if its controller must be asked."""
    if entry.state:
        return entry.state
    if not entry.here:
        return f"on {entry.host}"
    return "" if entry.lives else LOST


def _looked_at(chosen: Sequence[Entry]) -> list[Row]:
    if not chosen:
        return []
    with ThreadPoolExecutor(min(len(chosen), ASKED_AT_ONCE)) as pool:  # a stopped run must not delay the others
        return list(pool.map(_look, chosen))


def _look(entry: Entry) -> Row:
    row = {
        "run_id": entry.run_id, "state": state_of(entry), "hosts": None, "workers": None, "attempt": None,
        "step": None, "steps_per_s": None, "goodput": None, "waits_for": "", "began": entry.began,
        "age_s": round((entry.ended or time.time()) - entry.began, 1),
        "exit_code": entry.exit_code if entry.state else None, "cause": "",
        "detached": entry.detached, "host": entry.host, "pid": entry.pid, "folder": entry.folder,
        "command": entry.command,
    }  # fmt: skip
    if row["state"]:
        manifest = read_manifest(entry)
        newest = (manifest.get("attempts") or [{}])[-1]
        spent = (manifest.get("outcome") or {}).get("goodput") or {}
        return {
            **row,
            "hosts": len(newest["hosts"]) if "hosts" in newest else None,
            "workers": newest.get("world_size"),
            "attempt": newest.get("number"),
            "goodput": spent.get("goodput"),
            "cause": _cause(entry, manifest),
        }
    try:
        answer = ask(entry, "status")
    except RunError:
        return {**row, "state": "no answer"}
    if answer is None:  # it is ending, or has just ended
        return {**row, "state": "stopping" if entry.lives else LOST}
    return {**row, **answer}


def _cells(row: Row, *, with_cause: bool) -> dict[str, str]:
    return {
        "run": row["run_id"],
        "state": row["state"],
        "hosts": number(row["hosts"]),
        "workers": number(row["workers"]),
        "step": number(row["step"] or None),
        "step/s": number(row["steps_per_s"]),
        "age": span(row["age_s"]),
        "goodput": percent(row["goodput"]),
        **({"cause": row["cause"] or "-"} if with_cause else {}),
        "command": _cut(row["command"]),
    }


def _past(entry: Entry) -> Row:
    manifest = read_manifest(entry)
    git = manifest.get("git") or {}
    return {
        "run_id": entry.run_id,
        "began": entry.began,
        "took_s": round(entry.ended - entry.began, 1) if entry.state else None,
        "state": state_of(entry) or "running",
        "exit_code": entry.exit_code if entry.state else None,
        "cause": _cause(entry, manifest),
        "attempts": len(manifest.get("attempts") or []),
        "commit": git.get("commit"),
        "clean": git.get("clean"),
        "folder": entry.folder,
        "command": entry.command,
    }


def _cause(entry: Entry, manifest: Mapping[str, Any]) -> str:
    """Summarize why a run that has ended did not finish; empty if it did."""
    if entry.is_lost:
        return "its controller is gone"
    if not entry.report and (outcome := manifest.get("outcome")) is not None:  # older versions kept no cause
        with contextlib.suppress(KeyError, TypeError, ValueError):  # and may have had other keys
            return brief_cause(outcome)
    return entry.cause


def _past_cells(row: Row) -> dict[str, str]:
    commit = (row["commit"] or "-")[:7] + ("+" if row["clean"] is False else "")
    return {
        "run": row["run_id"],
        "began": local_time(row["began"]),
        "took": "-" if row["took_s"] is None else span(row["took_s"]),
        "state": row["state"],
        "exit": number(row["exit_code"]),
        "commit": commit,
        "cause": row["cause"] or "-",
        "command": _cut(row["command"]),
    }


def _print(rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table as wide as the terminal, at least TABLE_CHARACTERS; each run on one line if not on a terminal."""
    characters = max(TABLE_CHARACTERS, shutil.get_terminal_size().columns) if os.isatty(1) else _ONE_LINE
    lines = table(rows, characters=characters, wrapped=("cause", "command"))
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.0f} %"


def _cut(text: str) -> str:
    return text if len(text) <= COMMAND_CHARACTERS else f"{text[: COMMAND_CHARACTERS - 3]}..."


def span(seconds: float) -> str:
    """Format a duration: 12s, 3m20s, 5h03m, 2d04h."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{whole % 60:02}s" if minutes else f"{whole}s"
