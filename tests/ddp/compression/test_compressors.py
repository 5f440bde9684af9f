"""Compressed gradients: how exact one reduction is, what error feedback gives back, and what training notices of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ddp_worlds import compression_cases as cases
from ddp_worlds.compression_cases import LOW_RANK
from testbed.nursery import Nursery

from ddp.compression import PowerSGD


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_reduction_is_as_exact_as_its_numbers(nursery: Nursery, world_size: int) -> None:
    # Rounding to b bits of mantissa errs by 2^-b / sqrt(12) or so of a value; twice, since ranks and the average round.
    bounds = {"fp16": 0.0004, "bf16": 0.003, "int8": 0.016}
    for errors in nursery.run(world_size, "ddp_worlds.compression_cases:one_reduction"):
        for name, bound in bounds.items():
            assert bound / 8 < errors[name] < bound, (name, errors)


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (1, "world_of_one_compresses_nothing"),
        (3, "buckets_keep_their_order_at_any_pace"),
        (2, "stream_order_gives_the_same_bits"),
        (2, "two_models_go_backward_in_two_threads"),
        (2, "infinite_and_nan_reach_all_ranks_and_go_again"),
        (2, "states_that_do_not_fit_are_errors"),
        (2, "low_rank_takes_any_gradient"),
        (2, "low_rank_is_the_same_inside_autocast"),
        (2, "what_is_owed_is_paid_once_when_plans_return"),
        (3, "groups_and_arguments"),
    ],
)
def test_compressors(nursery: Nursery, world_size: int, case: str) -> None:
    nursery.run(world_size, f"ddp_worlds.compression_cases:{case}")


def test_quantized_blocks_come_back_within_half_a_scale() -> None:
    cases.quantized_blocks()


def test_error_feedback_delivers_the_sum_of_the_true_means(nursery: Nursery) -> None:
    for errors in nursery.run(2, "ddp_worlds.compression_cases:error_feedback", steps=60):
        assert errors["int8"] < 1.5  # that of the last step, however many there were
        assert errors["int8 without"] > 15
        assert errors["powersgd"] < 10


def test_training_is_that_of_float32(nursery: Nursery) -> None:
    for losses in nursery.run(2, "ddp_worlds.compression_cases:training"):
        plain = losses.pop("fp32")
        assert plain < 0.02
        for name, loss in losses.items():
            assert abs(loss - plain) < 0.02 * plain, (name, loss, plain)  # measured: 0.002


@pytest.mark.parametrize("method", ["bf16", "int8", LOW_RANK], ids=["bf16", "int8", "powersgd"])
def test_a_resumed_run_is_bitwise_the_one_that_went_on(
    nursery: Nursery, tmp_path: Path, method: str | PowerSGD
) -> None:
    nursery.run(3, "ddp_worlds.compression_cases:state_goes_on_bit_by_bit", method=method, folder=str(tmp_path))
    if method != "bf16":
        for world_size in (1, 2, 4):
            nursery.run(
                world_size, "ddp_worlds.compression_cases:what_is_owed_is_paid", method=method, folder=str(tmp_path)
            )


@pytest.mark.parametrize("method", ["bf16", "int8", LOW_RANK], ids=["bf16", "int8", "powersgd"])
def test_a_lost_rank_is_an_error(nursery: Nursery, method: str | PowerSGD) -> None:
    *others, gone = nursery.run(3, "ddp_worlds.compression_cases:lost_rank", method=method)
    assert gone is None
    for message in others:
        assert "missing: the " in message
        assert "rank 2: does not answer" in message


def test_a_rank_may_leave_without_waiting(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, "ddp_worlds.compression_cases:leaves_without_waiting", folder=str(tmp_path), deadline_s=20)


@pytest.mark.parametrize("method", ["int8", "powersgd"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_owed_stays_with_its_parameters(nursery: Nursery, world_size: int, method: str) -> None:
    nursery.run(world_size, "ddp_worlds.compression_plan_cases:plans_change", method=method)


@pytest.mark.parametrize("method", ["int8", "powersgd"])
def test_the_wrapper_may_plan_again_and_go_on_with_other_buckets_and_ranks(
    nursery: Nursery, tmp_path: Path, method: str
) -> None:
    nursery.run(3, "ddp_worlds.compression_plan_cases:wrapper_plans_again", method=method, folder=str(tmp_path))
    for world_size in (1, 2, 4):
        nursery.run(
            world_size,
            "ddp_worlds.compression_plan_cases:wrapper_goes_on_otherwise",
            method=method,
            folder=str(tmp_path),
        )


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_low_rank_recovers_from_a_gradient_of_zeros(nursery: Nursery, rank: int) -> None:
    nursery.run(2, "ddp_worlds.compression_plan_cases:zero_gradients_may_come_back", rank=rank)
