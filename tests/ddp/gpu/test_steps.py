# mypy: disable-error-code="index, union-attr"
"""Steps on CUDA devices: the host runs ahead, a step can be captured, drift and several devices are dealt with."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.sync_debug import waiting_is_an_error
from testbed.worlds import world
from torch import nn

import ddp

pytestmark = pytest.mark.gpu
DEADLINE_S = 250.0  # a first use of the device loads kernels


@contextlib.contextmanager
def _nccl_alone() -> Iterator[None]:
    """A world of one over NCCL, as ddp.init() makes it."""
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # torch's documentation asks for that in a graph capture
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32)).to("cuda:0")


def _reducing(module: nn.Module, **settings: Any) -> ddp.DistributedDataParallel:
    """A wrapper that communicates in a world of one as in others."""
    model = ddp.DistributedDataParallel(module, **settings)
    if model._reducer is None:
        model._attach(model._new_channel())
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@world(1, deadline_s=DEADLINE_S)
def test_steps_run_ahead_of_the_device() -> None:
    """The device sleeps; the host makes whole steps meanwhile, and asks it for nothing."""
    with _nccl_alone():
        x = torch.randn(16, 32, device="cuda:0")
        for settings in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-3}):
            model = _reducing(_net().bfloat16(), **settings)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for _ in range(4):
                _step(model, optimizer, x.bfloat16())
            torch.cuda.synchronize()
            is_over = torch.cuda.Event()
            with waiting_is_an_error():
                torch.cuda._sleep(10_000_000_000)  # cycles: some five seconds
                is_over.record()
                for _ in range(3):
                    _step(model, optimizer, x.bfloat16())
                assert not is_over.query(), f"the host has waited for the device: {settings}"
            torch.cuda.synchronize()


@world(1, deadline_s=DEADLINE_S)
def test_a_captured_step_trains_like_others() -> None:
    """Forward, backward and optimizer in one CUDA graph, as torch's documentation captures its own class."""
    with _nccl_alone():
        x = torch.empty(16, 32, device="cuda:0")
        net = _net()
        oracle = copy.deepcopy(net)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        batches = torch.randn(16, 16, 32, device="cuda:0")
        with torch.cuda.stream(side):
            model = _reducing(net, forward_sync_buffers=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for batch in batches[:11]:  # and the first one plans the buckets
                x.copy_(batch)
                _step(model, optimizer, x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # where the gradients arrive
            model(x).square().mean().backward()
            optimizer.step()
        for batch in batches[11:]:
            x.copy_(batch)
            graph.replay()
        theirs = torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9)
        for batch in batches:
            _step(oracle, theirs, batch)
        for mine, expected in zip(net.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@world(1, deadline_s=DEADLINE_S)
def test_a_measured_model_is_explained() -> None:
    """By events, for which the host waits in no step."""
    with _nccl_alone(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp.DistributedDataParallel, "_least_ranks", 1)
        model = ddp.DistributedDataParallel(_net(), measure=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(16, 32, device="cuda:0")
        _step(model, optimizer, x)
        torch.cuda.synchronize()
        with waiting_is_an_error():
            for _ in range(20):
                _step(model, optimizer, x)
        torch.cuda.synchronize()
        assert model.measurement is not None
        record = model.measurement.record
        ready = [gradient.ready_s for gradient in record.gradients]
        assert 0 < ready[0] <= ready[-1] <= record.backward_s
        assert min(record.forward_s, record.other_s, model.measurement.step_s) > 0
        report = model.explain()
        assert report.backend == "nccl"
        assert report.measured_steps >= 10
        assert 0 < report.measured_step_s < 1


@world(2, deadline_s=DEADLINE_S)
def test_drift_on_a_device_is_named() -> None:
    """Two ranks on one device, over gloo: one changes one bit of a weight."""
    net = _net()
    model = ddp.DistributedDataParallel(net, weight_checksum=True)
    x = torch.full((4, 32), float(dist.get_rank() + 1), device="cuda:0")
    for step in range(4):
        model.zero_grad()
        if step == 3 and dist.get_rank() == 1:
            with torch.no_grad():
                net[3].weight.view(torch.int32)[5, 5] ^= 1
        loss = model(x).square().mean()
        if step < 3:
            loss.backward()
            continue
        with pytest.raises(ddp.errors.DriftError) as caught:
            loss.backward()
        assert (caught.value.parameter, caught.value.step) == ("3.weight", 4)


@pytest.fixture
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


class Halves(nn.Module):
    """A layer on each of two devices, and an output on each. x: (rows, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.beside = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        here = self.first(x).tanh()
        there = here.to(self.second.weight.device)
        return self.beside(here).square().sum(), self.second(there).square().sum()


@pytest.mark.usefixtures("two_devices")
@world(2, deadline_s=DEADLINE_S)
def test_a_module_on_two_devices_is_exact() -> None:
    """Two ranks over gloo, each with both devices, against one process with all inputs."""
    torch.manual_seed(0)
    oracle = Halves().double()
    net = copy.deepcopy(oracle)
    net.to("cuda:0")
    net.second.to("cuda:1")
    ranks = dist.get_world_size()
    for views in (False, True):
        model = ddp.DistributedDataParallel(net, gradient_as_bucket_view=views)
        for step in range(20):
            x = torch.randn(4 * ranks, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            oracle.zero_grad()
            torch.autograd.backward(model(x.chunk(ranks)[dist.get_rank()].to("cuda:0")))
            torch.autograd.backward([loss / ranks for loss in oracle(x)])
            for mine, expected in zip(net.parameters(), oracle.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.cpu(), expected.grad, rtol=1e-10, atol=1e-12)
