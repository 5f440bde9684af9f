"""Steps on CUDA devices: the host runs ahead, a step can be captured, drift and several devices are dealt with."""

from __future__ import annotations

import pytest
import torch
from testbed.nursery import Nursery

pytestmark = pytest.mark.gpu

CASES = "ddp_worlds.gpu_step_cases:"
DEADLINE_S = 250.0  # a first use of the device loads kernels


@pytest.mark.parametrize(
    "case",
    ["steps_run_ahead_of_the_device", "a_captured_step_trains_like_others", "a_measured_model_is_explained"],
)
def test_over_nccl(nursery: Nursery, case: str) -> None:
    nursery.run(1, CASES + case, deadline_s=DEADLINE_S)


def test_drift_on_a_device_is_named(nursery: Nursery) -> None:
    nursery.run(2, CASES + "drift_on_a_device_is_named", deadline_s=DEADLINE_S)


def test_a_module_on_two_devices_is_exact(nursery: Nursery) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    nursery.run(2, CASES + "a_module_on_two_devices_is_exact", deadline_s=DEADLINE_S)
