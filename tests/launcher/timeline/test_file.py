"""The file of a run's times: bounded, readable while it is written, and never in the run's way."""

import errno
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed.processes import wait_until

from launcher.errors import RunError
from launcher.timeline.file import TIMELINE, TimelineFile, read_lines


def written(folder: Path, *lines: list[Any], **options: Any) -> list[OSError]:
    """Write a file; return what went wrong."""
    failed: list[OSError] = []
    file = TimelineFile(folder, "r", failed.append, **options)
    for line in lines:
        file.add(*line)
    file.begin()
    file.close()
    return failed


def steps_of(count: int) -> list[list[Any]]:
    return [["steps", 0, 0, step, 1, float(step), [0.001] * 6] for step in range(1, count + 1)]


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    lines: list[list[Any]] = [["attempt", 0, 1.5, [[0, "a"]]], ["event", "notice", 2.0, 'said "ü"']]
    assert written(tmp_path / "run", *lines) == []
    head, found = read_lines(tmp_path / "run")
    assert (head["run_id"], head["version"]) == ("r", 1)
    assert [*found] == lines
    assert (tmp_path / "run" / TIMELINE).stat().st_mode & 0o777 == 0o600


def test_the_file_of_a_run_that_goes_on_can_be_read(tmp_path: Path) -> None:
    (tmp_path / TIMELINE).write_text('{"format": ')
    with pytest.raises(RunError, match=r"timeline\.jsonl has no lines yet: the run has just begun"):
        read_lines(tmp_path)
    (tmp_path / TIMELINE).unlink()

    def lines() -> int:
        try:
            return len([*read_lines(tmp_path)[1]])
        except RunError:  # the thread has not begun to write
            return 0

    file = TimelineFile(tmp_path, "r", print)
    file.begin()
    file.add("event", "notice", 1.0, "x")
    wait_until(lambda: lines() == 1, "the line is there")
    file.add("event", "notice", 2.0, "y")
    wait_until(lambda: lines() == 2, "the next one, too")
    file.close()


def test_a_run_that_is_started_again_goes_on_with_the_same_axis(tmp_path: Path) -> None:
    written(tmp_path, ["event", "notice", 1.0, "x"])
    path = tmp_path / TIMELINE
    head, _, rest = path.read_text().partition("\n")
    hour_ago = json.loads(head)
    path.write_text(json.dumps({**hour_ago, "began": hour_ago["began"] - 3600}) + "\n" + rest)
    file = TimelineFile(tmp_path, "r", print)
    file.add("event", "notice", file.at(time.monotonic()), "y")
    file.begin()
    file.close()
    first, second = read_lines(tmp_path)[1]
    assert (first[2:], second[3]) == ([1.0, "x"], "y")
    assert second[2] >= 3600


def test_a_run_without_workers_leaves_no_file(tmp_path: Path) -> None:
    file = TimelineFile(tmp_path / "run", "r", print)
    file.add("host", "a", "connect", 0.0, 1.0)
    file.close()
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(RunError, match="the run had no workers"):
        read_lines(tmp_path)


def test_a_file_at_its_limit_is_thinned_and_no_step_is_lost(tmp_path: Path) -> None:
    limit = 30_000
    lines: list[list[Any]] = [["event", "notice", 0.0, "first"]]
    for step in range(1, 1001):
        for rank in (0, 1):
            phases_s = [0.001, 0.002, 0.003, 0.001 * rank, 0.0, 0.000001]
            lines += [["detail", 0, rank, step, "wait", 0, step - 0.5, step - 0.4]]
            lines += [["steps", 0, rank, step, 1, float(step), phases_s]]
    assert written(tmp_path, *lines, limit_bytes=limit) == []
    assert (tmp_path / TIMELINE).stat().st_size <= limit
    _, found = read_lines(tmp_path)
    kept = [*found]
    assert kept[0] == lines[0]
    for rank in (0, 1):
        steps = [line for line in kept if line[0] == "steps" and line[2] == rank]
        assert [line[3] for line in steps] == sorted(line[3] for line in steps)
        assert sum(line[4] for line in steps) == 1000
        assert steps[-1][3] == 1000
        total_s = math.fsum(each for line in steps for each in line[6])
        assert math.isclose(total_s, 1000 * (0.006001 + 0.001 * rank), abs_tol=1e-3)


def test_a_run_that_ends_waits_for_no_pause_of_the_thinning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.timeline.file.PAUSE_S", 60.0)
    file = TimelineFile(tmp_path, "r", print, limit_bytes=10_000)
    file.begin()
    for line in steps_of(2000):
        file.add(*line)
    wait_until((tmp_path / f".{TIMELINE}.new").exists, "it is being thinned")
    file.close()
    assert (tmp_path / TIMELINE).stat().st_size <= 10_000
    assert sum(line[4] for line in read_lines(tmp_path)[1]) == 2000


def test_a_run_that_ends_while_its_file_is_thinned_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(lines: Iterator[tuple[int, bytes]], half: int) -> Iterator[bytes]:  # 40 s in all
        for _, text in lines:
            time.sleep(0.02)
            yield text

    monkeypatch.setattr("launcher.timeline.file.PIECE_LINES", 1)
    monkeypatch.setattr("launcher.timeline.file._thinned", slow)
    new = tmp_path / f".{TIMELINE}.new"
    new.write_text("left by a run that was killed")
    file = TimelineFile(tmp_path, "r", print, limit_bytes=10_000)
    file.begin()
    wait_until(lambda: not new.exists(), "it is removed")
    for line in steps_of(2000):
        file.add(*line)
    wait_until(new.exists, "it is being thinned")
    file.add("event", "notice", 1.0, "the last")
    file.close()
    wait_until(lambda: [*read_lines(tmp_path)[1]][-1][-1] == "the last", "it is written", 20)
    wait_until(lambda: not new.exists(), "nothing else is left")
    assert sum(line[4] for line in read_lines(tmp_path)[1] if line[0] == "steps") == 2000


def test_a_line_that_was_cut_costs_itself_only(tmp_path: Path) -> None:
    """A run that was killed left it, and SLURM has started the run again."""
    written(tmp_path, ["event", "notice", 1.0, "x"])
    path = tmp_path / TIMELINE
    path.write_bytes(path.read_bytes() + b'["steps",0,0,1,1,1.0,[0.0')
    assert written(tmp_path, *steps_of(1000), limit_bytes=10_000) == []
    assert path.stat().st_size <= 10_000
    first, *steps = read_lines(tmp_path)[1]
    assert first[3] == "x"
    assert sum(line[4] for line in steps) == 1000
    assert not [*tmp_path.glob(".*.new")]


def test_what_cannot_be_summed_up_loses_its_oldest_lines(tmp_path: Path) -> None:
    lines = [["event", "notice", float(number), "x" * 50] for number in range(1000)]
    assert written(tmp_path, *lines, limit_bytes=10_000) == []
    assert (tmp_path / TIMELINE).stat().st_size <= 10_000
    _, found = read_lines(tmp_path)
    assert [*found][-1] == lines[-1]


def test_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / TIMELINE).symlink_to("/dev/full")
    failed: list[OSError] = []
    file = TimelineFile(tmp_path, "r", failed.append)
    file.begin()
    for number in range(100):
        file.add("event", "notice", float(number), "x")
    file.close()
    assert [error.errno for error in failed] == [errno.ENOSPC]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    (error,) = written(tmp_path / "run", ["event", "notice", 1.0, "x"])
    assert error.errno == errno.EEXIST


def test_a_line_that_is_cut_short_or_spoiled_is_left_out(tmp_path: Path) -> None:
    written(tmp_path, ["event", "notice", 1.0, "x"], ["event", "notice", 2.0, "y"])
    path = tmp_path / TIMELINE
    path.write_bytes(path.read_bytes() + b'\xff\xfe\n{}\n[]\n["event","noti')
    assert [line[3] for line in read_lines(tmp_path)[1]] == ["x", "y"]


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ("", "no file of a run's times"),
        ("[1]", "no file of a run's times"),
        (json.dumps({"format": "dtrain timeline", "version": 99}), "another dtrain"),
    ],
)
def test_another_file_or_version_is_an_error(tmp_path: Path, head: str, says: str) -> None:
    (tmp_path / TIMELINE).write_text(f"{head}\n")
    with pytest.raises(RunError, match=says):
        read_lines(tmp_path)
