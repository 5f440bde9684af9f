"""Pinned memory between a device and the host: what is copied arrives, whenever the device gets to it."""

from __future__ import annotations

import pytest
import torch
from testbed.seeds import Seeds
from testbed.simulated_device import DEVICE, simulated_device
from testbed.worlds import world

from ddp.comm import pinned_buffer
from ddp.comm.pinned_buffer import PinnedBuffer, device_with_stream


@world(1)
def test_gradients_come_when_they_are_waited_for(seeds: Seeds) -> None:
    for seed in seeds(5):
        with simulated_device(seed) as device:
            buffer = PinnedBuffer(10, torch.float32, torch.device(DEVICE))
            gradients = [torch.arange(6.0).view(2, 3).t().to(DEVICE), torch.full((), 7.0).to(DEVICE)]
            device.may_wait = False
            buffer.start_fetching(gradients)
            for gradient in gradients:
                gradient.zero_()  # what the device does next does not change what was copied
            assert buffer.wait()[:7].tolist() == [0, 3, 1, 4, 2, 5, 7]
            assert buffer.wait()[7:].isnan().all(), "no more than the gradients is written"


@world(1)
def test_fetched_tensors_are_parted_and_cast(seeds: Seeds) -> None:
    for seed in seeds(5):
        with simulated_device(seed):
            buffer = PinnedBuffer(6, torch.float32, torch.device(DEVICE))
            buffer.start_fetching([torch.ones(2, 2).to(DEVICE), torch.zeros(2).to(DEVICE)])
            into = [torch.empty(2, 2, dtype=torch.float64), torch.empty(2)]
            buffer.finish_fetching(into)
            assert [tensor.tolist() for tensor in into] == [[[1, 1], [1, 1]], [0, 0]]


@world(1)
def test_memory_that_is_still_copied_from_is_not_overwritten(seeds: Seeds) -> None:
    for seed in seeds(5):
        with simulated_device(seed):
            buffer = PinnedBuffer(4, torch.float32, torch.device(DEVICE))
            first, second, third = (torch.zeros(2, 2).to(DEVICE) for _ in range(3))
            values = torch.ones(4)
            buffer.start_sending([values], [first])
            values.fill_(2)  # the caller's again
            buffer.start_sending([values.to(torch.bfloat16)], [second])  # short numbers become those of the memory
            buffer.start_fetching([torch.full((4,), 5.0).to(DEVICE)])
            assert buffer.wait().tolist() == [5] * 4
            buffer.start_sending([torch.full((4,), 6.0)], [third])
            assert [tensor.cpu().unique().tolist() for tensor in (first, second, third)] == [[1], [2], [6]]


def test_only_one_device_with_streams_is_taken() -> None:
    fake, other = (torch.empty(1, device="meta"), torch.empty(1))
    assert device_with_stream([other, other]) is None
    assert device_with_stream([fake]) is None
    assert device_with_stream([]) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_buffer, "_WITH_STREAMS", {"meta", "cpu"})
        assert device_with_stream([fake, fake]) == fake.device
        assert device_with_stream([fake, other]) is None
