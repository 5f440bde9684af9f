"""A step of as many micro-batches as there were ranks, on fewer of them, or on more."""

import pytest
from ddp_worlds.nursery import Nursery

CASES = "ddp_worlds.micro_batch_cases"


@pytest.mark.parametrize(
    ("world_size", "count", "views", "weighted", "to_none"),
    [
        (1, 3, False, False, True),
        (2, 3, False, True, True),
        (2, 4, True, False, False),
        (3, 4, False, False, False),
        (3, 7, True, True, True),
        (3, 2, False, True, True),
        (3, 3, True, False, True),
    ],
)
def test_the_gradient_is_that_of_all_micro_batches(
    nursery: Nursery, world_size: int, count: int, views: bool, weighted: bool, to_none: bool
) -> None:
    what = f"{CASES}:a_step_is_over_all_micro_batches"
    nursery.run(world_size, what, count=count, views=views, weighted=weighted, to_none=to_none)


def test_a_pass_that_fails_ends_the_step_on_all_ranks(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:a_pass_that_fails_ends_the_step_on_all_ranks", count=4)


@pytest.mark.parametrize("count", [2, 3])
def test_averages_that_are_left_in_place_are_refused(nursery: Nursery, count: int) -> None:
    nursery.run(2, f"{CASES}:averages_that_are_left_in_place_are_refused", count=count)
