"""What waits for the terminal stays small, and what many ranks write costs no more than what one writes."""

import os
import pty
import re
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from testbed.processes import wait_until

from launcher.output.console import Console, takes_colour
from launcher.output.logfiles import LogFiles
from launcher.output.writer import QUEUE_BYTES, OutputThread

CHUNK = 1 << 16


@pytest.fixture
def no_files() -> LogFiles:
    logs = LogFiles(Path(os.devnull), lambda _: None)
    logs.usable = False
    return logs


def read_all(fd: int, seen: bytearray) -> None:
    try:
        while data := os.read(fd, CHUNK):
            seen += data
    except OSError:  # a terminal whose other end is closed
        return


@contextmanager
def read_until_closed(fd: int) -> Iterator[bytearray]:
    """Read in a thread; the other end is closed within the block."""
    seen = bytearray()
    reader = threading.Thread(target=read_all, args=(fd, seen))
    reader.start()
    yield seen
    reader.join(60)
    os.close(fd)
    assert not reader.is_alive()


def test_a_stuck_terminal_gets_the_newest_status_only(no_files: LogFiles) -> None:
    main, terminal = pty.openpty()
    output = OutputThread(Console(out=terminal, err=terminal, colour=False), no_files)
    output.start()
    output.add_worker(0, "a", 0)
    output.write(0, 1, b"x\n" * CHUNK)  # more than a terminal holds
    tracemalloc.start()
    for number in range(20_000):
        output.show_status(f"status {number}")
    grown_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for number in range(5_000):
        output.say(f"message {number}")
    with read_until_closed(main) as seen:
        wait_until(lambda: b"status 19999" in seen, "the newest status is shown")
        output.close()
        os.close(terminal)
    assert grown_bytes < 2 << 20
    assert len(re.findall(rb"status \d+", seen)) < 10
    assert len(re.findall(rb"message \d+", seen)) == 1000
    assert b"the terminal was blocked: 4000 more messages are not shown" in seen


def switches(thread: threading.Thread) -> int:
    """How often a thread has begun to wait."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)[0])


def test_of_many_readers_one_goes_on_for_each_chunk_written(no_files: LogFiles) -> None:
    readers, chunks = 100, 4
    read_end, write_end = os.pipe()
    output = OutputThread(Console(out=write_end, err=write_end), no_files)
    output.start()
    for rank in range(readers):
        output.add_worker(rank, "a", 0)
    counts: list[int] = []

    def write(rank: int) -> None:
        for _ in range(chunks):
            output.write(rank, 1, b"x" * (CHUNK - 1) + b"\n")
        counts.append(switches(threading.current_thread()))

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(readers)]
    for thread in threads:
        thread.start()
    queued = QUEUE_BYTES // CHUNK
    with read_until_closed(read_end) as seen:
        for thread in threads:
            thread.join(60)
        output.close()
        os.close(write_end)
    assert len(seen) > readers * chunks * CHUNK > 2 * queued * CHUNK
    assert len(counts) == readers
    assert sum(counts) < 20 * readers * chunks


def calls_of_a_write(ranks: int) -> int:
    """How many calls of Python code it takes to write a part of a line when all other ranks have begun one, too."""
    with open(os.devnull, "wb") as nowhere:
        console = Console(out=nowhere.fileno(), err=nowhere.fileno())
        for rank in range(ranks):
            console.add_worker(rank, "a")
            console.write(rank, 1, b"begun")
        calls = 0

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        console.write(ranks - 1, 1, b" and not ended")
        sys.setprofile(None)
        return calls


def test_a_write_costs_the_same_whatever_other_ranks_have_begun() -> None:
    assert calls_of_a_write(800) == calls_of_a_write(1)


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_terminal_shows_the_beginning_of_a_very_long_line(pieces: int) -> None:
    main, terminal = pty.openpty()
    console = Console(out=terminal, err=terminal, colour=False)
    console.add_worker(0, "a")
    text = b"x" * 5_000_000 + b"\nthe next\n" + b"y" * 4096 + b"\n"
    with read_until_closed(main) as seen:
        for start in range(0, len(text), len(text) // pieces):
            console.write(0, 1, text[start : start + len(text) // pieces])
        os.close(terminal)
    lines = bytes(seen).splitlines()
    assert lines == [b"[a:0] " + b"x" * 4096 + b"... (4.8 MB)", b"[a:0] the next", b"[a:0] " + b"y" * 4096]


@pytest.mark.parametrize(
    ("variables", "terminal", "pipe"),
    [({}, True, False), ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False), ({"FORCE_COLOR": "1"}, True, True),
     ({"TERM": "dumb"}, False, False), ({"NO_COLOR": ""}, True, False)],
)  # fmt: skip
def test_who_gets_colours(
    variables: dict[str, str], terminal: bool, pipe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for (one, other), expected in ((pty.openpty(), terminal), (os.pipe(), pipe)):
        assert takes_colour(other) == expected
        os.close(one)
        os.close(other)


def test_a_line_that_is_cut_leaves_no_colour() -> None:
    main, terminal = pty.openpty()
    console = Console(out=terminal, err=terminal, colour=False)
    console.add_worker(0, "a")
    with read_until_closed(main) as seen:
        console.write(0, 1, b"\x1b[31m" + b"x" * 5000 + b"\x1b[0m\n")
        os.close(terminal)
    assert bytes(seen).endswith(b"x\x1b[0m... (4.9 KB)\r\n")


def test_the_unfinished_line_that_began_last_is_at_the_bottom(no_files: LogFiles) -> None:
    main, terminal = pty.openpty()
    console = Console(out=terminal, err=terminal, colour=False)
    for rank in range(3):
        console.add_worker(rank, "a")
        console.write(rank, 1, b"\rbar %d" % rank)
    console.write(0, 1, b"\rbar 0 again")
    console.refresh(time.monotonic() + 1)
    with read_until_closed(main) as seen:
        wait_until(lambda: seen, "a line is drawn")
        os.close(terminal)
    assert bytes(seen) == b"[a:2] bar 2"
