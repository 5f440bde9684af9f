"""What a user's loop may do around backward, what stays as in torch, and what is refused instead of done wrong."""

from __future__ import annotations

import pytest
from testbed.nursery import Nursery


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (2, "no_sync_is_local_nested_and_survives_exceptions"),
        (3, "two_backwards_of_one_forward_are_both_reduced"),
        (2, "rank_that_reaches_no_parameter_takes_part"),
        (2, "autograd_grad_reduces_nothing_and_penalties_work"),
        (2, "outputs_may_be_nested_opaque_or_missing"),
        (2, "user_replaced_gradients_are_reduced"),
        (3, "buffers_follow_rank_zero"),
        (2, "two_forwards_through_batch_norm_then_backward"),
        (3, "subgroups_reduce_among_themselves"),
        (2, "gradients_around_the_wrapper_are_warned_of"),
        (2, "models_that_one_backward_reaches_in_another_order_on_each_rank_are_reduced"),
    ],
)
def test_the_loop_around_backward(nursery: Nursery, world_size: int, case: str) -> None:
    nursery.run(world_size, f"ddp_worlds.data_parallel_cases:{case}")


def test_a_lost_rank_is_an_error_that_names_the_gradients(nursery: Nursery) -> None:
    *others, gone = nursery.run(3, "ddp_worlds.data_parallel_cases:lost_rank_is_named")
    assert gone is None
    for message in others:
        assert message.startswith("rank 2 is missing: the all-reduce of bucket 1 of 1")
        assert "layers." in message


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        ("shape", "1.weight"),
        ("dtype", "1.weight"),
        ("stride", "1.weight"),
        ("order", "0.weight"),
        ("requires_grad", "1.bias"),
        ("more", "extra"),
        ("buffer", "table"),
        ("setting", "bucket sizes"),
    ],
)
def test_ranks_with_different_modules_learn_the_first_difference(nursery: Nursery, kind: str, entry: str) -> None:
    for message, rank, named in nursery.run(3, "ddp_worlds.data_parallel_cases:layout_error", kind=kind):
        assert (rank, named) == (2, entry)
        assert "rank 2" in message
        assert repr(entry) in message
