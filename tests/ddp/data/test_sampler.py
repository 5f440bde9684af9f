"""Our DistributedSampler gives the indices of torch's, and every sample where it should."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import ddp
from ddp.data.permutation import LARGE, Keyed, choose
from ddp.data.sampler import Even


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 100, 101])
def test_indices_are_those_of_torch(size: int) -> None:
    data = range(size)
    for replicas, drop_last, shuffle in itertools.product((1, 2, 3, 4, 7), (False, True), (False, True)):
        for rank in range(replicas):
            ours = ddp.DistributedSampler(data, replicas, rank, shuffle, 0, drop_last)
            theirs: TorchSampler[int] = TorchSampler(data, replicas, rank, shuffle, 0, drop_last)  # type: ignore[arg-type]
            assert isinstance(ours, TorchSampler)
            assert (len(ours), ours.num_samples, ours.total_size) == (len(theirs), len(theirs), theirs.total_size)
            for epoch in (0, 1, 9, 2**32 - 1):
                ours.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert list(ours) == list(theirs)
            assert vars(theirs).items() <= vars(ours).items()


def test_the_largest_set_with_torchs_order() -> None:
    theirs: TorchSampler[int] = TorchSampler(range(LARGE), 3, 1)  # type: ignore[arg-type]
    assert list(ddp.DistributedSampler(range(LARGE), 3, 1)) == list(theirs)
    assert list(ddp.DistributedSampler(range(LARGE + 1), 3, 1))[:100] != list(theirs)[:100]


def test_orders_of_seeds_and_epochs_stay_what_they_are() -> None:
    """A run that was saved by an older version must go on in the same order."""
    assert choose(10, seed=5, epoch=2)(torch.arange(10)).tolist() == [8, 5, 7, 3, 2, 9, 6, 0, 4, 1]
    assert choose(10**7, seed=5, epoch=2)(torch.arange(5)).tolist() == [8179005, 1482179, 232682, 2666333, 9644700]
    found = choose(10**12, seed=-1, epoch=0)(torch.arange(3)).tolist()
    assert found == [851253168881, 768491158027, 894498127584]


@pytest.mark.parametrize("size", [40, LARGE + 1])
def test_no_two_pairs_of_seed_and_epoch_share_an_order(size: int) -> None:
    numbers = [0, 1, 2, 3, -1, 2**32, 2**32 + 1, 2**64 - 1, 10**40]
    orders = set()
    for seed in numbers:
        sampler = ddp.DistributedSampler(range(size), 2, 0, seed=seed)
        for epoch in numbers:
            sampler.set_epoch(epoch)
            orders.add(tuple(itertools.islice(sampler, 20)))
    assert len(orders) == len(numbers) ** 2


def _surprise(counts: torch.Tensor) -> float:
    """How many standard deviations the chi-square of counts that should be equal is above its mean."""
    expected, freedom = counts.sum() / len(counts), len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


def _surprises(orders: torch.Tensor) -> dict[str, float]:
    """Of orders (count, n), where row s is that of seed s."""
    n = orders.shape[1]
    successive = (orders[1:] - orders[:-1]) % n
    neighbours = (orders[:, 1:] - orders[:, :-1]) % n
    pairs = (orders[:, 0] * n + orders[:, 1]).bincount(minlength=n * n)
    found = {f"place {place}": _surprise(orders[:, place].bincount(minlength=n)) for place in (0, 1, n // 2, n - 1)}
    return {
        **found,
        "successive orders": _surprise(successive.flatten().bincount(minlength=n)),
        "neighbours": _surprise(neighbours.flatten().bincount(minlength=n)[1:]),
        "first two": _surprise(pairs.view(n, n)[~torch.eye(n, dtype=torch.bool)]),
    }


def test_computed_orders_look_random() -> None:
    # The smaller the set, the harder for a Feistel network: 64 samples, where it is used from a million on.
    def orders(rounds: int) -> torch.Tensor:
        keys = (f"{seed},0".encode() for seed in range(2000))
        return torch.stack([Keyed(64, key, rounds=rounds)(torch.arange(64)) for key in keys])

    assert {what: by for what, by in _surprises(orders(3)).items() if abs(by) > 4} == {}
    assert _surprises(orders(2))["neighbours"] > 10


def test_hashed_orders_look_random() -> None:
    orders = torch.stack([choose(20, seed=seed, epoch=3)(torch.arange(20)) for seed in range(1, 3001)])
    assert {what: by for what, by in _surprises(orders).items() if abs(by) > 4} == {}


def test_orders_of_a_large_set_look_random() -> None:
    n, bins = 3_000_000, 64
    first, second = (choose(n, seed=0, epoch=epoch)(torch.arange(n)) for epoch in (0, 1))
    assert torch.equal(first.sort().values, torch.arange(n))
    place, of_first, of_second = (x * bins // n for x in (torch.arange(n), first, second))
    for what, x, y in (
        ("place and index", place, of_first),
        ("two epochs", of_first, of_second),
        ("neighbours", of_first[1:], of_first[:-1]),
        ("low parts", torch.arange(n) % bins, first % bins),
    ):
        assert abs(_surprise((x * bins + y).bincount(minlength=bins**2))) < 6, what
    near = ((first[1:] - first[:-1]).abs() < 100).sum().item()  # expected: 200 of them
    assert 130 < near < 280


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 1025, 2**17 + 1])
def test_a_computed_order_has_each_index_once(size: int) -> None:
    indices = Keyed(size, b"any key")(torch.arange(size))
    assert torch.equal(indices.sort().values, torch.arange(size))


@pytest.mark.parametrize("size", [2**33 + 1, 10**12, 2**60 + 1, 2**63 - 1])
def test_a_set_that_no_memory_would_hold(size: int) -> None:
    sampler = ddp.DistributedSampler(range(size), 3, 1)
    share = list(itertools.islice(sampler, 40_000))
    assert len(set(share)) == len(share)
    assert 0 <= min(share) < size // 1000
    assert size - size // 1000 < max(share) < size
    sampler.advance(40_000)
    assert sampler.state_dict()["position"] == 120_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", None)  # no one asked for it
        assert next(iter(ddp.DistributedSampler(range(size), 3, 1))) == share[0]


@pytest.mark.parametrize("even", ["pad", "drop", "exact"])
def test_a_large_set_is_shared_out_like_a_small_one(even: Even) -> None:
    size, replicas = LARGE + 2, 5  # 5 leave 3 over
    samplers = [ddp.DistributedSampler(range(size), replicas, rank, seed=3, even=even) for rank in range(replicas)]
    shares = [torch.tensor(list(sampler)) for sampler in samplers]
    full = size // replicas
    lengths = {"pad": [full + 1] * 5, "drop": [full] * 5, "exact": [full + 1] * 3 + [full] * 2}[even]
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers] == lengths
    seen = torch.cat(shares).bincount(minlength=size)
    times_seen = {"pad": [0, size - 2, 2], "drop": [3, size - 3], "exact": [0, size]}[even]
    assert seen.bincount().tolist() == times_seen


@settings(deadline=None, max_examples=200)
@given(
    size=st.integers(0, 300),
    replicas=st.integers(1, 40),
    seed=st.integers(),
    epoch=st.integers(0, 1000),
    shuffle=st.booleans(),
    even=st.sampled_from(["pad", "drop", "exact"]),
)
def test_shares_cover_the_set(size: int, replicas: int, seed: int, epoch: int, shuffle: bool, even: Even) -> None:
    seen: Counter[int] = Counter()
    lengths = []
    for rank in range(replicas):
        sampler = ddp.DistributedSampler(range(size), replicas, rank, shuffle, seed, even=even)
        sampler.set_epoch(epoch)
        share = list(sampler)
        assert len(share) == len(sampler) == sampler.num_samples
        lengths.append(len(share))
        seen.update(share)
    assert sampler.total_size == seen.total()
    assert set(seen) <= set(range(size))
    if even == "exact":
        assert seen == Counter(range(size))
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1
        return
    assert len(set(lengths)) == 1
    if even == "drop":
        assert max(seen.values(), default=1) == 1
        assert size - seen.total() < replicas
    else:
        assert seen.total() - size < replicas
        assert len(seen) == size
        assert not seen or max(seen.values()) - min(seen.values()) <= 1


def test_without_a_group_the_world_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert sorted(ddp.DistributedSampler(range(5))) == [0, 1, 2, 3, 4]
    sampler = ddp.DistributedSampler(range(6), shuffle=False)
    loader: DataLoader[int] = DataLoader(range(6), batch_size=3, sampler=sampler)  # type: ignore[arg-type]  # torch wants a Dataset
    assert [part.tolist() for part in loader] == [[0, 1, 2], [3, 4, 5]]


def test_a_launcher_without_a_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ddp.errors.NotInitializedError, match=r"WORLD_SIZE=2.*ddp.init\(\)"):
        ddp.DistributedSampler(range(5))


def test_rank_and_size_come_from_the_group(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(ddp.DistributedSampler(range(5))) == 5


@pytest.mark.parametrize("rank", [-1, 3, 4])
def test_a_rank_outside_the_world_is_an_error(rank: int) -> None:
    with pytest.raises(ddp.errors.ArgumentError, match="0 to 2"):
        ddp.DistributedSampler(range(5), num_replicas=3, rank=rank)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), size=st.integers(0, 200), shuffle=st.booleans(), drop_last=st.booleans())
def test_an_epoch_interrupted_anywhere_sees_each_sample_once(
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


@settings(deadline=None, max_examples=300)
@given(data=st.data(), size=st.integers(0, 120), shuffle=st.booleans(), tells_nothing=st.booleans())
def test_exact_shares_interrupted_see_each_sample_once(
    data: st.DataObject, size: int, shuffle: bool, tells_nothing: bool
) -> None:
    """Ranks in step, each with its own last batch, which may be shorter than the others' or missing."""
    seen: Counter[int] = Counter()
    state = None
    for last in [False] * data.draw(st.integers(0, 4), "interruptions") + [True]:
        replicas, batch = data.draw(st.integers(1, 9), "replicas"), data.draw(st.integers(1, 7), "batch")
        samplers = [
            ddp.DistributedSampler(range(size), replicas, rank, shuffle, 3, even="exact") for rank in range(replicas)
        ]
        for sampler in samplers:
            if state:
                sampler.load_state_dict(state)
            sampler.set_epoch(4)
        rest = size - seen.total()
        assert [len(sampler) for sampler in samplers] == [len(range(rank, rest, replicas)) for rank in range(replicas)]
        passes = [iter(sampler) for sampler in samplers]
        steps = size if last else data.draw(st.integers(0, rest // (replicas * batch) + 1), "steps")
        for _ in range(steps):
            batches = [list(itertools.islice(each, batch)) for each in passes]
            for sampler, indices in zip(samplers, batches, strict=True):
                seen.update(indices)
                if indices or not tells_nothing:
                    sampler.advance(len(indices))
            state = samplers[0].state_dict()
            assert state["position"] == seen.total()
            assert all(sampler.state_dict() == state for sampler in samplers)
    assert seen == Counter(range(size))


def test_exact_shares_drawn_ahead_leave_the_position_right() -> None:
    for size, replicas, batch in itertools.product(range(30), (1, 2, 3, 5), (1, 2, 3, 4)):
        samplers = [ddp.DistributedSampler(range(size), replicas, rank, even="exact") for rank in range(replicas)]
        shares = [list(sampler) for sampler in samplers]
        done = 0
        for begin in range(0, len(shares[0]), batch):
            for sampler, share in zip(samplers, shares, strict=True):
                sampler.advance(len(share[begin : begin + batch]))
                done += len(share[begin : begin + batch])
            positions = [sampler.state_dict()["position"] for sampler in samplers]
            assert positions[0] == done
            assert set(positions) <= {done, size}
        assert done == size


def test_a_rank_without_a_share_follows_into_the_next_pass() -> None:
    state = {**ddp.DistributedSampler(range(7), 1, 0, even="exact").state_dict(), "position": 5}
    samplers = [ddp.DistributedSampler(range(7), 3, rank, even="exact") for rank in range(3)]
    for sampler in samplers:
        sampler.load_state_dict(state)
    assert [list(sampler) for sampler in samplers][2] == []
    for sampler in samplers[:2]:
        sampler.advance(1)
    assert [sampler.state_dict()["position"] for sampler in samplers] == [7, 7, 7]
    assert [len(list(sampler)) for sampler in samplers] == [3, 2, 2]  # the whole epoch again


def test_even_follows_drop_last_and_does_not_contradict_it() -> None:
    def sampler(**arguments: object) -> ddp.DistributedSampler:
        return ddp.DistributedSampler(range(5), 2, 0, **arguments)  # type: ignore[arg-type]  # some on purpose

    for arguments, even, drop_last in (
        ({}, "pad", False),
        ({"drop_last": True}, "drop", True),
        ({"even": "drop"}, "drop", True),
        ({"even": "drop", "drop_last": True}, "drop", True),
        ({"even": "exact"}, "exact", False),
    ):
        assert (sampler(**arguments).even, sampler(**arguments).drop_last) == (even, drop_last)
    for even in ("pad", "exact"):
        with pytest.raises(ddp.errors.ArgumentError, match=f"drop_last=True and even='{even}' contradict"):
            sampler(even=even, drop_last=True)
    with pytest.raises(ddp.errors.ArgumentError, match="even is 'Exact'; it must be one of 'pad', 'drop', 'exact'"):
        sampler(even="Exact")
    with pytest.raises(ddp.errors.ArgumentError, match="seed is '3'"):
        sampler(seed="3")
    with pytest.raises(ddp.errors.ArgumentError, match=r"epoch is 1\.5"):
        sampler().set_epoch(1.5)  # type: ignore[arg-type]


def test_a_set_that_grew_is_refused() -> None:
    data = list(range(5))
    sampler = ddp.DistributedSampler(data, 2, 0)
    data.append(5)
    with pytest.raises(ddp.errors.ArgumentError, match=r"had 5 samples .* has 6 now"):
        iter(sampler)


def test_a_pass_keeps_the_epoch_that_it_began_with() -> None:
    first, second = (ddp.DistributedSampler(range(20), 2, 0) for _ in range(2))
    whole = list(first)
    begun = iter(second)
    second.set_epoch(1)
    assert list(begun) == whole
    with pytest.raises(ddp.errors.ArgumentError, match="yielded 0"):  # of epoch 1
        second.advance(1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
@pytest.mark.parametrize("size", [20, LARGE + 1])
def test_a_copy_stands_where_the_original_does(
    copied: Callable[[ddp.DistributedSampler], ddp.DistributedSampler], size: int
) -> None:
    sampler = ddp.DistributedSampler(range(size), 2, 0, seed=1)
    drawn = list(itertools.islice(sampler, 7))
    sampler.advance(5)
    twin = copied(sampler)
    assert twin.state_dict() == sampler.state_dict()
    twin.advance(2)
    with pytest.raises(ddp.errors.ArgumentError, match="yielded 7"):
        twin.advance(1)
    assert sampler.state_dict()["position"] == 10
    twin.set_epoch(0)
    assert list(itertools.islice(twin, 7)) == drawn


def test_a_default_device_makes_no_difference() -> None:
    sampler = ddp.DistributedSampler(range(LARGE + 1), 2, 0)
    expected = list(itertools.islice(sampler, 5))
    with torch.device("meta"):  # nothing could be read from it
        assert list(itertools.islice(sampler, 5)) == expected
        assert sorted(ddp.DistributedSampler(range(9), 1, 0, seed=1)) == list(range(9))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_draws_ahead_loses_nothing(workers: int) -> None:
    trained: list[int] = []
    state: dict[str, int | bool | str] = {}
    for stop in (3, 99):
        sampler = ddp.DistributedSampler(range(40), 1, 0)
        if state:
            sampler.load_state_dict(state)
        loader: DataLoader[int] = DataLoader(
            range(40),  # type: ignore[arg-type]  # torch wants a Dataset
            4,
            sampler=sampler,
            num_workers=workers,
            multiprocessing_context=_fork(workers),
        )
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


def test_a_position_that_is_not_known_is_not_guessed() -> None:
    sampler = ddp.DistributedSampler(range(10), 1, 0)
    assert sampler.state_dict()["position"] == 0
    list(sampler)
    with pytest.raises(ddp.errors.ArgumentError, match=r"10 samples of epoch 0 were yielded.*sampler.advance"):
        sampler.state_dict()
    sampler.set_epoch(0)  # not another pass yet
    with pytest.raises(ddp.errors.ArgumentError, match=r"sampler.advance"):
        sampler.state_dict()
    sampler.set_epoch(1)
    assert sampler.state_dict()["position"] == 0


@pytest.mark.parametrize("samples", [5, -1])
def test_more_than_was_handed_out_cannot_be_trained_on(samples: int) -> None:
    sampler = ddp.DistributedSampler(range(10), 2, 0)
    with pytest.raises(ddp.errors.ArgumentError, match=r"advance\(1\).*yielded 0"):
        sampler.advance(1)
    list(itertools.islice(sampler, 4))
    with pytest.raises(ddp.errors.ArgumentError, match=rf"advance\({samples}\).*yielded 4 to rank 0.*own batch"):
        sampler.advance(samples)
    sampler.advance(4)


@pytest.mark.parametrize("change", [{"dataset": range(21)}, {"shuffle": False}, {"seed": 1}])
def test_a_position_in_another_permutation_is_refused(change: dict[str, object]) -> None:
    state = ddp.DistributedSampler(range(20), 1, 0).state_dict()
    arguments: dict[str, object] = {"dataset": range(20), "num_replicas": 1, "rank": 0, **change}
    with pytest.raises(ddp.errors.ArgumentError, match="the sampler was saved with"):
        ddp.DistributedSampler(**arguments).load_state_dict(state)  # type: ignore[arg-type]  # on purpose


def test_a_state_from_before_orders_had_names_was_in_torchs() -> None:
    state = ddp.DistributedSampler(range(20), 1, 0, seed=1).state_dict()
    assert state.pop("order") == "hashed"
    with pytest.raises(ddp.errors.ArgumentError, match="saved with order torch and now has hashed"):
        ddp.DistributedSampler(range(20), 1, 0, seed=1).load_state_dict(state)
    for arguments in ({"seed": 0}, {"seed": 1, "shuffle": False}):
        sampler = ddp.DistributedSampler(range(20), 1, 0, **arguments)  # type: ignore[arg-type]
        sampler.load_state_dict({**state, "shuffle": True, **arguments, "position": 5})
        assert len(sampler) == 15
