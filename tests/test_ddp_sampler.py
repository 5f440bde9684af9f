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


@settings(deadline=None, max_examples=200)
@given(data=st.data(), size=st.integers(0, 200), shuffle=st.booleans(), drop_last=st.booleans())
def test_an_epoch_interrupted_anywhere_sees_each_sample_once_in_worlds_of_any_size(
    data: st.DataObject, size: int, shuffle: bool, drop_last: bool
) -> None:
    def world(replicas: int) -> list[ddp.DistributedSampler]:
        return [ddp.DistributedSampler(range(size), replicas, rank, shuffle, 3, drop_last) for rank in range(replicas)]

    seen: Counter[int] = Counter()
    samplers = world(data.draw(st.integers(1, 9), "replicas"))
    for sampler in samplers:
        sampler.set_epoch(4)
    for _ in range(data.draw(st.integers(0, 4), "interruptions")):
        replicas, batch = len(samplers), data.draw(st.integers(1, 7), "batch")
        left = size - seen.total()
        steps = data.draw(st.integers(0, left // (replicas * batch)), "steps")
        drawn_ahead = data.draw(st.integers(0, 20), "drawn ahead")
        for sampler in samplers:
            indices = list(itertools.islice(sampler, steps * batch + drawn_ahead))[: steps * batch]
            seen.update(indices)
            for _ in range(steps):
                sampler.advance(batch)
            sampler.advance(0)  # drawn ahead only: nothing of it was trained on
        states = [sampler.state_dict() for sampler in samplers]
        assert all(state == states[0] for state in states)
        samplers = world(data.draw(st.integers(1, 9), "replicas"))
        for sampler in samplers:
            sampler.load_state_dict(states[0])
            sampler.set_epoch(4)
    assert max(seen.values(), default=1) == 1
    rest = size - seen.total()
    for sampler in samplers:
        share = list(sampler)
        assert len(share) == len(sampler) == (rest // len(samplers) if drop_last else -(-rest // len(samplers)))
        seen.update(share)
    if drop_last:
        assert max(seen.values(), default=1) == 1
        assert size - seen.total() == rest % len(samplers)
    else:
        assert len(seen) == size
        assert seen.total() - size == -rest % len(samplers)


def test_a_resumed_world_of_the_same_size_hands_out_the_same_indices() -> None:
    for drop_last, rank in itertools.product((False, True), range(3)):
        first, second = (ddp.DistributedSampler(range(50), 3, rank, drop_last=drop_last) for _ in range(2))
        first.set_epoch(2)
        everything = list(first)
        first.advance(5)
        second.load_state_dict(first.state_dict())
        second.set_epoch(2)
        assert list(second) == everything[5:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_draws_ahead_loses_nothing(workers: int) -> None:
    trained: list[int] = []
    state: dict[str, int | bool] = {}
    for stop in (3, 99):
        sampler = ddp.DistributedSampler(range(40), 1, 0)
        if state:
            sampler.load_state_dict(state)
        loader = DataLoader(range(40), 4, sampler=sampler, num_workers=workers, multiprocessing_context=_fork(workers))  # type: ignore[arg-type]  # torch wants a Dataset
        sampler.set_epoch(0)
        assert len(loader) == (40 - len(trained)) // 4
        for step, batch in enumerate(loader):
            if step == stop:
                break
            trained += batch.tolist()
            sampler.advance(len(batch))
        state = sampler.state_dict()
    assert sorted(trained) == list(range(40))


def _fork(workers: int) -> str | None:
    return "fork" if workers else None


def test_a_loaded_position_is_for_one_pass_of_its_epoch() -> None:
    sampler = ddp.DistributedSampler(range(20), 2, 0)
    sampler.set_epoch(3)
    full = list(sampler)
    sampler.advance(4)
    state = sampler.state_dict()
    assert (state["epoch"], state["position"]) == (3, 8)

    resumed = ddp.DistributedSampler(range(20), 2, 0)
    resumed.load_state_dict(state)
    assert len(resumed) == 6
    resumed.set_epoch(3)
    resumed.set_epoch(3)
    next(iter(resumed))  # a look at the first sample trains on nothing
    assert list(resumed) == full[4:]
    resumed.advance(6)
    assert resumed.state_dict()["position"] == 20
    resumed.set_epoch(4)
    assert (len(resumed), resumed.state_dict()["position"]) == (10, 0)
    resumed.load_state_dict(state)
    resumed.set_epoch(4)  # another epoch than that of the position
    assert len(list(resumed)) == 10
    resumed.load_state_dict(state)
    assert list(resumed) == full[4:]
    resumed.advance(6)
    assert list(resumed) == full  # the epoch again, as in torch, although set_epoch() was not called
    resumed.advance(1)
    resumed.set_epoch(3)
    assert len(resumed) == 10


def test_the_end_of_an_epoch_leaves_nothing_of_it() -> None:
    sampler = ddp.DistributedSampler(range(10), 4, 1)  # 12 positions: two indices come twice
    assert len(list(sampler)) == 3
    sampler.advance(3)
    resumed = ddp.DistributedSampler(range(10), 3, 0)
    resumed.load_state_dict(sampler.state_dict())
    assert (len(resumed), list(resumed)) == (0, [])
    resumed.set_epoch(1)
    assert len(resumed) == 4


def test_a_position_that_nobody_told_is_not_guessed() -> None:
    sampler = ddp.DistributedSampler(range(10), 1, 0)
    assert sampler.state_dict()["position"] == 0
    list(sampler)
    with pytest.raises(ddp.ArgumentError, match=r"10 samples of epoch 0 were handed out.*sampler.advance"):
        sampler.state_dict()
    sampler.set_epoch(0)  # not another pass yet
    with pytest.raises(ddp.ArgumentError, match=r"sampler.advance"):
        sampler.state_dict()
    sampler.set_epoch(1)
    assert sampler.state_dict()["position"] == 0


@pytest.mark.parametrize("samples", [5, -1])
def test_more_than_was_handed_out_cannot_be_trained_on(samples: int) -> None:
    sampler = ddp.DistributedSampler(range(10), 2, 0)
    with pytest.raises(ddp.ArgumentError, match=r"advance\(1\).*handed out 0"):
        sampler.advance(1)
    list(itertools.islice(sampler, 4))
    with pytest.raises(ddp.ArgumentError, match=rf"advance\({samples}\).*handed out 4 to rank 0.*own batch"):
        sampler.advance(samples)
    sampler.advance(4)


@pytest.mark.parametrize("change", [{"dataset": range(21)}, {"shuffle": False}, {"seed": 1}])
def test_a_position_in_another_permutation_is_refused(change: dict[str, object]) -> None:
    state = ddp.DistributedSampler(range(20), 1, 0).state_dict()
    arguments: dict[str, object] = {"dataset": range(20), "num_replicas": 1, "rank": 0, **change}
    with pytest.raises(ddp.ArgumentError, match="the sampler was saved with"):
        ddp.DistributedSampler(**arguments).load_state_dict(state)  # type: ignore[arg-type]  # on purpose
