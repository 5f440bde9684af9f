"""Models that differ between ranks, or change after wrapping: the average of all, or an error that names what."""

from __future__ import annotations

import copy
import gc
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.training import F64, WAYS, Mlp, Way, batch, build, compare_passes, loss_of, shard
from testbed.worlds import world
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddp
from ddp.errors import BackwardError, CollectiveError, DdpError, LayoutMismatchError, PeerFailedError

# What differs when it is wrapped


def _reordered() -> nn.Sequential:
    module = nn.Sequential()
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    module.add_module("1", first)
    module.add_module("0", second)
    return module


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        ("shape", "1.weight"), ("dtype", "1.weight"), ("stride", "1.weight"), ("order", "0.weight"),
        ("requires_grad", "1.bias"), ("more", "extra"), ("buffer", "table"), ("setting", "bucket sizes"),
    ],
)  # fmt: skip
@world(3)
def test_ranks_with_different_modules_learn_the_first_difference(kind: str, entry: str) -> None:
    is_odd_one = dist.get_rank() == dist.get_world_size() - 1
    module = _reordered() if is_odd_one and kind == "order" else nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module.register_buffer("table", torch.zeros(3 if is_odd_one and kind == "buffer" else 2))
    second: Any = module[1]
    if is_odd_one:
        if kind == "shape":
            module[1] = nn.Linear(3, 4)
        elif kind == "dtype":
            second.weight.data = second.weight.data.to(F64)
        elif kind == "stride":
            second.weight.data = second.weight.data.t()
        elif kind == "requires_grad":
            second.bias.requires_grad_(False)
        elif kind == "more":
            module.register_buffer("extra", torch.zeros(1))
    with pytest.raises(LayoutMismatchError, match=rf"rank 2.*'{entry}'|'{entry}'.*rank 2") as caught:
        ddp.DistributedDataParallel(module, bucket_cap_mb=3 if is_odd_one and kind == "setting" else None)
    assert (caught.value.rank, caught.value.entry) == (2, entry)


# What changes later


class HalfFrozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)


@pytest.mark.parametrize("way", WAYS)
@world(3)
def test_unfreezing_on_one_rank_is_an_error(way: Way) -> None:
    """It names the parameter and the ranks on every rank; unfrozen everywhere, the next step is exact."""
    replica, alone = build(HalfFrozen), build(HalfFrozen)
    model = way.wrap(replica)
    for step in range(4):
        for module in (alone, replica):
            module.layers[2].weight.requires_grad_(step >= 2)
        if step == 1:
            x, y = batch(step, 6)
            replica.layers[2].weight.requires_grad_(dist.get_rank() == 1)
            replica.zero_grad(set_to_none=way.set_to_none)
            with pytest.raises(BackwardError, match="on rank 1, but not on rank 0, 2") as caught:
                loss_of(model, shard(x), shard(y)).backward()
            assert caught.value.parameter == "layers.2.weight"
            assert all(p.grad is None for p in replica.parameters())
        else:
            compare_passes(model, alone, step, set_to_none=way.set_to_none)


@pytest.mark.parametrize("way", WAYS[1::2])
@world(2)
def test_all_may_be_frozen_later(way: Way) -> None:
    """As alone: there is nothing to differentiate. Thawed again, the next step is exact."""
    replica, alone = build("mlp"), build("mlp")
    model = way.wrap(replica)
    for step in range(4):
        for module in (alone, model):
            module.requires_grad_(step != 1)
        if step == 1:
            x, y = batch(step, 4)
            with pytest.raises(RuntimeError, match="does not require grad"):
                loss_of(model, shard(x), shard(y)).backward()
            inputs = shard(x).clone().requires_grad_()
            loss_of(model, inputs, shard(y)).backward()  # an attack on a frozen model, say
            assert inputs.grad is not None
        else:
            compare_passes(model, alone, step, set_to_none=way.set_to_none)


@pytest.mark.parametrize(
    ("change", "on_all"), [("assign", True), ("added", True), ("replaced", False), ("added", False)]
)
@world(2)
def test_parameters_that_no_one_reduces_are_named(change: str, on_all: bool) -> None:
    """On all ranks, or on rank 0 alone; all learn it in the same step. Wrapped again, training goes on."""
    x, y = batch(0, 2 * dist.get_world_size())
    replica, is_cause = build("mlp"), on_all or dist.get_rank() == 0
    model = ddp.DistributedDataParallel(replica)
    loss_of(model, shard(x), shard(y)).backward()
    if is_cause:
        if change == "assign":
            replica.load_state_dict(build("mlp", seed=1).state_dict(), assign=True)
        elif change == "replaced":
            replica.layers[2].weight = nn.Parameter(torch.randn(33, 40, dtype=F64))
        else:
            replica.layers.append(build(lambda: nn.Linear(3, 3)))
    name = {"assign": "layers.0.weight", "replaced": "layers.2.weight", "added": "layers.5.weight"}[change]
    with pytest.raises(
        BackwardError if is_cause else PeerFailedError, match=rf"parameter '{name}' was added or replaced.*wrap the mod"
    ):
        loss_of(model, shard(x), shard(y)).backward()
    assert on_all or all(parameter.grad is None for parameter in replica.layers[0].parameters())
    if on_all:
        model = ddp.DistributedDataParallel(replica)
        compare_passes(model, copy.deepcopy(replica), 0, what=change)


class Repeated(nn.Module):
    """A layer in a given number of reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head, self.times = nn.Linear(6, 6), nn.Linear(6, 3), 1

    def forward(self, x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        for _ in range(self.times):
            x = checkpoint(self.shared, x, use_reentrant=True).tanh()
        return self.head(x)


@pytest.mark.parametrize("way", [WAYS[0], Way(1e-6, large_bytes=1)])
@world(2)
def test_weights_may_later_become_ready_twice(way: Way) -> None:
    """Exact at once, or an error in one step and exact from the next on."""
    alone, replica = build(Repeated), build(Repeated)
    model = way.wrap(replica)
    for step in range(6):
        alone.times = replica.times = 1 + (step >= 2)
        try:
            compare_passes(model, alone, step)
        except BackwardError as error:
            if step != 2 or "shared" not in str(error):
                raise


# Ranks that do not do the same


@world(2)
def test_a_rank_without_gradients_is_missed() -> None:
    """It has frozen everything and catches autograd's error; no rank may take its next pass for this one."""
    replica, alone = build("mlp"), build("mlp")
    model = ddp.DistributedDataParallel(replica)
    for step in range(5):
        if step != 1:
            compare_passes(model, alone, step)
            continue
        x, y = batch(step, 4)
        replica.zero_grad()
        if dist.get_rank() == 1:
            replica.requires_grad_(False)
            with pytest.raises(RuntimeError, match="does not require grad"):
                loss_of(model, shard(x), shard(y)).backward()
            replica.requires_grad_(True)
        with pytest.raises(BackwardError, match="rank 1 made 1 training forward"):
            loss_of(model, shard(x), shard(y)).backward()


@world(2)
def test_models_in_another_order_are_an_error() -> None:
    """Two models of one layout, which one rank runs in the other order: their gradients must not be mixed."""
    replicas, alone = (build("mlp"), build("mlp")), (build("mlp"), build("mlp"))
    models = [ddp.DistributedDataParallel(replica) for replica in replicas]

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x * (1 + (model in (models[1], alone[1]))), y)

    for step in range(5):
        if step != 1:
            for at in (0, 1):
                compare_passes(models[at], alone[at], step, loss=loss)
            continue
        x, y = batch(step, 4)
        for at in (0, 1) if dist.get_rank() else (1, 0):
            models[at].zero_grad()
            with pytest.raises(BackwardError, match="model"):
                loss(models[at], shard(x), shard(y)).backward()


@world(2)
def test_a_wrapper_that_is_gone_says_so() -> None:
    """Deleted between forward and backward, it reduces nothing."""
    loss = ddp.DistributedDataParallel(build("mlp"))(batch(0, 2)[0]).sum()
    gc.collect()
    with pytest.raises((UserWarning, DdpError), match=r"deleted|gone"):
        loss.backward()


@world(3)
def test_a_lost_rank_is_an_error_that_names_the_gradients() -> None:
    """The last rank leaves in the middle; the others get an error instead of a wrong result.

    gloo tells those that wait for that rank. One that waits for another's message in the same sum asks after a while.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = ddp.DistributedDataParallel(build("mlp"))
    x, y = batch(rank, 4)
    loss_of(model, x, y).backward()
    if rank == last:
        return
    with pytest.raises(
        CollectiveError, match=r"^(rank 2 is|ranks 1-2 are) missing: .*the all-reduce of bucket 1 of 1.*layers\."
    ) as caught:
        loss_of(model, x, y).backward()
    assert caught.value.rank == rank
    store = dist.distributed_c10d._get_default_store()
    store.set(f"caught.{rank}", "")  # one that ends before another has asked is missing, too
    store.wait([f"caught.{other}" for other in range(last)])


@world(3)
def test_a_rank_that_failed_for_another_is_not_missing() -> None:
    """Rank 1 does not come. Rank 0 has its error, and goes on, before rank 2 waits for both."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    model = ddp.DistributedDataParallel(build("mlp"), stall_timeout_s=2.0)
    x, y = batch(rank, 4)
    loss_of(model, x, y).backward()
    if rank == 1:
        store.wait(["done"])
        return
    if rank == 2:
        store.wait(["failed"])
    loss = loss_of(model, x, y)
    with pytest.raises(CollectiveError, match="^rank 1 is missing" if rank == 2 else None) as caught:
        loss.backward()
    store.set("failed" if rank == 0 else "done", "")
    store.wait(["done"])
    if rank == 2:
        assert caught.value.failed_ranks == (1,)
        assert re.search(r"rank 0: step 2, .*bucket 1 of 1.* failed there too", str(caught.value))
