# mypy: disable-error-code="no-any-return"
"""Models that are sharded over the ranks, with torch.distributed.checkpoint on the other side of a conversion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import ddp

DATA = torch.arange(40, dtype=torch.float64).reshape(8, 5) / 40


def build() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, data: torch.Tensor = DATA) -> float:
    """The loss after some steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
    return model(data).square().mean().item()


def _sharded() -> Any:
    return fully_shard(build(), mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))


def saves_sharded(folder: str, steps: int) -> None:
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, steps)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": weights, "optim": moments}, "epoch": 4}, checkpoint_id=folder)


def shards_are_refused_by_checkpoint(folder: str) -> None:
    with pytest.raises(ddp.errors.CheckpointError, match=r"0.weight'\] is a DTensor.*ddp\.checkpoint\.convert"):
        ddp.Checkpoint(folder).save(1, model=_sharded())


def loads_sharded(folder: str) -> float:
    """The loss of the model that a folder holds, in shards."""
    model = _sharded()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    return model(DATA).square().mean().item()
