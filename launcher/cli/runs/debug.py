"""`dtrain debug`: pdb in this terminal, or debugpy at a port of this machine, in a rank of a run that goes on."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from launcher.cli.runs.stacks import ask_stacks
from launcher.errors import DtrainError
from launcher.output.stacks import one_line_of
from launcher.runs.questions import Question, question
from launcher.runs.registry import Entry, choose, entries

__all__ = ["debug_rank"]

OPENS_S = 3.0  # after that it is said where the rank is
ANSWER_S = 10.0
_WAKE = signal.SIGUSR1  # ends the wait for a line that nobody will read


class _EndedError(Exception):
    """The debugger is closed: why, if that is to be said; `goes_on`: by its own end."""

    def __init__(self, why: str, *, goes_on: bool) -> None:
        super().__init__(why)
        self.goes_on = goes_on


def debug_rank(word: str, rank: int, *, port: int | None, say: Callable[[str], None]) -> int:
    """Be a debugger of a rank until either ends; with `port`, one for an editor. Return the exit code.

    Blocks; from the main thread only.
    """
    entry = choose(word, entries())
    debugger = "pdb" if port is None else "debugpy"
    with question(entry, {"ask": "debug", "rank": rank, "debugger": debugger}) as asked:
        answer = asked.answer(entry, ANSWER_S)
        say(f"rank {rank} on {answer['host']} of run {entry.run_id}; Ctrl-C leaves it, and it goes on")
        said = _Said(asked, rank)
        said.start()
        try:
            first = _wait_until_open(entry, rank, said, say)
            if port is None:
                _speak_pdb(asked, said, first, say)
            elif first.get("ready"):
                from launcher.cli.runs.debug_editor import forward  # seldom needed

                forward(said.next_bytes, asked.send, asked.close, port, say)
            raise _EndedError(first.get("end", ""), goes_on=True)
        except _EndedError as ended:
            if text := str(ended):
                say(text)
            return 0 if ended.goes_on else 1
        except (KeyboardInterrupt, EOFError):
            say(f"rank {rank} goes on without the debugger")
            return 0
        finally:
            asked.close()


class _Said:
    """What the rank and the controller say, read in a thread: a queue of lines, and of bytes after the line `ready`."""

    def __init__(self, asked: Question, rank: int) -> None:
        self._asked = asked
        self._rank = rank
        self._queue: queue.SimpleQueue[Mapping[str, Any] | bytes | _EndedError] = queue.SimpleQueue()
        self._unread = b""
        self._lock = threading.Lock()
        self._waits_for_line = False
        self._ended = False
        self._is_raw = False

    def start(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, wait_s: float | None = None) -> Mapping[str, Any]:
        """Return the next line. Raises _EndedError, queue.Empty."""
        said = self._next(wait_s)
        assert not isinstance(said, bytes)
        return said

    def next_bytes(self, wait_s: float | None = None) -> bytes:
        """Return what has come since the line `ready`, or the next of it. Raises as `next`."""
        said = self._next(wait_s)
        assert isinstance(said, bytes)
        return said

    def _next(self, wait_s: float | None) -> Mapping[str, Any] | bytes:
        said = self._queue.get(timeout=wait_s) if wait_s != 0 else self._queue.get_nowait()
        if isinstance(said, _EndedError):
            raise said
        return said

    @contextmanager
    def wakes_reader(self) -> Iterator[None]:
        """In this block, the end raises _EndedError in the main thread."""

        def wake(_: int, __: object) -> None:
            if self._waits_for_line:
                self._waits_for_line = False
                while True:
                    self._next(None)  # whose last one raises

        before = signal.signal(_WAKE, wake)
        try:
            with self._lock:
                self._waits_for_line = True
                ended = self._ended
            while ended:
                self._next(None)
            yield
        finally:
            try:
                with self._lock:  # which the thread holds while it sends the signal
                    self._waits_for_line = False
            finally:
                signal.signal(_WAKE, before)

    # In the thread

    def _read(self) -> None:
        ended = _EndedError("the run has ended, or its controller was killed", goes_on=False)
        while (packet := self._asked.receive()) is not None:
            if not isinstance(packet, bytes):
                if "ended" in packet:
                    ended = _EndedError(packet["ended"], goes_on=False)
                continue
            self._take(packet)
        if self._asked.is_closed:
            ended = _EndedError(f"rank {self._rank} goes on without the debugger", goes_on=True)
        with self._lock:
            self._queue.put(ended)
            self._ended = True
            if self._waits_for_line:
                signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)

    def _take(self, data: bytes) -> None:
        self._unread += data
        while not self._is_raw and b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            said = json.loads(line)
            self._is_raw = "ready" in said
            self._queue.put(said)
        if self._is_raw and self._unread:
            self._queue.put(self._unread)
            self._unread = b""


def _wait_until_open(entry: Entry, rank: int, said: _Said, say: Callable[[str], None]) -> Mapping[str, Any]:
    """Return the first line of the debugger; say what the rank is doing if that takes long."""
    with contextlib.suppress(queue.Empty):
        return said.next(OPENS_S)
    try:
        (found,) = ask_stacks(entry, [rank]).evidence
        where = one_line_of(found)
    except (DtrainError, ValueError):  # which the end of the wait will explain
        where = f"rank {rank} has not answered yet"
    say(f"{where}; the debugger opens when it comes back to Python. The others: dtrain stacks {entry.run_id}")
    return said.next()


def _speak_pdb(asked: Question, said: _Said, first: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Show what pdb says and give it lines, until the end. Raises _EndedError, KeyboardInterrupt, EOFError."""
    say(
        "to leave it, q or Ctrl-D; the rank goes on. Others wait for it: dtrain takes nobody's silence for a stall now,"
    )
    say("but torch's own timeouts go on: of a collective mostly 30 minutes, with NCCL 10 (init_process_group)")
    if os.isatty(0):
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # lines can be edited, and called back
    line = first
    while "end" not in line:
        if "text" in line:
            sys.stdout.write(line["text"])
            sys.stdout.flush()
        elif "prompt" in line:
            with said.wakes_reader():
                typed = input(line["prompt"])
            asked.send(typed.encode("utf-8", "replace") + b"\n")
        line = said.next()
    raise _EndedError(line["end"], goes_on=True)
