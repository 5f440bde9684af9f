"""Our DistributedSampler gives the indices of torch's, and every sample where it should."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import ddp


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 100, 101])
def test_indices_are_those_of_torch(size: int) -> None:
    data = range(size)
    for replicas, drop_last, shuffle, seed in itertools.product((1, 2, 3, 4, 7), (False, True), (False, True), (0, 5)):
        for rank in range(replicas):
            ours = ddp.DistributedSampler(data, replicas, rank, shuffle, seed, drop_last)
            theirs = TorchSampler(data, replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
            assert len(ours) == len(theirs)
            for epoch in (0, 1, 9):
                ours.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert list(ours) == list(theirs)


@settings(deadline=None, max_examples=200)
@given(
    size=st.integers(0, 300),
    replicas=st.integers(1, 40),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_shares_are_equal_and_cover_the_set(
    size: int, replicas: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    seen: Counter[int] = Counter()
    for rank in range(replicas):
        sampler = ddp.DistributedSampler(range(size), replicas, rank, shuffle, seed, drop_last)
        sampler.set_epoch(epoch)
        share = list(sampler)
        assert len(share) == len(sampler) == sampler.num_samples
        seen.update(share)
    assert set(seen) <= set(range(size))
    if drop_last:
        assert max(seen.values(), default=1) == 1
        assert size - seen.total() < replicas
    else:
        assert seen.total() - size < replicas
        assert len(seen) == size
        assert not seen or max(seen.values()) - min(seen.values()) <= 1


def test_epochs_differ_and_repeat() -> None:
    sampler = ddp.DistributedSampler(range(50), 2, 0)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_without_a_group_the_world_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert sorted(ddp.DistributedSampler(range(5))) == [0, 1, 2, 3, 4]
    loader = DataLoader(list(range(6)), batch_size=3, sampler=ddp.DistributedSampler(range(6), shuffle=False))
    assert [part.tolist() for part in loader] == [[0, 1, 2], [3, 4, 5]]


def test_a_launcher_without_a_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ddp.NotInitializedError, match=r"WORLD_SIZE=2.*ddp.init\(\)"):
        ddp.DistributedSampler(range(5))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_rank_and_size_come_from_the_group(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(ddp.DistributedSampler(range(5))) == 5


@pytest.mark.parametrize("rank", [-1, 3, 4])
def test_a_rank_outside_the_world_is_an_error(rank: int) -> None:
    with pytest.raises(ddp.ArgumentError, match="0 to 2"):
        ddp.DistributedSampler(range(5), num_replicas=3, rank=rank)
