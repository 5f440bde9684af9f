"""A program on a terminal of its own: what it shows is read, and keys are typed."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from testbed.left import Program
from testbed.processes import TIMEOUT_S, kill_tree, watched


class Terminal:
    """`shown` is all that has come so far."""

    def __init__(self, process: "subprocess.Popen[bytes]", master: int) -> None:
        self.process = process
        self.shown = ""
        self.master = master

    def read_until(self, text: str) -> None:
        """Read until `text` is shown; raise TimeoutError with what was instead."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.shown:
            if not self._read(0.1) and self.process.poll() is not None and not self._read(0.1):
                raise EOFError(f"it ended without {text!r}: {self.shown}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not shown: {text!r}, but {self.shown}")

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def wait(self) -> int:
        """Read to the end and return the exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.05)
        while self._read(0.05):
            pass
        return self.process.wait(1.0)

    def hang_up(self) -> None:
        """End the login: the terminal goes, and the kernel sends SIGHUP."""
        os.close(self.master)
        self.master = -1

    def close(self) -> None:
        if self.master >= 0:
            self.hang_up()

    def _read(self, wait_s: float) -> bool:
        if not select.select([self.master], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # no one has the other side open any more
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def dtrain_on_terminal(
    *args: str | Path,
    cwd: Path,
    program: Sequence[str] = ("-m", "launcher"),
    columns: int = 0,
    outlived: bool = False,
) -> Iterator[Terminal]:
    """Run `dtrain ARGS` as the leader of a session with a terminal; kill its tree if it still runs at the end.

    `program` is another one for Python. Without `columns` the terminal does not know its size.
    """
    master, slave = pty.openpty()
    if columns:
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    words = [sys.executable, *program, *(os.fspath(arg) for arg in args)]

    def start(env: dict[str, str]) -> Program:
        return Program(
            words, env=env, cwd=cwd, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=take_terminal,
        )  # fmt: skip

    process = watched(start, words, outlived=outlived)
    os.close(slave)
    terminal = Terminal(process, master)
    try:
        yield terminal
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
        terminal.close()
        process.wait()
