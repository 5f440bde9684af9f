"""What the ranks of a test world do while rank 0's thread writes a checkpoint, on a disk that waits for a word."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_worlds.checkpoint_cases import listed
from torch import nn

import ddp
from ddp.checkpoint import checkpoint as checkpoint_module
from ddp.checkpoint import file as checkpoint_file
from ddp.checkpoint import writer

_LIMIT_S = 60.0


class Disk:
    """`checkpoint_file.write` of this process: it notes the steps, and begins when it may."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.events: list[str] = []
        self._write = checkpoint_file.write

    def write(self, folder: Path, step: int, content: Any) -> Path:
        self.events.append(f"begin {step}")
        assert self.may_write.wait(_LIMIT_S)
        path = self._write(folder, step, content)
        self.events.append(f"end {step}")
        return path


@contextlib.contextmanager
def slow_disk() -> Iterator[Disk]:
    disk = Disk()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint_file, "write", disk.write)
        try:
            yield disk
        finally:
            disk.may_write.set()


def training_goes_on_while_rank_zero_writes(folder: str) -> None:
    model = ddp.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = ddp.Checkpoint(folder)
    notes: dict[str, Any] = {"list": [1], "tensor": torch.ones(2)}

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()

    train()
    saved = {name: value.clone() for name, value in model.module.state_dict().items()}
    with slow_disk() as disk:
        checkpoint.save(1, model=model, optimizer=optimizer, notes=notes)
        for _ in range(3):
            train()  # a collective of all ranks
        notes["list"].append(2)
        notes["tensor"].zero_()
        dist.barrier()
        assert not list(Path(folder).glob("*.pt")), "no one has waited for the disk"
        dist.barrier()  # the disk of rank 0 stays slow until all have looked
    restored = checkpoint.load(model=model, optimizer=optimizer)  # waits for it
    assert restored.step == 1
    assert restored.values["notes"]["list"] == [1]
    assert restored.values["notes"]["tensor"].tolist() == [1, 1]
    assert all(torch.equal(value, saved[name]) for name, value in model.module.state_dict().items())
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    assert disk.events == (["begin 1", "end 1"] if dist.get_rank() == 0 else [])


def one_save_after_the_other(folder: str) -> None:
    checkpoint, other = ddp.Checkpoint(Path(folder) / "a"), ddp.Checkpoint(Path(folder) / "b")
    with slow_disk() as disk:
        checkpoint.save(1)
        timer = threading.Timer(0.3, disk.may_write.set)
        timer.start()
        checkpoint.save(2)
        other.save(3)
        other.wait()
        timer.join()
    expected = [f"{what} {step}" for step in (1, 2, 3) for what in ("begin", "end")]
    assert disk.events == (expected if dist.get_rank() == 0 else [])


def a_failed_save_is_everybodys_error(folder: str) -> list[str]:
    """By the next save, load or wait; and only once."""
    checkpoint = ddp.Checkpoint(folder, on_error="stop")
    counted: list[int] = []
    for module in (checkpoint_module, writer):
        vars(module)["count_checkpoint"] = lambda: counted.append(1)  # in this process
    checkpoint.save(1)
    checkpoint.wait()
    model = nn.Linear(1, 1)
    reported = []
    steps = iter(range(2, 9))
    calls: list[Callable[[], object]] = [
        lambda: checkpoint.save(next(steps)),
        checkpoint.wait,
        lambda: checkpoint.load(model=model),
    ]
    for call in calls:
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        checkpoint.save(next(steps), weights=torch.zeros(10_000))
        with pytest.raises(ddp.errors.CheckpointError, match="rank 0: could not write step") as caught:
            call()
        reported.append(str(caught.value))
        if dist.get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpoint.wait()  # the ranks are still in step
        assert sorted(listed(folder)) == ["step-0000000001.pt"]
    checkpoint.save(9)
    assert checkpoint.load().step == 9
    assert counted == [1, 1]
    return reported


def ranks_that_differ_in_how_they_save_are_told(folder: str) -> None:
    checkpoint = ddp.Checkpoint(folder, in_background=dist.get_rank() == 0)
    with pytest.raises(ddp.errors.CheckpointError, match="in_background is False on rank 1, but True on rank 0"):
        checkpoint.save(1)
    assert ddp.Checkpoint(folder).load() is None
