"""When a rank is missing, the error on every other rank says which and where, and the ranks end in time."""

from __future__ import annotations

import gc
import itertools
import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs.stalls import (
    DEADLINE_S,
    DEVICE,
    STALL_S,
    OnDevice,
    all_come,
    interrupt_when_waiting,
    make,
    monitors,
    reduce,
    stall,
    until,
)
from testbed.nursery import ROOT, Nursery
from testbed.present import present
from testbed.worlds import world

import ddp
from ddp.errors import CollectiveError
from ddp.monitoring.stall_report import HostWork, StallReport

RANK = "import json, os; from programs.stalls import run_rank; run_rank(**json.loads(os.environ['STALL_RANK']))"


@dataclass(frozen=True)
class Ended:
    """How the ranks of a world ended, what their case returned (None also without a result), and their stderr."""

    codes: list[int]
    results: list[Any]
    errors: list[str]


@dataclass
class Worlds:
    nursery: Nursery
    folder: Path
    count: int = 0

    def run(self, case: str, size: int, store: str, **options: Any) -> Ended:
        return self.run_at_once({"case": case, "size": size, "store": store, **options})[0]

    def run_at_once(self, *worlds: dict[str, Any]) -> list[Ended]:
        ranks: list[tuple[Path, int, dict[str, Any]]] = []
        for each in worlds:
            self.count += 1
            (folder := self.folder / str(self.count)).mkdir()
            ranks += [(folder, rank, each) for rank in range(each["size"])]
        variables = [
            {"STALL_RANK": json.dumps({"rank": rank, "into": str(folder), **more})} for folder, rank, more in ranks
        ]
        codes = [each.returncode for each in self.nursery.programs(RANK, ROOT, variables)]
        taken = iter(zip(ranks, codes, strict=True))
        return [_read(list(itertools.islice(taken, each["size"]))) for each in worlds]


def _said(text: str) -> str:
    """Without what torch says where a busy machine does not look up the name of a host."""
    return "".join(line for line in text.splitlines(keepends=True) if "hostname of the client socket" not in line)


def _read(ranks: list[tuple[tuple[Path, int, dict[str, Any]], int]]) -> Ended:
    paths = [folder / f"result.{rank}" for (folder, rank, _), _ in ranks]
    return Ended(
        [code for _, code in ranks],
        [json.loads(path.read_text()) if path.exists() else None for path in paths],
        [_said((folder / f"stderr.{rank}").read_text()) for (folder, rank, _), _ in ranks],
    )


@pytest.fixture
def worlds(nursery: Nursery, tmp_path: Path) -> Worlds:
    return Worlds(nursery, tmp_path)


def test_a_stall_names_the_rank_that_is_elsewhere_and_its_line(worlds: Worlds) -> None:
    # The whole end of the interpreter, which must not wait for the collective that still hangs.
    ended = worlds.run("comes_late", 3, "file", whole_end=True)
    assert ended.codes == [1, 0, 1]
    for rank in (0, 2):
        said = ended.errors[rank]
        missing = rf"CollectiveError: rank 1 is missing: rank {rank} of 3 has waited \d+\.\d s in the all-reduce of "
        assert re.search(missing, said), said
        assert "rank 1: step 2, backward for " in said
        assert ", at tests/programs/stalls.py:" in said
        assert " in until" in said
        assert "; parameters not ready: a.weight, b .bias" in said
    # On a busy machine one of them may answer the other too late.
    assert any("ranks 0, 2: in the all-reduce of bucket 1 of 1 for " in ended.errors[rank] for rank in (0, 2))
    late = ended.results[1]
    assert late.startswith("ranks 0, 2 are missing: the all-reduce of bucket 1 of 1 of step 2 failed on rank 1 of 3")
    assert "ended with ddp.errors.CollectiveError: rank 1 is missing: rank 0 of 3 has waited " in late
    assert "in comes_late, " not in late
    assert any(said in late for said in ("closed by peer", "has ended", "has destroyed the group"))


def test_a_rank_that_hangs_outside_of_passes_is_named(worlds: Worlds) -> None:
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
            assert "at tests/programs/stalls.py:" in said[1], where
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
        assert "rank 1: ended with ValueError: no such sample: 17, at tests/programs/stalls.py:" in report
        assert " in raises (after step 1)" in report
        assert "and more" not in report
    late = in_turn.results[2]
    assert late.startswith("rank 1 is missing: ")
    assert "rank 0: step 2, all-reduce of bucket 1 of 1, which failed there too, and is at tests/programs/" in late
    for ended in (early, returned):
        assert ended.errors == ["", "", ""]


@world(2, backend="gloo")
def test_waiting_for_host_memory_is_bounded_on_any_device(tmp_path: Path) -> None:
    """What a model on a device waits for in host memory is bounded, as is what gloo moves on a device."""
    stall_report = StallReport(present(dist.group.WORLD), timeout_s=STALL_S, device=DEVICE)
    stall_report.at("user code")
    by_gloo = make()
    if dist.get_rank() == 1:
        until((tmp_path / "seen").exists)
        dist.all_reduce(torch.ones(3))
        return
    work = dist.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(CollectiveError) as caught:
        stall_report.wait(HostWork(work), "step status")
    on_device: Any = OnDevice(work)
    by_gloo.wait(on_device, "all-reduce", device=DEVICE)  # takes no timeout, and returns
    by_gloo.check_in_step()
    with pytest.raises(CollectiveError, match="rank 1 is missing: "):
        by_gloo.wait(work, "all-reduce", device=torch.device("cuda"))
    with pytest.raises(CollectiveError, match="has waited too long in the all-reduce, so it is not in step"):
        by_gloo.check_in_step()
    (tmp_path / "seen").touch()
    work.wait()
    assert re.match("rank 1 is missing: rank 0 of 2 has waited .* in the step status of step 1", str(caught.value))


@world(2)
def test_ctrl_c_ends_a_wait_and_the_rank_cannot_go_on(tmp_path: Path) -> None:
    """Ctrl-C ends a wait that has long to go; the rank cannot go on in step with the others."""
    stall_report = make(10 * DEADLINE_S)
    if dist.get_rank() == 1:
        until((tmp_path / "seen").exists)
        dist.all_reduce(torch.ones(3))
        return
    work = dist.all_reduce(torch.ones(3), async_op=True)
    thread = interrupt_when_waiting(stall_report)
    with pytest.raises(KeyboardInterrupt):
        stall_report.wait(work, "all-reduce of bucket 1 of 1")
    assert not work.is_completed()
    thread.join()
    with pytest.raises(
        CollectiveError, match="was interrupted in the all-reduce of bucket 1 of 1, so it is not in step"
    ):
        stall_report.check_in_step()
    (tmp_path / "seen").touch()
    work.wait()


def test_ctrl_c_ends_a_backward_pass_and_then_the_process(worlds: Worlds) -> None:
    # The whole end of the interpreter, which must not wait for the collective that still hangs.
    ended = worlds.run("interrupted_in_a_step", 2, "file", whole_end=True)
    assert ended.codes == [-signal.SIGINT, 0], ended.errors
    assert "KeyboardInterrupt" in ended.errors[0]


@world(2)
@pytest.mark.parametrize("by_stall", [False, True])
def test_a_rank_that_leaves_a_step_spoils_no_other_s_average(by_stall: bool, tmp_path: Path) -> None:
    """Rank 0 leaves a step by Ctrl-C or a stall and calls forward; rank 1 is late and gets the average all the same."""
    model = ddp.DistributedDataParallel(torch.nn.Linear(2, 1), stall_timeout_s=DEADLINE_S)
    rank, stall_report = dist.get_rank(), present(model._reducer).report
    model(torch.ones(1, 2)).sum().backward()  # after which the ranks agree on an order
    model.zero_grad()
    if by_stall:
        stall_report._own_timeout_s = STALL_S
    loss = model(torch.full((1, 2), 1.0 + rank)).sum()
    if rank == 0:
        if by_stall:
            with pytest.raises(CollectiveError, match="rank 1 is missing: "):
                loss.backward()
        else:
            thread = interrupt_when_waiting(stall_report)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
            thread.join()
        for _ in range(2):
            with pytest.raises(CollectiveError, match="so it is not in step with the other ranks any more"):
                model(torch.ones(1, 2))
        (tmp_path / "seen").touch()  # rank 1 has not sent yet: a late one would get zeros if these had been written
        until((tmp_path / "averaged").exists)
        return
    until((tmp_path / "seen").exists)
    loss.backward()
    (tmp_path / "averaged").touch()
    assert present(model.module.weight.grad).view(-1).tolist() == [1.5, 1.5]


@pytest.mark.parametrize("who", [1, 4])
def test_a_sum_over_many_ranks_names_the_rank_that_is_gone(worlds: Worlds, who: int) -> None:
    ended = worlds.run("sums_with_one_gone", 5, "tcp", who=who)
    assert ended.codes == [0 if rank != who else -signal.SIGKILL for rank in range(5)], ended.errors
    for rank in {*range(5)} - {who}:
        assert ended.results[rank].startswith(f"rank {who} is missing: "), ended.results
        assert f"rank {who}: does not answer: its process is gone" in ended.results[rank]


def test_stopped_and_killed_ranks_and_a_lost_store_are_named(worlds: Worlds) -> None:
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


@world(3)
def test_groups_and_models_are_distinguished(tmp_path: Path) -> None:
    """Ranks 1 and 2 have a group of their own, and its model, before the model of all; rank 0 has only that."""
    pair = dist.new_group([1, 2])
    rank = dist.get_rank()
    inner = make(group=pair) if rank else None
    outer = make()
    again = make()
    reduce(outer)
    assert (outer.rank, outer.size) == (rank, 3)
    if inner is None:
        report = stall(outer)
    elif rank == 1:
        assert (inner.rank, inner.size) == (0, 2)
        report = stall(inner, "all-reduce of the pair", group=pair)
    else:
        again.at("evaluation")
        report = ""
        until(lambda: len(list(tmp_path.glob("end.*"))) == 2)
    if rank < 2:
        assert report.startswith(f"{('ranks 1-2 are', 'rank 1 is')[rank]} missing: rank 0 of {3 - rank} has waited ")
        of_all = "; it waits for another model in step 1, all-reduce of the pair"
        assert (of_all, "(ranks of a group; in the world they are 1, 2)")[rank] in report
        all_come(tmp_path, "end", 2)


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_without_a_stall_nothing_is_written_to_store_or_stderr(worlds: Worlds, store: str) -> None:
    ended = worlds.run("writes", 2, store, whole_end=store == "tcp")
    assert ended.codes == [0, 0]
    assert ended.errors == ["", ""]
    for before, after in ended.results:
        assert before == after


@world(2)
def test_one_thread_serves_all_and_ends_with_the_last(tmp_path: Path) -> None:
    """One thread for all, none after the last is closed or collected, and a new one for a new model."""
    first, second = make(), make(None)
    assert second.timeout_s == 0.9 * 30.0
    assert len(monitors()) == 1
    reduce(first)
    first.close()
    first.close()
    assert len(monitors()) == 1
    del second
    gc.collect()
    until(lambda: not monitors())
    all_come(tmp_path, "gone", 2)
    third = make()
    assert len(monitors()) == 1
    if dist.get_rank() == 0:
        report = stall(third)
        assert "rank 1 is missing" in report
        assert "deleted" not in report
        (tmp_path / "asked").touch()
    until((tmp_path / "asked").exists)
    third.close()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    reduce(make(group=alone), group=alone)
    until(lambda: not monitors())


def test_a_forked_child_inherits_nothing_of_it(worlds: Worlds) -> None:
    assert worlds.run("forks", 2, "file").codes == [0, 0]


@world(3)
def test_exceptions_are_reported_under_the_number_of_their_round() -> None:
    stall_report = make()
    rank = dist.get_rank()
    if rank:
        stall_report.tell_failure(7, f"ValueError: bad\x1b[31m batch {rank}\n" + "x" * 10_000)
    dist.barrier()
    reported = stall_report.failures(7, expected=2)
    assert stall_report.failures(8, patience_s=0.1) == {}
    dist.barrier()
    assert sorted(reported) == [1, 2]
    assert reported[1].startswith("ValueError: bad [31m batch 1 xxx")
    assert len(reported[1]) == 400


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


def test_a_stall_on_a_device_is_written_once(
    worlds: Worlds,
) -> None:
    """It is forgotten when it ends, and not written under a debugger."""
    ended = worlds.run("on_device", 2, "tcp")
    assert ended.codes == [0, 0]
    assert ended.errors[0].count("rank 1 is missing: rank 0 of 2 has waited ") == 1


@world(1)
def test_details_may_change_or_fail() -> None:
    """`detail` is called while its rank changes what it reads."""
    stall_report = make()
    unready = {"a", "b"}

    def changing() -> str:
        for name in unready:
            unready.add(name + "'")
        return "never"

    texts = []
    details: list[Callable[[], Any]] = [changing, lambda: 1 / 0, lambda: "x" * 1000]
    for detail in details:
        stall_report.at("backward", detail)
        texts.append(stall_report.position().detail)
    dist.barrier()
    assert texts == ["(changes all the time)", "(no detail: ZeroDivisionError)", "x" * 397 + "..."]


@world(1)
def test_a_work_that_cannot_be_queried_does_not_end_the_look() -> None:
    """Its end is an event in a captured graph, or its device is lost; the thread answers other ranks, too."""

    class Captured:
        def is_completed(self) -> bool:
            raise RuntimeError("CUDA error: captured event")

    report = StallReport(present(dist.group.WORLD), timeout_s=0.01)
    report._newest = Captured(), "the all-reduce of bucket 1 of 1", 0.0  # type: ignore[assignment]  # as of NCCL's work
    report.look()
    assert report._newest is None


@world(2)
def test_a_collective_that_ends_while_the_ranks_are_asked_has_ended() -> None:
    store = dist.distributed_c10d._get_default_store()
    report = StallReport(present(dist.group.WORLD), timeout_s=0.2)
    if dist.get_rank() == 1:
        store.wait(["asked"])
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if dist.get_rank() == 0:
        ask = report._ask

        def ask_and_let_it_end(*given: str) -> Any:
            heard = ask(*given)
            store.set("asked", "")
            until(work.is_completed)
            return heard

        report._ask = ask_and_let_it_end  # type: ignore[method-assign, assignment]
    report.wait(work, "sum")
