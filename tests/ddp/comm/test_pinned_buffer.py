"""Pinned memory between a device and the host: what is copied arrives, whenever the device gets to it."""

from __future__ import annotations

import pytest
import torch
from testbed.nursery import Nursery
from testbed.seeds import Seeds

from ddp.comm import pinned_buffer
from ddp.comm.pinned_buffer import device_with_stream

CASES = "ddp_worlds.simulated_device_cases"


@pytest.mark.parametrize(
    "case",
    [
        "gradients_come_when_they_are_waited_for",
        "fetched_tensors_are_parted_and_cast",
        "memory_that_is_still_copied_from_is_not_overwritten",
    ],
)
def test_a_pinned_buffer(nursery: Nursery, seeds: Seeds, case: str) -> None:
    nursery.run(1, f"{CASES}:{case}", seeds=seeds(5))


def test_only_one_device_with_streams_is_taken() -> None:
    fake, other = (torch.empty(1, device="meta"), torch.empty(1))
    assert device_with_stream([other, other]) is None
    assert device_with_stream([fake]) is None
    assert device_with_stream([]) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_buffer, "_WITH_STREAMS", {"meta", "cpu"})
        assert device_with_stream([fake, fake]) == fake.device
        assert device_with_stream([fake, other]) is None
