"""Steps of several passes on a rank, beside one process that has all micro-batches. Each runs on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp
from ddp.data_parallel.micro_batches import MicroBatches
from ddp.errors import BackwardError, PeerFailedError


class Net(nn.Module):
    """Some micro-batches do not use `extra`; the gradient of `table` is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 6, sparse=True)
        self.body = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 4))
        self.extra = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(self.table(x))
        return self.extra(y) if int(x[0]) % 2 else y


def loss_of(model: nn.Module, step: int, which: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(100 * step + which)
    return model(torch.randint(16, (5,), generator=numbers)).square().mean()


def wrapped(count: int, *, views: bool = False) -> tuple[ddp.DistributedDataParallel, nn.Module, MicroBatches]:
    torch.manual_seed(1)
    net = Net().double()
    alone = copy.deepcopy(net)
    ddp.DistributedDataParallel._least_ranks = 1
    model = ddp.DistributedDataParallel(net, bucket_cap_mb=0.01, gradient_as_bucket_view=views)
    micro = MicroBatches()
    model.step_in(micro)
    micro.deal(count, dist.get_rank(), dist.get_world_size())
    return model, alone, micro


def a_step_is_over_all_micro_batches(count: int, views: bool, weighted: bool, to_none: bool) -> None:
    model, alone, micro = wrapped(count, views=views)
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
    weights = [1.0 + which if weighted else 1.0 for which in range(count)]
    for step in range(5):
        for at, which in enumerate(micro.own):
            micro.at, micro.passes = at, 0
            loss = loss_of(model, step, which)
            mine.zero_grad(set_to_none=to_none)  # between forward and backward, as many do
            model.backward(loss, weight=weights[which] if weighted else None)
            if not micro.is_last:
                assert all(parameter.grad is None for parameter in model.parameters())
                before = [parameter.detach().clone() for parameter in model.parameters()]
                mine.step()
                assert all(map(torch.equal, before, model.parameters()))
        assert micro.passes == 1
        theirs.zero_grad(set_to_none=to_none)
        for which in range(count):
            (loss_of(alone, step, which) * weights[which] / sum(weights)).backward()
        mine.step()
        theirs.step()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def a_pass_that_fails_ends_the_step_on_all_ranks(count: int) -> None:
    model, _, micro = wrapped(count)
    rank = dist.get_rank()
    loss = loss_of(model, 0, micro.own[0])
    if rank == 1:
        handle = model.module.body[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        del loss
    else:
        loss.backward()
        micro.at, micro.passes = 1, 0
        with pytest.raises(PeerFailedError, match=r"rank 1.*its backward pass raised"):
            loss_of(model, 0, micro.own[1]).backward()
    micro.deal(count, rank, dist.get_world_size())
    for at, which in enumerate(micro.own):
        micro.at, micro.passes = at, 0
        loss_of(model, 1, which).backward()
    assert model.module.body[0].weight.grad is not None


def averages_that_are_left_in_place_are_refused(count: int) -> None:
    ddp.DistributedDataParallel._least_ranks = 1
    model = ddp.DistributedDataParallel(nn.Linear(3, 1))
    micro = MicroBatches()
    model.step_in(micro)
    micro.deal(count, dist.get_rank(), dist.get_world_size())
    for at, _ in enumerate(micro.own):
        micro.at, micro.passes = at, 0
        model(torch.ones(2, 3)).sum().backward()
    micro.at, micro.passes = 0, 0
    with pytest.raises(BackwardError, match=r"call optimizer.zero_grad\(\) in each step"):
        model(torch.ones(2, 3)).sum().backward()
