# mypy: disable-error-code="union-attr"
"""A save in the background keeps every promise of one in the foreground, while training goes on."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.checkpoints import listed
from testbed.nursery import Nursery
from testbed.processes import Result
from testbed.seeds import Seeds
from testbed.simulated_device import DEVICE, register, simulated_device
from testbed.worlds import world
from torch import nn

import ddp
from ddp.checkpoint import copies
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


@world(2)
def test_training_goes_on_while_rank_zero_writes(tmp_path: Path) -> None:
    model = ddp.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = ddp.Checkpoint(tmp_path)
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
        assert not list(tmp_path.glob("*.pt")), "no one has waited for the disk"
        dist.barrier()  # the disk of rank 0 stays slow until all have looked
    restored = checkpoint.load(model=model, optimizer=optimizer)  # waits for it
    assert restored.step == 1
    assert restored.values["notes"]["list"] == [1]
    assert restored.values["notes"]["tensor"].tolist() == [1, 1]
    assert all(torch.equal(value, saved[name]) for name, value in model.module.state_dict().items())
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    assert disk.events == (["begin 1", "end 1"] if dist.get_rank() == 0 else [])


@world(2)
def test_saves_are_written_one_after_the_other(tmp_path: Path) -> None:
    checkpoint, other = ddp.Checkpoint(tmp_path / "a"), ddp.Checkpoint(tmp_path / "b")
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


@world(2)
def test_ranks_that_differ_in_how_they_save_are_named(tmp_path: Path) -> None:
    checkpoint = ddp.Checkpoint(tmp_path, in_background=dist.get_rank() == 0)
    with pytest.raises(ddp.errors.CheckpointError, match="in_background is False on rank 1, but True on rank 0"):
        checkpoint.save(1)
    assert ddp.Checkpoint(tmp_path).load() is None


def test_both_ways_write_the_same_bytes(tmp_path: Path) -> None:
    first, last = nn.Linear(4, 3), nn.Linear(3, 4)
    last.weight = nn.Parameter(first.weight.t())  # shares memory, in another order
    model = nn.Sequential(first, nn.BatchNorm1d(3), last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    values = {"parameter": nn.Parameter(torch.ones(2)), "grads": torch.zeros(3, requires_grad=True)}
    for in_background in (False, True):
        checkpoint = ddp.Checkpoint(tmp_path / str(in_background), in_background=in_background)
        checkpoint.save(1, model=model, optimizer=optimizer, values=values)
        checkpoint.wait()
    foreground, background = ((tmp_path / str(way) / "step-0000000001.pt").read_bytes() for way in (False, True))
    assert background == foreground


# Copies


def test_a_copy_shares_memory_within_itself_alone() -> None:
    """It shares none with the original, and keeps what is shared within."""
    base = torch.arange(12.0)
    state = nn.BatchNorm1d(2).state_dict()
    original: dict[str, Any] = {
        "whole": base, "part": base[3:7], "columns": base.view(3, 4).t(), "again": [base, (base,)],
        "sparse": torch.eye(3).to_sparse(), "conjugate": torch.tensor([1j]).conj(), "empty": torch.zeros(0, 3),
        "state": state, "plain": {"a": [1, None, {2}], 3: torch.Size([1])}, "half": torch.ones(3, dtype=torch.bfloat16),
    }  # fmt: skip
    copied = HostCopy().of(original)
    base.zero_()
    state["weight"].zero_()
    original["plain"]["a"].append(4)
    assert copied["whole"].tolist() == [*map(float, range(12))]
    assert copied["part"].tolist() == [3, 4, 5, 6]
    assert (copied["columns"].shape, copied["columns"].stride()) == ((4, 3), (1, 4))
    assert len({t.untyped_storage().data_ptr() for t in (copied["whole"], copied["part"], copied["columns"])}) == 1
    assert copied["again"][1][0].untyped_storage().data_ptr() == copied["whole"].untyped_storage().data_ptr()
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(3))
    assert copied["conjugate"].tolist() == [-1j]
    assert (copied["empty"].shape, copied["half"].dtype) == ((0, 3), torch.bfloat16)
    assert type(copied["state"]) is OrderedDict
    assert vars(copied["state"])["_metadata"] == vars(state)["_metadata"]
    assert copied["state"]["weight"].tolist() == [1, 1]
    assert copied["plain"] == {"a": [1, None, {2}], 3: torch.Size([1])}


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


@world(1)
def test_copies_from_a_device_share_blocks_and_are_saved_apart(tmp_path: Path, seeds: Seeds) -> None:
    register()
    ddp.Checkpoint(Path(tmp_path, "plain"), in_background=False).save(1, **_trained("cpu"))
    with device_with_blocks(*seeds(1)) as blocks:
        checkpoint, given = ddp.Checkpoint(Path(tmp_path, "pinned")), _trained(DEVICE)
        for _ in range(2):
            checkpoint.save(1, **given)
            checkpoint.wait()
            plain, pinned = (Path(tmp_path, way, "step-0000000001.pt").read_bytes() for way in ("plain", "pinned"))
            assert pinned == plain
    assert 0 < len(blocks) < 6
    assert all(size & (size - 1) == 0 for size in blocks)


@world(1)
def test_pinned_blocks_take_little_more_than_the_state(seeds: Seeds) -> None:
    layer = [768 * 3 * 768, 3 * 768, 768 * 768, 768, 4 * 768 * 768, 4 * 768, 4 * 768 * 768, *[768] * 5]
    sizes = 3 * [4 * numel // 64 for numel in (50257 * 768, 1024 * 768, 768, 768, *12 * layer)]  # GPT-2, 64 times less
    with device_with_blocks(*seeds(1)) as blocks:
        memory = HostMemory()
        taken = memory.take(sizes)
        assert [len(each) for each in taken] == sizes
        for number, each in enumerate(taken):
            each.fill_(number % 251)
        assert all(each.eq(number % 251).all() for number, each in enumerate(taken))
        assert sum(sizes) < sum(blocks) < 1.05 * sum(sizes)
        memory.free()
        assert [each.data_ptr() for each in memory.take(sizes)] == [each.data_ptr() for each in taken]


@world(1)
def test_where_no_memory_can_be_pinned_ordinary_memory_is_taken(seeds: Seeds) -> None:
    def refuse(_: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with device_with_blocks(*seeds(1)) as blocks, pytest.MonkeyPatch.context() as patch:
        memory = HostMemory()
        memory.take([128])
        memory.free()
        patch.setattr(copies, "_pinned", refuse)
        copy = HostCopy(memory)
        copied = copy.of([torch.ones(size, device=DEVICE) for size in (16, 1000, 2000)])
        copy.wait()
        assert [tensor.sum() for tensor in copied] == [16, 1000, 2000]
    assert blocks == [128]


# The end of the process


SLOW = """
import os, sys, time
import torch
import ddp
from ddp.checkpoint import file
write = file.write
def slow(*arguments):
    if os.environ.get("GATE"):
        os.write(1, b"up\\n")  # no lock of stdout is held when the process forks
        while not os.path.exists(os.environ["GATE"]):
            time.sleep(0.01)
    return write(*arguments)
file.write = slow
checkpoint = ddp.Checkpoint("saved")
checkpoint.save(1, weights=torch.ones(1000))
"""


@pytest.fixture
def run(nursery: Nursery, tmp_path: Path) -> Callable[..., Result]:
    return lambda program, **variables: nursery.program(SLOW + program, tmp_path, **variables)


@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(75)", 75), ("raise ValueError('a bad batch')", 1)])
def test_a_process_that_ends_waits_for_the_file(
    end: str, code: int, run: Callable[..., Result], tmp_path: Path
) -> None:
    done = run(f"checkpoint.save(2)\n{end}")
    assert done.returncode == code, done
    assert sorted(listed(tmp_path / "saved")) == ["step-0000000001.pt", "step-0000000002.pt"]


@pytest.mark.parametrize(
    ("end", "code"), [("raise ValueError('a bad batch')", 1), ("raise KeyboardInterrupt", -signal.SIGINT)]
)
def test_a_process_that_fails_waits_for_a_disk_with_an_end(
    end: str, code: int, run: Callable[..., Result], tmp_path: Path
) -> None:
    program = f"from ddp.checkpoint import writer\nwriter._LONGEST_WAIT_S = 0.2\n{end}"
    done = run(program, GATE=str(tmp_path / "never"))
    assert done.returncode == code, done
    assert "ends before its last checkpoint is written; the previous one is whole" in done.stderr


def test_a_failed_copy_is_an_error_of_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no memory is left")

    checkpoint = ddp.Checkpoint(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(HostCopy, "of", refuse)
        checkpoint.save(1, weights=torch.zeros(1))
    expected = "could not copy step 1: RuntimeError: no memory is left"
    assert f"ddp: {expected}" in capfd.readouterr().err
    with pytest.raises(ddp.errors.CheckpointError, match=expected):
        checkpoint.wait()
    checkpoint.save(2, weights=torch.zeros(1))
    restored = checkpoint.load()
    assert restored is not None
    assert restored.step == 2


@pytest.mark.parametrize("settings", ["", "in_background=False", "on_error='stop'"])
def test_a_process_whose_last_save_failed_says_so_and_ends_with_1(
    settings: str, run: Callable[..., Result], tmp_path: Path
) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    again = f"checkpoint = ddp.Checkpoint('saved', {settings})"
    done = run(f"checkpoint.wait(); {limit}\n{again}\ncheckpoint.save(2, weights=torch.ones(10_000))\nprint('said')")
    assert (done.returncode, done.stdout) == (1, "said\n")
    assert re.match(r"ddp: (rank 0 )?could not write step 2 to", done.stderr)  # at once
    assert "CheckpointError: could not write step 2 to" in done.stderr
    assert listed(tmp_path / "saved") == ["step-0000000001.pt"]


def test_a_forked_process_leaves_the_save_to_its_parent(run: Callable[..., Result], tmp_path: Path) -> None:
    fork = (
        "pid = os.fork()\n"
        "if not pid:\n"
        "    checkpoint.wait()\n"  # has nothing to wait for
        "    sys.exit(7)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "open(os.environ['GATE'], 'w').close()\n"
        "checkpoint.wait()\n"
        "print(code, checkpoint.load().step)\n"
    )
    done = run(fork, GATE=str(tmp_path / "gate"))
    assert (done.returncode, done.stdout.split()) == (0, ["up", "7", "1"]), done


def test_a_save_after_the_warning_is_durable_when_it_returns(run: Callable[..., Result], tmp_path: Path) -> None:
    """The warning says that time is nearly up."""
    program = (
        "checkpoint.wait()\n"
        "assert not checkpoint.due(1, every=0)\n"
        "import signal; os.kill(os.getpid(), signal.SIGUSR1)\n"
        "assert checkpoint.due(2, every=0)\n"
        "checkpoint.save(2)\n"
        "os._exit(3)\n"
    )
    done = run(program)
    assert done.returncode == 3, done
    assert sorted(listed(tmp_path / "saved")) == ["step-0000000001.pt", "step-0000000002.pt"]
