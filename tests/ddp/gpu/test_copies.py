# mypy: disable-error-code="assignment"
"""What only a CUDA device can show of copies beside the host and of compression: streams, pinned memory, gloo on it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.central_training import MAKERS, batch
from testbed.central_training import build as build_for_all
from testbed.compressed import Bucket, error
from testbed.one_training import Setting, data
from testbed.one_training import build as build_for_servers
from testbed.same import assert_same
from testbed.servers import in_roles, start
from testbed.sync_debug import waiting_is_an_error
from testbed.training import assert_same_bits
from testbed.worlds import world
from torch.nn import functional as F

from ddp.comm.pinned_buffer import PinnedBuffer, device_with_stream
from ddp.compression import Half, Int8, PowerSGD, make_compression
from ddp.strategies.central_storage.step import Storage
from ddp.strategies.central_storage.strategy import CentralOptimizer

CUDA = torch.device("cuda", 0)
STEPS = 5


pytestmark = pytest.mark.gpu

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


@world(2, deadline_s=DEADLINE_S)
def test_central_storage() -> None:
    settings = [("mlp", "sgd"), ("odd", "adamw"), ("words", "sparse sgd"), ("conv", "plain sgd")]
    torch.sparse.check_sparse_tensor_invariants.disable()  # or torch's own optimizers warn
    for name, maker in settings:
        states = []
        for device in (torch.device("cpu"), CUDA):
            model = build_for_all(name).to(device)
            users = MAKERS[maker](list(model.parameters()))
            optimizer = CentralOptimizer(Storage(model, users, dist.group.WORLD, None, None), users)
            for step in range(STEPS):
                model.step = step  # which some models read
                x, y = (tensor.to(device) for tensor in batch(step))
                (model(x) - y).square().mean().backward()
                with waiting_is_an_error() if device == CUDA and step and name == "mlp" else contextlib.nullcontext():
                    optimizer.step()
                optimizer.zero_grad()
            states.append({key: tensor.cpu() for key, tensor in model.state_dict().items()})
            optimizer.close()
        assert_same(states[1], states[0], f"{name} {maker}", rtol=1e-9)


@world(2, deadline_s=DEADLINE_S)
@pytest.mark.parametrize("options", [{}, {"shared_memory": False, "chunk_mb": 0.001}], ids=["memory", "network"])
@pytest.mark.parametrize("name", ["mlp", "odd"])
def test_a_parameter_server(options: dict[str, Any], name: str) -> None:
    """One worker on the device, whose servers step: as the same optimizer on the CPU."""
    setting = Setting(name, "adamw", options=options)
    x, y = data().tensors

    def body() -> None:
        strategy = start(setting)
        model, optimizer = strategy.prepare(*build_for_servers(setting))
        device = strategy.world.device
        assert device.type == "cuda"
        plain, its_optimizer = build_for_servers(setting)
        for _ in range(STEPS):
            for each, stepped in ((model, optimizer), (plain, its_optimizer)):
                where = next(each.parameters()).device
                F.cross_entropy(each(x.to(where)), y.to(where)).backward()
                stepped.step()
                stepped.zero_grad()
        for (key, mine), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(
                mine.cpu(), theirs, rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
            )
        strategy.close()

    in_roles(1, 1, body)


@world(2, deadline_s=DEADLINE_S)
def test_compression_by_gloo() -> None:
    """Each method by gloo on the device; approximations get a gradient of their rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    rows, columns = torch.linspace(-1, 1, 60), torch.linspace(0, 2, 50)
    shapes = [(60, 50), (9,)]
    methods: dict[Half | Int8 | PowerSGD, float] = {
        Half(): 0.01,
        Half(torch.float16): 0.001,
        Int8(): 0.02,
        PowerSGD(1, 2): 1e-4,
        PowerSGD(3, 2): 1e-4,
    }
    for method, bound in methods.items():
        made = make_compression(method)
        for step in range(5):
            every = [
                torch.cat([torch.outer(rows * (r + 1), columns + step).flatten(), torch.ones(9)]) for r in range(size)
            ]
            mine = [every[rank].to(CUDA, copy=True) for _ in range(2)]
            buckets = [Bucket(number, flat, number == 1, shapes) for number, flat in enumerate(mine)]
            futures = [made.hook(made.state, bucket) for bucket in buckets]
            for result in [future.wait().cpu() for future in futures]:
                assert_same_bits([result])
                assert error(result, torch.stack(every).double().mean(0)) < bound, (method, step)
        made.state.close()
