"""`dtrain trace` and `dtrain plot`: how an active or ended run spent its time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from launcher.errors import RunError, UsageError
from launcher.runs.registry import Entry, choose, entries
from launcher.timeline.file import read_lines
from launcher.timeline.trace import trace_events


def trace_run(word: str, out: str | None, *, say: Callable[[str], None]) -> int:
    """Write the trace of a run to `out`, or `RUN.trace.json` here; `-` is stdout. Return 0."""
    entry = choose(word, entries())
    head, lines = read_lines(_folder(entry))
    path = out or f"{entry.run_id}.trace.json"
    about = {"run_id": entry.run_id, "began": head.get("began"), "command": entry.command}
    with _opened(path) as file:
        _write(file, trace_events(lines), about)
    if path != "-":
        say(f"wrote {path}; open it in https://ui.perfetto.dev")
    return 0


def plot_run(word: str, out: str | None, *, say: Callable[[str], None]) -> int:
    """Draw the steps of a run to `out`, or `RUN.png` here. Return 0."""
    from launcher.timeline.plot import StepCurves, draw

    entry = choose(word, entries())
    _, lines = read_lines(_folder(entry))
    path = Path(out or f"{entry.run_id}.png")
    try:
        draw(StepCurves(lines), path, f"{entry.run_id}: {entry.command}"[:100])
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    say(f"wrote {path}")
    return 0


def _folder(entry: Entry) -> Path:
    folder = Path(entry.folder)
    if not folder.is_dir():
        raise RunError(f"the output of run {entry.run_id} no longer exists: {folder}")
    return folder


@contextmanager
def _opened(path: str) -> Iterator[TextIO]:
    if path == "-":
        yield sys.stdout
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _write(file: TextIO, events: Iterable[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write event by event: a long run has hundreds of thousands."""
    to_json = json.JSONEncoder(separators=(",", ":")).encode
    file.write('{"displayTimeUnit":"ms","otherData":' + to_json(about) + ',"traceEvents":[\n')
    for number, event in enumerate(events):
        file.write((",\n" if number else "") + to_json(event))
    file.write("\n]}\n")
