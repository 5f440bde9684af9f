"""What ranks do with a model on a device: each function runs on every rank and asserts there. See pretend_device."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_worlds.pretend_device import HostWaits, PretendDevice, group_of_both, on_device, pretend_device
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import ddp
from ddp.comm import fingerprint
from ddp.data_parallel import wrapper
from ddp.data_parallel.buckets import transfers
from ddp.data_parallel.planning import step_timer


class Net(nn.Module):
    """Layers, batch normalization and one layer that is used on request. x: (rows, 8) -> (rows, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.BatchNorm1d(8))
        self.sometimes = nn.Linear(8, 8)
        self.uses_all, self.fails = True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("a bad batch")
        out = self.layers(x)
        return out + self.sometimes(x) if self.uses_all else out


def inputs() -> torch.Tensor:
    return torch.empty(4, 8, device="pretend:0")


def wrapped(net: nn.Module, group: dist.ProcessGroup | None = None, **settings: Any) -> ddp.DistributedDataParallel:
    with _waiting_allowed():
        group = group_of_both() if group is None else group
        settings = {"init_sync": False, **settings}
        return ddp.DistributedDataParallel(on_device(net), process_group=group, **settings)


@contextlib.contextmanager
def _waiting_allowed() -> Any:
    """Wrapping may wait for the device; a step may not."""
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    assert isinstance(mode, PretendDevice)
    mode.may_wait = True
    yield
    mode.may_wait = False


def the_device_notices_who_waits() -> None:
    """Each way in which the host waits for a device is an error: what the other tests rely on."""
    with pretend_device():
        tensor = inputs()
        for wait in (
            tensor.tolist,
            tensor.cpu,
            tensor.nonzero,
            lambda: bool(tensor.sum()),
            lambda: tensor[0, 0].item(),
            lambda: torch.tensor([1.0, 2.0], device="pretend:0"),
            lambda: torch.empty(4, 8).copy_(tensor),
            lambda: tensor.copy_(torch.empty(4, 8)),
            lambda: tensor[torch.tensor([1, 2])],
        ):
            with pytest.raises(
                (HostWaits, NotImplementedError)
            ):  # torch.tensor() goes to kernels, of which it has none
                wait()


def plain_steps_wait_for_no_device(ways: list[tuple[dict[str, Any], torch.dtype]], only_device: bool) -> None:
    """Steps with everything that a plain loop has: none reads or writes the device's memory from the host."""
    with pretend_device():
        group = dist.new_group(backend="pretend:fake") if only_device else group_of_both()
        for settings, dtype in ways:
            net = Net().to(dtype)
            model = wrapped(net, group, **settings)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for step in range(6):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                net.uses_all = step != 3 or dist.get_rank() == 0
                with model.no_sync():
                    model(inputs().to(dtype)).square().mean().backward()
                model(inputs().to(dtype)).square().mean().backward()
                assert all(p.grad is not None and p.grad.device == p.device for p in model.parameters())
                optimizer.step()


def a_failure_reaches_ranks_whose_model_is_on_a_device() -> str:
    with pretend_device():
        net = Net()
        model = wrapped(net)
        rank = dist.get_rank()
        text = ""
        for step in range(4):
            net.fails = step == 2 and rank == 1
            if step != 2:
                model(inputs()).sum().backward()
                continue
            with pytest.raises(ValueError if rank else ddp.errors.PeerFailedError) as caught:
                model(inputs()).sum().backward()
            text = str(caught.value)
            assert all(p.grad is None for p in model.parameters())
        return text


def a_parameter_that_no_rank_uses_keeps_its_gradient() -> None:
    with pretend_device():
        net = Net()
        model = wrapped(net)
        for step in range(5):
            model.zero_grad()
            net.uses_all = (dist.get_rank() == 0, False, True)[step % 3]
            model(inputs()).sum().backward()
            assert (net.sometimes.weight.grad is None) == (step % 3 == 1), step


def a_skipped_backward_is_told() -> str:
    with pretend_device():
        model = wrapped(Net())
        model(inputs()).sum().backward()
        out = model(inputs()).sum()
        if dist.get_rank() == 1:
            out = model(inputs()).sum()
        with pytest.raises(ddp.errors.BackwardError) as caught:
            out.backward()
        return str(caught.value)


def calls_of_a_step(ways: list[dict[str, Any]], averages: bool) -> list[Counter[str]]:
    """How often each operation runs on the device in a backward pass, after the first ones, for each way to wrap."""
    with pretend_device() as device, pytest.MonkeyPatch.context() as patch:
        if averages:
            patch.setattr(transfers, "_backends", lambda group: {"cpu": "gloo", "pretend": "nccl"})
        return [_calls_of_a_step(device, settings) for settings in ways]


def _calls_of_a_step(device: PretendDevice, settings: dict[str, Any]) -> Counter[str]:
    model = wrapped(Net(), **settings)
    for _ in range(4):
        model.zero_grad()
        out = model(inputs()).sum()
        device.calls.clear()
        out.backward()
    return Counter(call.rpartition(".")[0] for call in device.calls)


def weights_are_compared_with_one_late_wait() -> None:
    """Their sums are enqueued when backward begins, and read when all gradients are on their way."""
    with pretend_device() as device, pytest.MonkeyPatch.context() as patch:
        waits: list[str] = []

        class Buffer:  # pinned memory is of a device that is there
            def __init__(self, numel: int, *_: object) -> None:
                self._numel = numel

            def start_fetching(self, tensors: list[torch.Tensor]) -> None:
                (sums,) = tensors
                assert isinstance(sums, FakeTensor)
                assert sums.numel() == self._numel

            def wait(self) -> torch.Tensor:
                waits.append([call for call in device.calls if not call.startswith("prim")][-1])
                return torch.zeros(self._numel, dtype=torch.int64)

        patch.setattr(fingerprint, "PinnedBuffer", Buffer)
        drawn = torch.empty(1 << 18, dtype=torch.int64, device="pretend:0")
        patch.setattr(fingerprint, "_weights", lambda _: drawn)  # which are copied to the device once
        model = wrapped(Net(), weight_checksum=True)
        for step in range(3):
            model(inputs()).sum().backward()
            assert waits == ["c10d.allreduce_.default"] * (step + 1)


class _Events:
    """The events of the device, which comes by one each millisecond, and is always `BEHIND` of them behind the host."""

    BEHIND = 10

    def __init__(self, device: PretendDevice) -> None:
        self._device = device
        self.recorded = self.done = 0

    def record(self, *_: object, is_timed: bool) -> Any:
        assert is_timed
        self.recorded += 1
        self.done = max(self.done, self.recorded - self.BEHIND)
        return SimpleNamespace(
            query=lambda at=self.recorded: at <= self.done,
            synchronize=lambda at=self.recorded: self._wait(at),
            elapsed_time=lambda end, at=self.recorded: float(end.at - at),
            at=self.recorded,
        )

    def _wait(self, at: int) -> None:
        if at > self.done and not self._device.may_wait:
            raise HostWaits("for an event")
        self.done = max(self.done, at)


def a_measured_model_waits_for_no_device_and_is_explained() -> None:
    with pretend_device() as device, pytest.MonkeyPatch.context() as patch:
        events = _Events(device)
        patch.setattr(step_timer, "recorded_event", events.record)
        model = wrapped(Net(), measure=True, init_sync=True)
        count = len(list(model.parameters()))
        for step in range(18):
            assert (model.measurement is None) == (step < 7), step  # two steps after the last that is measured
            model.zero_grad()
            model(inputs()).sum().backward()
        assert model.measurement is not None
        record = model.measurement.record
        parts = record.forward_s, record.backward_s, record.other_s, model.measurement.step_s
        assert parts == pytest.approx((0.001, 0.001 * (count + 1), 0.002, 0.006))
        assert [each.ready_s for each in record.gradients] == pytest.approx([0.001 * at for at in range(1, count + 1)])
        steps_s, computed_s = model._reducer.planner.timer.recent_s()
        assert 3 <= len(steps_s) < 18 - 7 - 1  # the last ones are not over
        assert (steps_s[0], computed_s[0]) == pytest.approx((0.006, 0.004))  # an event is a millisecond
        if dist.get_rank() == 0:
            report = model.explain()
            assert report.backend == "fake"
            assert report.measured_step_s == pytest.approx(0.006)
            assert sum(len(time.bucket.indices) for time in report.step.buckets) == count
            assert all(time.bucket.indices for time in report.step.buckets)  # the step status is in host memory
            assert [way.title for way in report.ways] == ["LocalSGD, every=8"]
        ways: dict[str, dict[str, Any]] = {"measure=True": {}, "on a device": {"measure": True, "compression": "bf16"}}
        for refused, settings in ways.items():
            other = wrapped(Net(), init_sync=True, **settings)
            with pytest.raises(ddp.errors.UnsupportedError, match=refused):
                other.explain()


class Spread(nn.Module):
    """A layer on each of two devices, each with an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, here: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.here(here).sum(), self.there(there).sum()


def a_module_on_two_devices_begins_one_pass() -> None:
    """Autograd has a thread for each device; both find their first gradient while the pass begins.

    One of the devices is the CPU, which the wrapper refuses beside others, since there is only one that pretends.
    """
    with pretend_device() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapper, "checked_device", lambda parameters: torch.device("cpu"))
        net, oracle = Spread(), nn.Linear(8, 8)
        oracle.load_state_dict(net.here.state_dict())
        on_device(net.there)
        device.may_wait = True
        model = ddp.DistributedDataParallel(net, process_group=group_of_both(), init_sync=False)
        device.may_wait = False
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
            torch.autograd.backward(model(rows, inputs()))
            oracle(torch.ones(4, 8) * (step + 0.5)).sum().backward()
            assert len(threads) == 1, step
            torch.testing.assert_close(net.here.weight.grad, oracle.weight.grad)
            assert net.there.weight.grad.device == inputs().device
