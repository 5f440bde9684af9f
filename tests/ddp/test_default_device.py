"""ddp names the device of every tensor that it makes: `torch.set_default_device` is the script's."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from testbed.nursery import ROOT
from testbed.worlds import world
from torch import nn
from torch.utils._device import _device_constructors

import ddp

CONSTRUCTORS = {function.__name__ for function in _device_constructors()}


def unnamed(source: str) -> list[str]:
    """Return the calls of torch's constructors that do not say on which device."""
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in CONSTRUCTORS
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_every_constructor_of_a_tensor_names_its_device() -> None:
    files = [*(ROOT / "ddp").rglob("*.py")]
    found = {str(file.relative_to(ROOT)): unnamed(file.read_text(encoding="utf-8")) for file in files}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_the_rule_finds_a_call_without_a_device() -> None:
    assert unnamed("torch.zeros(3, dtype=x)") == ["1: torch.zeros(3, dtype=x)"]
    assert unnamed("torch.zeros(3, device=x)") == []


DATA = torch.utils.data.TensorDataset(torch.randn(32, 4, device="cpu"), torch.randn(32, 2, device="cpu"))


def _train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for start in range(0, 4 * steps, 4):
        x, y = DATA.tensors[0][start : start + 4], DATA.tensors[1][start : start + 4]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), 0.01)


def _plain(net: nn.Module, table: nn.Module, folder: Path) -> None:
    model = ddp.DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = _adam(net)
    _train(model, optimizer)
    ddp.check_replicas(model, optimizer, buffers=True)
    sparse = ddp.DistributedDataParallel(table)
    sparse(torch.tensor([1, 3], device="cpu")).sum().backward()
    gradient = next(table.parameters()).grad
    assert gradient is not None
    assert gradient.coalesce().values().device.type == "cpu"
    assert len([*ddp.DistributedSampler(DATA)]) == 16
    assert ddp.gather_metrics({"loss": (1.5, 2)}) == {"loss": 0.75}
    assert ddp.gather_samples(torch.ones(1, 2, device="cpu")).shape == (2, 2)


def _checkpoint(net: nn.Module, table: nn.Module, folder: Path) -> None:
    model, optimizer = ddp.DistributedDataParallel(net), _adam(net)
    _train(model, optimizer)
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    checkpoint = ddp.Checkpoint(folder)
    checkpoint.save(3, model=model, optimizer=optimizer)
    checkpoint.wait()
    _train(model, optimizer)
    assert ddp.Checkpoint(folder).load(model=model, optimizer=optimizer) is not None
    assert all(torch.equal(kept[name], value) for name, value in net.state_dict().items())


def _compressed(net: nn.Module, table: nn.Module, folder: Path) -> None:
    for kind in ("fp16", "bf16", "int8", "powersgd"):
        _train(ddp.DistributedDataParallel(net, compression=kind), _adam(net))


def _local_sgd(net: nn.Module, table: nn.Module, folder: Path) -> None:
    model, optimizer = ddp.DistributedDataParallel(net), _adam(net)
    local = ddp.LocalSGD(model, optimizer, every=2, outer_momentum=0.9)
    _train(model, optimizer, 6)
    local.sync()


def _central_storage(net: nn.Module, table: nn.Module, folder: Path) -> None:
    strategy = ddp.strategy("central_storage")
    _train(*strategy.prepare(net, _adam(net)))
    strategy = ddp.strategy("central_storage")
    model, optimizer = strategy.prepare(table, torch.optim.SGD(table.parameters(), 0.1))
    model(torch.tensor([1, 3], device="cpu")).sum().backward()
    optimizer.step()


def _horovod(net: nn.Module, table: nn.Module, folder: Path) -> None:
    optimizer = ddp.horovod.DistributedOptimizer(_adam(net), named_parameters=net.named_parameters())
    ddp.horovod.broadcast_parameters(net.state_dict(), root_rank=0)
    _train(net, optimizer)


_CASES: dict[str, Callable[[nn.Module, nn.Module, Path], None]] = {
    "plain": _plain,
    "checkpoint": _checkpoint,
    "compressed": _compressed,
    "LocalSGD": _local_sgd,
    "central storage": _central_storage,
    "horovod": _horovod,
}


@world(2, backend=("gloo", "shm"))
@pytest.mark.parametrize("what", _CASES)
def test_training_on_the_cpu_with_another_default_device(what: str, tmp_path: Path) -> None:
    """The script has called `torch.set_default_device("meta")`: a tensor that is made there has no values."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    table = nn.Embedding(9, 2, sparse=True)
    torch.set_default_device("meta")
    _CASES[what](net, table, tmp_path)
    assert all(value.isfinite().all() for value in net.state_dict().values())
