"""The interface is that of torch's DistributedDataParallel, with the same numbers behind it."""

from __future__ import annotations

import pytest
from testbed.nursery import Nursery


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            ["signatures_are_torchs", "arguments_are_taken_as_torchs", "bad_arguments_are_errors"], id="arguments"
        ),
        pytest.param(
            ["what_others_read_of_a_wrapper", "lightnings_manual_optimization", "torchs_loader_and_class_beside_ours"],
            id="libraries",
        ),
        pytest.param(
            [
                "bf16_hooks_work_on_the_cpu",
                "buckets_have_torchs_interface",
                "wrong_hooks_are_errors",
                "a_hook_that_fails_on_one_rank_fails_everywhere",
                "buffer_hooks_synchronise_buffers",
            ],
            id="hooks",
        ),
        pytest.param(["states_load_both_ways", "copies_train_like_the_original"], id="copies"),
        pytest.param(
            [
                "ignored_names_stay_out",
                "functional_calls_are_exact",
                "functional_calls_with_other_parameters_say_so",
                "optimizers_in_backward_step_on_averages",
            ],
            id="parameters",
        ),
        pytest.param(["compiled_models_are_exact", "compiled_autograd_is_refused"], id="compilers"),
        pytest.param(["another_module_says_so"], id="another module"),
    ],
)
def test_surface(nursery: Nursery, cases: list[str]) -> None:
    nursery.in_turn(2, "ddp_worlds.surface_cases", cases)


@pytest.mark.parametrize("world_size", [1, 2])  # of more ranks, float16 sums depend on the order
def test_hooks_give_what_they_give_with_torchs_class(nursery: Nursery, world_size: int) -> None:
    nursery.run(world_size, "ddp_worlds.surface_cases:hooks_give_what_they_give_with_torchs_class")
