"""Training with ddp equals training in one process on the whole batch, whatever the settings: float64, to 1e-12."""

from __future__ import annotations

import itertools
import random

import pytest
from testbed.nursery import Nursery

MODELS = ("mlp", "odd", "attention", "conv", "complex")
# bucket_cap_mb, views, set_to_none, accumulated micro-batches, find_unused_parameters, from where on a
# gradient is large (bytes)
WAYS = (
    (None, False, True, 1, False, 32768),
    (None, True, True, 1, True, 32768),
    (None, False, True, 2, True, 1),
    (None, True, False, 1, False, 200),
    (1e-4, False, False, 1, False, 100),
    (1e-4, True, True, 3, False, 100),
    (2e-3, True, False, 2, True, 32768),
    (2e-3, False, True, 1, False, 500),
    (1e-6, False, True, 1, False, 32768),
    (1e-6, True, False, 2, False, 32768),
)


@pytest.mark.parametrize(
    ("world_size", "part"),
    [
        *(pytest.param(size, slice(size % 4, None, 4), id=str(size)) for size in (1, 2, 3, 4)),  # each in one world
        *(
            pytest.param(size, slice(None), id=f"{size}-all", marks=pytest.mark.slow(turn=size))
            for size in (1, 2, 3, 4)
        ),
    ],
)
def test_training_equals_one_process_on_the_whole_batch(nursery: Nursery, world_size: int, part: slice) -> None:
    setups = [(model, *way) for model in MODELS for way in WAYS][part]
    nursery.run(world_size, "ddp_worlds.data_parallel_cases:equals_whole_batch", setups=setups, steps=5)


@pytest.mark.parametrize(
    ("world_size", "seed"),  # of 12 ways that have all pairs of values
    [(2, 34), (3, 3), (4, 57), *(pytest.param(size, None, marks=pytest.mark.slow(turn=size)) for size in (2, 3, 4))],
)
def test_parameters_unused_on_some_or_all_ranks_are_exact(nursery: Nursery, world_size: int, seed: int | None) -> None:
    ways = itertools.product((None, 1e-4, 1e-6), (False, True), (True, False), (1, 2), (False, True), (32768, 50))
    setups = [("branches", *way) for way in ways if (way[0] != 1e-6) or way[-1] != 50]
    if seed is not None:
        setups = random.Random(seed).sample(setups, 12)
    nursery.run(world_size, "ddp_worlds.data_parallel_cases:unused_parameters", setups=setups)


@pytest.mark.parametrize("large_bytes", [32768, 1])
@pytest.mark.parametrize("views", [False, True])
def test_a_gradient_that_no_rank_renews_stays_to_the_bit(nursery: Nursery, views: bool, large_bytes: int) -> None:
    nursery.run(
        3,
        "ddp_worlds.data_parallel_cases:unused_everywhere_keeps_its_gradient_to_the_bit",
        views=views,
        large_bytes=large_bytes,
    )


@pytest.mark.parametrize(
    ("model", "way"),
    [
        ("mlp", 4),
        ("odd", 7),
        ("conv", 0),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in itertools.product(["mlp", "odd", "conv"], [0, 4, 7])
            if each not in {("mlp", 4), ("odd", 7), ("conv", 0)}
        ),
    ],
)
def test_replicas_are_bitwise_equal_after_100_steps(nursery: Nursery, model: str, way: int) -> None:
    nursery.run(3, "ddp_worlds.data_parallel_cases:replicas_stay_bitwise_equal", setup=(model, *WAYS[way]), steps=100)


@pytest.mark.parametrize("keep", ["itself", "detached", "part", "numpy", "storage", "graph", "nothing"])
@pytest.mark.parametrize("large_bytes", [32768, 1])
def test_what_is_kept_of_a_gradient_is_not_overwritten_by_default(
    nursery: Nursery, large_bytes: int, keep: str
) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:kept_gradients_stay", large_bytes=large_bytes, keep=keep)


def test_what_is_kept_of_a_gradient_is_not_overwritten_where_torch_has_no_count_of_owners(nursery: Nursery) -> None:
    nursery.run(
        2, "ddp_worlds.data_parallel_cases:kept_gradients_stay", large_bytes=32768, keep="detached", counts=False
    )


@pytest.mark.parametrize("large_bytes", [32768, 1])
def test_what_is_kept_of_a_gradient_is_not_overwritten_by_a_failed_step(nursery: Nursery, large_bytes: int) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:kept_gradients_outlive_a_failed_step", large_bytes=large_bytes)


def test_the_plan_follows_the_order_of_use(nursery: Nursery) -> None:
    orders = nursery.run(2, "ddp_worlds.data_parallel_cases:follows_order_of_use")
    assert orders[0] == orders[1]
    assert [index // 2 for index in orders[0]] == [0, 0, 1, 1, 2, 2, 3, 3]
