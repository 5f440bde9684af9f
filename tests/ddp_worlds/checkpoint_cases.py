"""What the ranks of a test world do with checkpoints, and a writer that is killed: `python checkpoint_cases.py`."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp
from ddp import rng
from ddp.checkpoint import checkpoint, loading, writer
from ddp.checkpoint import file as checkpoint_file
from ddp.comm import objects
from ddp.monitoring import progress


def listed(folder: str | Path) -> list[str]:
    """The files of a folder but for the one that says whose it is."""
    return [name for name in os.listdir(folder) if name != ".owner"]


def numbers_after_saving(folder: str) -> list[float]:
    """Save, then draw: what every rank's generators give next."""
    seed = 100 + dist.get_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    checkpoint = ddp.Checkpoint(folder)
    checkpoint.save(7, model=model, here="there")
    drawn = _draw()
    checkpoint.wait()
    return drawn


def numbers_after_loading(folder: str) -> list[float]:
    restored = ddp.Checkpoint(folder).load(model=nn.Linear(2, 2))
    assert (restored.step, restored.values, restored.world_size) == (7, {"here": "there"}, 2)
    return _draw()


def _draw() -> list[float]:
    return [random.random(), float(numpy.random.random()), float(torch.rand(()))]


def saves_wrapped(folder: str, wrapper: str) -> list[float]:
    kind = ddp.DistributedDataParallel if wrapper == "ddp" else nn.parallel.DistributedDataParallel
    model = kind(_linear())
    ddp.Checkpoint(folder, in_background=False).save(1, model=model)
    return model.module.weight.flatten().tolist()


def loads_wrapped(folder: str, wrapper: str) -> list[float]:
    model: Any = _linear()
    if wrapper != "plain":
        model = (ddp.DistributedDataParallel if wrapper == "ddp" else nn.parallel.DistributedDataParallel)(model)
    assert ddp.Checkpoint(folder).load(model=model) is not None
    return next(iter(model.parameters())).flatten().tolist()


def _linear() -> nn.Linear:
    return nn.Linear(3, 2)


def loads_from_the_rank_that_sees_it(folder: str, owner: int, size: int) -> None:
    """Every rank has a folder of its own; only the owner's has the newest checkpoint."""
    rank = dist.get_rank()
    model = nn.Linear(size, 1, bias=False)
    own = Path(folder) / str(rank)
    # Written as a process alone would have done it.
    for step in (3, 8) if rank == owner else (3,):
        weights = {"weight": torch.full((1, size), float(step))}
        content = {"step": step, "world_size": 1, "model": weights, "random": [rng.capture()], "values": {}}
        checkpoint_file.write(own, step, content)
    loading._CHUNK_BYTES = 1000  # many, and the last one shorter
    restored = ddp.Checkpoint(own).load(model=model)
    assert restored.step == 8
    assert torch.equal(model.weight, torch.full_like(model.weight, 8.0))
    with torch.no_grad():
        model.weight.zero_()
    restored = ddp.Checkpoint("elsewhere").load(own / "step-0000000008.pt", model=model)
    assert restored is not None
    assert torch.equal(model.weight, torch.full_like(model.weight, 8.0))


def reads_each_byte_once_per_host(folder: str, elements: int, hosts: int) -> tuple[int, int]:
    """Load on ranks of `hosts` hosts, as far as folders of their own make them such; bytes read by this rank, by system
    calls and from the disk."""
    rank = dist.get_rank()
    own = Path(folder) / str(rank % hosts)
    path = own / "step-0000000008.pt"
    if rank < hosts:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert (
        ddp.Checkpoint(Path(folder) / "small").load() is not None
    )  # pages of torch's libraries come from the disk too
    dist.barrier()
    before = _bytes_read()
    restored = ddp.Checkpoint(own).load()
    after = _bytes_read()
    dist.barrier()
    if rank < hosts:
        os.truncate(path, 0)  # who still needed it would die of SIGBUS
    dist.barrier()
    assert torch.equal(restored.values["weights"], torch.arange(elements))
    return after[0] - before[0], after[1] - before[1]


def _bytes_read() -> tuple[int, int]:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["read_bytes"])


def one_that_cannot_open_it_receives_the_file(folder: str) -> None:
    """Rank 1 sees the folder that rank 0 reads, but not the file that rank 0 has found there."""
    if dist.get_rank() == 1:
        checkpoint.open_again = lambda *_: None  # type: ignore[attr-defined]  # replaced in this process
    model = nn.Linear(2, 1)
    assert ddp.Checkpoint(folder).load(model=model).step == 4
    assert model.weight.tolist() == [[4.0, 4.0]]


@contextlib.contextmanager
def unwritable(folder: str, what: str = "full disk") -> Iterator[None]:
    """Let rank 0's writes of more than 20 kB fail ("full disk"), or all in the folder ("read-only folder")."""
    is_writer = dist.get_rank() == 0
    if is_writer and what == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    elif is_writer:
        os.chmod(folder, 0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may write anywhere
    try:
        yield
    finally:
        if is_writer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            if os.getuid() == 0:
                os.seteuid(0)
            os.chmod(folder, 0o755)
        dist.barrier()


@contextlib.contextmanager
def caught_stderr(path: Path) -> Iterator[Path]:
    """Let this rank's stderr go to a file of its own, which is returned."""
    own = path.with_name(f"{path.name}.{dist.get_rank()}")
    own.touch()
    with own.open("w") as file, contextlib.redirect_stderr(file):
        yield own


def failure_of_rank_zero_is_raised_by_all(folder: str, what: str, in_background: bool) -> str:
    checkpoint = ddp.Checkpoint(folder, in_background=in_background, on_error="stop")
    checkpoint.save(1, weights=torch.zeros(10_000))
    checkpoint.wait()
    before = sorted(listed(folder))
    with unwritable(folder, what), pytest.raises(ddp.errors.CheckpointError, match=r"rank 0: could not") as caught:
        _save_durably(checkpoint)
    assert sorted(listed(folder)) == before
    checkpoint.save(2)  # the ranks are still in step
    assert (checkpoint.load() or pytest.fail("nothing saved")).step == 2
    return str(caught.value)


def a_failed_save_costs_that_save_alone(folder: str, what: str, in_background: bool) -> str:
    """Return what this rank wrote to stderr."""
    counted: list[int] = []
    for module in (checkpoint, writer):
        vars(module)["count_checkpoint"] = lambda: counted.append(1)  # in this process
    saves = ddp.Checkpoint(folder, in_background=in_background)
    weights = torch.zeros(10_000)
    with caught_stderr(Path(f"{folder}.stderr")) as stderr:
        saves.save(1, weights=weights)
        saves.wait()
        for step in (2, 5):  # two failures in a row, twice: the count begins again with a save that works
            with unwritable(folder, what):
                saves.save(step, weights=weights)
                saves.save(step + 1, weights=weights)
                _until_written()
            saves.save(step + 2, weights=weights)
            _until_written()
        saves.wait()
    assert sorted(listed(folder)) == [f"step-{step:010d}.pt" for step in (1, 4, 7)]
    assert (saves.load() or pytest.fail("nothing saved")).step == 7
    assert len(counted) == 3
    return stderr.read_text()


def _until_written() -> None:
    """Wait for the thread that writes, and leave what came of it to the next call."""
    if writer._thread is not None:
        writer._thread.join()
    dist.barrier()


def the_third_failure_in_a_row_is_an_error(folder: str, in_background: bool) -> str:
    checkpoint = ddp.Checkpoint(folder, in_background=in_background)
    checkpoint.save(1)
    checkpoint.wait()
    weights = torch.zeros(10_000)
    with unwritable(folder):
        checkpoint.save(2, weights=weights)
        checkpoint.save(3, weights=weights)
        if in_background:
            checkpoint.save(4, weights=weights)  # its failure is known in the next call
        with pytest.raises(ddp.errors.CheckpointError, match="rank 0: could not write step 4") as caught:
            checkpoint.save(5 if in_background else 4, weights=weights)
    checkpoint.save(6)  # the ranks are still in step
    assert (checkpoint.load() or pytest.fail("nothing saved")).step == 6
    return str(caught.value)


def who_needs_the_file_hears_of_a_failed_save(folder: str, in_background: bool) -> list[str]:
    """`wait` and `load` raise, once, whatever a save before has said on stderr."""
    checkpoint = ddp.Checkpoint(folder, in_background=in_background)
    checkpoint.save(1)
    checkpoint.wait()
    messages = []
    for call in (checkpoint.wait, checkpoint.load):
        with unwritable(folder):
            checkpoint.save(2, weights=torch.zeros(10_000))
            with pytest.raises(ddp.errors.CheckpointError, match="rank 0: could not write step 2") as caught:
                call()
        messages.append(str(caught.value))
        assert (checkpoint.load() or pytest.fail("nothing saved")).step == 1
    return messages


def a_rank_hangs_at_its_files(folder: str, hangs_s: float, stall_timeout_s: float) -> str:
    """Rank 0 reads from a pipe to which no process writes, until another thread ends that."""
    model = ddp.DistributedDataParallel(nn.Linear(1, 1), stall_timeout_s=stall_timeout_s)
    owner = Path(folder) / ".owner"
    if dist.get_rank() == 0:
        os.mkfifo(owner)
        descriptor = os.open(owner, os.O_RDWR)

        def end() -> None:
            owner.unlink()
            os.close(descriptor)

        threading.Timer(hangs_s, end).start()
    saves = ddp.Checkpoint(folder)
    dist.barrier()  # no one is late but for the files
    with caught_stderr(Path(f"{folder}.stderr")) as stderr:
        saves.save(1, model=model)
        saves.wait()
    assert listed(folder) == ["step-0000000001.pt"]
    return stderr.read_text()


def a_folder_that_cannot_be_made_is_an_error_at_once(folder: str) -> str:
    Path(folder).touch()
    dist.barrier()
    with pytest.raises(ddp.errors.CheckpointError, match="rank 0: could not save step 1") as caught:
        ddp.Checkpoint(Path(folder) / "below").save(1)
    return str(caught.value)


def _save_durably(checkpoint: ddp.Checkpoint) -> None:
    checkpoint.save(2, weights=torch.zeros(10_000))
    checkpoint.wait()


def differing_arguments_are_refused_by_all(folder: str) -> list[str]:
    rank = dist.get_rank()
    checkpoint = ddp.Checkpoint(folder)
    sampler = ddp.DistributedSampler(range(100))
    extra: dict[str, Any] = {"extra": 1} if rank else {}
    wrong: list[Callable[[], None]] = [
        lambda: checkpoint.save(5 + rank),
        lambda: checkpoint.save(5, **extra),
        lambda: checkpoint.save(5, extra=object() if rank else 1),
        lambda: checkpoint.save(5, model=nn.Linear(1, 1) if rank else object()),  # type: ignore[arg-type]  # on purpose
        lambda: checkpoint.save(5, sampler=sampler),
    ]
    messages = []
    for save in wrong:
        if save is wrong[-1]:
            batch = [index for index, _ in zip(sampler, range(8), strict=False)]
            sampler.advance(len(batch) - rank)
        with pytest.raises(ddp.errors.CheckpointError) as caught:
            save()
        messages.append(str(caught.value))
    assert checkpoint.load() is None
    checkpoint.save(5, model=nn.Linear(1, 1))
    with pytest.raises(ddp.errors.CheckpointError) as caught:
        checkpoint.load(model=nn.Linear(1, 2 if rank else 1))
    messages.append(str(caught.value))
    return messages


def is_silent_about_what_all_see(folder: str) -> int:
    """Load beside a damaged file; the number of warnings on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ddp.Checkpoint(folder).load() is not None
    return len(caught)


def counts_progress(folder: str) -> None:
    """Three reduced passes, one that only accumulates, two checkpoints."""
    os.environ["DTRAIN_PROGRESS_FILE"] = str(Path(folder) / str(dist.get_rank()))
    progress._counters.cache_clear()
    model = ddp.DistributedDataParallel(_linear())
    for _ in range(3):
        with model.no_sync():
            model(torch.ones(3)).sum().backward()
        model(torch.ones(3)).sum().backward()
    checkpoint = ddp.Checkpoint(Path(folder) / "checkpoints")
    for step in (1, 2):
        checkpoint.save(step, model=model)
    checkpoint.wait()


# A writer that is killed

_WEIGHTS = 3000


def kill_writers(folder: Path, kills: int, seed: int, in_background: bool) -> dict[str, int]:
    """Fork a process that saves in a loop, kill it at a random moment, check what it left; `kills` times."""
    rng = random.Random(seed)
    in_the_middle = newest = 0
    checkpoint = ddp.Checkpoint(folder, keep=2)
    for _ in range(kills):
        done_read, done_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(done_read)
            _save_for_ever(folder, done_write, in_background)
        os.close(done_write)
        first = os.read(done_read, 8)  # it has saved once: from now on any moment is a moment of saving
        time.sleep(rng.uniform(0, 0.012))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reported = first
        while more := os.read(done_read, 8192):
            reported = more[-8:]
        os.close(done_read)
        durable = int.from_bytes(reported, "little")

        in_the_middle += any(name.endswith(".tmp") for name in os.listdir(folder))
        weights = nn.Linear(_WEIGHTS, 1)
        restored = checkpoint.load(model=weights)
        assert restored.step >= max(durable, newest), "a checkpoint that was durable is gone"
        newest = restored.step
        assert restored.values == {"number": newest}
        assert all(bool((value == newest).all()) for value in weights.state_dict().values())
    checkpoint.save(newest + 1)
    checkpoint.wait()
    left = sorted(listed(folder))
    assert len(left) == 2, left
    return {"in_the_middle": in_the_middle, "newest": newest}


def _save_for_ever(folder: Path, done: int, in_background: bool) -> None:
    try:
        model = nn.Linear(_WEIGHTS, 1)
        checkpoint = ddp.Checkpoint(folder, keep=2, in_background=in_background)
        restored = checkpoint.load(model=model)
        begun = step = restored.step if restored else 0
        while True:
            step += 1
            for value in model.state_dict().values():
                value.fill_(step)
            checkpoint.save(step, model=model, number=step)
            durable = step - 1 if in_background else step
            if durable > begun:
                os.write(done, durable.to_bytes(8, "little"))
    finally:
        os._exit(1)


def a_warning_is_heard_in_one_step(folder: str, has_host_group: bool) -> None:
    """Rank 1 hears SIGUSR1 twice: all ranks save in the same two steps, by tensors in host memory."""
    if not has_host_group:  # as of NCCL alone
        for module in (checkpoint, objects):
            module.device_of = lambda *_: torch.device("cuda")  # type: ignore[attr-defined]  # replaced in this process
    seen = []
    control_group = checkpoint.control_group  # type: ignore[attr-defined]  # replaced in this process

    used: weakref.WeakSet[Any] = weakref.WeakSet()

    class Noted:
        def __init__(self, *arguments: Any) -> None:
            self.group = control_group(*arguments)
            used.add(self)

        def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> dist.Work:
            seen.append((tensors[0].device.type, self.group is dist.group.WORLD))
            return self.group.allreduce(tensors, options)

    checkpoint.control_group = Noted  # type: ignore[attr-defined]  # replaced in this process
    made = ddp.Checkpoint(folder)
    answers = []
    for step in range(8):
        answers.append(made.due(step, every=0))
        if dist.get_rank() == 1 and step in (2, 5):
            os.kill(os.getpid(), signal.SIGUSR1)
    assert answers == [step in (4, 7) for step in range(8)]
    assert seen == [("cpu", has_host_group)] * 8
    gc.collect()
    assert not used  # a group that is kept does not end when the process leaves it


def a_warning_comes_with_the_status_of_a_pass(folder: str) -> None:
    """Rank 1 hears SIGUSR1 twice, once in a step that fails on rank 0: the same calls say so; nothing else is sent."""
    checkpoint.control_group = None  # type: ignore[attr-defined]  # no collective but those of the pass
    model = ddp.DistributedDataParallel(nn.Linear(2, 1))
    first, second = ddp.Checkpoint(folder), ddp.Checkpoint(folder + "2")
    answers = []
    for step in range(8):
        if dist.get_rank() == 1 and step in (2, 5):
            os.kill(os.getpid(), signal.SIGUSR1)
        loss = model(torch.ones(1, 2)).sum()
        hook = model.module.weight.register_hook(_raises) if step == 2 and dist.get_rank() == 0 else None
        with pytest.raises((ValueError, ddp.errors.PeerFailedError)) if step == 2 else contextlib.nullcontext():
            loss.backward()
        if hook is not None:
            hook.remove()
        answers.append((first.due(step, every=0), second.due(step, every=0)))
    assert answers == [(step in (2, 5),) * 2 for step in range(8)]


def _raises(_: torch.Tensor) -> None:
    raise ValueError("this pass fails")


if __name__ == "__main__":
    print(json.dumps(kill_writers(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")))
