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
from testbed.simulated_device import DEVICE, register, simulated_device
from torch import nn

import ddp
from ddp.checkpoint import checkpoint as checkpoint_module
from ddp.checkpoint import copies, writer
from ddp.checkpoint import file as checkpoint_file
from ddp.checkpoint.copies import HostCopy, HostMemory

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


@contextlib.contextmanager
def device_with_blocks(seed: int) -> Iterator[list[int]]:
    """Have the simulated device; the sizes of the blocks that are pinned for copies from it."""
    blocks: list[int] = []
    with simulated_device(seed), pytest.MonkeyPatch.context() as patch:
        pinned = copies._pinned

        def note(size: int) -> torch.Tensor:
            blocks.append(size)
            return pinned(size)

        patch.setattr(copies, "_pinned", note)
        yield blocks


def _trained(device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    first, last = nn.Linear(100, 33).to(device), nn.Linear(33, 100).to(device)
    last.weight = nn.Parameter(first.weight.t())
    model = nn.Sequential(first, nn.BatchNorm1d(33).to(device), last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 100).to(device)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "none": torch.zeros(0, 2)}


def copies_from_a_device_share_blocks_that_are_kept_and_are_saved_apart(folder: str, seed: int) -> None:
    register()
    ddp.Checkpoint(Path(folder, "plain"), in_background=False).save(1, **_trained("cpu"))
    with device_with_blocks(seed) as blocks:
        checkpoint, given = ddp.Checkpoint(Path(folder, "pinned")), _trained(DEVICE)
        for _ in range(2):
            checkpoint.save(1, **given)
            checkpoint.wait()
            plain, pinned = (Path(folder, way, "step-0000000001.pt").read_bytes() for way in ("plain", "pinned"))
            assert pinned == plain
    assert 0 < len(blocks) < 6
    assert all(size & (size - 1) == 0 for size in blocks)


def pinned_blocks_take_little_more_than_the_state(folder: str, seed: int) -> None:
    layer = [768 * 3 * 768, 3 * 768, 768 * 768, 768, 4 * 768 * 768, 4 * 768, 4 * 768 * 768, *[768] * 5]
    sizes = 3 * [4 * numel // 64 for numel in (50257 * 768, 1024 * 768, 768, 768, *12 * layer)]  # GPT-2, 64 times less
    with device_with_blocks(seed) as blocks:
        memory = HostMemory()
        taken = memory.take(sizes)
        assert [len(each) for each in taken] == sizes
        for number, each in enumerate(taken):
            each.fill_(number % 251)
        assert all(each.eq(number % 251).all() for number, each in enumerate(taken))
        assert sum(sizes) < sum(blocks) < 1.05 * sum(sizes)
        memory.free()
        assert [each.data_ptr() for each in memory.take(sizes)] == [each.data_ptr() for each in taken]


def where_no_more_memory_can_be_pinned_ordinary_memory_is_taken(folder: str, seed: int) -> None:
    def refuse(_: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with device_with_blocks(seed) as blocks, pytest.MonkeyPatch.context() as patch:
        memory = HostMemory()
        memory.take([128])
        memory.free()
        patch.setattr(copies, "_pinned", refuse)
        copy = HostCopy(memory)
        copied = copy.of([torch.ones(size, device=DEVICE) for size in (16, 1000, 2000)])
        copy.wait()
        assert [tensor.sum() for tensor in copied] == [16, 1000, 2000]
    assert blocks == [128]
