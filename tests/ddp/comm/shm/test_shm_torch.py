"""What torch does with groups of the backend `shm`."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.nursery import Nursery

CASES = "ddp_worlds.shm_torch"


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        ("torchs_ddp_trains_as_on_the_whole_batch", 2),
        ("torchs_ddp_trains_as_on_the_whole_batch", 3),
        ("ddps_own_trains_as_on_the_whole_batch", 2),
        ("functional_collectives_and_meshes_use_it", 2),
        ("some_ranks_have_a_group_of_their_own", 3),
        ("other_devices_have_their_backends", 2),
        ("sparse_tensors_go_by_gloo", 2),
        ("torch_checks_nothing_else_in_detail", 2),
        ("tensors_of_any_kind", 3),
        ("ranks_that_share_no_memory_go_by_gloo", 3),
        ("one_store_serves_several_times", 2),
        ("one_store_serves_several_times", 3),
        ("a_rank_without_memory_is_known_to_all", 3),
        ("what_is_tried_is_as_large_as_what_is_needed", 2),
        ("unlike_devices_are_an_error_on_all", 3),
    ],
)
def test_with_torch(nursery: Nursery, tmp_path: Path, case: str, world_size: int) -> None:
    nursery.run(world_size, f"{CASES}:{case}", folder=str(tmp_path))
