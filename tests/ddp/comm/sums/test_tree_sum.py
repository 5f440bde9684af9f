"""Sums whose bits depend on the ranks alone."""

from __future__ import annotations

import pytest
from testbed.nursery import Nursery

CASES = "ddp_worlds.tree_sum_cases"


@pytest.mark.parametrize("world_size", [3, 5])
def test_sums_have_the_bits_of_the_tree(nursery: Nursery, world_size: int) -> None:
    nursery.in_turn(world_size, CASES, ["sums_have_the_bits_of_the_tree", "a_rank_that_is_gone_ends_the_sum"])


@pytest.mark.parametrize(
    ("hosts", "by_itself"),
    [
        ([(0, 1), (2, 3)], True),
        ([(0, 1), (2,)], False),
        ([(0, 2), (1, 3)], False),
        ([(0, 1, 2), (3, 4)], False),
    ],
    ids=["each host has a subtree", "unequal", "in turn", "three on a host"],
)
def test_sums_over_hosts_have_the_same_bits(nursery: Nursery, hosts: list[tuple[int, ...]], by_itself: bool) -> None:
    nursery.run(sum(map(len, hosts)), f"{CASES}:over_hosts_too", hosts=hosts, by_itself=by_itself)


@pytest.mark.parametrize(("backend", "deterministic"), [("gloo", True), ("shm", None)])
def test_gradients_have_the_bits_of_the_tree(nursery: Nursery, backend: str, deterministic: bool | None) -> None:
    nursery.run(3, f"{CASES}:gradients_have_the_bits_of_the_tree", group=backend, deterministic=deterministic)


def test_operators_of_a_device_are_deterministic_and_its_name_is_compared(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:operators_of_a_device_are_deterministic", names=["GPU A", "GPU B"])


def test_what_cannot_be_deterministic_is_refused(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:what_cannot_be_deterministic_is_refused")
