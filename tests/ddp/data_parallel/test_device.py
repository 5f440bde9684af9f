"""Models on a device: how much it does in a step, and what the host waits for. Numbers: test_simulated_device.py."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.present import present
from testbed.seeds import Seeds
from testbed.simulated_device import DEVICE, Device, HostWaits, register
from testbed.simulated_device.queues import Event
from testbed.simulated_device.training import F64, Net, Place, world_with_device
from testbed.worlds import world
from torch import nn

import ddp
from ddp.comm.pinned_buffer import PinnedBuffer, recorded_event
from ddp.data_parallel import wrapper
from ddp.data_parallel.buckets import transfers
from ddp.data_parallel.buckets.transfers import Adder
from ddp.data_parallel.planning import step_timer


def wrapped(**settings: Any) -> ddp.DistributedDataParallel:
    return ddp.DistributedDataParallel(Net().to(F64).to(DEVICE), **settings)


def calls_of_a_step(ways: list[dict[str, Any]], averages: bool, seed: int) -> list[Counter[str]]:
    """How often each operation runs on the device in a backward pass, after the first ones, for each way to wrap."""
    register()
    with world_with_device(seed) as device, pytest.MonkeyPatch.context() as patch:
        if not averages:
            patch.setattr(transfers, "_backends", lambda group: {"cpu": "gloo", "sim": "other"})
        return [_calls_of_a_step(device, settings) for settings in ways]


def _calls_of_a_step(device: Device, settings: dict[str, Any]) -> Counter[str]:
    place, model = Place(device), wrapped(**settings)
    for step in range(4):
        model.zero_grad()
        out = model(place.inputs(step)).sum()
        device.calls.clear()
        out.backward()
    return Counter(call.rpartition(".")[0] for call in device.calls)


class Spread(nn.Module):
    """A layer on each of two devices, each with an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, here: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.here(here).sum(), self.there(there).sum()


MOVING = {f"aten.{name}" for name in ("copy_", "_foreach_copy_", "div", "div_", "mul", "mul_", "clone", "zero_")}
MOVING.add("c10d.allreduce_")


@pytest.mark.parametrize("averages", [False, True])
def test_a_bucket_on_a_device_is_one_copy_and_one_reduction(nursery: Nursery, seeds: Seeds, averages: bool) -> None:
    expected = {None: (1, 1), 1e-4: (2, 6)}  # by size of buckets: copies, reductions
    ways = [{"bucket_cap_mb": cap, "gradient_as_bucket_view": views} for cap in expected for views in (False, True)]
    for every in nursery.run(2, calls_of_a_step, ways=ways, averages=averages, seed=seeds(1)[0]):
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


@world(2)
def test_threads_of_two_devices_begin_one_pass(seeds: Seeds) -> None:
    """Autograd has a thread for each device; both find their first gradient while the pass begins.

    One of the devices is the CPU, which the wrapper refuses beside others, since only one is simulated.
    """
    (seed,) = seeds(1)
    register()
    with world_with_device(seed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapper, "checked_device", lambda parameters: torch.device("cpu"))
        net, oracle = Spread(), Spread()
        oracle.load_state_dict(net.state_dict())
        net.there.to(DEVICE)
        model = ddp.DistributedDataParallel(net)
        policy = model._policy
        starting, threads = policy.starting, []

        def start_slowly() -> None:
            threads.append(threading.get_ident())
            time.sleep(0.3)  # for the other thread
            starting()

        patch.setattr(policy, "starting", start_slowly)
        for step in range(3):
            model.zero_grad()
            oracle.zero_grad()
            threads.clear()
            rows = torch.ones(4, 8) * (dist.get_rank() + step)
            torch.autograd.backward(model(rows, rows.to(DEVICE)))
            torch.autograd.backward(oracle(*[torch.ones(4, 8) * (step + 0.5)] * 2))
            assert len(threads) == 1, step
            for found, right in zip(net.parameters(), oracle.parameters(), strict=True):
                torch.testing.assert_close(present(found.grad).cpu(), right.grad)


@world(2)
def test_weights_are_compared_with_one_late_wait(seeds: Seeds) -> None:
    """Their sums are enqueued when backward begins, and read when all gradients are on their way."""
    (seed,) = seeds(1)
    register()
    with world_with_device(seed) as device, pytest.MonkeyPatch.context() as patch:
        waits: list[str] = []
        real = PinnedBuffer.wait

        def wait(buffer: PinnedBuffer) -> torch.Tensor:
            if buffer._is_busy:
                waits.append([call for call in device.calls if not call.startswith("prim")][-1])
            return real(buffer)

        patch.setattr(PinnedBuffer, "wait", wait)
        model = wrapped(weight_checksum=True)
        for step in range(3):
            model(Place(device).inputs(step)).sum().backward()
            assert waits == ["c10d.allreduce_.default"] * (step + 1)


@world(2)
def test_a_measured_model_waits_for_no_device_and_is_explained(seeds: Seeds) -> None:
    """Timed events are a millisecond apart, and the device is always 10 of them behind the host."""
    (seed,) = seeds(1)
    register()
    with world_with_device(seed) as device, pytest.MonkeyPatch.context() as patch:
        events: list[Any] = []

        def record(*given: Any, **options: Any) -> Any:
            events.append(recorded_event(*given, **options))
            if len(events) > 10:
                device.scheduler.finish(events[-11].op)
            return events[-1]

        def synchronize(event: Event) -> None:
            if not device.may_wait and event in events and not present(event.op).is_done:
                raise HostWaits("for an event")
            wait(event)

        wait = Event.synchronize
        patch.setattr(step_timer, "recorded_event", record)
        patch.setattr(Event, "synchronize", synchronize)
        patch.setattr(Event, "elapsed_time", lambda start, end: float(events.index(end) - events.index(start)))
        place, model = Place(device), wrapped(measure=True)
        count = len(list(model.parameters()))
        with place.without_waits():
            for step in range(18):
                assert (model.measurement is None) == (step < 7), step  # two steps after the last that is measured
                model.zero_grad()
                model(place.inputs(step)).sum().backward()
            steps_s, computed_s = present(
                present(model._reducer).planner
            ).timer.recent_s()  # of the steps that are over
        assert model.measurement is not None
        times = model.measurement.record
        parts = times.forward_s, times.backward_s, times.other_s, model.measurement.step_s
        assert parts == pytest.approx((0.001, 0.001 * (count + 1), 0.002, 0.006))
        assert [each.ready_s for each in times.gradients] == pytest.approx([0.001 * at for at in range(1, count + 1)])
        assert len(steps_s) >= 3
        assert (steps_s[0], computed_s[0]) == pytest.approx((0.006, 0.004))  # an event is a millisecond
        if dist.get_rank() == 0:
            report = model.explain()
            assert report.backend == "nccl"
            assert report.measured_step_s == pytest.approx(0.006)
            assert sum(len(time.bucket.indices) for time in report.step.buckets) == count
            assert all(time.bucket.indices for time in report.step.buckets)  # the step status is in host memory
            assert [way.title for way in report.ways] == ["LocalSGD, every=8"]
        ways: dict[str, dict[str, Any]] = {"measure=True": {}, "on a device": {"measure": True, "compression": "bf16"}}
        for refused, settings in ways.items():
            other = wrapped(**settings)
            with pytest.raises(ddp.errors.UnsupportedError, match=refused):
                other.explain()
