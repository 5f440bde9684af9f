"""Sums whose bits depend on the ranks alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.present import present
from testbed.shm import tree_of
from testbed.worlds import world
from torch import nn

import ddp
from ddp.comm.shm.hosts_group import HostsGroup
from ddp.comm.sums.tree_sum import adds_by_tree, start_tree_sum
from ddp.data_parallel import wrapper
from ddp.data_parallel.arguments import checked_deterministic
from ddp.errors import ArgumentError, LayoutMismatchError, UnsupportedError

# Sent whole; in pieces of which some are longer; and one for which messages need several packets.
LENGTHS = (1, 7, 5000, 9001, 300_001)


def _values(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the values of each rank, of which the order of additions shows in the sum."""
    every = []
    for rank in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(1000 * rank + length)
        exponents = torch.randint(-3, 4, (length,), generator=generator)
        every.append((torch.randn(length, generator=generator) * 10.0**exponents).to(dtype))
    return every


def _check_sums(group: Any) -> None:
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        every = [_values(length, dtype) for length in LENGTHS]
        mine = [values[rank].clone() for values in every]
        works = [start_tree_sum(group, flat) for flat in mine]  # all in transit
        dist.all_reduce(torch.ones(3))
        for work, flat, values in zip(works, mine, every, strict=True):
            work.wait()
            assert torch.equal(flat, tree_of(dist.ReduceOp.SUM, values)), (dtype, len(flat))


@world(3, 5)
def test_sums_have_the_bits_of_the_tree() -> None:
    group = present(dist.group.WORLD)
    assert not adds_by_tree(group, torch.float32)
    _check_sums(group)


def _over_hosts(hosts: Sequence[Sequence[int]], by_itself: bool) -> None:
    store = dist.PrefixStore("hosts", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = HostsGroup(store, rank, size, timedelta(seconds=60), hosts)
    assert adds_by_tree(group, torch.float32) == by_itself
    assert not adds_by_tree(group, torch.bfloat16), "each host rounds its sum"
    _check_sums(group)
    dist.barrier()
    group.shutdown()


@pytest.mark.parametrize(
    ("hosts", "by_itself"),
    [
        ([(0, 1), (2, 3)], True),
        ([(0, 1), (2,)], False),
        ([(0, 2), (1, 3)], False),
        ([(0, 1, 2), (3, 4)], False),
    ],
    ids=["each host has a subtree", "unequal", "in turn", "three on a host"],
)
def test_sums_over_hosts_have_the_same_bits(nursery: Nursery, hosts: list[tuple[int, ...]], by_itself: bool) -> None:
    nursery.run(sum(map(len, hosts)), _over_hosts, hosts=hosts, by_itself=by_itself)


@world(3)
def test_a_rank_that_is_gone_ends_the_sum() -> None:
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    dist.barrier()
    if dist.get_rank() == 1:
        return
    with pytest.raises(RuntimeError, match=r"closed|reset"):
        # In pieces that are sent at once: gloo does not tell who has received part of one that its sender has ended.
        start_tree_sum(group, torch.ones(12_000)).wait()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(20, 8, sparse=True)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))
        self.unused = nn.Linear(8, 8)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(self.table(indices))
        return output


@world(3, backend=("gloo", "shm"))
def test_gradients_have_the_bits_of_the_tree() -> None:
    """Of what each rank alone computes, from gradients divided by the number of ranks; by shm without asking for it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    deterministic = True if dist.get_backend() == "gloo" else None
    batches = [torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(each)) for each in range(size)]
    every: list[dict[str, torch.Tensor]] = []
    for batch in batches:
        alone = Net()
        alone(batch).square().sum().backward()
        found = {name: present(each.grad) for name, each in alone.layers.named_parameters() if each.grad is not None}
        every.append(found)
    for cap_mb in (25.0, 0.0001):
        net = Net()
        model = ddp.DistributedDataParallel(net, deterministic=deterministic, bucket_cap_mb=cap_mb)
        for _ in range(2):  # the second with buckets in the order of gradients
            model.zero_grad()
            model(batches[rank]).square().sum().backward()
            for name, parameter in net.layers.named_parameters():
                wanted = tree_of(dist.ReduceOp.SUM, [each[name] / size for each in every])
                assert torch.equal(present(parameter.grad), wanted), (cap_mb, name)


@world(2)
def test_what_cannot_be_deterministic_is_refused() -> None:
    with pytest.raises(ArgumentError, match="deterministic=True and compression"):
        ddp.DistributedDataParallel(nn.Linear(2, 2), deterministic=True, compression="bf16")
    model = ddp.DistributedDataParallel(nn.Linear(2, 2), deterministic=True)
    with pytest.raises(UnsupportedError, match="deterministic=True and a communication hook"):
        model.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    with pytest.raises(UnsupportedError, match="deterministic=True for a module on cuda"):
        checked_deterministic(True, torch.device("cuda"), None)
    with pytest.raises(ArgumentError, match="give True, False or 'device'"):
        ddp.DistributedDataParallel(nn.Linear(2, 2), deterministic="gpu")  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatchError, match="deterministic"):
        ddp.DistributedDataParallel(nn.Linear(2, 2), deterministic=dist.get_rank() == 0)


@world(2)
def test_operators_of_a_device_are_deterministic() -> None:
    """Each rank has a GPU of another name; the wrapper compares what is returned."""
    names = ["GPU A", "GPU B"]
    torch.cuda.get_device_name = lambda device=None: names[dist.get_rank()]
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert checked_deterministic("device", torch.device("cpu"), None) is True
    assert not torch.are_deterministic_algorithms_enabled()
    found = checked_deterministic("device", torch.device("cuda:0"), None)
    assert found == f"on {names[dist.get_rank()]}"
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapper, "checked_deterministic", lambda *_: found)
        with pytest.raises(LayoutMismatchError, match=names[0]):
            ddp.DistributedDataParallel(nn.Linear(2, 2), deterministic="device")
