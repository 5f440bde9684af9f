"""Ranks of the backend `shm` that end, stall, fork or are interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.nursery import Nursery

from ddp.comm.shm.waiting import Fence

CASES = "ddp_worlds.shm_failures"


@pytest.mark.parametrize(
    "name", ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "recv", "barrier"]
)
def test_a_dead_rank_is_named_on_all_others(nursery: Nursery, tmp_path: Path, name: str) -> None:
    case = f"{CASES}:a_dead_rank_is_named_on_all_others"
    nursery.run(3, case, folder=str(tmp_path), name=name, chunks=0)
    if name not in ("barrier", "recv"):
        nursery.run(3, case, folder=str(tmp_path), name=name, chunks=2)


@pytest.mark.parametrize(
    "case",
    [
        "a_rank_that_stalls_is_named",
        "a_monitored_barrier_names_all_that_are_missing",
        "a_wait_has_a_limit_of_its_own",
        "ctrl_c_ends_a_wait",
        "a_wait_costs_no_core",
        "a_forked_child_leaves_the_group_alone",
        "a_rank_that_leaves_is_named",
        "a_rank_that_fails_after_a_collective_fails_the_next_one",
        "a_message_of_a_rank_that_has_left_arrives",
        "all_threads_that_wait_learn_of_a_dead_rank",
        "a_callback_that_waits_ends_with_the_group",
        "a_rank_that_leaves_ends_its_collectives_first",
        "a_message_that_no_one_waits_for_has_no_limit",
        "a_message_is_late_by_the_clock_of_its_own_rank",
        "all_hosts_that_are_late_are_named",
        "a_work_keeps_its_group",
        "across_hosts_limits_count_and_a_forked_child_closes_nothing",
        "nothing_is_left_of_a_group",
    ],
)
def test_of_three_ranks(nursery: Nursery, tmp_path: Path, case: str) -> None:
    nursery.run(3, f"{CASES}:{case}", folder=str(tmp_path))


def test_a_rank_that_stalls_on_another_host(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(4, f"{CASES}:a_rank_that_stalls_on_another_host_is_an_error_on_all_others", folder=str(tmp_path))


def test_a_fence_works_after_an_interrupt_in_the_middle_of_one() -> None:
    fence = Fence()
    fence._release()
    fence()
    fence()
