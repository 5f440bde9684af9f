"""What ranks do with a model on the simulated device, beside its numbers: how often, and for what the host waits."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_worlds.simulated_training_cases import F64, Net, Place, world_with_device
from testbed.present import present
from testbed.simulated_device import DEVICE, Device, HostWaits, register
from testbed.simulated_device.queues import Event
from torch import nn

import ddp
from ddp.comm.pinned_buffer import PinnedBuffer, recorded_event
from ddp.data_parallel import wrapper
from ddp.data_parallel.buckets import transfers
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


def weights_are_compared_with_one_late_wait(seed: int) -> None:
    """Their sums are enqueued when backward begins, and read when all gradients are on their way."""
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


def a_measured_model_waits_for_no_device_and_is_explained(seed: int) -> None:
    """Timed events are a millisecond apart, and the device is always 10 of them behind the host."""
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
            steps_s, computed_s = model._reducer.planner.timer.recent_s()  # of the steps that are over
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


class Spread(nn.Module):
    """A layer on each of two devices, each with an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, here: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.here(here).sum(), self.there(there).sum()


def a_module_on_two_devices_begins_one_pass(seed: int) -> None:
    """Autograd has a thread for each device; both find their first gradient while the pass begins.

    One of the devices is the CPU, which the wrapper refuses beside others, since only one is simulated.
    """
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
