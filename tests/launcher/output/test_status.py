"""The status of a training gives way to what workers write, and comes back."""

import os
import pty
import time
from collections.abc import Iterator

import pytest

from launcher.output.console import REDRAW_S, Console

ERASED = b"\r\x1b[K"
STATUS = b"dtrain: step 7"


class _Screen:
    """A terminal, and a console that writes to it; `now` is the time of its refreshes, never behind the clock's."""

    def __init__(self) -> None:
        self._main, self._secondary = pty.openpty()
        self.console = Console(out=self._secondary, err=self._secondary, colour=False)
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


def test_a_line_removes_the_status_and_the_next_refresh_draws_it_again(screen: _Screen) -> None:
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


def test_a_progress_bar_has_the_last_line_as_long_as_it_is_unfinished(screen: _Screen) -> None:
    screen.console.show_status("step 7", gives_way=True)
    assert screen.refresh() == STATUS
    screen.console.write(0, 2, b"\r10%")
    assert screen.refresh() == ERASED + b"[h:0] 10%"
    screen.console.show_status("step 8", gives_way=True)
    assert screen.refresh() == b""
    assert screen.console.pause_s(time.monotonic()) is None
    screen.console.write(0, 2, b"\r100%\n")
    assert screen.refresh() == ERASED + b"[h:0] 100%\r\n" + b"dtrain: step 8"


def test_what_dtrain_does_itself_gives_way_to_nothing(screen: _Screen) -> None:
    screen.console.show_status("stopping")
    assert screen.refresh() == b"dtrain: stopping"
    screen.console.write(0, 2, b"\r10%")
    assert screen.refresh() == ERASED + b"[h:0] 10%"
    screen.console.show_status("stopping")
    assert screen.read() == ERASED + b"dtrain: stopping"


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
