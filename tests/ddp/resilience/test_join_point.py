"""A rank that waits at a commit for the promises of the others stops waiting when there is no agreement."""

import threading

import pytest
import torch.distributed as dist

from ddp.resilience.join_point import JoinPoint, Regroup, stop_elsewhere

LIMIT_S = 30.0


class GoneStore:
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")


def waiting(point: JoinPoint) -> threading.Thread:
    """A thread that is at a commit far ahead of the promise."""
    thread = threading.Thread(target=point.committed, args=(100,), daemon=True)
    thread.start()
    return thread


def test_a_commit_does_not_wait_for_ranks_stopped_elsewhere() -> None:
    store, point = dist.HashStore(), JoinPoint(1, lambda: False)
    agreed: list[bool] = []
    agreement = threading.Thread(target=lambda: agreed.append(point.agree(store, 0, 2, lambda: 0)), daemon=True)
    agreement.start()
    store.wait(["promise/0"])
    at_commit = waiting(point)
    stop_elsewhere(store)
    agreement.join(LIMIT_S)
    at_commit.join(LIMIT_S)
    assert agreed == [False]
    assert not at_commit.is_alive()


def test_a_commit_does_not_wait_when_the_store_is_gone() -> None:
    point = JoinPoint(1, lambda: False)
    with pytest.raises(RuntimeError, match="Broken pipe"):
        point.agree(GoneStore(), 0, 2, lambda: 0)
    at_commit = waiting(point)
    at_commit.join(LIMIT_S)
    assert not at_commit.is_alive()
    assert not point.is_agreed


def test_all_stop_at_the_last_of_the_promised_commits() -> None:
    store, point, other = dist.HashStore(), JoinPoint(1, lambda: False), JoinPoint(1, lambda: False)
    promise = threading.Thread(target=other.agree, args=(store, 1, 2, lambda: 5), daemon=True)
    promise.start()
    assert point.agree(store, 0, 2, lambda: 3)
    promise.join(LIMIT_S)
    point.committed(6)
    with pytest.raises(Regroup):
        point.committed(7)
