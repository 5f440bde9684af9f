"""Models on a device: the host waits for it in no plain step, and the ranks tell each other the same as on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_worlds.nursery import Nursery

from ddp.data_parallel.buckets.transfers import Adder

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="only torch 2.10 has devices that are made in Python"
)

CASES = "ddp_worlds.device_cases:"
MOVING = {f"aten.{name}" for name in ("copy_", "_foreach_copy_", "div", "div_", "mul", "mul_", "clone", "zero_")}
MOVING.add("c10d.allreduce_")


@pytest.mark.control
def test_the_device_of_these_tests_notices_who_waits_for_it(nursery: Nursery) -> None:
    nursery.run(1, CASES + "the_device_notices_who_waits")


@pytest.mark.parametrize("only_device", [False, True])
def test_no_plain_step_waits_for_the_device(nursery: Nursery, only_device: bool) -> None:
    ways = [
        ({}, torch.float32),
        ({"gradient_as_bucket_view": True}, torch.bfloat16),
        ({"bucket_cap_mb": 1e-4}, torch.float64),
        ({"bucket_cap_mb": 1e-6}, torch.bfloat16),
    ]
    nursery.run(2, CASES + "plain_steps_wait_for_no_device", ways=ways, only_device=only_device)


def test_a_failure_on_one_rank_is_everybodys(nursery: Nursery) -> None:
    reported, own = nursery.run(2, CASES + "a_failure_reaches_ranks_whose_model_is_on_a_device")
    assert own == "a bad batch"
    assert "step 3 failed on rank 1" in reported


def test_unused_parameters_are_reported(nursery: Nursery) -> None:
    nursery.run(2, CASES + "a_parameter_that_no_rank_uses_keeps_its_gradient")


def test_a_skipped_backward_is_reported(nursery: Nursery) -> None:
    for text in nursery.run(2, CASES + "a_skipped_backward_is_told"):
        assert "rank 1 made 1" in text


@pytest.mark.parametrize("averages", [False, True])
def test_a_bucket_on_a_device_is_one_copy_and_one_reduction_and_a_gradient_alone_is_not_copied(
    nursery: Nursery, averages: bool
) -> None:
    expected = {None: (1, 1), 1e-4: (2, 7)}  # by size of buckets: copies, reductions
    ways = [{"bucket_cap_mb": cap, "gradient_as_bucket_view": views} for cap in expected for views in (False, True)]
    for every in nursery.run(2, CASES + "calls_of_a_step", ways=ways, averages=averages):
        for way, calls in zip(ways, every, strict=True):
            copies, buckets = expected[way["bucket_cap_mb"]]
            moving = {name: count for name, count in calls.items() if name in MOVING}
            assert (moving.pop("aten._foreach_copy_"), moving.pop("c10d.allreduce_")) == (copies, buckets)
            assert moving == ({} if averages else {"aten.div_": buckets})


def test_nccl_averages_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = SimpleNamespace(size=lambda: 4)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl,xpu:xccl")
    found = {device: Adder(group, torch.device(device)) for device in ("cpu", "cuda", "xpu")}
    assert {device: adder.divisor for device, adder in found.items()} == {"cpu": 4, "cuda": 1, "xpu": 4}
    operations: list[object] = [adder._options.reduceOp for adder in found.values()]
    assert operations == [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.SUM]


def test_threads_of_two_devices_begin_one_pass(nursery: Nursery) -> None:
    nursery.run(2, CASES + "a_module_on_two_devices_begins_one_pass")


def test_weights_are_compared_with_one_late_wait(nursery: Nursery) -> None:
    nursery.run(2, CASES + "weights_are_compared_with_one_late_wait")


def test_a_measured_model_waits_for_no_device_and_is_explained(nursery: Nursery) -> None:
    nursery.run(2, CASES + "a_measured_model_waits_for_no_device_and_is_explained")
