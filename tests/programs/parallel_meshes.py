"""FSDP2, HSDP, tensor parallelism, and tensor parallelism with FSDP2, as their tutorials have them.

Run by four ranks on the CPU. Every rank prints, for each of them, the loss of the whole batch after some steps, and a
sum over the whole weights.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}


def toy() -> nn.Sequential:
    torch.manual_seed(4)
    layers = [nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3)]
    return nn.Sequential(*layers).double()


def alone(mesh: DeviceMesh) -> tuple[nn.Module, int, int]:
    """A model, and which of how many shares of a batch this rank takes."""
    return toy(), 0, 1


def fsdp(mesh: DeviceMesh) -> tuple[Any, int, int]:
    model: Any = toy()
    flat = init_device_mesh("cpu", (mesh.size(),))
    for layer in model[::2]:
        fully_shard(layer, mesh=flat)
    return fully_shard(model, mesh=flat), dist.get_rank(), mesh.size()


def hsdp(mesh: DeviceMesh) -> tuple[Any, int, int]:
    model: Any = toy()
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)  # replicas along the first dimension, shards along the second
    return fully_shard(model, mesh=mesh), dist.get_rank(), mesh.size()


def tensor_parallel(mesh: DeviceMesh) -> tuple[nn.Module, int, int]:
    return parallelize_module(toy(), mesh["tp"], PLAN), 0, 1


def tensor_parallel_and_fsdp(mesh: DeviceMesh) -> tuple[Any, int, int]:
    model = parallelize_module(toy(), mesh["tp"], PLAN)
    return fully_shard(model, mesh=mesh["dp"]), mesh.get_local_rank("dp"), mesh["dp"].size()


def train(make: Callable[[DeviceMesh], tuple[nn.Module, int, int]], mesh: DeviceMesh) -> None:
    model, share, shares = make(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(5)
    for _ in range(5):
        data = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(data[share::shares]).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        loss = model(data).square().mean()
        total = sum(whole(parameter).sum() for parameter in model.parameters())
    print(f"result {make.__name__} {loss.item():.9f} {total.item():.9f}\n", end="", flush=True)


def whole(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for make in (alone, fsdp, hsdp, tensor_parallel, tensor_parallel_and_fsdp):
        train(make, mesh)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
