"""What users do to parameters, graphs, gradients and loops: the same as one process on the whole batch, to 1e-12."""

from __future__ import annotations

import pytest
from testbed.nursery import Nursery

PROGRAMS = (
    # parameters
    "strided", "recurrent", "reused", "frozen in turn", "unfrozen", "unfrozen, accumulating", "normed",
    # graphs
    "answers", "answers, accumulating", "two forwards", "forward without backward", "one rank evaluates",
    "two backwards", "backward to some", "backward of two", "other order", "other layers", "conditional",
    "normed, two forwards",
    # activation checkpoints
    "recomputed", "recomputed, reentrant", "recomputed, accumulating", "wrapper recomputed",
    "wrapper recomputed, reentrant",
    # gradients
    "words", "words, accumulating", "words by SparseAdam", "replaced", "replaced, accumulating", "hooked",
)  # fmt: skip


THREE, FOUR = PROGRAMS[1::4], PROGRAMS[3::6]
TWO = tuple(name for name in PROGRAMS if name not in THREE + FOUR)


@pytest.mark.parametrize(
    ("world_size", "names"), [(1, PROGRAMS[::4]), (2, TWO), (3, THREE), (4, FOUR)], ids=["1", "2", "3", "4"]
)
def test_programs_equal_one_process(nursery: Nursery, world_size: int, names: tuple[str, ...]) -> None:
    nursery.run(world_size, "ddp_worlds.exact_cases:follow", names=names)


def test_every_program_is_tried(nursery: Nursery) -> None:
    assert nursery.run(1, "ddp_worlds.exact_cases:names_of_programs") == [sorted(PROGRAMS)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_that_are_no_means_over_equal_shards(nursery: Nursery, world_size: int) -> None:
    cases = ["sums_and_shares_with_their_factor", "weighted_means_are_exact"]
    if world_size < 3:
        cases = [
            "weighted_means_are_exact",
            "weights_that_do_not_fit_are_errors",
            "no_sync_counts_where_the_forward_is",
        ]
    nursery.in_turn(world_size, "ddp_worlds.exact_cases", cases)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            ["everything_frozen_later", "replaced_parameters_are_errors"],
            id="frozen or replaced later",
        ),
        pytest.param(
            [
                "a_rank_without_gradients_is_missed",
                "models_in_another_order_are_an_error",
                "a_wrapper_that_is_gone_says_so",
                "weights_that_later_become_ready_twice",
                "a_weight_that_is_no_number_on_one_rank_ends_the_step_everywhere",
            ],
            id="never silent",
        ),
        pytest.param(
            [
                "half_precision_is_rounded_once",
                "scaler_skips_on_all_ranks_together",
                "clipping_is_the_same_everywhere",
                "penalties_on_the_averaged_gradient",
            ],
            id="numbers",
        ),
        pytest.param(["join_may_throw_at_the_first_end", "two_threads_with_a_model_each"], id="loops"),
        pytest.param(["nothing_is_left_of_a_wrapper"], id="garbage"),
        pytest.param(
            [
                "a_control_group_has_the_timeout_of_its_group",
                "control_groups_are_shared_and_end_with_their_group",
                "a_default_device_does_not_move_what_ranks_tell_each_other",
            ],
            id="control",
        ),
    ],
)
def test_two_ranks(nursery: Nursery, cases: list[str]) -> None:
    nursery.in_turn(2, "ddp_worlds.exact_cases", cases)


def test_three_ranks(nursery: Nursery) -> None:
    cases = [
        "buffers_after_two_forwards_are_rank_zeros",
        "adversaries",
        "uneven_weighted_and_hooked_inputs",
        "unfreezing_on_one_rank_is_an_error",
        "control_groups_are_shared_and_end_with_their_group",
    ]
    nursery.in_turn(3, "ddp_worlds.exact_cases", cases)


def test_two_groups_train_side_by_side(nursery: Nursery) -> None:
    nursery.run(4, "ddp_worlds.exact_cases:two_groups_train_side_by_side")


@pytest.mark.parametrize("is_after", [False, True])
def test_hooks_of_the_user_run_before_the_average(nursery: Nursery, is_after: bool) -> None:
    nursery.run(2, "ddp_worlds.exact_cases:post_accumulate_hooks_see_this_ranks_gradient", is_after=is_after)
    nursery.run(2, "ddp_worlds.exact_cases:gradients_that_a_hook_takes_are_an_error", is_after=is_after)


@pytest.mark.parametrize("with_zero", [False, True])
def test_uneven_inputs_are_exact(nursery: Nursery, with_zero: bool) -> None:
    nursery.run(2 if with_zero else 3, "ddp_worlds.exact_cases:uneven_inputs_are_exact", with_zero=with_zero)


@pytest.mark.parametrize(
    "modes",
    [["weighted", "words", "half"], ["int8", "powersgd"]],
    ids=["plain", "compressed"],
)
def test_replicas_are_bitwise_equal_after_100_steps(nursery: Nursery, modes: list[str]) -> None:
    nursery.run(2, "ddp_worlds.exact_cases:replicas_stay_bitwise_equal", modes=modes, steps=100)
