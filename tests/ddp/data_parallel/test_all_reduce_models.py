"""Times of all-reduces in worlds that are not here: what each algorithm sends, counted by hand and by the messages."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp.data_parallel.explaining.all_reduce_models import (
    Layout,
    Link,
    all_reduce_s,
    hierarchical_s,
    recursive_doubling_s,
    ring_s,
    tree_s,
)
from ddp.data_parallel.explaining.extrapolate import expected_maximum

LOCAL, NETWORK = Link(1e-6, 1e10), Link(1e-5, 1e9)
Model = Callable[[Layout, float], float]
MODELS = (hierarchical_s, recursive_doubling_s, ring_s, tree_s)


def layout(hosts: int, ranks: int) -> Layout:
    return Layout(hosts, ranks, LOCAL, NETWORK)


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_sends_nothing(model: Model) -> None:
    assert model(layout(1, 1), 1e9) == 0


@pytest.mark.parametrize("model", [hierarchical_s, ring_s])
def test_a_ring_sends_each_byte_nearly_twice_over_the_slowest_link(model: Model) -> None:
    assert model(layout(1, 4), 1e9) == pytest.approx(6 * 1e-6 + 1.5 * 0.1)
    assert model(layout(4, 1), 1e9) == pytest.approx(6 * 1e-5 + 1.5 * 1.0)


def test_a_ring_over_hosts_passes_the_network_twice_a_host() -> None:
    assert ring_s(layout(2, 4), 1e9) == pytest.approx(12 * 1e-6 + 2 * 1e-5 + 2 * 7 / 8 * 1.0)


def test_a_ring_waits_for_local_links_that_are_slower_than_the_network() -> None:
    slow = Layout(2, 2, Link(0, 1e8), NETWORK)
    assert ring_s(slow, 1e8) == pytest.approx(1.5, rel=1e-3)
    assert ring_s(Layout(4, 1, Link(0, 1e8), NETWORK), 1e8) == pytest.approx(0.15, rel=1e-3)  # nobody uses them


def test_a_hierarchy_sends_over_the_network_what_a_ring_of_the_hosts_does() -> None:
    within_s, between_s = 2 * 3 * 1e-6 + 2 * 3 / 4 * 0.1, 2 * 1e-5 + 1.0
    assert hierarchical_s(layout(2, 4), 1e9) == pytest.approx(within_s + between_s)


@given(hosts=st.integers(1, 40), ranks=st.integers(1, 9))
def test_recursive_doubling_takes_as_long_as_its_messages_one_by_one(hosts: int, ranks: int) -> None:
    """The messages of `ddp.comm.small_sum`, and how many of them a host sends at the same time."""
    size = hosts * ranks
    inner = 1 << (size.bit_length() - 1)
    extra = [[(rank, rank - inner) for rank in range(inner, size)]] if size > inner else []
    rounds = [[(rank, rank ^ (1 << step)) for rank in range(inner)] for step in range(inner.bit_length() - 1)]
    free = Layout(hosts, ranks, Link(1.0, math.inf), Link(1.0, math.inf))
    assert recursive_doubling_s(free, 1) == len([*extra, *rounds, *extra])
    if hosts & (hosts - 1) or ranks & (ranks - 1):
        return  # the model takes a round whose partners are partly of one host for one over the network or not
    wire = Layout(hosts, ranks, Link(0, 1.0), Link(0, 1.0))
    busiest = 0.0
    for pairs in rounds:
        sent = [source // ranks for source, target in pairs if source // ranks != target // ranks]
        busiest += max((sent.count(host) for host in range(hosts)), default=1) if sent else 1
    assert recursive_doubling_s(wire, 1) == busiest


def test_trees_win_with_small_messages_in_many_hosts_and_rings_with_large_ones() -> None:
    world = layout(64, 8)
    assert all_reduce_s("nccl", world, 1e3) == tree_s(world, 1e3) < ring_s(world, 1e3)
    local = layout(1, 8)
    assert all_reduce_s("nccl", local, 1e9) == ring_s(local, 1e9) < tree_s(local, 1e9)
    assert tree_s(world, 0) == pytest.approx(2 * (7 * 1e-6 + 6 * 1e-5))


@pytest.mark.parametrize(("backend", "model"), [("gloo", ring_s), ("shm", hierarchical_s), ("mpi", ring_s)])
def test_each_backend_has_its_algorithm(backend: str, model: Model) -> None:
    assert all_reduce_s(backend, layout(3, 5), 12345) == model(layout(3, 5), 12345)


@given(sample=st.lists(st.floats(0, 100), min_size=1, max_size=6), draws=st.integers(1, 4))
def test_the_expected_maximum_is_the_mean_over_all_draws_from_the_sample(sample: list[float], draws: int) -> None:
    if draws > len(sample):
        return
    every = [max(drawn) for drawn in itertools.product(sample, repeat=draws)]
    assert expected_maximum(sample, draws) == pytest.approx(sum(every) / len(every), abs=1e-9)


def test_the_expected_maximum_of_more_draws_than_samples_grows_as_that_of_an_exponential_tail_does() -> None:
    random_ = random.Random(0)
    sample = [10 + random_.expovariate(1.0) for _ in range(2000)]
    for draws in (2, 100, 2000, 100_000):
        truth = 10 + sum(1 / at for at in range(1, draws + 1))  # the harmonic number
        assert expected_maximum(sample, draws) == pytest.approx(truth, rel=0.05)


def test_ranks_that_always_take_the_same_wait_for_nobody() -> None:
    assert expected_maximum([0.5] * 7, 1000) == pytest.approx(0.5)
    assert expected_maximum([0.5], 1000) == 0.5
