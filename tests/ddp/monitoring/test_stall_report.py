"""When a rank is missing, the error on every other rank says which and where, and the ranks end in time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from testbed.nursery import ROOT

from ddp.monitoring.stall_text import Answer, Heard, Position, Scene, describe_stall, printable

CASES = ROOT / "tests" / "ddp_worlds" / "stall_report_cases.py"


@dataclass(frozen=True)
class Ended:
    """How the ranks of a world ended, what their case returned (None also without a result), and their stderr."""

    codes: list[int]
    results: list[Any]
    errors: list[str]


class Worlds:
    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._count = 0

    def run(self, case: str, size: int, store: str, **options: Any) -> Ended:
        return self.run_at_once({"case": case, "size": size, "store": store, **options})[0]

    def run_at_once(self, *worlds: dict[str, Any]) -> list[Ended]:
        folders = []
        for _ in worlds:
            self._count += 1
            folders.append(self._folder / str(self._count))
            folders[-1].mkdir()
        requests = [{**world, "folder": str(folder)} for world, folder in zip(worlds, folders, strict=True)]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        every_codes = json.loads(self._process.stdout.readline())
        return [_read(folder, codes) for folder, codes in zip(folders, every_codes, strict=True)]


def _said(text: str) -> str:
    """Without what torch says where a busy machine does not look up the name of a host."""
    return "".join(line for line in text.splitlines(keepends=True) if "hostname of the client socket" not in line)


def _read(folder: Path, codes: list[int]) -> Ended:
    paths = [folder / f"result.{rank}" for rank in range(len(codes))]
    return Ended(
        codes,
        [json.loads(path.read_text()) if path.exists() else None for path in paths],
        [_said((folder / f"stderr.{rank}").read_text()) for rank in range(len(codes))],
    )


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    process = subprocess.Popen(
        [sys.executable, str(CASES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=env,
        start_new_session=True,
    )
    try:
        with process:
            yield Worlds(process, tmp_path_factory.mktemp("stall_report"))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_stall_names_the_rank_that_is_elsewhere_and_the_line_of_its_script(worlds: Worlds) -> None:
    # The whole end of the interpreter, which must not wait for the collective that still hangs.
    ended = worlds.run("comes_late", 3, "file", whole_end=True)
    assert ended.codes == [1, 0, 1]
    for rank in (0, 2):
        said = ended.errors[rank]
        missing = rf"CollectiveError: rank 1 is missing: rank {rank} of 3 has waited \d+\.\d s in the all-reduce of "
        assert re.search(missing, said), said
        assert "rank 1: step 2, backward for " in said
        assert ", at tests/ddp_worlds/stall_report_cases.py:" in said
        assert " in until" in said
        assert "; parameters not ready: a.weight, b .bias" in said
    # On a busy machine one of them may answer the other too late.
    assert any("ranks 0, 2: in the all-reduce of bucket 1 of 1 for " in ended.errors[rank] for rank in (0, 2))
    late = ended.results[1]
    assert late.startswith("ranks 0, 2 are missing: the all-reduce of bucket 1 of 1 of step 2 failed on rank 1 of 3")
    assert "ended with ddp.errors.CollectiveError: rank 1 is missing: rank 0 of 3 has waited " in late
    assert "in comes_late, " not in late
    assert any(said in late for said in ("closed by peer", "has ended", "has destroyed the group"))


def test_a_rank_that_hangs_outside_of_passes_is_named_within_the_limit_of_the_model(worlds: Worlds) -> None:
    places = {
        "save": "exchange of notes before saving",
        "load": "exchange of what each rank saved",
        "gather_metrics": "gather_metrics",
        "LocalSGD": "exchange of LocalSGD's states",
        "check_replicas": "comparison of the replicas",
        "join": "count of the ranks that have inputs",
        "failures": "end of its pass on all ranks",
        "sparse gradients": "exchange of the rows of '0.weight'",
        "evaluation": "strategy.reduce",
    }
    for half in (list(places)[:4], list(places)[4:]):
        every = worlds.run_at_once(
            *({"case": "hangs_elsewhere", "size": 2, "store": "tcp", "where": where} for where in half)
        )
        for where, ended in zip(half, every, strict=True):
            assert ended.results[0] is not None, (where, ended)
            said = ended.results[0].splitlines()
            assert said[0].startswith("rank 1 is missing: rank 0 of 2 has waited "), where
            assert f" in the {places[where]} of step " in said[0], where
            assert "at tests/ddp_worlds/stall_report_cases.py:" in said[1], where
            assert " in until" in said[1], where


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_ranks_that_have_left_are_known_to_have(worlds: Worlds, store: str) -> None:
    early, returned, raised, in_turn = worlds.run_at_once(
        {"case": "exits_early", "size": 3, "store": store},
        {"case": "returns_from_main_early", "size": 3, "store": store},
        {"case": "raises", "size": 3, "store": store},
        {"case": "fails_one_after_the_other", "size": 3, "store": store},
    )
    assert (early.codes, returned.codes, raised.codes) == ([0, 0, 0], [0, 0, 0], [0, 1, 0])
    for report in early.results[:2]:
        assert report.startswith("rank 2 is missing: the all-reduce of bucket 1 of 1 of step 3 failed on rank ")
        assert "rank 2: has exited (after step 2)" in report
        assert re.search(r"(ranks 0-1|rank [01]): in the all-reduce of bucket 1 of 1", report)
        assert "the backend says: " in report
    for report in returned.results[:2]:
        assert "rank 2: has deleted its last model (after step 1)" in report
    for report in (raised.results[0], raised.results[2]):
        assert report.startswith("rank 1 is missing: ")
        assert "rank 1: ended with ValueError: no such sample: 17, at tests/ddp_worlds/stall_report_cases.py:" in report
        assert " in raises (after step 1)" in report
        assert "and more" not in report
    late = in_turn.results[2]
    assert late.startswith("rank 1 is missing: ")
    assert "rank 0: step 2, all-reduce of bucket 1 of 1, which failed there too, and is at tests/ddp_worlds/" in late
    for ended in (early, returned):
        assert ended.errors == ["", "", ""]


def test_waiting_for_host_memory_is_bounded_whatever_the_model_s_device_is(worlds: Worlds) -> None:
    on_host, interrupted = worlds.run_at_once(
        {"case": "on_host", "size": 2, "store": "tcp", "backend": "gloo"},
        {"case": "interrupted", "size": 2, "store": "tcp"},
    )
    assert (on_host.codes, interrupted.codes) == ([0, 0], [0, 0]), (on_host.errors, interrupted.errors)
    assert on_host.results[0].startswith("rank 1 is missing: rank 0 of 2 has waited ")
    assert "in the step status of step 1" in on_host.results[0]


def test_ctrl_c_ends_a_backward_pass_that_waits_and_then_the_process(worlds: Worlds) -> None:
    # The whole end of the interpreter, which must not wait for the collective that still hangs.
    ended = worlds.run("interrupted_in_a_step", 2, "file", whole_end=True)
    assert ended.codes == [-signal.SIGINT, 0], ended.errors
    assert "KeyboardInterrupt" in ended.errors[0]


def test_a_rank_that_leaves_a_step_cannot_go_on_and_spoils_no_other_rank_s_average(worlds: Worlds) -> None:
    of_world = {"case": "goes_on_after_an_end", "size": 2, "store": "tcp"}
    for ended in worlds.run_at_once({**of_world, "by_stall": False}, {**of_world, "by_stall": True}):
        assert ended.codes == [0, 0], ended.errors
        assert ended.results[1] == [1.5, 1.5]


@pytest.mark.parametrize("who", [1, 4])
def test_a_sum_over_many_ranks_names_the_rank_that_is_gone(worlds: Worlds, who: int) -> None:
    ended = worlds.run("sums_with_one_gone", 5, "tcp", who=who)
    assert ended.codes == [0 if rank != who else -signal.SIGKILL for rank in range(5)], ended.errors
    for rank in {*range(5)} - {who}:
        assert ended.results[rank].startswith(f"rank {who} is missing: "), ended.results
        assert f"rank {who}: does not answer: its process is gone" in ended.results[rank]


def test_a_stopped_or_killed_rank_does_not_answer_and_a_lost_store_is_said(worlds: Worlds) -> None:
    stop, kill = int(signal.SIGSTOP), int(signal.SIGKILL)
    of_world = {"case": "signalled", "size": 3, "store": "tcp"}
    stopped, killed, frozen_store, lost_store = worlds.run_at_once(
        {**of_world, "number": stop, "who": 1},
        {**of_world, "number": kill, "who": 1},
        {**of_world, "number": stop, "who": 0},
        {**of_world, "number": kill, "who": 0},
    )
    for ended in (stopped, killed):
        assert ended.codes == [0, -kill, 0]
        for report in (ended.results[0], ended.results[2]):
            assert report.startswith("rank 1 is missing: ")
            assert "rank 1: does not answer: its process is gone, stopped or cut off" in report
            assert "ranks 0, 2: in the all-reduce of bucket 1 of 1" in report
    for ended, reasons in (
        (frozen_store, ("the store does not answer: ",)),
        (lost_store, ("the store is gone: ", "the store failed: ")),
    ):
        assert ended.codes == [-kill, 0, 0], ended.errors
        for report in ended.results[1:]:
            unknown = "and it is not known where the others are: "
            assert any(unknown + reason in report for reason in reasons), report
            assert "all-reduce of bucket 1 of 1 of step 2" in report
    for ended in (stopped, killed, frozen_store, lost_store):
        assert ended.errors == ["", "", ""]


def test_groups_and_models_are_distinguished(worlds: Worlds) -> None:
    ended = worlds.run("two_groups", 3, "file")
    assert ended.codes == [0, 0, 0]
    of_all, of_pair, _ = ended.results
    assert of_all.startswith("ranks 1-2 are missing: rank 0 of 3 has waited ")
    assert "; it waits for another model in step 1, all-reduce of the pair" in of_all
    assert of_pair.startswith("rank 1 is missing: rank 0 of 2 has waited ")
    assert "(ranks of a group; in the world they are 1, 2)" in of_pair


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_without_a_stall_nothing_is_written_to_store_or_stderr(worlds: Worlds, store: str) -> None:
    ended = worlds.run("writes", 2, store, whole_end=store == "tcp")
    assert ended.codes == [0, 0]
    assert ended.errors == ["", ""]
    for before, after in ended.results:
        assert before == after


def test_one_thread_serves_all_and_ends_with_the_last(worlds: Worlds) -> None:
    assert worlds.run("closes", 2, "tcp").codes == [0, 0]


def test_a_forked_child_inherits_nothing_of_it(worlds: Worlds) -> None:
    assert worlds.run("forks", 2, "file").codes == [0, 0]


def test_exceptions_are_reported_under_the_number_of_their_round(worlds: Worlds) -> None:
    ended = worlds.run("failures", 3, "tcp")
    assert ended.codes == [0, 0, 0]
    for reported in ended.results:
        assert sorted(reported) == ["1", "2"]
        assert reported["1"].startswith("ValueError: bad [31m batch 1 xxx")
        assert len(reported["1"]) == 400


def test_what_blocks_without_a_work_is_reported_while_it_does(worlds: Worlds) -> None:
    ended = worlds.run("blocks", 2, "file")
    assert ended.codes == [0, 0]
    assert ended.results[0].startswith("rank 1 is missing: the broadcast of the plan of step 1 failed on rank 0 of 2")
    assert "rank 1: has exited" in ended.results[0]
    assert ended.errors[0].count("rank 1 is missing: rank 0 of 2 has waited ") == 1
    assert " in until" in ended.errors[0]


@pytest.mark.parametrize(
    ("case", "where", "why"),
    [
        ("wraps_alone", "the comparison of the modules of step 1", "does not answer: "),
        ("iterates_alone", "the agreement on an iteration with uneven inputs of step 2", "has exited"),
        ("verifies_alone", "the exchange of ddp.verify of step 1", "does not answer: "),
    ],
)
def test_a_rank_that_leaves_before_or_between_steps_is_named(worlds: Worlds, case: str, where: str, why: str) -> None:
    ended = worlds.run(case, 2, "file")
    assert ended.codes == [0, 0], ended.errors
    # Its connection may end after the limit.
    seen = rf"{where} failed on rank 0 of 2 after |rank 0 of 2 has waited \S+ s in {where}"
    assert re.match(f"rank 1 is missing: ({seen})", ended.results[0]), ended.results[0]
    assert f"rank 1: {why}" in ended.results[0]


def test_a_stall_on_a_device_is_written_once_and_forgotten_when_it_ends_but_not_under_a_debugger(
    worlds: Worlds,
) -> None:
    ended = worlds.run("on_device", 2, "tcp")
    assert ended.codes == [0, 0]
    assert ended.errors[0].count("rank 1 is missing: rank 0 of 2 has waited ") == 1


def test_details_may_change_or_fail(worlds: Worlds) -> None:
    ended = worlds.run("details", 1, "file")
    assert ended.results == [["(changes all the time)", "(no detail: ZeroDivisionError)", "x" * 397 + "..."]]


SCENE = Scene(
    rank=0,
    global_ranks=tuple(range(100)),
    key="0/0",
    step=4,
    what="all-reduce",
    waited_s=2.0,
    limit_s=2.0,
    torchs_text="",
)


def _at(step: int, phase: str, **options: Any) -> Answer:
    place = Position(step=step, phase=phase, is_waiting=options.pop("is_waiting", False), for_s=1.0)
    return Answer(1, line="train.py:8 in main", positions={"0/0": place}, **options)


def test_the_likeliest_cause_comes_first_and_secondary_failures_are_not_it() -> None:
    here = _at(4, "all-reduce", is_waiting=True)
    answers = dict.fromkeys(range(1, 100), here)
    answers[7] = Answer(2**53, finished={"0/0": 4}, ended="ended with CollectiveError: rank 9", is_secondary=True)
    answers[8] = _at(3, "all-reduce", is_waiting=True)
    answers[9] = answers[10] = _at(4, "user code")
    answers[11] = _at(4, "user code", has_group=False)
    del answers[12]
    lines = describe_stall(SCENE, Heard(answers)).splitlines()
    assert lines[0] == (
        "ranks 8-12 are missing: rank 0 of 100 has waited 2.0 s in the all-reduce of step 5"
    )  # all but rank 7, which left because of them
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == [
        "rank 12",
        "ranks 9-10",
        "rank 11",
        "rank 8",
        "rank 7",
        "ranks 0-6, 13-99",
    ]
    assert lines[2] == "  ranks 9-10: step 5, user code for 1.0 s, at train.py:8 in main"


def test_a_report_fits_one_screen() -> None:
    answers = {rank: _at(rank, "user code " + "x" * 300) for rank in range(1, 100)}
    lines = describe_stall(replace(SCENE, torchs_text="y" * 300), Heard(answers)).splitlines()
    assert len(lines) <= 24
    assert "  ranks 17-99: elsewhere" in lines
    assert max(map(len, lines)) <= 400


def test_no_one_missing_is_said() -> None:
    answers = {rank: _at(4, "all-reduce", is_waiting=True) for rank in range(1, 100)}
    report = describe_stall(SCENE, Heard(answers))
    assert "no rank is missing: all 100 are there" in report
    assert "network" in report


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"[]", b"{}", b"null", b'{"question": "x"}', b"[" * 100_000, b'{"positions": {"0/0": 1}}']
)
def test_what_is_no_answer_is_none(text: bytes) -> None:
    assert Answer.from_json(text) is None


def test_answers_arrive_as_they_were_sent_but_printable() -> None:
    sent = Answer(
        3, "a.py:1 in f", {"0/0": Position(1, "user\x1b[2J code", False, 0.5)}, {"0/1": 7}, "left", True, False
    )
    assert Answer.from_json(sent.to_json().encode()) == replace(
        sent, positions={"0/0": Position(1, "user [2J code", False, 0.5)}
    )
    assert printable("a\nb\0c" * 200, 6) == "a b..."
