"""DDP, fully sharded data parallelism, a device mesh with a DTensor, a distributed checkpoint; see test_libraries.py.

Each as its tutorial has it, on the CPU.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    data = torch.randn(world_size * 5, 10)[rank::world_size]

    wrapped = DistributedDataParallel(toy())
    print(f"result ddp {train(wrapped, data):.9f}\n", end="", flush=True)

    sharded = toy()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    print(f"result fsdp {train(sharded, data):.9f}\n", end="", flush=True)
    state = {"model": sharded.state_dict()}
    dcp.save(state, checkpoint_id=os.path.join(sys.argv[1], "checkpoint"))
    dcp.load(state, checkpoint_id=os.path.join(sys.argv[1], "checkpoint"))

    whole = torch.arange(12.0).reshape(6, 2)
    tensor: Any = distribute_tensor(whole, mesh, [Shard(0)])
    gathered = tensor.redistribute(mesh, [Replicate()])
    assert torch.equal(gathered.to_local(), whole)
    local, total = tuple(tensor.to_local().shape), tensor.sum().full_tensor()
    print(f"result mesh {mesh.get_local_rank()} {local} {total:g}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def toy() -> torch.nn.Sequential:
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))


def train(model: torch.nn.Module, data: torch.Tensor) -> float:
    """Return the loss over all ranks after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


if __name__ == "__main__":
    main()
