"""What one CUDA device can show: NCCL by a world of one that reduces all the same, two ranks by gloo on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.nursery import Nursery

pytestmark = pytest.mark.gpu

CASES = "ddp_worlds.gpu_cases"
DEADLINE_S = 250.0  # a first use of the device compiles and loads kernels
PROGRAMS = (
    "strided", "reused", "frozen in turn", "unfrozen", "unfrozen, accumulating", "normed",
    "answers", "answers, accumulating", "two forwards", "forward without backward", "one rank evaluates",
    "two backwards", "backward to some", "backward of two", "other order", "other layers", "conditional",
    "normed, two forwards", "recomputed", "recomputed, reentrant", "recomputed, accumulating", "wrapper recomputed",
    "wrapper recomputed, reentrant", "words", "words, accumulating", "words by SparseAdam", "replaced",
    "replaced, accumulating", "hooked",
)  # fmt: skip


@pytest.mark.parametrize("part", range(3))
def test_programs_equal_one_process(nursery: Nursery, part: int) -> None:
    nursery.run(2, f"{CASES}:on_one_device", deadline_s=DEADLINE_S, names=PROGRAMS[part::3])


@pytest.mark.parametrize(
    "case",
    [
        "nccl_changes_nothing_in_a_world_of_one",
        "a_plain_step_waits_for_no_device",
        "compressions_change_nothing_in_a_world_of_one",
        "mixed_precision_and_compile",
        "models_on_a_device_are_pickled",
    ],
)
def test_over_nccl(nursery: Nursery, case: str) -> None:
    nursery.run(1, f"{CASES}:{case}", deadline_s=DEADLINE_S)


def test_checkpoints_come_back_on_the_device(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(1, f"{CASES}:checkpoints_come_back_on_the_device", deadline_s=DEADLINE_S, folder=str(tmp_path))


@pytest.mark.parametrize("case", ["one_rank_out_of_memory_ends_the_step_everywhere", "horovods_collectives"])
def test_two_ranks_on_one_device(nursery: Nursery, case: str) -> None:
    nursery.run(2, f"{CASES}:{case}", deadline_s=DEADLINE_S)
