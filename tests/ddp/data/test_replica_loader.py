"""Every sample once an epoch, for any length, batch and number of replicas, and from any point on."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import ddp
from ddp.data.replica_loader import ReplicaLoader
from ddp.errors import UnsupportedError

Pair = namedtuple("Pair", "x y")


def _numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length))


def _loaders(length: int, batch: int, replicas: int, **more: Any) -> list[ReplicaLoader]:
    return [
        ReplicaLoader(_numbers(length), global_batch_size=batch, replica=replica, replicas=replicas, **more)
        for replica in range(replicas)
    ]


def _passes(loaders: list[ReplicaLoader]) -> Iterator[list[int]]:
    """Make one pass of all replicas in step; yield the samples of each global batch, in its order."""
    for shares in zip(*loaders, strict=True):
        parts = [share[0].tolist() for share in shares]
        whole = [0] * sum(map(len, parts))
        for replica, part in enumerate(parts):
            whole[replica :: len(parts)] = part
        yield whole


sizes = st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(1, 5), st.booleans(), st.booleans()).filter(
    lambda drawn: drawn[1] >= drawn[2]
)


@given(sizes)
def test_every_sample_once_an_epoch(drawn: tuple[int, int, int, bool, bool]) -> None:
    length, batch, replicas, shuffle, drop_last = drawn
    loaders = _loaders(length, batch, replicas, shuffle=shuffle, drop_last=drop_last)
    kept = length - length % batch if drop_last else length
    alone = _loaders(length, batch, 1, shuffle=shuffle, drop_last=drop_last)
    orders = []
    for epoch in range(2):
        seen = list(_passes(loaders))
        assert [len(each) for each in seen] == [batch] * (kept // batch) + ([kept % batch] if kept % batch else [])
        assert {len(loader) for loader in loaders} == {len(seen)}
        assert seen == list(_passes(alone)), "the same batches whatever the number of replicas"
        order = [sample for each in seen for sample in each]
        assert len(set(order)) == kept
        assert set(order) <= set(range(length))
        orders.append(order)
        assert loaders[0].epoch == epoch + 1
    if not shuffle:
        assert orders[0] == orders[1] == list(range(kept))
    elif kept > 20:
        assert orders[0] != orders[1]


@given(sizes, st.integers(0, 30), st.integers(1, 5), st.integers(1, 12))
def test_a_saved_place_goes_on_at_another_world_size_and_batch(
    drawn: tuple[int, int, int, bool, bool], stop: int, replicas: int, batch: int
) -> None:
    length, first_batch, first_replicas, shuffle, _ = drawn
    batch = max(batch, replicas)
    loaders = _loaders(length, first_batch, first_replicas, shuffle=shuffle, seed=7)
    seen: list[int] = []
    state = loaders[0].state_dict()
    for count, whole in enumerate(_passes(loaders), start=1):
        if count > stop:
            break
        seen += whole
        states = [loader.state_dict() for loader in loaders]
        assert all(each == states[0] for each in states)
        state = states[0]
    others = _loaders(length, batch, replicas, shuffle=shuffle, seed=7)
    for other in others:
        other.load_state_dict(state)
    is_new = len(seen) == length  # that epoch is over
    if not is_new:
        for other in others:
            assert list(other.epochs(1))[:1] == [0]
            other.load_state_dict(state)
        seen += [sample for whole in _passes(others) for sample in whole]
    assert sorted(seen) == list(range(length))
    assert {other.epoch for other in others} == {1}
    expected = _loaders(length, batch, replicas, shuffle=shuffle, seed=7)
    for loader in expected:
        loader.set_epoch(1)
    assert list(_passes(others)) == list(_passes(expected)), "and the next epoch is whole"


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_that_was_committed_is_not_made_twice(drop_last: bool) -> None:
    """The loop of a resilient function, whose own epoch is still that of the last commit."""
    (loader,) = _loaders(10, 4, 1, shuffle=True, drop_last=drop_last)
    loader.set_epoch(1)
    for _ in loader:
        state = loader.state_dict()
    (expected,) = _loaders(10, 4, 1, shuffle=True, drop_last=drop_last)
    expected.set_epoch(2)
    (other,) = _loaders(10, 4, 1, shuffle=True, drop_last=drop_last)
    for resumed in (loader, other):
        resumed.load_state_dict(state)
        resumed.set_epoch(1)
        assert list(resumed) == []
        resumed.set_epoch(2)
        assert str(list(resumed)) == str(list(expected))
        expected.set_epoch(2)
    other.set_epoch(1)
    assert len(list(other)) == len(other), "a script may make an epoch again"


@given(sizes, st.integers(0, 30), st.booleans())
def test_one_that_joins_leaves_out_what_the_others_have_done(
    drawn: tuple[int, int, int, bool, bool], behind: int, by_epochs: bool
) -> None:
    length, batch, replicas, shuffle, drop_last = drawn
    epochs = 3

    def run(loaders: list[ReplicaLoader]) -> list[list[int]]:
        if not by_epochs:
            return [whole for _ in range(epochs) for whole in _passes(loaders)]
        seen = []
        for _ in zip(*(loader.epochs(epochs) for loader in loaders), strict=True):
            seen += list(_passes(loaders))
        return seen

    options = {"shuffle": shuffle, "drop_last": drop_last}
    whole = run(_loaders(length, batch, replicas, **options))
    joining = _loaders(length, batch, replicas, **options)
    for loader in joining:
        loader.begin_after(lambda: behind)
    assert run(joining) == whole[behind:]


def test_a_pass_that_is_broken_off_is_over() -> None:
    (loader,) = _loaders(10, 4, 1)
    assert next(iter(loader))[0].tolist() == [0, 1, 2, 3]
    assert next(iter(loader))[0].tolist() == [0, 1, 2, 3]
    assert loader.epoch == 1
    seen = []
    for epoch in loader.epochs(4):
        seen.append(epoch)
        for _ in loader:
            break
    assert seen == [1, 2, 3]
    loader.set_epoch(0)
    assert [epoch for epoch in loader.epochs(2) for _ in loader] == [0] * 3 + [1] * 3


def test_a_pass_that_an_epoch_is_set_in_ends() -> None:
    (loader,) = _loaders(10, 2, 1)
    seen = []
    for (batch,) in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            loader.set_epoch(5)
    assert seen == [[0, 1], [2, 3]]
    assert loader.epoch == 5


def test_a_place_in_another_order_is_refused() -> None:
    (loader,) = _loaders(10, 4, 1, shuffle=True, seed=1)
    for change in ({"seed": 2}, {"shuffle": False}):
        (other,) = _loaders(10, 4, 1, **{"shuffle": True, "seed": 1, **change})
        with pytest.raises(ddp.errors.ArgumentError, match="is another one here"):
            other.load_state_dict(loader.state_dict())
    (longer,) = _loaders(11, 4, 1, shuffle=True, seed=1)
    with pytest.raises(ddp.errors.ArgumentError, match="saved with length 10 and now has 11"):
        longer.load_state_dict(loader.state_dict())


class Rich(Dataset[Any]):
    """A sample with everything that torch collates."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return {"pair": Pair(torch.ones(2, 3) * index, index), "list": [torch.tensor(index)], "float": 0.5}


def test_the_batch_of_one_that_has_no_sample_is_like_the_others() -> None:
    loaders = [ReplicaLoader(Rich(), global_batch_size=2, replica=replica, replicas=2) for replica in range(2)]
    first, second = (list(loader) for loader in loaders)
    assert len(first) == len(second) == 2
    empty = second[1]
    assert empty["pair"].x.shape == (0, 2, 3)
    assert empty["pair"].y.shape == (0,)
    assert empty["pair"].y.dtype == first[0]["pair"].y.dtype
    assert [each.shape for each in empty["list"]] == [(0,)]
    assert empty["float"].shape == (0,)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ddp.errors.ArgumentError, match="a stream of its own"):
        ReplicaLoader(Stream(), global_batch_size=4, replica=0, replicas=2)
    with pytest.raises(ddp.errors.ArgumentError, match="less than one sample for each of the 3 replicas"):
        ReplicaLoader(_numbers(9), global_batch_size=2, replica=0, replicas=3)
    with pytest.raises(ddp.errors.ArgumentError, match=r"loader\(batch_size=...\): the strategy decides that"):
        ReplicaLoader(_numbers(9), global_batch_size=2, replica=0, replicas=1, batch_size=2)


def test_the_arguments_of_a_data_loader_are_passed_on() -> None:
    (loader,) = _loaders(7, 3, 1, collate_fn=lambda rows: [sum(int(row[0]) for row in rows)], num_workers=1)
    assert list(loader) == [[3], [12], [6]]


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


def test_workers_of_a_resumed_run_draw_the_numbers_of_its_epoch() -> None:
    first, resumed, other = (
        ReplicaLoader(Noise(), global_batch_size=2, replica=replica, replicas=2, num_workers=1) for replica in (0, 0, 1)
    )
    (zeroth,) = first
    resumed.load_state_dict(first.state_dict())
    drawn = [zeroth, *first, *other]
    assert torch.equal(next(iter(resumed)), drawn[1])
    assert len({number.item() for number in drawn}) == 3


def test_a_pass_draws_nothing_from_torchs_own_generator() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    assert len([list(loader) for loader in _loaders(9, 3, 3, shuffle=True)]) == 3
    assert torch.equal(before, torch.get_rng_state())


def test_a_loader_is_dealt_over_only_if_it_was_where_the_rank_was() -> None:
    loader = ReplicaLoader(_numbers(12), global_batch_size=4, replica=1, replicas=2)
    loader.deal_over((0, 4), (0, 1))  # the script has chosen another place than the rank's
    assert [batch.tolist() for (batch,) in loader] == [[1, 3], [5, 7], [9, 11]]
    loader.deal_over((1, 2), (0, 1))
    assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    with pytest.raises(UnsupportedError, match="less than one sample for each of the 5 replicas"):
        loader.deal_over((0, 1), (4, 5))
