"""The status of a training gives way to what workers write, and comes back."""

import os
import pty
import re
import time
from collections.abc import Iterator

import pytest

from launcher.output.console import REDRAW_S, Console

ERASED = b"\r\x1b[K"
STATUS = b"dtrain: step 7"


class _Screen:
    """A terminal, and a console that writes to it; `now` is the time of its refreshes, never behind the clock's."""

    def __init__(self, *, is_typed_at: bool = False) -> None:
        self._main, self._secondary = pty.openpty()
        self.console = Console(out=self._secondary, err=self._secondary, colour=False, is_typed_at=is_typed_at)
        self.console.add_worker(0, "h")
        self.now = time.monotonic()

    def refresh(self) -> bytes:
        """Let some time pass; return what the terminal got since."""
        self.now = max(self.now, time.monotonic()) + 2 * REDRAW_S
        self.console.refresh(self.now)
        return self.read()

    def read(self) -> bytes:
        """Return what the terminal got: all until a mark, since the kernel hands it over only after a while."""
        os.write(self._secondary, b"\0")
        data = b""
        while not data.endswith(b"\0"):
            data += os.read(self._main, 1 << 16)
        return data[:-1]

    def close(self) -> None:
        os.close(self._secondary)
        os.close(self._main)


@pytest.fixture
def screen() -> Iterator[_Screen]:
    screen = _Screen()
    yield screen
    screen.close()


def test_a_line_removes_the_status_until_the_next_refresh(screen: _Screen) -> None:
    screen.console.show_status("step 7", gives_way=True)
    assert screen.refresh() == STATUS
    assert screen.console.pause_s(time.monotonic()) is None
    screen.console.write(0, 1, b"a line\n")
    assert screen.console.pause_s(time.monotonic()) is not None
    assert screen.refresh() == ERASED + b"[h:0] a line\r\n" + STATUS
    screen.console.show_status("step 8", gives_way=True)
    assert screen.read() == ERASED + b"dtrain: step 8"
    screen.console.finish()
    assert screen.read() == ERASED


def test_an_unfinished_progress_bar_has_the_last_line(screen: _Screen) -> None:
    screen.console.show_status("step 7", gives_way=True)
    assert screen.refresh() == STATUS
    screen.console.write(0, 2, b"\r10%")
    assert screen.refresh() == ERASED + b"[h:0] 10%"
    screen.console.show_status("step 8", gives_way=True)
    assert screen.refresh() == b""
    assert screen.console.pause_s(time.monotonic()) is None
    screen.console.write(0, 2, b"\r100%\n")
    assert screen.refresh() == ERASED + b"[h:0] 100%\r\n" + b"dtrain: step 8"


def test_a_line_written_in_pieces_leaves_the_status_below_it(screen: _Screen) -> None:
    screen.console.show_status("step 7", gives_way=True)
    assert screen.refresh() == STATUS
    for piece in (b"a", b" ", b"line", b"\n"):  # print("a", "line") under python -u
        screen.console.write(0, 1, piece)
    assert screen.refresh() == ERASED + b"[h:0] a line\r\n" + STATUS


def test_what_dtrain_does_itself_gives_way_to_nothing(screen: _Screen) -> None:
    screen.console.show_status("stopping")
    assert screen.refresh() == b"dtrain: stopping"
    screen.console.write(0, 2, b"\r10%")
    assert screen.refresh() == ERASED + b"[h:0] 10%"
    screen.console.show_status("stopping")
    assert screen.read() == ERASED + b"dtrain: stopping"


class _Glass:
    """What a terminal of so many rows shows of the bytes that it gets, as far as the console uses it."""

    def __init__(self, rows: int) -> None:
        self.rows = [""] * rows
        self._row = self._column = 0
        self._saved = (0, 0)

    def show(self, data: bytes) -> list[str]:
        for part in re.findall(r"\x1b(?:\[[0-9]*[A-Z]|[78])|[^\x1b]", data.decode()):
            self._take(part)
        return [row.rstrip() for row in self.rows]

    def _take(self, part: str) -> None:
        match part:
            case "\r":
                self._column = 0
            case "\n" if self._row == len(self.rows) - 1:
                self.rows = [*self.rows[1:], ""]
            case "\n":
                self._row += 1
            case "\x1b[A":
                self._row = max(0, self._row - 1)
            case "\x1b[B":
                self._row = min(len(self.rows) - 1, self._row + 1)
            case "\x1b[K" | "\x1b[J":
                self.rows[self._row] = self.rows[self._row][: self._column]
                if part == "\x1b[J":
                    self.rows[self._row + 1 :] = [""] * (len(self.rows) - self._row - 1)
            case "\x1b7":
                self._saved = self._row, self._column
            case "\x1b8":
                self._row, self._column = self._saved
            case _:
                row = self.rows[self._row].ljust(self._column)
                self.rows[self._row] = row[: self._column] + part + row[self._column + 1 :]
                self._column += 1


@pytest.mark.parametrize("rows", [4, 10])
def test_what_is_typed_does_not_land_in_the_status(rows: int) -> None:
    screen, glass = _Screen(is_typed_at=True), _Glass(rows)
    console = screen.console
    console.show_status("step 7", gives_way=True)
    glass.show(screen.refresh())
    console.write(0, 1, b"a line\n")
    shown = glass.show(screen.refresh())
    assert [row for row in shown if row] == ["[h:0] a line", "dtrain: step 7"]
    glass.show(b"he")
    console.show_status("step 8", gives_way=True)
    glass.show(screen.refresh())
    shown = glass.show(b"llo\r\n")
    assert [row for row in shown if row] == ["[h:0] a line", "hello", "dtrain: step 8"]
    console.answer(is_line=True)
    console.write(0, 1, b"read hello\n")
    shown = glass.show(screen.refresh())
    assert [row for row in shown if row][-3:] == ["hello", "[h:0] read hello", "dtrain: step 8"]
    console.finish()
    shown = glass.show(screen.read() + b"$ ")
    assert [row for row in shown if row][-2:] == ["[h:0] read hello", "$"]
    screen.close()


def test_a_file_gets_no_status_and_has_nothing_to_do(tmp_path: os.PathLike[str]) -> None:
    descriptor = os.open(os.path.join(tmp_path, "out"), os.O_RDWR | os.O_CREAT)
    console = Console(out=descriptor, err=descriptor)
    console.add_worker(0, "h")
    console.show_status("step 7", gives_way=True)
    console.refresh(time.monotonic() + 1.0)
    console.write(0, 1, b"a line\n")
    console.refresh(time.monotonic() + 2.0)
    assert console.pause_s(time.monotonic()) is None
    assert os.pread(descriptor, 100, 0) == b"[h:0] a line\n"
    os.close(descriptor)
