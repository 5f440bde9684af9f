"""Training on a device whose work is late gives the CPU's numbers: see testbed.simulated_device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.seeds import Seeds
from testbed.simulated_device import DEVICE, group_of_all, simulated_device
from testbed.simulated_device.training import WAYS, Net, Place, equals_the_cpu
from testbed.slow import slow
from testbed.worlds import world

import ddp
from ddp.compression import row_exchange

LIKE_ANOTHER = {
    "only_device", "views", "buffer_hook", "status_int8", "half", "copied", "explained", "packed", "chunks",
    "compressed_again",
}  # fmt: skip


@pytest.mark.parametrize("name", [slow(name) if name in LIKE_ANOTHER else name for name in WAYS])
def test_equals_the_cpu(nursery: Nursery, seeds: Seeds, name: str) -> None:
    nursery.run(2, equals_the_cpu, names=[name], seeds=seeds(1))


@world(2)
def test_compression_on_a_device_connects_the_ranks_once(seeds: Seeds) -> None:
    """The mesh for the second steps is for buckets in host memory alone."""
    made: list[str] = []
    real = row_exchange._connect_again

    def connect(group: dist.ProcessGroup, name: str) -> Any:
        made.append(name)
        return real(group, name)

    with pytest.MonkeyPatch.context() as patch, simulated_device(*seeds(1)):
        patch.setattr(row_exchange, "_connect_again", connect)
        group = group_of_all()
        model = ddp.DistributedDataParallel(Net().to(DEVICE), process_group=group, compression="int8")
        model(Place().inputs(0, torch.float32).to(DEVICE)).square().mean().backward()
        assert not made
        ddp.DistributedDataParallel(Net(), process_group=group, compression="int8")
        assert made
        torch.accelerator.synchronize()
