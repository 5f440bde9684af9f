"""Equal lines of many ranks are shown once on a terminal; a prompt has it alone; what is kept and its order stay."""

import os
import pty
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed.processes import wait_until
from testbed.terminal import dtrain_on_terminal

from launcher.output.console import PROMPT_BYTES, Console
from launcher.output.merging import LONGEST_S, MOST_LINES, PAUSE_S, LineMerger, label


def merger(ranks: int) -> LineMerger:
    made = LineMerger()
    made.ranks = ranks
    return made


def test_a_line_waits_for_others_until_all_have_written_it() -> None:
    lines = merger(3)
    lines.add(0, 1, b"loss", 10.0)
    lines.add(2, 1, b"loss", 10.0)
    assert lines.leave(10.0 + 0.9 * PAUSE_S) == []
    lines.add(1, 1, b"loss", 10.0 + 0.9 * PAUSE_S)
    (line,) = lines.leave(10.0 + 0.9 * PAUSE_S)
    assert (line.text, sorted(line.ranks)) == (b"loss", [0, 1, 2])
    assert lines.next_due is None


def test_no_line_waits_longer_than_the_longest_time() -> None:
    lines = merger(100)
    for rank in range(50):
        lines.add(rank, 1, b"x", 10.0 + rank * LONGEST_S / 60)
    assert lines.next_due == 10.0 + LONGEST_S
    assert len(lines.leave(10.0 + LONGEST_S)[0].ranks) == 50


@pytest.mark.parametrize("seed", range(20))
def test_lines_of_one_rank_are_never_reordered_lost_or_doubled(seed: int) -> None:
    chance = random.Random(seed)
    lines, now = merger(4), 0.0
    wrote: dict[int, list[tuple[int, bytes]]] = {rank: [] for rank in range(4)}
    read: dict[int, list[tuple[int, bytes]]] = {rank: [] for rank in range(4)}
    for _ in range(500):
        now += chance.choice([0.0, 0.01, 0.15])
        rank, stream = chance.randrange(4), chance.choice([1, 2])
        texts = [chance.choice([b"", b"a", b"b"]) for _ in range(chance.randrange(1, 4))]
        wrote[rank] += [(stream, text) for text in texts]
        lines.add(rank, stream, b"\n".join(texts), now)
        for line in lines.leave(chance.choice([now, 0.0])):
            assert len({*line.ranks}) == len(line.ranks)
            for each in line.ranks:
                read[each] += [(line.stream, text) for text in line.text.split(b"\n")]
    for line in lines.leave(float("inf")):
        for each in line.ranks:
            read[each] += [(line.stream, text) for text in line.text.split(b"\n")]
    assert read == wrote


@pytest.mark.parametrize(
    "ranks",
    [
        ([b"a\nb", b"c\nd"], [b"a\nb", b"c\nd"], [b"a", b"b\nc", b"d"]),
        ([b"a", b"b", b"a\nb"], [b"a\nb", b"a\nb"]),
        ([b"a\nb", b"a", b"b"], [b"a", b"b", b"a\nb"]),
    ],
)
def test_lines_are_equal_however_they_came(ranks: tuple[list[bytes], ...]) -> None:
    lines = merger(len(ranks))
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            lines.add(rank, 1, piece, 0.0)
    left = lines.leave(0.0)
    assert b"\n".join(line.text for line in left) == b"\n".join(ranks[0])
    assert all(line.ranks == [*range(len(ranks))] for line in left)


def test_a_flood_is_not_held() -> None:
    lines = merger(2)
    flood = b"\n".join(b"%d" % number for number in range(MOST_LINES))
    assert lines.takes(b"", 0.0)
    lines.add(0, 1, flood, 0.0)
    assert not lines.takes(b"", 0.0)
    assert not lines.takes(flood, LONGEST_S)  # it goes on
    assert not lines.takes(b"few", 2 * LONGEST_S)
    assert lines.takes(b"few", 3 * LONGEST_S)


def test_labels() -> None:
    assert label([3, 0, 1, 2], 4) == "all 4"
    assert label([2, 3, 4, 7], 8) == "2-4,7"


@contextmanager
def terminal() -> Iterator[tuple[int, bytearray]]:
    """Yield the descriptor of a terminal, and what it has been sent."""
    main, other = pty.openpty()
    seen = bytearray()

    def read() -> None:
        try:
            while data := os.read(main, 1 << 16):
                seen.extend(data)
        except OSError:
            return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield other, seen
    finally:
        os.close(other)
        reader.join(10)
        os.close(main)


def console_of(descriptor: int, ranks: int, lines: str | None) -> Console:
    console = Console(out=descriptor, err=descriptor, colour=False, lines=lines)
    for rank in range(ranks):
        console.add_worker(rank, "a")
    return console


def shown_lines(seen: bytearray) -> list[str]:
    return [line.rpartition("\x1b[K")[2] for line in seen.decode().split("\r\n")[:-1]]


def test_a_terminal_shows_equal_lines_once_with_who_wrote_them() -> None:
    with terminal() as (descriptor, seen):
        console = console_of(descriptor, 8, None)
        for rank in range(8):
            console.write(rank, 1, b"loss 0.31\n" + (b"warning\n" if rank > 1 else b"") + b"rank %d\n" % rank)
        console.write(0, 2, b"the last line before a crash\n")
        console.finish()
    assert shown_lines(seen) == [
        "[all 8] loss 0.31",
        "[a:0] rank 0",
        "[a:1] rank 1",
        "[2-7] warning",
        *(f"[a:{rank}] rank {rank}" for rank in range(2, 8)),
        "[a:0] the last line before a crash",
    ]


def test_own_words_come_after_what_was_written_before_them() -> None:
    with terminal() as (descriptor, seen):
        console = console_of(descriptor, 2, None)
        console.write(0, 1, b"before\n")
        console.say("rank 0 was killed")
        console.finish()
    assert shown_lines(seen) == ["[a:0] before", "dtrain: rank 0 was killed"]


def test_bars_are_not_merged() -> None:
    with terminal() as (descriptor, seen):
        console = console_of(descriptor, 2, None)
        for rank in range(2):
            console.write(rank, 2, b"\r 50%\r100%\n")
        console.finish()
    assert shown_lines(seen) == ["[a:0] 100%", "[a:1] 100%"]


@pytest.mark.parametrize("pieces", [[b"one\r\ntwo\r\n"], [b"one\r", b"\ntwo\r", b"\n"]])
def test_lines_that_end_as_in_windows_are_no_bars(pieces: list[bytes]) -> None:
    with terminal() as (descriptor, seen):
        console = console_of(descriptor, 2, None)
        for piece in pieces:
            for rank in range(2):
                console.write(rank, 1, piece)
        console.finish()
    assert shown_lines(seen) == ["[all 2] one", "[all 2] two"]


@pytest.mark.parametrize(("lines", "expected"), [(None, 2), ("all", 2), ("merge", 1)])
def test_where_there_is_no_terminal_each_line_is_shown(tmp_path: Path, lines: str | None, expected: int) -> None:
    with open(tmp_path / "out", "wb") as file:
        console = console_of(file.fileno(), 2, lines)
        for rank in range(2):
            console.write(rank, 1, b"equal\n")
        console.finish()
    assert len((tmp_path / "out").read_text().splitlines()) == expected


def test_a_prompt_has_the_terminal_alone_until_it_is_answered() -> None:
    with terminal() as (descriptor, seen):
        console = console_of(descriptor, 2, None)
        console.write(0, 1, b"-> x = 1\n(Pdb) ")
        console.ask(0)
        wait_until(lambda: seen.endswith(b"(Pdb) "), "the prompt is shown")
        until_prompt = bytes(seen)
        for number in range(3):
            console.write(1, 1, b"other %d\n" % number)
        console.show_status("1 of 2 workers started")
        console.say("something")
        console.refresh(time.monotonic() + 10)
        assert bytes(seen) == until_prompt
        console.answer(is_line=True)
        console.write(0, 1, b"42\n")
        console.finish()
    assert bytes(seen).startswith(until_prompt + b"[a:1] other 0\r\n[a:1] other 1\r\n")
    assert b"dtrain: something" in seen
    assert bytes(seen).endswith(b"[a:0] 42\r\n")
    assert seen.count(b"(Pdb)") == 1
    assert b"not shown" not in seen, "there was room for all"


def test_what_a_rank_left_unfinished_is_shown_when_it_ends() -> None:
    with terminal() as (descriptor, seen):
        console = console_of(descriptor, 2, None)
        console.write(0, 1, b"half of a line")
        console.write(0, 2, b"half of an error")
        console.write(1, 1, b"of another rank")
        console.end_line(0)
        console.write(0, 1, b"next\n")
        console.finish()
    of_rank = [line for line in shown_lines(seen) if line.startswith("[a:0]")]
    assert of_rank == ["[a:0] half of a line", "[a:0] half of an error", "[a:0] next"]


def test_what_waits_for_an_answer_is_bounded_and_that_is_said() -> None:
    with terminal() as (descriptor, seen):
        console = console_of(descriptor, 2, None)
        console.write(0, 1, b"(Pdb) ")
        console.ask(0)
        for _ in range(2 * PROMPT_BYTES >> 12):
            console.write(1, 1, b"x" * 4000 + b"\n")
        console.withdraw(0)
        console.finish()
    assert re.search(rb"dtrain: .* of output that came during the prompt are not shown; the log files have all", seen)
    assert 0.8 * PROMPT_BYTES < len(seen) < 1.2 * PROMPT_BYTES


def named(who: str) -> list[int]:
    """Return the ranks of a label: `all 8`, `2-4,7`, or `host:0`."""
    if who.startswith("all "):
        return [*range(int(who[4:]))]
    if ":" in who:
        return [int(who.rpartition(":")[2])]
    ends = [[int(end) for end in part.split("-")] for part in who.split(",")]
    return [rank for end in ends for rank in range(end[0], end[-1] + 1)]


@pytest.mark.parametrize("lines", ["merge", "all"])
def test_eight_ranks_that_print_at_once(tmp_path: Path, lines: str) -> None:
    """As they are started together, and wait for each other before each line, in files."""
    (tmp_path / "script.py").write_text(
        "import os, time\nrank = int(os.environ['RANK'])\n"
        "open(f'up{rank}', 'w').close()\n"
        "while len([name for name in os.listdir() if name.startswith('up')]) < 8: time.sleep(0.01)\n"
        "print('loss 0.31')\n"
        "print('mine', rank)\n"
    )
    options = ["--nproc-per-node", "8", "--run-id", "r", "--lines", lines]
    with dtrain_on_terminal("run", *options, "script.py", cwd=tmp_path) as terminal:
        assert terminal.wait() == 0
    written = re.sub(r"\x1b(\[[0-9;]*[A-Za-z]|[78])", "", terminal.shown).split("\r\n")
    plain = "\n".join(line.rpartition("\r")[2] for line in written)  # without the status, which was written over
    shown = re.findall(r"\[([^\]]*)\] loss 0\.31$", plain, re.MULTILINE)
    if lines == "all":
        assert len(shown) == 8
    # 1 of all ranks, unless the machine is slow: then several, in which each rank is once.
    assert sorted(rank for who in shown for rank in named(who)) == [*range(8)]
    for rank in range(8):
        assert len(re.findall(rf"^\[.*:{rank}\] mine {rank}$", plain, re.MULTILINE)) == 1
        assert (tmp_path / f"runs/r/attempt_0/{rank}/stdout.log").read_text() == f"loss 0.31\nmine {rank}\n"
