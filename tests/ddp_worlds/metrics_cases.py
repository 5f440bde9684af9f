"""What the ranks of a test world do about metrics: each function runs on every rank, in a process group, and asserts.

The oracle is the same sum in one process over the whole set.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import ddp
from ddp.data.metrics import gather_metrics, gather_samples


def same(found: object, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and torch.equal(found, expected)


def _everything(size: int) -> tuple[Tensor, Tensor]:
    """Values (size, 3) of very different size, where the order of additions shows, and classes (size,)."""
    generator = torch.Generator().manual_seed(size)
    scale = 10.0 ** torch.randint(-8, 9, (size, 1), generator=generator, dtype=torch.float64)
    values = torch.randn(size, 3, dtype=torch.float64, generator=generator) * scale
    return values, torch.randint(4, (size,), generator=generator)


def sums_over_exact_shares(sizes: list[int]) -> list[bytes]:
    """Return what each size gave, as bytes: they must be equal on all ranks."""
    results = []
    for size in sizes:
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
        found = gather_metrics(
            {"loss": (total, count), "count": count, "of class": of_class, "columns": (by_column, count), "sum": total}
        )
        assert list(found) == ["loss", "count", "of class", "columns", "sum"]
        assert (found["count"], type(found["count"])) == (size, int)
        assert same(found["of class"], classes.bincount(minlength=4))
        torch.testing.assert_close(found["sum"], values.sum().item(), rtol=1e-9, atol=1e-9)
        assert found["loss"] == found["sum"] / size
        torch.testing.assert_close(found["columns"], values.sum(0) / size, rtol=1e-9, atol=1e-9)
        assert torch.equal(gather_samples(torch.cat(predicted)), values * 2)
        results.append(struct.pack("<dd3d", found["loss"], found["sum"], *found["columns"].tolist()))
    return results


def sums_are_exact_and_do_not_depend_on_who_has_what() -> list[bytes]:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [1e100, 1.0, -1e100, 3e-17, 0.1, 2**-60][:size]
    results = []
    for shift in range(size):
        found = gather_metrics({"x": parts[(rank + shift) % size], "many": 2**62 + rank, "wide": 10**30, "yes": True})
        assert found["x"] == float(sum(map(Fraction, parts)))
        assert found["many"] == size * 2**62 + size * (size - 1) // 2  # beyond 64 bits
        assert (found["wide"], found["yes"]) == (size * 10**30, size)
        results.append(struct.pack("<d", found["x"]))
    assert len(set(results)) == 1

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
    return results


def a_rank_with_nothing_passes_plain_zeros() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    others = dist.get_world_size() - 1
    matrix = torch.tensor([[1, 2], [3, 4]])
    found = gather_metrics({"a": 0 if last else matrix, "b": (0, 0) if last else (matrix.double(), 2), "c": 0.0})
    assert same(found["a"], matrix * others)
    assert same(found["b"], matrix.double() / 2)
    assert found["c"] == 0.0
    first = dist.get_rank() == 0
    assert same(gather_metrics({"a": 0 if first else matrix})["a"], matrix * others)


def differences_are_errors_of_all() -> list[str]:
    """The messages of one difference after another. Afterwards everything still works."""
    odd = dist.get_rank() == 1
    messages = []
    for mine in (
        {"loss": 1.0, "acc": 1} if not odd else {"loss": 1.0},
        {"loss": 1.0} if not odd else {"loss": 1.0, "extra": 2},
        {"loss": 1.0} if not odd else {},
        {"loss": (1.0, 2)} if not odd else {"loss": 1.0},
        {"loss": torch.ones(3)} if not odd else {"loss": torch.ones(2)},
        {"loss": torch.ones(3)} if not odd else {"loss": 4},
        {"loss": (torch.ones(3), torch.ones(2))},
        {"loss": 1.0} if not odd else {"loss": "1.0"},
        {"loss": 1.0} if not odd else {"loss": torch.ones(2, dtype=torch.complex64)},
        {"loss": 1.0} if not odd else {"loss": torch.ones(2, device="meta")},
        {"loss": 1.0} if not odd else {"loss": (1, 2, 3)},
        {"loss": 1.0} if not odd else {3: 1.0},
        {"loss": 1.0} if not odd else 1.0,
    ):
        with pytest.raises(ddp.errors.ArgumentError) as caught:
            gather_metrics(mine)  # type: ignore[arg-type]  # on purpose
        messages.append(str(caught.value))
    for rows in (
        torch.ones(2) if not odd else torch.ones(4),
        torch.ones(2, 3) if not odd else torch.ones(2, 4),
        torch.ones(2) if not odd else torch.ones(2, dtype=torch.float64),
        torch.ones(2) if not odd else torch.tensor(1.0),
        torch.ones(2) if not odd else [1.0, 2.0],
    ):
        with pytest.raises(ddp.errors.ArgumentError) as caught:
            gather_samples(rows)  # type: ignore[arg-type]  # on purpose
        messages.append(str(caught.value))
    assert gather_metrics({"loss": 1}) == {"loss": dist.get_world_size()}
    return messages


def samples_of_any_kind_come_in_the_order_of_the_set() -> None:
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


def a_subgroup_gathers_among_its_members() -> None:
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ddp.errors.ArgumentError, match="not in the group"):
            gather_metrics({"rank": rank}, group=group)
        return
    assert gather_metrics({"rank": rank}, group=group) == {"rank": 2}
    assert gather_samples(torch.tensor([rank]), group=group).tolist() == [0, 2]


def a_rank_that_is_gone_is_an_error() -> str | None:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the end of the case
        return None
    with pytest.raises(ddp.errors.CollectiveError) as caught:
        gather_metrics({"loss": 1.0})
    assert (caught.value.rank, caught.value.what) == (0, "gather_metrics")
    return str(caught.value)
