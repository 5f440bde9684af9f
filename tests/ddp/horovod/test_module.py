"""`import ddp.horovod as hvd` stands for Horovod's module: it has its names, or says what to use instead."""

from __future__ import annotations

import pytest
import torch
from testbed.training import assert_close, batch, build, loss_of, shard
from testbed.worlds import world

import ddp.horovod as hvd
from ddp.errors import MissingNameError, UnsupportedError


def test_it_has_every_name_that_it_lists() -> None:
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []
    horovods = "init shutdown rank size local_rank local_size cross_rank cross_size allreduce allgather broadcast join"
    there = [name for name in horovods.split() if hasattr(hvd, name)]
    assert there == horovods.split()[:-1]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("Adasum", "op=hvd.Average"),
        ("elastic", "--max-restarts"),
        ("add_process_set", "torch.distributed.new_group"),
        ("ProcessSet", "group="),
        ("start_timeline", "torch.profiler"),
        ("nccl_built", "is_nccl_available"),
        ("mpi_threads_supported", "is_mpi_available"),
        ("run", "dtrain run"),
    ],
)
def test_what_it_lacks_of_horovod_says_what_to_use_instead(name: str, instead: str) -> None:
    assert not hasattr(hvd, name)
    with pytest.raises(MissingNameError, match=rf"^ddp\.horovod has no {name}: ") as caught:
        getattr(hvd, name)
    assert instead in str(caught.value)
    assert isinstance(caught.value, AttributeError)
    assert isinstance(caught.value, UnsupportedError)


def test_any_other_name_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'allreduse'") as caught:
        hvd.allreduse  # noqa: B018
    assert not isinstance(caught.value, MissingNameError)


@world(2)
def test_a_script_for_horovod_trains_with_the_module_alone() -> None:
    assert hvd.init().world_size == hvd.size() == 2
    model, alone = build("mlp"), build("mlp")
    if hvd.rank():
        torch.nn.init.zeros_(model.layers[0].weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=hvd.Compression.none
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    x, y = batch(0, 8)
    loss_of(model, shard(x), shard(y)).backward()
    loss_of(alone, x, y).backward()
    assert_close(model, alone)
    assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == 2
    assert hvd.broadcast_object({"rank": hvd.rank()}) == {"rank": 0}
