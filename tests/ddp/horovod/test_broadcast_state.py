"""States and objects are those of the root, and travel without pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.training import assert_replicas_equal, batch, build, loss_of
from testbed.worlds import world
from torch import nn

from ddp.comm.broadcast_objects import broadcast_object, broadcast_optimizer_state
from ddp.errors import ArgumentError, LayoutMismatchError
from ddp.horovod.broadcast_state import allgather_object, broadcast_parameters
from ddp.horovod.optimizer import DistributedOptimizer


def assert_same(actual: Any, expected: Any) -> None:
    """Of the same types and bits."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.device) == (expected.dtype, expected.device)
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert [*actual] == [*expected]
        assert_same([*actual.values()], [*expected.values()])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e)
    else:
        assert actual == expected


def _model(seed: int) -> Any:
    model: Any = nn.Sequential(build("odd", seed=seed), nn.BatchNorm1d(3)).double()
    model[1].running_mean.fill_(seed + 1)
    return model


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda m: m.state_dict(),
    "named_parameters": lambda m: m.named_parameters(),
    "parameters": lambda m: [*m.parameters()],
    "dict": lambda m: dict(m.named_parameters()),
}


@pytest.mark.parametrize("form", FORMS)
@world(1, 3)
def test_parameters_are_those_of_the_root(form: str) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model, expected = _model(rank), _model(last)
    before = [*model.parameters()]
    broadcast_parameters(FORMS[form](model), root_rank=last)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    for a, e in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, e)
        assert a.requires_grad == e.requires_grad
    assert model[1].running_mean[0] == (last if form == "state_dict" else rank) + 1


@world(3)
def test_parameters_that_do_not_fit_are_errors() -> None:
    late = dist.get_rank() == 1
    with pytest.raises(LayoutMismatchError, match=r"rank 1 .*shape \(3,\)") as found:
        broadcast_parameters({"same": torch.ones(2), "w": torch.ones(2 + late)})
    assert found.value.entry == "w"
    with pytest.raises(ArgumentError, match="there is no rank -1"):
        broadcast_parameters({}, root_rank=-1)
    with pytest.raises(ArgumentError, match="'extra' is a int, and only dense tensors"):
        broadcast_parameters({"extra": 3})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.3, max_iter=3, line_search_fn="strong_wolfe"),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, torch.tensor(0.01), amsgrad=True, foreach=False),
}


@pytest.mark.parametrize("others_train", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@world(1, 3)
def test_optimizer_states_are_those_of_the_root(kind: str, others_train: bool) -> None:
    """The root has trained; the others have no state, or another one."""
    rank, model = dist.get_rank(), build("mlp")
    optimizer = OPTIMIZERS[kind](model.parameters())

    def closure() -> Any:
        model.zero_grad()
        loss = loss_of(model, *batch(rank, 4))
        loss.backward()
        return loss

    for _ in range(2 + rank if rank == 0 or others_train else 0):
        optimizer.step(closure)
        optimizer.param_groups[0]["lr"] = 0.5 / (1 + rank)
    broadcast_optimizer_state(optimizer, root_rank=0)
    broadcast_parameters(model.state_dict(), root_rank=0)
    reported = allgather_object(optimizer.state_dict())
    for other in reported[1:]:
        assert_same(other, reported[0])
    assert optimizer.param_groups[0]["lr"] == 0.5
    wrapped = DistributedOptimizer(optimizer, model.named_parameters())
    broadcast_optimizer_state(wrapped, root_rank=0)
    if kind != "lbfgs":
        loss_of(model, *batch(rank, 4)).backward()
        wrapped.step()
        assert_replicas_equal(model)


@world(3)
def test_optimizers_that_do_not_fit_are_errors() -> None:
    model = build("mlp")
    kind: Any = torch.optim.Adam if dist.get_rank() == 1 else torch.optim.SGD
    with pytest.raises(ArgumentError, match=r"rank 1 called .*Adam with \[6\] parameters.*rank 0.*SGD"):
        broadcast_optimizer_state(kind(model.parameters(), 0.1))
    odd = torch.optim.SGD(model.parameters(), 0.1)
    odd.param_groups[0]["odd"] = lambda: None
    with pytest.raises(ArgumentError, match="cannot be sent"):
        broadcast_optimizer_state(odd)


class Opaque:
    """Nothing that may be read back."""

    def __reduce__(self) -> Any:
        return print, ("this must not run",)


@world(1, 3)
def test_objects_travel_without_pickle() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = {"epoch": 3, "x": [1.5, None, True, "text", b"bytes", (1, 2)], "t": torch.arange(4), 5: {1, 2}}
    assert_same(broadcast_object(sent if rank == 0 else None, root_rank=0, name="state"), sent)
    assert broadcast_object(rank, root_rank=size - 1) == size - 1
    assert broadcast_object(torch.full((1 << 20,), float(rank)), root_rank=0).sum() == 0
    assert allgather_object({"rank": rank}) == [{"rank": each} for each in range(size)]
    for odd in (Opaque(), lambda: None):
        with pytest.raises(ArgumentError, match=r"rank 0's object cannot be sent: .*It may hold None, numbers"):
            broadcast_object(odd if rank == 0 else None)
        with pytest.raises(ArgumentError, match=rf"allgather_object: rank {size - 1}: "):
            allgather_object(odd if rank == size - 1 else 1)
    with pytest.raises(ArgumentError, match="there is no rank 9"):
        broadcast_object(1, root_rank=9)
