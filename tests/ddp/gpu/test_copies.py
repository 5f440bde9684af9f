"""What only a CUDA device can show of copies beside the host and of compression: streams, pinned memory, gloo on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_worlds.sync_debug import waiting_is_an_error
from testbed.nursery import Nursery

from ddp.comm.pinned_buffer import PinnedBuffer, device_with_stream

pytestmark = pytest.mark.gpu

CASES = "ddp_worlds.gpu_copy_cases"
DEADLINE_S = 250.0  # a first use of the device compiles and loads kernels


def test_pinned_memory_takes_and_gives_in_the_order_of_the_stream() -> None:
    device = torch.device("cuda", 0)
    buffer = PinnedBuffer(1 << 20, torch.float32, device)
    assert buffer.wait().is_pinned()
    source, other = torch.zeros(1 << 10, 1 << 10, device=device), torch.zeros(1 << 20, device=device)
    assert device_with_stream([source, other]) == device
    torch.cuda.synchronize()
    with waiting_is_an_error():
        for step in range(1, 6):
            source.fill_(step)
            buffer.start_fetching([source.t()])
            source.fill_(-1)  # later on the stream
            memory = buffer.wait()
            assert memory[[0, -1]].tolist() == [step, step]
            values = torch.full((1 << 20,), 10.0 * step)
            buffer.start_sending([values[:100], values[100:]], [other[:7], other[7:]])
            values.zero_()
            buffer.start_sending([torch.full((10,), 3.0)], [other[:10]])
            buffer.start_fetching([other])
            assert buffer.wait()[:10].eq(3).all()
            assert buffer.wait()[10:].eq(10 * step).all()


def test_central_storage(nursery: Nursery) -> None:
    settings = [("mlp", "sgd"), ("odd", "adamw"), ("words", "sparse sgd"), ("conv", "plain sgd")]
    nursery.run(2, f"{CASES}:central_storage_equals_that_of_the_cpu", deadline_s=DEADLINE_S, settings=settings)


@pytest.mark.parametrize("options", [{}, {"shared_memory": False, "chunk_mb": 0.001}], ids=["memory", "network"])
@pytest.mark.parametrize("name", ["mlp", "odd"])
def test_a_parameter_server(nursery: Nursery, name: str, options: dict[str, Any]) -> None:
    nursery.run(2, f"{CASES}:a_server_equals_plain_torch", deadline_s=DEADLINE_S, name=name, options=options)


def test_compression_by_gloo(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:compressors_average_on_the_device", deadline_s=DEADLINE_S)
