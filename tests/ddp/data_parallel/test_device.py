"""Models on a device: the host waits for it in no plain step, and the ranks tell each other the same as on the CPU."""

from __future__ import annotations

import pytest
import torch
from ddp_worlds.nursery import Nursery

CASES = "ddp_worlds.device_cases:"


def test_the_device_of_these_tests_notices_who_waits_for_it(nursery: Nursery) -> None:
    nursery.run(1, CASES + "the_device_notices_who_waits")


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float32),
        ({"gradient_as_bucket_view": True}, torch.bfloat16),
        ({"bucket_cap_mb": 1e-4}, torch.float64),
        ({"bucket_cap_mb": 1e-6}, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("only_device", [False, True])
def test_no_plain_step_waits_for_the_device(
    nursery: Nursery, settings: dict[str, object], dtype: torch.dtype, only_device: bool
) -> None:
    nursery.run(2, CASES + "plain_steps_wait_for_no_device", settings=settings, dtype=dtype, only_device=only_device)


def test_a_failure_on_one_rank_is_everybodys(nursery: Nursery) -> None:
    told, own = nursery.run(2, CASES + "a_failure_reaches_ranks_whose_model_is_on_a_device")
    assert own == "a bad batch"
    assert "step 3 failed on rank 1" in told


def test_unused_parameters_are_told(nursery: Nursery) -> None:
    nursery.run(2, CASES + "a_parameter_that_no_rank_uses_keeps_its_gradient")


def test_a_skipped_backward_is_told(nursery: Nursery) -> None:
    for text in nursery.run(2, CASES + "a_skipped_backward_is_told"):
        assert "rank 1 made 1" in text
