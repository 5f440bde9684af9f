# mypy: disable-error-code="index, union-attr"
"""A saved state goes on with the same bits, and ranks that cannot become equal are named."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_worlds.data_parallel_cases import build, loss_of
from testbed.local_steps import Outer, Simulated, adamw, assert_is, data, sgd
from testbed.nursery import Nursery
from testbed.worlds import world
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ddp
from ddp.errors import DdpError, DriftError, LayoutMismatchError
from ddp.strategies.local_sgd.averaging import LocalSGD
from ddp.strategies.local_sgd.rank_state import cut_into_chunks


def training_resumes_from_a_state(path: Path) -> None:
    """Save after `sync()`, train on; a second run from the saved state gets the same bits."""

    def start() -> tuple[nn.Module, torch.optim.Optimizer, LocalSGD]:
        model = ddp.DistributedDataParallel(build("mlp"))
        optimizer = adamw(model.parameters())
        return model, optimizer, LocalSGD(model, optimizer, every=3, after=2, outer_lr=0.7, outer_momentum=0.9)

    def run(steps: range, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, *data(step, dist.get_rank())).backward()
            optimizer.step()

    model, optimizer, local = start()
    run(range(7), model, optimizer)
    for diverged in (model, model.module, local):
        with pytest.raises(DdpError, match=r"made 2 steps by itself .* sync\(\)"):
            diverged.state_dict()
    copied = copy.deepcopy(model.module)
    assert copied.state_dict().keys() == build("mlp").state_dict().keys()  # a copy is someone else's
    pickle.loads(pickle.dumps(model.module)).state_dict()
    local.sync()
    inner = copy.deepcopy(optimizer.state_dict())  # each rank's own
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "local": local.state_dict()}, path)
    dist.barrier()
    run(range(7, 15), model, optimizer)
    local.sync()

    again, optimizer, local = start()
    saved = torch.load(path, weights_only=True)
    again.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(inner)
    local.load_state_dict(saved["local"])
    assert local.step == 7
    run(range(7, 15), again, optimizer)
    local.sync()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def a_state_fits_another_world(path: Path) -> None:
    """One that two ranks have saved, on three."""
    outer = Outer(3, after=2, outer_lr=0.7, outer_momentum=0.9)
    saved = torch.load(path, weights_only=True)
    model = ddp.DistributedDataParallel(build("mlp", seed=1))
    optimizer = sgd(model.parameters())
    local = LocalSGD(model, optimizer, **outer._asdict())
    model.module.load_state_dict(saved["model"])
    local.load_state_dict(saved["local"])
    oracle = Simulated(outer, dist.get_world_size(), sgd)
    for replica in oracle.replicas:
        replica.load_state_dict(saved["model"])
    oracle.anchor = [p.detach().clone() for p in oracle.replicas[0].parameters()]
    oracle.velocity = [t.clone() for t in saved["local"]["outer_momentum"].values()]
    oracle.steps = 7
    for step in range(7):
        optimizer.zero_grad()
        loss_of(model, *data(step, dist.get_rank())).backward()
        optimizer.step()
        oracle.step(oracle.gradients(step))
        assert_is(model.module, oracle.replicas[dist.get_rank()], f"step {step}")


def test_training_resumes_bitwise_and_in_another_world(nursery: Nursery, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    nursery.run(2, training_resumes_from_a_state, path=path)
    nursery.run(3, a_state_fits_another_world, path=path)


@world(2)
def test_ranks_that_cannot_become_equal_are_an_error_on_all() -> None:
    rank = dist.get_rank()
    x, y = data(0, rank)

    def start(**outer: Any) -> tuple[nn.Module, Callable[[], None], LocalSGD]:
        model = ddp.DistributedDataParallel(build("mlp"))
        optimizer = sgd(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()

        return model, step, LocalSGD(model, optimizer, **outer)

    _, step, local = start(every=2 + rank)
    step()
    with pytest.raises(LayoutMismatchError) as mismatch:
        local.sync()
    assert (mismatch.value.rank, mismatch.value.entry) == (1, "settings")
    assert "'every': 3" in str(mismatch.value)

    model, step, local = start(every=2, outer_momentum=0.9)
    step()
    local.sync()
    state = local.state_dict()
    state["outer_momentum"]["layers.2.bias"] = state["outer_momentum"]["layers.2.bias"] + rank
    local.load_state_dict(state)
    step()
    with pytest.raises(DriftError) as drift:
        local.sync()
    assert (drift.value.parameter, drift.value.step, drift.value.ranks) == ("layers.2.bias", 2, (1,))
    assert "outer momentum of 'layers.2.bias' is another on rank 1" in str(drift.value)

    model, step, local = start(every=2, outer_lr=0.9)
    with torch.no_grad():
        model.module.layers[4].bias[-1] += rank * 1e-9
    step()
    with pytest.raises(DriftError) as drift:
        local.sync()
    assert drift.value.parameter == "layers.4.bias"
    assert "starting point of the last steps of 'layers.4.bias' is another on rank 1" in str(drift.value)


def test_chunks_have_one_order_whatever_the_devices_numbers() -> None:
    orders = []
    for first in (0, 9):  # cuda:10 comes before cuda:9 in the alphabet
        with FakeTensorMode():  # the simulated device is one alone
            tensors = [torch.empty(2, device=f"cuda:{first + place}") for place in (0, 1, 0, 2, 1)]
            number_of = {id(tensor): number for number, tensor in enumerate(tensors)}
            orders.append([[number_of[id(tensor)] for tensor in chunk] for chunk in cut_into_chunks(tensors)])
    assert orders == [[[0, 2], [1, 4], [3]]] * 2
