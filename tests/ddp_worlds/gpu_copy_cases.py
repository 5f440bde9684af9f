"""What ranks with parameters on a CUDA device do by parameter servers, central storage and compression, compared with
the same on the CPU. Ranks may share one device: collectives of devices are gloo's here.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from ddp_worlds.compression_cases import Bucket, assert_same_bits, error
from ddp_worlds.sync_debug import waiting_is_an_error
from testbed.central_training import MAKERS, assert_same, batch
from testbed.central_training import build as build_for_all
from testbed.one_training import Setting, data
from testbed.one_training import build as build_for_servers
from testbed.servers import in_roles, start
from torch.nn import functional as F

from ddp.compression import Half, Int8, PowerSGD, make_compression
from ddp.strategies.central_storage.step import Storage
from ddp.strategies.central_storage.strategy import CentralOptimizer

CUDA = torch.device("cuda", 0)
STEPS = 5


def central_storage_equals_that_of_the_cpu(settings: list[tuple[str, str]]) -> None:
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


def a_server_equals_plain_torch(options: dict[str, Any], name: str) -> None:
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


def compressors_average_on_the_device() -> None:
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
