"""Pinned memory between a device and the host: what is copied arrives, whenever the device gets to it."""

from __future__ import annotations

import pytest
import torch
from ddp_worlds.late_device import LateDevice

from ddp.comm import pinned_buffer
from ddp.comm.pinned_buffer import PinnedBuffer, device_with_stream

CPU = torch.device("cpu")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    late = LateDevice()
    monkeypatch.setattr(torch.nn.modules.module, "register_module_forward_pre_hook", lambda _: None)
    late.install(monkeypatch)
    return late


def test_gradients_come_when_they_are_waited_for(device: LateDevice) -> None:
    buffer = PinnedBuffer(10, torch.float32, CPU)
    gradients = [torch.arange(6.0).view(2, 3).t(), torch.tensor(7.0)]
    buffer.start_fetching(gradients)
    for gradient in gradients:
        gradient.zero_()  # what the device does next does not change what was copied
    assert (device.copies, device.waits) == (1, 0)
    assert buffer.wait()[:7].tolist() == [0, 3, 1, 4, 2, 5, 7]
    assert buffer.wait()[7:].tolist() == [99] * 3
    assert device.waits == 1  # a second time there is nothing to wait for


def test_fetched_tensors_are_parted_and_cast(device: LateDevice) -> None:
    buffer = PinnedBuffer(6, torch.float32, CPU)
    buffer.start_fetching([torch.ones(2, 2), torch.zeros(2)])
    into = [torch.empty(2, 2, dtype=torch.float64), torch.empty(2)]
    buffer.finish_fetching(into)
    assert [tensor.tolist() for tensor in into] == [[[1, 1], [1, 1]], [0, 0]]


def test_memory_that_is_still_copied_from_is_not_overwritten(device: LateDevice) -> None:
    buffer = PinnedBuffer(4, torch.float32, CPU)
    first, second, third = (torch.zeros(2, 2) for _ in range(3))
    values = torch.ones(4)
    buffer.start_sending([values], [first])
    values.fill_(2)  # the caller's again
    assert device.waits == 0
    buffer.start_sending([values.to(torch.bfloat16)], [second])  # short numbers become those of the memory
    assert device.waits == 1
    buffer.start_fetching([torch.full((4,), 5.0)])
    assert device.waits == 2
    assert buffer.wait().tolist() == [5] * 4
    buffer.start_sending([torch.full((4,), 6.0)], [third])
    assert third.eq(0).all()
    device.catch_up()
    assert [tensor.unique().tolist() for tensor in (first, second, third)] == [[1], [2], [6]]


def test_only_one_device_with_streams_is_taken() -> None:
    fake, other = (torch.empty(1, device="meta"), torch.empty(1))
    assert device_with_stream([other, other]) is None
    assert device_with_stream([fake]) is None
    assert device_with_stream([]) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_buffer, "_WITH_STREAMS", {"meta", "cpu"})
        assert device_with_stream([fake, fake]) == fake.device
        assert device_with_stream([fake, other]) is None
