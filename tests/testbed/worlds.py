"""Tests that run on each rank of a world: real processes with real gloo or shm, forked by the nursery.

    @world(2, 3, backend="shm")
    @pytest.mark.parametrize("size", [1, 1000])
    def test_ranks_are_equal_after_training(size: int) -> None:
        assert ...

The arguments are pytest's, and must be picklable. An assertion that fails on a rank shows its values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from testbed.nursery import BACKEND, DEADLINE_S, Nursery

T = TypeVar("T")


def world(
    *ranks: Any, backend: str | tuple[str, ...] = BACKEND, deadline_s: float = DEADLINE_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on so many processes, whose default group has this backend; once for each number and backend.

    `slow(3)` is a number whose case is slow.
    """
    backends = (backend,) if isinstance(backend, str) else backend

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def on_ranks(nursery: Nursery, _ranks: Any = ranks[0], _backend: str = backends[0], **arguments: Any) -> None:
            __tracebackhide__ = True
            nursery.run(_ranks, function, group=_backend, deadline_s=deadline_s, **arguments)

        chosen = {"_ranks": ranks, "_backend": backends}
        several = {name: values for name, values in chosen.items() if len(values) > 1}
        test = run_by(on_ranks, function, ["nursery", *several, *inspect.signature(function).parameters])
        for name, values in several.items():
            test = pytest.mark.parametrize(name, values)(test)
        return test

    return decorate


def run_by(test: Callable[..., None], on_rank: Callable[..., None], names: Sequence[str]) -> Callable[..., None]:
    """Have the nursery call `on_rank` for a test, whose arguments are those that pytest has for these names."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    vars(test)["on_rank"] = on_rank
    vars(test)["__signature__"] = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return test


def agreed(value: T) -> T:
    """Return a value of this rank, which must be the same on all."""
    import torch.distributed as dist  # heavy, and not for those that only declare

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    assert every == [every[0]] * len(every)
    return value
