"""Ranks that meet under a new generation: who is missing is named, and a look costs the store one key."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import mul
from typing import Any

import pytest
import torch.distributed as dist

from ddp.errors import RendezvousError, ReplacementError
from ddp.generation.meeting import meet, refuse
from ddp.resilience.join_point import JoinPoint, Regroup

RANKS = 8
LIMIT_S = 60.0


class Asked:
    """A store that notes how many keys each look asks for."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.keys: list[int] = []

    def check(self, keys: list[str]) -> bool:
        self.keys.append(len(keys))
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def never() -> bool:
    return False


def test_all_ranks_meet_and_a_look_asks_for_one_key() -> None:
    store = Asked(dist.HashStore())
    with ThreadPoolExecutor(RANKS) as pool:
        early = [pool.submit(meet, store, rank, RANKS, never, LIMIT_S) for rank in range(1, RANKS)]
        assert not any(each.done() for each in early)
        assert meet(store, 0, RANKS, never, LIMIT_S)
        assert all(each.result(LIMIT_S) for each in early)
    assert {*store.keys} == {1}


def test_promises_are_exchanged_and_a_look_asks_for_one_key() -> None:
    store = Asked(dist.HashStore())
    points = [JoinPoint(1, never) for _ in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        agreed = [
            pool.submit(point.agree, store, rank, RANKS, partial(mul, 10, rank)) for rank, point in enumerate(points)
        ]
        assert all(each.result(LIMIT_S) for each in agreed)
    for point in points:
        point.committed(71)
        with pytest.raises(Regroup):
            point.committed(72)
    assert {*store.keys} == {1}


def test_a_look_for_the_promises_of_others_is_one_request() -> None:
    store, looks = Asked(dist.HashStore()), 0

    def is_over() -> bool:
        nonlocal looks
        looks += 1
        return looks == 4

    assert not JoinPoint(1, is_over).agree(store, 0, 2, lambda: 3)
    assert len(store.keys) == looks


def test_ranks_that_do_not_come_are_named() -> None:
    store = dist.HashStore()
    assert not meet(store, 2, 4, lambda: True, LIMIT_S)  # it has come, and heard of a newer generation
    assert not meet(store, 2, 4, lambda: True, LIMIT_S)  # however often it comes, it is one rank
    with pytest.raises(RendezvousError, match=r"rank 0 of 4 waited \d+ s for .*; missing: 1, 3$"):
        meet(store, 0, 4, never, 0.1)


def test_a_rank_that_will_not_come_ends_the_wait_of_the_others() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, store, 0, 2, never, LIMIT_S)
        refuse(store, "rank 1 has left")
        with pytest.raises(ReplacementError, match=r"^rank 1 has left, so the others cannot continue"):
            waiting.result(LIMIT_S)


def test_a_newer_generation_ends_the_wait() -> None:
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, dist.HashStore(), 0, 2, is_over.is_set, LIMIT_S)
        is_over.set()
        assert waiting.result(LIMIT_S) is False
