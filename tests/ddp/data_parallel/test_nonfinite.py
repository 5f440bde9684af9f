"""Gradients that are infinite or NaN are named with rank and step, or stop the run before the weights change."""

from __future__ import annotations

import pytest
from testbed.nursery import Nursery

STEPS = "ddp_worlds.nonfinite_cases:steps"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("by", ["ddp", "horovod"])
def test_one_rank_warns_once(nursery: Nursery, by: str, value: float) -> None:
    results = nursery.run(3, STEPS, by=by, on_nonfinite="warn", value=value)
    assert [len(warned) for warned, *_ in results] == [0, 0, 1]
    assert results[2][0][0].startswith("in step 3, gradients of rank 2 were infinite or NaN, and an optimizer stepped")
    assert [rest for _, *rest in results] == [[(), False, 6]] * 3


@pytest.mark.parametrize("by", ["ddp", "horovod"])
def test_stop_raises_on_every_rank_before_the_weights_change(nursery: Nursery, by: str) -> None:
    results = nursery.run(2, STEPS, by=by, on_nonfinite="stop", value=float("nan"))
    for rank, (warned, (error, *known), are_finite, done) in enumerate(results):
        assert (warned, are_finite, done) == ([], True, 2)
        assert error.startswith("in step 3, gradients of rank 1 were infinite or NaN, and an optimizer was about to")
        assert known == [3, (1,), None if rank == 1 else (1,)]


def test_gradients_that_are_spoilt_in_backward_are_seen_in_that_step(nursery: Nursery) -> None:
    results = nursery.run(2, STEPS, by="ddp", on_nonfinite="stop", value=float("nan"), in_the_middle=True)
    assert [(error[1:3], are_finite, done) for _, error, are_finite, done in results] == [((3, (1,)), True, 2)] * 2


@pytest.mark.parametrize("on_nonfinite", ["warn", "stop"])
def test_a_step_that_is_skipped_as_by_a_grad_scaler_is_no_matter(nursery: Nursery, on_nonfinite: str) -> None:
    result = nursery.run(2, STEPS, by="ddp", on_nonfinite=on_nonfinite, value=float("inf"), skipped=True)
    assert result == [([], (), True, 6)] * 2


def test_each_micro_batch_of_a_step_is_looked_at(nursery: Nursery) -> None:
    case = "ddp_worlds.nonfinite_cases:a_micro_batch_that_is_not_the_last_is_spoilt"
    assert nursery.run(2, case) == [(2, (1,), True)] * 2
