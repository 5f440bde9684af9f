"""Training on a device whose work is late gives the CPU's numbers: see testbed.simulated_device."""

import pytest
from testbed.nursery import Nursery
from testbed.seeds import Seeds

CASES = "ddp_worlds.simulated_training_cases"
WAYS = (
    "plain", "only_device", "skipped", "views", "accumulated", "unused", "bf16", "hooks", "buffer_hook", "checksum",
    "status", "status_int8", "half", "int8", "powersgd", "local_sgd", "horovod", "central", "background_saves",
    "copied", "scaled", "explained", "pinned", "packed", "hooked", "chunks", "compressors", "compressed_again",
    "settled",
)  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_equals_the_cpu(nursery: Nursery, seeds: Seeds, name: str) -> None:
    nursery.run(2, f"{CASES}:equals_the_cpu", names=[name], seeds=seeds(1))


def test_compression_on_a_device_connects_the_ranks_once(nursery: Nursery, seeds: Seeds) -> None:
    nursery.run(2, f"{CASES}:compression_on_a_device_connects_the_ranks_once", seed=seeds(1)[0])
