"""`dtrain debug`: pdb in this terminal, or debugpy on a port of this machine, for a rank of an active run."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from launcher.cli.runs.stacks import ask_stacks
from launcher.cli.runs.steer import end_of, how_it_ended
from launcher.errors import DtrainError, RunError
from launcher.output.stacks import one_line_of
from launcher.runs.control import Question, question
from launcher.runs.registry import Entry, choose, entries

OPENS_S = 3.0  # then print where the rank is
ANSWER_S = 10.0
LOOK_S = 0.1
EDITOR_LOOK_S = 0.2  # interval of checks that the rank is alive, until an editor connects
PIECE_BYTES = 64 << 10


class _EndedError(Exception):
    """The debugger is closed, with the reason; `goes_on`: it was open, and the rank continues."""

    def __init__(self, why: str, *, goes_on: bool) -> None:
        super().__init__(why)
        self.goes_on = goes_on


def debug_rank(word: str, rank: int, *, port: int | None, say: Callable[[str], None]) -> int:
    """Run a debugger of a rank until either ends; with `port`, for an editor. Return the exit code.

    Blocks; call from the main thread only.
    """
    entry = choose(word, entries())
    debugger = "pdb" if port is None else "debugpy"
    with question(entry, "debug", rank=rank, debugger=debugger) as asked:
        answer = asked.answer(entry, ANSWER_S)
        if answer is None:
            raise RunError(how_it_ended(end_of(entry)))
        say(f"rank {rank} on {answer['host']} of run {entry.run_id}; Ctrl-C leaves it, and it continues")
        said = _Said(asked, rank)
        said.start()
        try:
            first = _wait_until_open(entry, rank, said, say)
            if "end" in first:
                raise _EndedError(first["end"], goes_on=False)
            if port is None:
                _speak_pdb(asked, said, first, say)
            else:
                _serve_editor(asked, said, first["ready"], port, say)
        except _EndedError as ended:
            say(str(ended))
            return 0 if ended.goes_on else 1
        except (KeyboardInterrupt, EOFError):
            pass
        finally:
            asked.close()
        say(f"rank {rank} goes on without the debugger")
        return 0


class _Said:
    """Messages of the rank and the controller, read in a thread: a queue of lines, and of bytes after `ready`."""

    def __init__(self, asked: Question, rank: int) -> None:
        self._asked = asked
        self._rank = rank
        # Not SimpleQueue: in CPython 3.11 its `get` waits forever if a signal, such as Ctrl-C, comes at its timeout.
        self._queue: queue.Queue[Mapping[str, Any] | bytes | _EndedError] = queue.Queue()
        self._unread = b""
        self._ended = False
        self._is_open = False
        self._is_raw = False

    def start(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, wait_s: float | None = None) -> Mapping[str, Any]:
        """Return the next line. Raises _EndedError, queue.Empty."""
        said = self._next(wait_s)
        assert not isinstance(said, bytes)
        return said

    def next_bytes(self, wait_s: float | None = None) -> bytes:
        """Return the bytes received after the line `ready`, or the next ones. Raises like `next`."""
        said = self._next(wait_s)
        assert isinstance(said, bytes)
        return said

    def _next(self, wait_s: float | None) -> Mapping[str, Any] | bytes:
        said = self._queue.get(timeout=wait_s) if wait_s != 0 else self._queue.get_nowait()
        if isinstance(said, _EndedError):
            raise said
        return said

    def read_line(self, prompt: str) -> str:
        """Let the user type a line. Raises _EndedError, KeyboardInterrupt, EOFError.

        readline shows its prompt and then ignores signals that came earlier: Python's handlers run only for a signal
        that comes while it waits. So a timer checks for Ctrl-C and for the end of the debugger. It runs only in here,
        since its handler uses the queue.
        """

        def look(_: int, __: object) -> None:
            if self._ended:
                signal.setitimer(signal.ITIMER_REAL, 0)
                while True:
                    self.next()  # the last one raises

        before = signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
        try:
            return input(prompt)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    # In the thread

    def _read(self) -> None:
        ended = _EndedError("the run has ended, or its controller was killed", goes_on=False)
        try:
            while (packet := self._asked.receive()) is not None:
                if isinstance(packet, bytes):
                    self._add(packet)
                elif "ended" in packet:
                    ended = self._how_ended(packet["ended"])
        except ValueError as error:  # not JSON
            ended = _EndedError(f"rank {self._rank} sent an unknown message: {error}", goes_on=False)
        if self._asked.is_closed:
            ended = self._how_ended("")
        self._queue.put(ended)
        self._ended = True

    def _how_ended(self, why: str) -> _EndedError:
        """Return the reason why a debugger closed; `why` is empty if the rank closed it itself."""
        if why:
            return _EndedError(why, goes_on=False)
        if self._is_open:
            return _EndedError(f"rank {self._rank} goes on without the debugger", goes_on=True)
        text = f"rank {self._rank} continues: it closed the debugger before it was ready; see its output: dtrain logs"
        return _EndedError(text, goes_on=False)

    def _add(self, data: bytes) -> None:
        self._unread += data
        while not self._is_raw and b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            said = json.loads(line)
            self._is_raw = "ready" in said
            self._is_open = True
            self._queue.put(said)
        if self._is_raw and self._unread:
            self._queue.put(self._unread)
            self._unread = b""


def _wait_until_open(entry: Entry, rank: int, said: _Said, say: Callable[[str], None]) -> Mapping[str, Any]:
    """Return the first line of the debugger; print where the rank is if that takes long."""
    with contextlib.suppress(queue.Empty):
        return said.next(OPENS_S)
    try:
        (found,) = ask_stacks(entry, [rank]).evidence
        where = one_line_of(found)
    except (DtrainError, ValueError):  # the end of the wait explains it
        where = f"rank {rank} has not answered yet"
    say(f"{where}; the debugger opens when it returns to Python. The others: dtrain stacks {entry.run_id}")
    return said.next()


def _speak_pdb(asked: Question, said: _Said, first: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Show pdb's output and send it lines, until the end. Raises _EndedError, KeyboardInterrupt, EOFError."""
    say("type q or Ctrl-D to leave; the rank then continues. Others wait for it: dtrain reports no stall meanwhile,")
    say("but torch's own timeouts keep running: of a collective mostly 30 minutes, with NCCL 10 (init_process_group)")
    if os.isatty(0):
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # line editing and history
    line = first
    while "end" not in line:
        if "text" in line:
            sys.stdout.write(line["text"])
            sys.stdout.flush()
        elif "prompt" in line:
            typed = said.read_line(line["prompt"])
            asked.send(typed.encode("utf-8", "replace") + b"\n")
        line = said.next()
    raise _EndedError(line["end"], goes_on=True)


def _serve_editor(
    asked: Question, said: _Said, folders: Mapping[str, str], port: int, say: Callable[[str], None]
) -> None:
    """Let an editor connect to a loopback port, and relay between it and the rank's debugpy, until either ends.

    `folders` are those of sent files on the rank's host, by their path here.
    Accept only this user's processes, and one editor: debugpy supports one. Raises RunError if the port is not free.
    """
    try:
        listening = socket.create_server(("127.0.0.1", port), backlog=1)
    except OSError as error:
        raise RunError(f"--port {port}: {error.strerror}") from error
    with listening:
        listening.settimeout(EDITOR_LOOK_S)
        number = listening.getsockname()[1]
        say(f"debugpy waits for an editor at 127.0.0.1:{number}. VS Code: launch.json with")
        attach = {"type": "debugpy", "request": "attach", "connect": {"host": "127.0.0.1", "port": number}}
        mappings = [{"localRoot": here, "remoteRoot": there} for here, there in folders.items()]
        say(json.dumps({**attach, "pathMappings": mappings} if mappings else attach))
        early: list[bytes] = []
        editor = _accept(listening, said, early)
    with editor:
        threading.Thread(target=_read_editor, args=(editor, asked), daemon=True).start()
        with contextlib.suppress(OSError):  # the editor disconnected
            for data in early:
                editor.sendall(data)
            while True:
                editor.sendall(said.next_bytes())


def _accept(listening: socket.socket, said: _Said, early: list[bytes]) -> socket.socket:
    while True:
        with contextlib.suppress(queue.Empty):
            early.append(said.next_bytes(0))
        try:
            editor, _ = listening.accept()
        except TimeoutError:
            continue
        if _uid_of_peer(editor) == os.geteuid():
            editor.settimeout(None)
            return editor
        editor.close()


def _uid_of_peer(connection: socket.socket) -> int | None:
    """Return the owner of the other end of a loopback connection; None if the kernel does not list it."""
    ours, theirs = (f":{end[1]:04X}" for end in (connection.getsockname(), connection.getpeername()))
    with open("/proc/net/tcp", encoding="ascii") as file:
        for line in list(file)[1:]:
            fields = line.split()
            if fields[1].endswith(theirs) and fields[2].endswith(ours):
                return int(fields[7])
    return None


def _read_editor(editor: socket.socket, asked: Question) -> None:
    with contextlib.suppress(OSError):
        while data := editor.recv(PIECE_BYTES):
            asked.send(data)
    asked.close()
