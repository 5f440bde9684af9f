"""Metrics over shares of different lengths are those of the whole set, the same on every rank, or an error of all."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from testbed.nursery import Nursery

import ddp
from ddp.data.metrics import gather_metrics, gather_samples


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_metrics_over_exact_shares_are_those_of_the_whole_set(nursery: Nursery, world_size: int) -> None:
    first, *others = nursery.run(world_size, "ddp_worlds.metrics_cases:sums_over_exact_shares", sizes=[1, 2, 7, 31])
    assert all(other == first for other in others)


@pytest.mark.parametrize("world_size", [1, 4])
def test_sums_are_exact_however_they_are_divided(nursery: Nursery, world_size: int) -> None:
    first, *others = nursery.run(
        world_size, "ddp_worlds.metrics_cases:sums_are_exact_and_do_not_depend_on_who_has_what"
    )
    assert all(other == first for other in others)


def test_a_rank_without_data_passes_zeros(nursery: Nursery) -> None:
    nursery.run(3, "ddp_worlds.metrics_cases:a_rank_with_nothing_passes_plain_zeros")


def test_what_does_not_fit_is_an_error_that_names_rank_and_metric(nursery: Nursery) -> None:
    first, *others = nursery.run(3, "ddp_worlds.metrics_cases:differences_are_errors_of_all")
    assert others == [first, first]
    for message, part in zip(
        first,
        [
            "rank 0 passes 'acc', but rank 1 does not (it passes 'loss')",
            "rank 1 passes 'extra', but rank 0 does not (it passes 'loss')",
            "rank 0 passes 'loss', but rank 1 does not (it passes nothing)",
            "rank 1 passes 'loss' as one amount, but rank 0 as (sum, count)",
            "rank 1 passes 'loss' as of shape (2,), but rank 0 of shape (3,)",
            "rank 1 passes 'loss' as a number, but rank 0 of shape (3,)",
            "the count of 'loss' has shape (2,), but its sum has shape (3,)",
            "rank 1: 'loss' holds '1.0' (str)",
            "rank 1: 'loss' holds a tensor of torch.complex64",
            "rank 1: NotImplementedError: Cannot copy out of meta tensor",
            "rank 1: 'loss' is a tuple of 3",
            "rank 1: the name 3 is not a string",
            "rank 1: metrics is a float",
            "rank 0 has 2 rows, but 3 of 8 rows are its share (all have 2, 4, 2)",
            "rank 1 has rows of shape (4,) and float32, but rank 0 of shape (3,)",
            "rank 1 has rows of shape () and float64, but rank 0 of shape () and float32",
            "rank 1: rows is a torch.strided tensor of shape ()",
            "rank 1: rows is [1.0, 2.0]",
        ],
        strict=True,
    ):
        assert part in message


@pytest.mark.parametrize("world_size", [1, 3])
def test_samples_come_in_the_order_of_the_set(nursery: Nursery, world_size: int) -> None:
    nursery.run(world_size, "ddp_worlds.metrics_cases:samples_of_any_kind_come_in_the_order_of_the_set")


def test_a_subgroup_gathers_among_its_members(nursery: Nursery) -> None:
    nursery.run(3, "ddp_worlds.metrics_cases:a_subgroup_gathers_among_its_members")


def test_a_lost_rank_is_an_error(nursery: Nursery) -> None:
    message, gone = nursery.run(2, "ddp_worlds.metrics_cases:a_rank_that_is_gone_is_an_error")
    assert gone is None
    assert message.startswith("rank 1 is missing: the gather_metrics of step 1 failed on rank 0 of 2")


def test_without_a_group_the_world_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = gather_metrics({"loss": (torch.tensor(6.0), 4), "count": numpy.int64(4), "x": numpy.float32(0.5)})
    assert found == {"loss": 1.5, "count": 4, "x": 0.5}
    assert {name: type(value) for name, value in found.items()} == {"loss": float, "count": int, "x": float}
    assert math.isnan(gather_metrics({"loss": (0, 0)})["loss"])
    rows = torch.ones(3, requires_grad=True)
    samples = gather_samples(rows)
    assert (samples.tolist(), samples.requires_grad) == ([1, 1, 1], False)
    samples += 1
    assert rows.tolist() == [1, 1, 1]
    with pytest.raises(ddp.errors.ArgumentError, match=r"gather_metrics: rank 0: 'loss' holds None \(NoneType\)"):
        gather_metrics({"loss": None})  # type: ignore[dict-item]  # on purpose


def test_a_launcher_without_a_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for gather in (lambda: gather_metrics({"loss": 1}), lambda: gather_samples(torch.ones(1))):
        with pytest.raises(ddp.errors.NotInitializedError, match=r"call ddp.init\(\) before gather_"):
            gather()
