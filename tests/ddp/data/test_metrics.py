"""Metrics over shares of different lengths are those of the whole set, the same on every rank, or an error of all."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from testbed.training import assert_same_bits
from testbed.worlds import world
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import ddp
from ddp.comm.objects import gather_values
from ddp.data.metrics import gather_metrics, gather_samples
from ddp.errors import ArgumentError, CollectiveError, NotInitializedError


def same(found: object, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and torch.equal(found, expected)


def _everything(size: int) -> tuple[Tensor, Tensor]:
    """Values (size, 3) of very different size, where the order of additions shows, and classes (size,)."""
    generator = torch.Generator().manual_seed(size)
    scale = 10.0 ** torch.randint(-8, 9, (size, 1), generator=generator, dtype=torch.float64)
    values = torch.randn(size, 3, dtype=torch.float64, generator=generator) * scale
    return values, torch.randint(4, (size,), generator=generator)


@world(1, 2, 3)
def test_metrics_over_exact_shares_are_those_of_the_whole_set() -> None:
    results = []
    for size in (1, 2, 7, 31):
        values, classes = _everything(size)
        sampler = ddp.DistributedSampler(range(size), shuffle=False, even="exact")
        total: Any = 0.0
        count, of_class, by_column = 0, torch.zeros(4, dtype=torch.int64), 0
        predicted: Any = [torch.empty(0)]
        for x, y in DataLoader(TensorDataset(values, classes), 2, sampler=sampler):
            if count == 0:
                predicted = []
            total, count = total + x.sum(), count + len(x)
            of_class += y.bincount(minlength=4)
            by_column = by_column + x.sum(0)
            predicted.append(x * 2)
        assert count == len(sampler)
        found: Any = gather_metrics(
            {"loss": (total, count), "count": count, "of class": of_class, "columns": (by_column, count), "sum": total}
        )
        assert list(found) == ["loss", "count", "of class", "columns", "sum"]
        assert (found["count"], type(found["count"])) == (size, int)
        assert same(found["of class"], classes.bincount(minlength=4))
        torch.testing.assert_close(found["sum"], values.sum().item(), rtol=1e-9, atol=1e-9)
        assert found["loss"] == found["sum"] / size
        torch.testing.assert_close(found["columns"], values.sum(0) / size, rtol=1e-9, atol=1e-9)
        assert torch.equal(gather_samples(torch.cat(predicted)), values * 2)
        results.append([found["loss"], found["sum"], *found["columns"].tolist()])
    assert_same_bits([torch.tensor(results, dtype=torch.float64)])


@world(1, 4)
def test_sums_are_exact_however_they_are_divided() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [1e100, 1.0, -1e100, 3e-17, 0.1, 2**-60][:size]
    results = []
    for shift in range(size):
        found: Any = gather_metrics(
            {"x": parts[(rank + shift) % size], "many": 2**62 + rank, "wide": 10**30, "yes": True}
        )
        assert found["x"] == float(sum(map(Fraction, parts)))
        assert found["many"] == size * 2**62 + size * (size - 1) // 2  # beyond 64 bits
        assert (found["wide"], found["yes"]) == (size * 10**30, size)
        results.append(found["x"])
    assert len(set(results)) == 1
    assert_same_bits([torch.tensor(results, dtype=torch.float64)])

    half = torch.tensor([0.5, 1.5], dtype=torch.bfloat16, requires_grad=True)
    found = gather_metrics({"half": half, "flag": torch.tensor([True, rank == 0]), "square": torch.ones(2, 0, 3)})
    assert found["half"].dtype is torch.float64
    assert found["half"].tolist() == [0.5 * size, 1.5 * size]
    assert found["flag"].tolist() == [size, 1]
    assert found["square"].shape == (2, 0, 3)

    found = gather_metrics({"none": (0.0, 0), "inf": math.inf, "both": -math.inf if rank else math.inf})
    assert math.isnan(found["none"])
    assert found["inf"] == math.inf
    assert math.isnan(found["both"]) == (size > 1)
    assert gather_metrics({}) == {}


@world(3)
def test_a_rank_without_data_passes_zeros() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    others = dist.get_world_size() - 1
    matrix = torch.tensor([[1, 2], [3, 4]])
    found: Any = gather_metrics({"a": 0 if last else matrix, "b": (0, 0) if last else (matrix.double(), 2), "c": 0.0})
    assert same(found["a"], matrix * others)
    assert same(found["b"], matrix.double() / 2)
    assert found["c"] == 0.0
    first = dist.get_rank() == 0
    assert same(gather_metrics({"a": 0 if first else matrix})["a"], matrix * others)


UNLIKE = {"loss": (torch.ones(3), torch.ones(2))}
WRONG: list[tuple[Any, Any, str]] = [  # what rank 1 passes, and what the others
    ({"loss": 1.0}, {"loss": 1.0, "acc": 1}, "rank 0 passes 'acc', but rank 1 does not (it passes 'loss')"),
    ({"loss": 1.0, "extra": 2}, {"loss": 1.0}, "rank 1 passes 'extra', but rank 0 does not (it passes 'loss')"),
    ({}, {"loss": 1.0}, "rank 0 passes 'loss', but rank 1 does not (it passes nothing)"),
    ({"loss": 1.0}, {"loss": (1.0, 2)}, "rank 1 passes 'loss' as one amount, but rank 0 as (sum, count)"),
    (
        {"loss": torch.ones(2)},
        {"loss": torch.ones(3)},
        "rank 1 passes 'loss' as of shape (2,), but rank 0 of shape (3,)",
    ),
    ({"loss": 4}, {"loss": torch.ones(3)}, "rank 1 passes 'loss' as a number, but rank 0 of shape (3,)"),
    (UNLIKE, UNLIKE, "the count of 'loss' has shape (2,), but its sum has shape (3,)"),
    ({"loss": "1.0"}, {"loss": 1.0}, "rank 1: 'loss' holds '1.0' (str)"),
    ({"loss": torch.ones(2) * 1j}, {"loss": 1.0}, "rank 1: 'loss' holds a tensor of torch.complex64"),
    (
        {"loss": torch.ones(2, device="meta")},
        {"loss": 1.0},
        "rank 1: NotImplementedError: Cannot copy out of meta tensor",
    ),
    ({"loss": (1, 2, 3)}, {"loss": 1.0}, "rank 1: 'loss' is a tuple of 3"),
    ({3: 1.0}, {"loss": 1.0}, "rank 1: the name 3 is not a string"),
    (1.0, {"loss": 1.0}, "rank 1: metrics is a float"),
]
WRONG_ROWS: list[tuple[Any, Any, str]] = [
    (torch.ones(4), torch.ones(2), "rank 0 has 2 rows, but 3 of 8 rows are its share (all have 2, 4, 2)"),
    (torch.ones(2, 4), torch.ones(2, 3), "rank 1 has rows of shape (4,) and float32, but rank 0 of shape (3,)"),
    (torch.ones(2).double(), torch.ones(2), "rank 1 has rows of shape () and float64, but rank 0 of shape ()"),
    (torch.tensor(1.0), torch.ones(2), "rank 1: rows is a torch.strided tensor of shape ()"),
    ([1.0, 2.0], torch.ones(2), "rank 1: rows is [1.0, 2.0]"),
]  # fmt: skip


@world(3)
def test_what_does_not_fit_is_an_error_that_names_rank_and_metric() -> None:
    """The same on all ranks; afterwards everything still works."""
    wrong = [(gather_metrics, each) for each in WRONG] + [(gather_samples, each) for each in WRONG_ROWS]
    for gather, (late, others, said) in wrong:
        with pytest.raises(ArgumentError, match=re.escape(said)) as caught:
            gather(late if dist.get_rank() == 1 else others)
        assert gather_values(str(caught.value)) == [str(caught.value)] * 3
    assert gather_metrics({"loss": 1}) == {"loss": 3}


@world(1, 3)
def test_samples_come_in_the_order_of_the_set() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for n in (0, 1, size, 3 * size + 1):
        for whole in (
            torch.arange(n),
            torch.arange(n * 6.0).view(n, 2, 3).to(torch.bfloat16),
            torch.arange(n) % 2 == 0,
            torch.complex(torch.arange(float(n)), torch.ones(n)).conj(),
            torch.zeros(n, 0, 2),
            torch.arange(2.0 * n).view(2, n).t().requires_grad_(),  # (n, 2), not contiguous
        ):
            found = gather_samples(whole[rank::size])
            assert not found.requires_grad
            assert (found.dtype, found.shape) == (whole.dtype, whole.shape)
            assert torch.equal(found, whole)
    shuffled = ddp.DistributedSampler(range(11), seed=2)
    found = gather_samples(torch.tensor(list(shuffled)))
    alone = ddp.DistributedSampler(range(11), 1, 0, seed=2)
    assert found[:11].tolist() == list(alone)


@world(3)
def test_a_subgroup_gathers_among_its_members() -> None:
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ArgumentError, match="not in the group"):
            gather_metrics({"rank": rank}, group=group)
        return
    assert gather_metrics({"rank": rank}, group=group) == {"rank": 2}
    assert gather_samples(torch.tensor([rank]), group=group).tolist() == [0, 2]


@world(2)
def test_a_lost_rank_is_an_error() -> None:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the end of the test
        return
    said = "^rank 1 is missing: the gather_metrics of step 1 failed on rank 0 of 2"
    with pytest.raises(CollectiveError, match=said) as caught:
        gather_metrics({"loss": 1.0})
    assert (caught.value.rank, caught.value.what) == (0, "gather_metrics")


def test_without_a_group_the_world_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found: Any = gather_metrics({"loss": (torch.tensor(6.0), 4), "count": numpy.int64(4), "x": numpy.float32(0.5)})
    assert found == {"loss": 1.5, "count": 4, "x": 0.5}
    assert {name: type(value) for name, value in found.items()} == {"loss": float, "count": int, "x": float}
    assert math.isnan(gather_metrics({"loss": (0, 0)})["loss"])
    rows = torch.ones(3, requires_grad=True)
    samples = gather_samples(rows)
    assert (samples.tolist(), samples.requires_grad) == ([1, 1, 1], False)
    samples += 1
    assert rows.tolist() == [1, 1, 1]
    with pytest.raises(ArgumentError, match=r"gather_metrics: rank 0: 'loss' holds None \(NoneType\)"):
        gather_metrics({"loss": None})  # type: ignore[dict-item]  # on purpose


def test_a_launcher_without_a_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for gather in (lambda: gather_metrics({"loss": 1}), lambda: gather_samples(torch.ones(1))):
        with pytest.raises(NotInitializedError, match=r"call ddp.init\(\) before gather_"):
            gather()
