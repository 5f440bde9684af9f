"""`dtrain logs` and `dtrain attach`: the output of a run so far, and as it is written."""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

from launcher.cli.runs.steer import end_of, say_end
from launcher.errors import RunError
from launcher.output.console import Console
from launcher.runs.control import ask
from launcher.runs.housekeeping import MANIFEST
from launcher.runs.log_reader import LogReader
from launcher.runs.record import read_manifest
from launcher.runs.registry import Entry, choose, entries
from launcher.runs.session import CONSOLE_LOG

LOOK_S = 0.2  # interval of checks of the files
CONTEXT_BYTES = 4096  # earlier output to show on attaching


class _Shown:
    """Shows the pieces of the log files as the run would; `lines` is Console's."""

    def __init__(self, entry: Entry, reader: LogReader, *, lines: str | None) -> None:
        self._entry = entry
        self._reader = reader
        self._console = Console(lines=lines)
        self._attempt = -1
        self._hosts: dict[int, str] = {}
        self._manifest = (0, 0)  # from which they were read

    def more(self) -> bool:
        """Show new output; return whether stdout is still open."""
        for piece in self._reader.read():
            if _is_stdout_closed():
                return False
            if piece.attempt != self._attempt:
                self._console.finish()
                self._attempt = piece.attempt
                self._hosts, self._manifest = {}, (0, 0)
            self._read_hosts()
            if piece.rank not in self._hosts:
                self._add_worker(piece.rank, "?")
            self._console.write(piece.rank, piece.stream, piece.data)
        self._console.refresh(time.monotonic())
        return not _is_stdout_closed()

    def _read_hosts(self) -> None:
        """Read where the ranks are, if another manifest was written: others come, and a rank moves to another host."""
        manifest = _newest_manifest(self._entry)
        if manifest == self._manifest:
            return
        self._manifest = manifest
        for rank, host in _hosts_of(self._entry, self._attempt).items():
            if self._hosts.get(rank) != host:
                self._add_worker(rank, host)

    def _add_worker(self, rank: int, host: str) -> None:
        if rank in self._hosts:
            self._console.end_line(rank)
        self._hosts[rank] = host
        self._console.add_worker(rank, host)

    def finish(self) -> None:
        self._console.finish()


def show_logs(word: str, *, follow: bool, ranks: Collection[int] | None, since_s: float | None) -> int:
    """Show the output of a run, with `follow` until its end; return 0."""
    entry = choose(word, entries())
    folder = Path(entry.folder)
    if not folder.is_dir():
        raise RunError(f"the output of run {entry.run_id} no longer exists: {folder}")
    since = 0.0 if since_s is None else time.time() - since_s
    shown = _Shown(entry, LogReader(folder, ranks=ranks, since=since), lines="all")
    try:
        while shown.more() and follow:
            if _has_ended(entry):
                shown.more()
                break
    except KeyboardInterrupt:
        pass
    shown.finish()
    return 0


def attach(word: str, *, say: Callable[[str], None]) -> int:
    """Show a run as if it were in the foreground, until its end; return its exit code. Ctrl-C asks what to do.

    For a run that has ended, show only the report.
    """
    entry = choose(word, entries())
    if entry.state or entry.is_lost:
        return say_end(entry, say)
    log = Path(entry.folder) / CONSOLE_LOG
    has_report = log.is_file()
    if has_report:
        with log.open("rb") as file:
            left = _follow(entry, _console_of(file), say)
    else:
        reader = LogReader(Path(entry.folder))
        reader.skip()
        shown = _Shown(entry, reader, lines=None)
        left = _follow(entry, shown.more, say)
        shown.finish()
    if left:
        return 0
    entry = end_of(entry)
    return entry.exit_code if entry.state and has_report else say_end(entry, say)


def _follow(entry: Entry, more: Callable[[], bool], say: Callable[[str], None]) -> bool:
    """Show new output until the run ends or the user leaves; return whether the user left."""
    what = "stop"
    greeting = f"run {entry.run_id} continues without this terminal; Ctrl-C asks whether to stop it"
    while True:
        try:
            if greeting:
                say(greeting)
            greeting = ""
            while more():
                if _has_ended(entry):
                    more()
                    return False
            return True
        except KeyboardInterrupt:
            if not _wants_to_stop(what):
                say(f"run {entry.run_id} continues: dtrain attach {entry.run_id}")
                return True
            ask(entry, what)
            what = "kill"


def _wants_to_stop(what: str) -> bool:
    """Ask the user; without a terminal, leave the run running."""
    if not os.isatty(0):
        return False
    while True:
        sys.stderr.write(f"\ndtrain: {what} the run, or leave it running? [{what}/leave] ")
        sys.stderr.flush()
        try:
            answer = sys.stdin.readline().strip().lower()
        except KeyboardInterrupt:  # the second one: the user wants to leave
            return False
        if answer and what.startswith(answer):
            return True
        if not answer or "leave".startswith(answer):
            return False


def _console_of(file: BinaryIO) -> Callable[[], bool]:
    """Return a function that shows the end of a file, then what is appended."""
    size = os.fstat(file.fileno()).st_size
    if size > CONTEXT_BYTES:
        file.seek(size - CONTEXT_BYTES)
        file.readline()  # a partial line

    def more() -> bool:
        if _is_stdout_closed():
            return False
        sys.stdout.flush()
        shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return True

    return more


def _has_ended(entry: Entry) -> bool:
    """Wait for LOOK_S; return whether the run has ended."""
    time.sleep(LOOK_S)
    if entry.here:
        return not entry.lives
    return any(each.name == entry.name and each.state for each in entries())


def _newest_manifest(entry: Entry) -> tuple[int, int]:
    """Return what differs between two manifests of a run; zeros if there is none."""
    try:
        about = (Path(entry.folder) / MANIFEST).stat()
    except OSError:
        return 0, 0
    return about.st_ino, about.st_mtime_ns


def _hosts_of(entry: Entry, attempt: int) -> dict[int, str]:
    attempts = read_manifest(entry).get("attempts") or []
    return {worker[0]: worker[1] for each in attempts if each["number"] == attempt for worker in each["workers"]}


def _is_stdout_closed() -> bool:
    """Return whether stdout is a pipe without a reader, as after `head`."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
