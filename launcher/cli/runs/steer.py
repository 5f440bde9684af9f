"""`dtrain stop`, `dtrain wait` and `dtrain report`: request, wait for and show the end of a run."""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.errors import RunError
from launcher.runs.control import question
from launcher.runs.registry import Entry, choose, entries

LOST_EXIT_CODE = 1
NOTED_S = 5.0  # from the end of the socket to the end of the process


def stop_run(word: str, *, kill: bool, say: Callable[[str], None]) -> int:
    """Stop a run as SIGTERM does, with `kill` without the grace period; return once it has ended."""
    entry = choose(word, entries())
    with question(entry, "kill" if kill else "stop") as asked:
        if asked.answer(entry) is not None:
            say(f"stopping run {entry.run_id}" + ("" if kill else "; to kill it: dtrain stop --kill " + entry.run_id))
            asked.receive()  # until it has ended
    say(how_it_ended(end_of(entry)))
    return 0


def wait_for_run(word: str, *, say: Callable[[str], None]) -> int:
    """Wait for the end of a run, print how it ended, and return its exit code."""
    entry = choose(word, entries())
    with question(entry, "wait") as asked:
        asked.receive()
    return say_end(end_of(entry), say)


def show_report(word: str) -> int:
    """Print the report of a run; return 0, whatever it says. Raises RunError for an active run."""
    entry = choose(word, entries())
    if not entry.state and not entry.is_lost:
        raise RunError(f"run {entry.run_id} is active; it has a report once it has ended: dtrain wait {entry.run_id}")
    print(_report_of(entry))
    return 0


def say_end(entry: Entry, say: Callable[[str], None]) -> int:
    """Print how a run ended, and return its exit code, or LOST_EXIT_CODE."""
    say(_report_of(entry))
    return entry.exit_code if entry.state else LOST_EXIT_CODE


def _report_of(entry: Entry) -> str:
    """Return the final report of a run that has ended; one line instead if none was kept."""
    return entry.report or how_it_ended(entry)


def end_of(entry: Entry) -> Entry:
    """Return the newest entry of a run that has just ended. Raises RunError for an active one."""
    deadline = time.monotonic() + NOTED_S
    while True:
        newest = next((each for each in entries() if each.name == entry.name), entry)
        if newest.state or newest.is_lost:
            return newest
        if time.monotonic() > deadline:
            raise RunError(f"run {entry.run_id} (pid {entry.pid}) is active, but does not answer")
        time.sleep(0.05)


def how_it_ended(entry: Entry) -> str:
    where = f"output in {entry.folder}"
    if not entry.state:
        return (
            f"run {entry.run_id} is lost: its controller (pid {entry.pid} on {entry.host}) ended without a report. "
            f"Its hosts end their workers by themselves (--heartbeat-timeout-s); {where}"
        )
    return f"run {entry.run_id} has ended: {entry.state}, exit code {entry.exit_code}; {where}"
