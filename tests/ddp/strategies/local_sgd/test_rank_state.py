"""A saved state goes on with the same bits, and ranks that cannot become equal are named."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from testbed.local_steps import Outer, Simulated, adamw, assert_is, data, sgd, start
from testbed.nursery import Nursery
from testbed.training import build
from testbed.worlds import world
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp.errors import DdpError, DriftError, LayoutMismatchError
from ddp.strategies.local_sgd.rank_state import cut_into_chunks


def training_resumes_from_a_state(path: Path) -> None:
    """Save after `sync()`, train on; a second run from the saved state gets the same bits."""

    outer, rank = Outer(3, after=2, outer_lr=0.7, outer_momentum=0.9), dist.get_rank()
    model, optimizer, local, train = start(outer, adamw)
    for step in range(7):
        train(*data(step, rank))
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
    for step in range(7, 15):
        train(*data(step, rank))
    local.sync()

    again, optimizer, local, train = start(outer, adamw)
    saved = torch.load(path, weights_only=True)
    again.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(inner)
    local.load_state_dict(saved["local"])
    assert local.step == 7
    for step in range(7, 15):
        train(*data(step, rank))
    local.sync()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def a_state_fits_another_world(path: Path) -> None:
    """One that two ranks have saved, on three."""
    outer = Outer(3, after=2, outer_lr=0.7, outer_momentum=0.9)
    saved = torch.load(path, weights_only=True)
    model, _, local, train = start(outer)
    model.module.load_state_dict(saved["model"])
    local.load_state_dict(saved["local"])
    oracle = Simulated(outer, dist.get_world_size(), sgd)
    for replica in oracle.replicas:
        replica.load_state_dict(saved["model"])
    oracle.anchor = [p.detach().clone() for p in oracle.replicas[0].parameters()]
    oracle.velocity = [t.clone() for t in saved["local"]["outer_momentum"].values()]
    oracle.steps = 7
    for step in range(7):
        train(*data(step, dist.get_rank()))
        oracle.step(oracle.gradients(step))
        assert_is(model.module, oracle.replicas[dist.get_rank()], f"step {step}")


def test_training_resumes_bitwise_and_in_another_world(nursery: Nursery, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    nursery.run(2, training_resumes_from_a_state, path=path)
    nursery.run(3, a_state_fits_another_world, path=path)


@world(2)
def test_ranks_that_cannot_become_equal_are_an_error_on_all() -> None:
    rank = dist.get_rank()
    batch = data(0, rank)
    _, _, local, train = start(Outer(2 + rank))
    train(*batch)
    with pytest.raises(LayoutMismatchError) as mismatch:
        local.sync()
    assert (mismatch.value.rank, mismatch.value.entry) == (1, "settings")
    assert "'every': 3" in str(mismatch.value)

    _, _, local, train = start(Outer(2, outer_momentum=0.9))
    train(*batch)
    local.sync()
    state = local.state_dict()
    state["outer_momentum"]["layers.2.bias"] = state["outer_momentum"]["layers.2.bias"] + rank
    local.load_state_dict(state)
    train(*batch)
    with pytest.raises(DriftError) as drift:
        local.sync()
    assert (drift.value.parameter, drift.value.step, drift.value.ranks) == ("layers.2.bias", 2, (1,))
    assert "outer momentum of 'layers.2.bias' is another on rank 1" in str(drift.value)

    model, _, local, train = start(Outer(2, outer_lr=0.9))
    with torch.no_grad():
        model.module.layers[4].bias[-1] += rank * 1e-9
    train(*batch)
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
