"""What one CUDA device can show: NCCL by a world of one that reduces all the same, two ranks by gloo on one device."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.programs import follow
from testbed.sync_debug import waiting_is_an_error
from testbed.worlds import world
from torch import nn

import ddp
import ddp.horovod as hvd
from ddp.errors import PeerFailedError

DEVICE = "cuda:0"


def on_one_device(names: list[str]) -> None:
    """The programs of the exact tests, with all tensors on the device."""
    with torch.device(DEVICE):
        follow(names)


@contextlib.contextmanager
def over_nccl() -> Iterator[None]:
    """A world of one over NCCL, in which a wrapper communicates as in a larger one."""
    dist.destroy_process_group()
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    ddp.DistributedDataParallel._least_ranks = 1
    try:
        yield
    finally:
        ddp.DistributedDataParallel._least_ranks = 2


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return nn.Sequential(*layers).to(DEVICE, dtype)


def _train(model: nn.Module, steps: int = 5) -> list[torch.Tensor]:
    """Train by AdamW on made data; return the weights."""
    parameter = next(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(32, 64, generator=made, device=DEVICE).to(parameter.dtype)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def _out_of_memory(*_: object) -> None:
    torch.empty(1 << 60, dtype=torch.uint8, device=DEVICE)


def _forget(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


pytestmark = pytest.mark.gpu

DEADLINE_S = 250.0  # a first use of the device compiles and loads kernels
PROGRAMS = (
    "strided", "reused", "frozen in turn", "unfrozen", "unfrozen, accumulating", "normed",
    "answers", "answers, accumulating", "two forwards", "forward without backward", "one rank evaluates",
    "two backwards", "backward to some", "backward of two", "other order", "other layers", "conditional",
    "normed, two forwards", "recomputed", "recomputed, reentrant", "recomputed, accumulating", "wrapper recomputed",
    "wrapper recomputed, reentrant", "words", "words, accumulating", "words by SparseAdam", "replaced",
    "replaced, accumulating", "hooked",
)  # fmt: skip


@pytest.mark.parametrize("part", range(3))
def test_programs_equal_one_process(nursery: Nursery, part: int) -> None:
    nursery.run(2, on_one_device, deadline_s=DEADLINE_S, names=PROGRAMS[part::3])


@world(1, deadline_s=DEADLINE_S)
def test_nccl_changes_nothing_in_a_world_of_one() -> None:
    with over_nccl():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for views in (False, True):
                plain = _model(dtype)
                wrapped = ddp.DistributedDataParallel(copy.deepcopy(plain), [0], gradient_as_bucket_view=views)
                for alone, averaged in zip(_train(plain), _train(wrapped), strict=True):
                    assert torch.equal(alone, averaged), (dtype, views)


@world(1, deadline_s=DEADLINE_S)
def test_a_plain_step_waits_for_no_device() -> None:
    """Forward, backward and optimizer make no host synchronisation once they have run."""
    with over_nccl():
        x = torch.randn(32, 64, device=DEVICE)
        for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"compression": "bf16"}):
            model = ddp.DistributedDataParallel(_model(), [0], **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

            def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

            for _ in range(3):
                step()
            torch.cuda.synchronize()
            with waiting_is_an_error():
                for _ in range(3):
                    step()


@world(1, deadline_s=DEADLINE_S)
def test_compressions_change_nothing_in_a_world_of_one() -> None:
    with over_nccl():
        exact = _train(_model())
        for name in ("bf16", "fp16", "int8", "powersgd"):
            found = _train(ddp.DistributedDataParallel(_model(), [0], compression=name))
            for mine, theirs in zip(found, exact, strict=True):
                assert torch.equal(mine, theirs), name


@world(1, deadline_s=DEADLINE_S)
def test_mixed_precision_and_compile() -> None:
    with over_nccl():
        plain = _model()
        model = ddp.DistributedDataParallel(copy.deepcopy(plain), [0])
        for each in (plain, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cuda")
            x = torch.ones(32, 64, device=DEVICE)
            for _ in range(3):
                with torch.autocast("cuda", torch.float16):
                    loss = each(x).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of what the compiler imports
            compiled: Any = torch.compile(ddp.DistributedDataParallel(_model(), [0]), backend="aot_eager")
            _train(compiled, steps=2)  # inductor would need a C compiler


@world(1, deadline_s=DEADLINE_S)
def test_models_on_a_device_are_pickled() -> None:
    with over_nccl():
        model = ddp.DistributedDataParallel(_model(), [0])
        start = [parameter.detach().clone() for parameter in model.parameters()]
        copied = pickle.loads(pickle.dumps(model))
        assert copied._policy is not None  # it communicates
        expected, found = _train(model), _train(copied)
        assert all(each.device == torch.device(DEVICE) for each in found)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
        assert not any(torch.equal(mine, before) for mine, before in zip(found, start, strict=True))


@world(1, deadline_s=DEADLINE_S)
def test_checkpoints_come_back_on_the_device(tmp_path: Path) -> None:
    with over_nccl():
        model = ddp.DistributedDataParallel(_model(), [0])
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 64, device=DEVICE)).square().mean().backward()
        optimizer.step()
        ddp.Checkpoint(tmp_path).save(1, model=model, optimizer=optimizer)
        other = ddp.DistributedDataParallel(_model().apply(_forget), [0])
        again = torch.optim.AdamW(other.parameters())
        restored = ddp.Checkpoint(tmp_path).load(model=other, optimizer=again)
        assert restored is not None
        assert restored.step == 1
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert mine.device == torch.device(DEVICE)
            assert torch.equal(mine, theirs)
            assert again.state[mine]["exp_avg"].device == torch.device(DEVICE)


@world(2, deadline_s=DEADLINE_S)
def test_one_rank_out_of_memory_ends_the_step_everywhere() -> None:
    """Two ranks over gloo on one device: one runs out of memory, both raise, and the next step is right."""
    model = ddp.DistributedDataParallel(_model(), [0])
    x = torch.ones(8, 64, device=DEVICE)
    model(x).square().mean().backward()
    hook = model.module.register_forward_hook(_out_of_memory) if dist.get_rank() == 1 else None
    error, text = (PeerFailedError, "rank 1") if hook is None else (torch.cuda.OutOfMemoryError, "out of memory")
    with pytest.raises(error, match=text):
        model(x).square().mean().backward()
    if hook is not None:
        hook.remove()
    model.zero_grad()
    model(x).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@world(2, deadline_s=DEADLINE_S)
def test_horovods_collectives() -> None:
    """Two ranks over gloo, tensors on the device."""
    rank = dist.get_rank()
    hvd.init()
    mine = torch.full((5,), float(rank), device=DEVICE)
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [1.0] * 5
    assert hvd.allgather(mine[: rank + 1]).tolist() == [0.0, 1.0, 1.0]
    assert hvd.broadcast(mine, root_rank=1).tolist() == [1.0] * 5
    assert hvd.allreduce(mine, op=hvd.Sum).device == torch.device(DEVICE)
