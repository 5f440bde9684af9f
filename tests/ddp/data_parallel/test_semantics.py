"""What a user's loop may do around backward, what stays as in torch, and what is refused instead of done wrong."""

from __future__ import annotations

import pytest
from ddp_worlds.nursery import Nursery


def test_no_sync_is_local_nested_and_exception_safe(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:no_sync_is_local_nested_and_survives_exceptions")


def test_every_backward_of_a_forward_is_reduced(nursery: Nursery) -> None:
    nursery.run(3, "ddp_worlds.data_parallel_cases:two_backwards_of_one_forward_are_both_reduced")


def test_a_rank_whose_backward_reaches_no_parameter_takes_part(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:rank_that_reaches_no_parameter_takes_part")


def test_autograd_grad_reduces_nothing_and_penalties_work(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:autograd_grad_reduces_nothing")


def test_outputs_may_be_nested_opaque_or_missing(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:outputs_of_any_shape")


def test_gradients_that_the_user_replaced_are_reduced(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:user_replaced_gradients_are_reduced")


def test_mixed_dtypes_are_reduced_in_their_own(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:mixed_dtypes")


def test_buffers_follow_rank_zero(nursery: Nursery) -> None:
    nursery.run(3, "ddp_worlds.data_parallel_cases:buffers_follow_rank_zero")


def test_two_forwards_through_batch_norm_then_one_backward(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:two_forwards_through_batch_norm_then_backward")


def test_parameters_frozen_later_keep_no_gradient(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:frozen_later_is_unused")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints(nursery: Nursery, use_reentrant: bool) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:checkpointed", use_reentrant=use_reentrant)


def test_state_dict_has_the_keys_of_torchs(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:state_dict_has_torchs_keys")


def test_ignored_parameters_stay_local(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:ignored_parameters_stay_local")


def test_a_subgroup_reduces_among_its_members(nursery: Nursery) -> None:
    nursery.run(3, "ddp_worlds.data_parallel_cases:subgroups_reduce_among_themselves")


def test_no_hook_outlives_the_wrapper(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:no_hook_is_left_behind")


def test_torchs_sampler_and_module_mix_with_ours(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:both_samplers_and_modules_mix")


def test_what_cannot_be_right_says_so(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.data_parallel_cases:refused")


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
