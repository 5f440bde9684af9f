"""Which output is shown: by rank, by local rank, by stream; what is hidden is in the files."""

from pathlib import Path

import pytest
from testbed.processes import run_dtrain

from launcher.errors import UsageError
from launcher.output.filter import OutputFilter, parse_ranks, parse_std


@pytest.mark.parametrize(
    ("redirects", "tee", "shown"),
    [
        (None, None, ["01", "02", "11", "12"]),
        ("3", None, []),
        ("1", None, ["02", "12"]),
        ("0:3,1:1", None, ["12"]),
        ("3", "0:2", ["02"]),
        ("3", "3", ["01", "02", "11", "12"]),
        (None, "3", ["01", "02", "11", "12"]),
    ],
)
def test_redirected_streams_are_not_shown_unless_they_are_teed(
    redirects: str | None, tee: str | None, shown: list[str]
) -> None:
    choice = OutputFilter(redirected=parse_std(redirects, "--redirects"), teed=parse_std(tee, "--tee"))
    assert [f"{local}{stream}" for local in (0, 1) for stream in (1, 2) if choice.shows(5, local, stream)] == shown


def test_ranks_and_local_ranks_both_have_to_be_chosen() -> None:
    choice = OutputFilter(ranks=frozenset({2, 3}), local_ranks=frozenset({0}))
    assert [rank for rank, local in [(0, 0), (1, 1), (2, 0), (3, 1)] if choice.shows(rank, local, 1)] == [2]


@pytest.mark.parametrize("text", ["4", "a", "0:4", "x:1", "", "0:1;1:1", "-1:1"])
def test_a_wrong_choice_of_streams_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="--tee is"):
        parse_std(text, "--tee")


@pytest.mark.parametrize(("text", "ranks"), [("0", {0}), ("4,0", {0, 4}), ("", None), (None, None)])
def test_ranks_are_read(text: str | None, ranks: set[int] | None) -> None:
    assert parse_ranks(text, "--only-rank") == ranks


@pytest.mark.parametrize("text", ["a", "-1", "1;2", "1,,2"])
def test_wrong_ranks_are_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="it must be numbers such as 0 or 0,4"):
        parse_ranks(text, "--only-rank")


def test_a_local_rank_is_the_worker_s_though_it_gets_another(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text("import os\nprint('rank', os.environ['RANK'], os.environ['LOCAL_RANK'])")
    options = ["--nproc-per-node", "2", "--virtual-local-rank", "--local-ranks-filter", "1", "-q"]
    result = run_dtrain("run", *options, "talk.py", cwd=tmp_path)
    assert result.stdout.endswith("rank 1 0\n"), result


def test_what_is_not_shown_is_in_the_files(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text("import os, sys\nprint('out'); print('err', file=sys.stderr)")
    options = ["--nproc-per-node", "2", "-r", "1:3", "--local_ranks_filter", "0,1", "--run-id", "r", "-q"]
    result = run_dtrain("run", *options, "talk.py", cwd=tmp_path)
    assert result.returncode == 0, result
    assert [line.partition(" ")[2] for line in (result.stdout + result.stderr).splitlines()] == ["out", "err"]
    folder = tmp_path / "runs" / "r" / "attempt_0" / "1"
    assert [(folder / f"{name}.log").read_text() for name in ("stdout", "stderr")] == ["out\n", "err\n"]
