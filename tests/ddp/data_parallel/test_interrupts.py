"""An exception that a signal's handler raises at any line of a step: that rank's own, and nothing is sent twice."""

from __future__ import annotations

import random

import pytest
from testbed.nursery import Nursery


def interrupt_from(nursery: Nursery, backend: str, first: int, stride: int, worlds: int = 1000) -> list[str]:
    """Interrupt steps at lines `first`, `first` + `stride` and so on, until a step has no such line; what was wrong."""
    wrong: list[str] = []
    for _ in range(worlds):
        results = nursery.run(
            2, "ddp_worlds.interrupt_cases:interrupted_from", group=backend, first=first, stride=stride
        )
        wrong += [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(results) for text in texts]
        last = results[1][0]
        if not last:
            break
        first = last + stride
    return wrong


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_signal_at_any_line_of_a_step_raises_on_its_rank_alone_and_no_rank_waits(
    nursery: Nursery, backend: str
) -> None:
    """In two worlds at some lines; in many more in test_a_signal_all_through_a_step."""
    first = random.randrange(1, 500)
    print("first line:", first)
    assert interrupt_from(nursery, backend, first, 90, worlds=2) == []


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_signal_all_through_a_step(nursery: Nursery, backend: str) -> None:
    first = random.randrange(1, 38)
    print("first line:", first)
    assert interrupt_from(nursery, backend, first, 37) == []


def test_a_signal_at_each_line_where_the_passes_of_reducers_end_together(nursery: Nursery) -> None:
    assert nursery.run(1, "ddp_worlds.interrupt_cases:interrupted_where_passes_end_together") == [[]]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize(
    "call", ["check_replicas", "gather_metrics", "gather_samples", "broadcast_object", "step that unfreezes", "fit"]
)
def test_a_signal_at_any_line_of_a_call_that_others_make_too_raises_on_its_rank_alone(
    nursery: Nursery, call: str, backend: str
) -> None:
    part = random.random()
    print("part:", part)
    for wrong in nursery.run(2, "ddp_worlds.interrupt_cases:interrupted_call", group=backend, call=call, part=part):
        assert wrong == []
