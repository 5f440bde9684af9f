"""Groups that ddp makes beside those of the user."""

from __future__ import annotations

from testbed.nursery import Nursery


def test_a_group_of_some_ranks_is_made_by_these_alone(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.comm_cases:a_group_of_some_ranks_is_not_split_off")
