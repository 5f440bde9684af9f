"""Writes the workers' output to the terminal and the log files, with one thread and one bounded queue.

Readers of streams put bytes into the queue and wait while it is full, so a slow terminal or disk slows the workers down
and no process grows. The controller's loop never waits here, nor for text that takes long to format; messages beyond
what a stuck terminal can take are dropped and counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.hangs.positions import groups
from launcher.output.console import Console
from launcher.output.filter import OutputFilter
from launcher.output.logfiles import LogFiles
from launcher.output.stacks import one_line, write_out
from launcher.output.text import printable
from launcher.protocol.message import LEDGER
from launcher.protocol.reports import Evidence

QUEUE_BYTES = 4 << 20
ENTRY_BYTES = 256  # overhead of a queue entry: many short lines must not use more memory than a few long ones
MESSAGES = 1000  # dtrain's own messages that may wait for the terminal
TAIL_BYTES = 8192


class OutputThread:
    """Owns the console and the log files from `start` to `close`. Every method may be called from any thread."""

    def __init__(
        self, console: Console, logs: LogFiles, *, output_filter: OutputFilter | None = None,
        read_ledger: Callable[[int, bytes], Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        """`read_ledger` gets what a rank writes to its ledger, in the thread, and returns lines to print."""
        self._console = console
        self._read_ledger = read_ledger or (lambda *_: ())
        self._logs = logs
        self._filter = output_filter or OutputFilter()
        self._local_ranks: dict[int, int] = {}
        self._queue: deque[tuple[Callable[[], None], int]] = deque()
        self._bytes = 0
        self._unsaid = 0  # messages that wait
        self._dropped = 0  # messages that came while MESSAGES were waiting
        self._status: tuple[str, bool] | None = None  # the newest, until it is shown
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # there is something to do
        self._room = threading.Condition(self._lock)  # there is room for another reader's bytes
        self._closing = False
        self._attempt = 0
        self._tails: dict[tuple[int, int], bytes] = {}  # of each rank's newest process
        self._thread = threading.Thread(target=self._work, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add_worker(self, rank: int, host: str, attempt: int, local_rank: int = 0) -> None:
        """Announce a worker before its first bytes: all later bytes of this rank belong to this attempt.

        The first worker of a new attempt ends the previous attempt, whose workers must no longer write.
        """
        self._put(lambda: self._add_worker(rank, host, attempt, local_rank))

    def replace_worker(self, rank: int) -> None:
        """Announce a process that replaces this rank's dead one: its output starts on a new line."""
        self._put(lambda: self._replace_worker(rank))

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Add bytes of a worker's stdout (1), stderr (2) or LEDGER. Blocks while the queue is full."""
        with self._lock:
            while self._bytes > QUEUE_BYTES and not self._closing:
                self._room.wait()
            self._append(lambda: self._write(rank, stream, data), len(data) + ENTRY_BYTES)
            self._pass_on_room()

    def ask(self, rank: int) -> None:
        """Leave the terminal to the prompt of a rank, and hold all other output back, until `answer`."""
        self._put(lambda: self._console.ask(rank))

    def answer(self, *, is_line: bool) -> None:
        """Resume after the user typed an answer; if it is a line, the terminal is on a new one."""
        self._put(lambda: self._console.answer(is_line=is_line))

    def withdraw(self, rank: int) -> None:
        """Resume, since a rank no longer waits for an answer."""
        self._put(lambda: self._console.withdraw(rank))

    def error_file(self, rank: int, attempt: int, text: str) -> None:
        """Write the text of a worker's error file."""
        self._put(lambda: self._logs.write_error(rank, attempt, text))

    def keep_evidence(self, attempt: int, number: int, evidence: Sequence[Evidence], *, say: bool) -> None:
        """Write where the ranks were to `evidence_path(attempt, number)`; with `say`, print it too.

        Parsing thousands of stacks takes seconds, which must not block the loop: the thread does it.
        """
        self._put(lambda: self._keep_evidence(attempt, number, evidence, say=say))

    def keep_manifest(self, content: Mapping[str, Any]) -> None:
        """Replace the manifest; after `close`, immediately."""
        if self._thread.is_alive():
            self._put(lambda: self._logs.write_manifest(content))
        else:
            self._logs.write_manifest(content)

    def keep_report(self, text: str) -> None:
        """Write the report; call after `close`."""
        self._logs.write_report(text)

    def cannot_write(self, error: OSError) -> None:
        """Note that another file in the run's folder cannot be written: one message covers all."""
        self._put(lambda: self._logs.give_up(error))

    def leave_terminal(self, fd: int, then: Callable[[], None]) -> None:
        """Switch later output to `fd`, a file, and call `then` once all earlier output is on the terminal."""

        def leave() -> None:
            self._console.leave_terminal(fd)
            then()

        self._put(leave)

    def evidence_path(self, attempt: int, number: int) -> Path:
        return self._logs.evidence_path(attempt, number)

    def say(self, text: str) -> None:
        """Print a message of dtrain itself on stderr, unless MESSAGES already wait for a stuck terminal."""

        def say() -> None:
            self._console.say(text)
            with self._lock:
                self._unsaid -= 1
                dropped = 0 if self._unsaid else self._dropped
                self._dropped -= dropped
            if dropped:
                self._console.say(f"the terminal was blocked: {dropped} more messages are not shown")

        with self._lock:
            if self._unsaid < MESSAGES:
                self._unsaid += 1
                self._append(say)
            else:
                self._dropped += 1

    def show_status(self, text: str, *, gives_way: bool = False) -> None:
        """Show a status in the terminal's last line; empty to remove it. See Console.show_status."""
        with self._lock:
            self._status = text, gives_way
            self._changed.notify()

    def tail(self, rank: int, stream: int) -> list[str]:
        """Return the last lines of a rank's newest worker as a terminal would show them; call after `close`."""
        text = self._tails.get((rank, stream), b"").decode("utf-8", "replace")
        lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
        return [printable(line) for line in lines if line.strip()]

    def hurry(self) -> None:
        """Stop waiting for a blocked terminal (a stopped pager, Ctrl-S) and for an answer to a prompt."""
        self._console.impatient = True
        self._put(self._console.withdraw)

    def close(self) -> None:
        """Write what remains, including unfinished lines, and end the thread. Blocks."""
        with self._lock:
            self._closing = True
            self._changed.notify()
            self._room.notify_all()
        self._thread.join()

    def _put(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._append(action)

    def _append(self, action: Callable[[], None], size: int = 0) -> None:
        self._queue.append((action, size))
        self._bytes += size
        self._changed.notify()

    def _pass_on_room(self) -> None:
        """Wake one reader if there is room; the others could only wait again."""
        if self._bytes <= QUEUE_BYTES:
            self._room.notify()

    # In the thread

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue and self._status is None and not self._closing:
                    self._changed.wait(self._console.pause_s(time.monotonic()))
                ready, self._queue = self._queue, deque()
                status, self._status = self._status, None
                closing = self._closing
            for action, size in ready:
                try:
                    action()
                except Exception as error:  # a bug here may lose some output, not the run
                    self._console.say(f"output was lost: {type(error).__name__}: {error}")
                if size:
                    with self._lock:
                        self._bytes -= size
                        self._pass_on_room()
            if status is not None:
                self._console.show_status(status[0], gives_way=status[1])
            self._console.refresh(time.monotonic())
            if closing and not ready:
                self._console.finish()
                self._logs.close()
                return

    def _add_worker(self, rank: int, host: str, attempt: int, local_rank: int) -> None:
        self._local_ranks[rank] = local_rank
        if attempt != self._attempt:
            self._attempt = attempt
            self._console.begin_attempt()
            self._logs.begin_attempt(attempt)
        self._forget_tails(rank)
        self._console.add_worker(rank, host, local_rank=local_rank, attempt=attempt)
        self._logs.add_worker(rank)

    def _replace_worker(self, rank: int) -> None:
        self._forget_tails(rank)
        self._console.end_line(rank)
        self._logs.replace_worker(rank)

    def _forget_tails(self, rank: int) -> None:
        for stream in (1, 2):
            self._tails.pop((rank, stream), None)

    def _keep_evidence(self, attempt: int, number: int, evidence: Sequence[Evidence], *, say: bool) -> None:
        self._logs.write_evidence(attempt, number, write_out(evidence))
        if say:
            lines = [one_line(group) for group in groups(evidence)]
            lines.append(f"stacks of all ranks: {self.evidence_path(attempt, number)}")
            self._console.say("\n".join(lines))

    def _write(self, rank: int, stream: int, data: bytes) -> None:
        if stream == LEDGER:
            self._logs.write_ledger(rank, data)
            for line in self._read_ledger(rank, data):
                self._console.say(line)
            return
        self._logs.write(rank, stream, data)
        key = (rank, stream)
        self._tails[key] = (self._tails.get(key, b"") + data)[-TAIL_BYTES:]
        if self._filter.shows(rank, self._local_ranks.get(rank, 0), stream):
            self._console.write(rank, stream, data)
