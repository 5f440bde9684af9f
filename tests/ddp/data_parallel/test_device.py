"""Models on a device: how much it does in a step, and what the host waits for. Numbers: test_simulated_device.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.seeds import Seeds

from ddp.data_parallel.buckets.transfers import Adder

CASES = "ddp_worlds.device_cases:"
MOVING = {f"aten.{name}" for name in ("copy_", "_foreach_copy_", "div", "div_", "mul", "mul_", "clone", "zero_")}
MOVING.add("c10d.allreduce_")


@pytest.mark.parametrize("averages", [False, True])
def test_a_bucket_on_a_device_is_one_copy_and_one_reduction_and_a_gradient_alone_is_not_copied(
    nursery: Nursery, seeds: Seeds, averages: bool
) -> None:
    expected = {None: (1, 1), 1e-4: (2, 6)}  # by size of buckets: copies, reductions
    ways = [{"bucket_cap_mb": cap, "gradient_as_bucket_view": views} for cap in expected for views in (False, True)]
    for every in nursery.run(2, CASES + "calls_of_a_step", ways=ways, averages=averages, seed=seeds(1)[0]):
        for way, calls in zip(ways, every, strict=True):
            copies, buckets = expected[way["bucket_cap_mb"]]
            moving = {name: count for name, count in calls.items() if name in MOVING}
            assert (moving.pop("aten._foreach_copy_"), moving.pop("c10d.allreduce_")) == (copies, buckets)
            assert moving.pop("aten.mul") == 1  # the model's
            assert moving == ({} if averages else {"aten.div_": buckets})


def test_nccl_averages_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = SimpleNamespace(size=lambda: 4)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl,xpu:xccl")
    found = {device: Adder(group, torch.device(device)) for device in ("cpu", "cuda", "xpu")}
    assert {device: adder.divisor for device, adder in found.items()} == {"cpu": 4, "cuda": 1, "xpu": 4}
    operations: list[object] = [adder._options.reduceOp for adder in found.values()]
    assert operations == [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.SUM]


def test_threads_of_two_devices_begin_one_pass(nursery: Nursery, seeds: Seeds) -> None:
    nursery.run(2, CASES + "a_module_on_two_devices_begins_one_pass", seed=seeds(1)[0])


def test_weights_are_compared_with_one_late_wait(nursery: Nursery, seeds: Seeds) -> None:
    nursery.run(2, CASES + "weights_are_compared_with_one_late_wait", seed=seeds(1)[0])


def test_a_measured_model_waits_for_no_device_and_is_explained(nursery: Nursery, seeds: Seeds) -> None:
    nursery.run(2, CASES + "a_measured_model_waits_for_no_device_and_is_explained", seed=seeds(1)[0])
