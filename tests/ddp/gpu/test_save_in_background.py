"""A save in the background of a model on a CUDA device: copied in stream order, without waiting for the device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from testbed.sync_debug import waiting_is_an_error
from torch import nn

import ddp
from ddp.checkpoint.copies import HostCopy, HostMemory

pytestmark = pytest.mark.gpu


def test_a_copy_is_what_the_tensors_were_in_stream_order() -> None:
    size = 4096
    weight = torch.ones(size, size, device="cuda")
    tied = weight.t()
    memory = HostMemory()
    HostCopy(memory).of(weight)  # the pinned memory is there from now on
    torch.cuda.synchronize()
    copies = HostCopy(memory)
    with waiting_is_an_error():
        for _ in range(20):
            weight.copy_((weight @ weight).div_(size))  # 1 again, and long enough to be still running below
        copied = copies.of({"weight": weight, "tied": tied})
        weight.zero_()
    copies.wait()
    assert copied["weight"].device.type == "cpu"
    assert copied["weight"].is_pinned()
    assert torch.equal(copied["weight"], torch.ones(size, size))
    assert copied["tied"].untyped_storage().data_ptr() == copied["weight"].untyped_storage().data_ptr()


def test_training_that_goes_on_does_not_change_the_file(tmp_path: Path) -> None:
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()

    train()
    expected = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    checkpoint = ddp.Checkpoint(tmp_path)
    checkpoint.save(1, model=model, optimizer=optimizer)
    for _ in range(10):
        train()
    checkpoint.wait()
    saved = torch.load(tmp_path / "step-0000000001.pt", weights_only=True)
    assert {value.device.type for value in saved["model"].values()} == {"cpu"}
    assert checkpoint.load(model=model, optimizer=optimizer) is not None
    for name, value in expected[0].items():
        assert torch.equal(model.state_dict()[name], value)
    for index, state in expected[1]["state"].items():
        for name, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][index][name].cpu(), value.cpu())
