"""Data parallelism with other kinds of parallelism: along one dimension of a mesh, or not at all and with an error."""
# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.training import batch, build, loss_of
from testbed.worlds import world
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ddp

WIDTH = 40


class SplitMlp(nn.Module):
    """This rank's half of an Mlp's first two layers, and the whole of what follows."""

    def __init__(self, whole: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        layers: Any = whole.layers
        first, _, second, *rest = layers
        mine = slice(group.rank() * WIDTH // 2, (group.rank() + 1) * WIDTH // 2)
        self.group = group
        self.first = nn.Linear(6, WIDTH // 2, dtype=first.weight.dtype)
        self.second = nn.Linear(WIDTH // 2, 33, bias=False, dtype=first.weight.dtype)
        with torch.no_grad():
            self.first.weight.copy_(first.weight[mine])
            self.first.bias.copy_(first.bias[mine])
            self.second.weight.copy_(second.weight[:, mine])
        self.bias = nn.Parameter(second.bias.detach().clone())
        self.rest = nn.Sequential(*rest)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest(_Sum.apply(self.second(self.first(x).tanh()), self.group) + self.bias)


class _Sum(torch.autograd.Function):
    """The sum over a group, whose every rank then computes the same, so that the gradient is everywhere that of one."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


@world(4)
def test_replicas_along_one_dimension_are_exact() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, replica = mesh.get_group("tp"), mesh.get_local_rank("dp")
    ways: list[dict[str, Any]] = [
        {"device_mesh": mesh["dp"]},
        {"process_group": mesh.get_group("dp")},
        {"device_mesh": mesh["dp"], "compression": None, "gradient_as_bucket_view": True, "weight_checksum": True},
    ]
    for settings in ways:
        alone, split = build("mlp"), SplitMlp(build("mlp"), tp)
        if replica:
            nn.init.zeros_(split.first.weight)  # the first of the replicas gives the others its values
        model = ddp.DistributedDataParallel(split, **settings)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (alone, model)]
        for step in range(5):
            x, y = batch(step, 8)
            for module, optimizer, rows in zip(
                (alone, model), optimizers, (slice(8), slice(replica, 8, 2)), strict=True
            ):
                optimizer.zero_grad()
                loss_of(module, x[rows], y[rows]).backward()
                optimizer.step()
            expected = SplitMlp(alone, tp)
            for (name, mine), right in zip(split.named_parameters(), expected.parameters(), strict=True):
                assert torch.allclose(mine, right, rtol=1e-12, atol=1e-13), f"{settings}, step {step}, {name}"


@world(4)
def test_distributed_tensors_are_refused_by_all() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan: Any = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
    modules: list[Any] = [
        parallelize_module(build("mlp"), mesh["tp"], plan),
        fully_shard(build("mlp"), mesh=mesh["dp"]),
        fully_shard(build("mlp"), mesh=mesh),
    ]
    for module in modules:
        refused: list[dict[str, Any]] = [{}, {"device_mesh": mesh["dp"]}, {"init_sync": False}]
        for settings in refused:
            with pytest.raises(ddp.errors.UnsupportedError, match=r"is a DTensor.*fully_shard\(module, mesh="):
                ddp.DistributedDataParallel(module, **settings)
    with pytest.raises(ddp.errors.ArgumentError, match=r'1D device mesh.*mesh\["dp"\]'):
        ddp.DistributedDataParallel(build("mlp"), device_mesh=mesh)
    dist.barrier()  # no one has sent anything that another waits for
