# mypy: disable-error-code="assignment, no-any-return, operator, union-attr"
"""What is saved and loaded by several ranks: equal keys, one read of a host, errors and warnings on all or on none."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import struct
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
import torch.distributed as dist
from testbed.checkpoints import caught_stderr, damage, listed, unwritable
from testbed.nursery import Nursery
from testbed.worlds import agreed, world
from torch import nn

import ddp
from ddp import rng
from ddp.checkpoint import checkpoint, loading, writer
from ddp.checkpoint import file as checkpoint_file
from ddp.comm import objects
from ddp.errors import CheckpointError, PeerFailedError
from ddp.monitoring import progress


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


def _save_twice(checkpoint: ddp.Checkpoint) -> None:
    """In the background, the second call raises what became of the first."""
    checkpoint.save(2, weights=torch.zeros(10_000))
    checkpoint.save(3)


def _until_written() -> None:
    """Wait for the thread that writes, and leave what came of it to the next call."""
    if writer._thread is not None:
        writer._thread.join()
    dist.barrier()


def _raises(_: torch.Tensor) -> None:
    raise ValueError("this pass fails")


FAILURES = pytest.mark.parametrize(
    ("what", "reason"), [("full disk", "File too large"), ("read-only folder", "Permission denied")]
)


BOTH_WAYS = pytest.mark.parametrize("in_background", [False, True])


@world(3)
@BOTH_WAYS
@FAILURES
def test_all_ranks_raise_when_rank_zero_cannot_write(
    what: str,
    reason: str,
    in_background: bool,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "folder"
    checkpoint = ddp.Checkpoint(folder, in_background=in_background, on_error="stop")
    checkpoint.save(1, weights=torch.zeros(10_000))
    checkpoint.wait()
    before = sorted(listed(folder))
    refused = pytest.raises(CheckpointError, match=r"rank 0: could not .* step 2")
    with unwritable(folder, what), refused as caught:
        _save_twice(checkpoint)
    assert sorted(listed(folder)) == before
    checkpoint.save(2)  # the ranks are still in step
    assert (checkpoint.load() or pytest.fail("nothing saved")).step == 2
    assert reason in agreed(str(caught.value))


@world(3)
@BOTH_WAYS
@FAILURES
def test_a_failed_save_costs_that_save_alone_and_is_said_once(
    what: str,
    reason: str,
    in_background: bool,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "folder"
    counted: list[int] = []
    for module in (checkpoint, writer):
        vars(module)["count_checkpoint"] = lambda: counted.append(1)  # in this process
    saves = ddp.Checkpoint(folder, in_background=in_background)
    weights = torch.zeros(10_000)
    with caught_stderr(tmp_path / "stderr") as stderr:
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
    lines = stderr.read_text().splitlines()
    if dist.get_rank():
        assert lines == []
        return
    assert len(lines) == 4, lines
    for line, (step, newest, nth) in zip(lines, [(2, 1, 1), (3, 1, 2), (5, 4, 1), (6, 4, 2)], strict=True):
        assert line.startswith(f"ddp: rank 0 could not write step {step} to {folder}: "), line
        assert reason in line
        assert f"The newest whole checkpoint is {folder}/step-{newest:010d}.pt" in line
        assert f"failed saves in a row: {nth}; 3 are an error" in line


@world(1)
def test_a_resumed_run_whose_first_save_fails_names_the_file_before(tmp_path: Path) -> None:
    folder, weights = tmp_path / "folder", torch.zeros(10_000)
    ddp.Checkpoint(folder, in_background=False).save(1, weights=weights)
    resumed = ddp.Checkpoint(folder, in_background=False)
    resumed.load()
    with caught_stderr(tmp_path / "stderr") as stderr, unwritable(folder):
        resumed.save(2, weights=weights)
    assert f"The newest whole checkpoint is {folder}/step-0000000001.pt" in stderr.read_text()


@world(3)
@BOTH_WAYS
def test_the_third_failed_save_in_a_row_is_raised_by_all(in_background: bool, tmp_path: Path) -> None:
    checkpoint = ddp.Checkpoint(tmp_path, in_background=in_background)
    checkpoint.save(1)
    checkpoint.wait()
    weights = torch.zeros(10_000)
    with unwritable(tmp_path):
        checkpoint.save(2, weights=weights)
        checkpoint.save(3, weights=weights)
        if in_background:
            checkpoint.save(4, weights=weights)  # its failure is known in the next call
        with pytest.raises(CheckpointError, match="rank 0: could not write step 4") as caught:
            checkpoint.save(5 if in_background else 4, weights=weights)
    checkpoint.save(6)  # the ranks are still in step
    assert (checkpoint.load() or pytest.fail("nothing saved")).step == 6
    assert re.search("File too large.*3 saves in a row have failed", agreed(str(caught.value)))


@world(3)
@BOTH_WAYS
def test_who_waits_or_loads_hears_of_a_failed_save(in_background: bool, tmp_path: Path) -> None:
    """`wait` and `load` raise, once, whatever a save before has said on stderr."""
    checkpoint = ddp.Checkpoint(tmp_path, in_background=in_background)
    checkpoint.save(1)
    checkpoint.wait()
    for call in (checkpoint.wait, checkpoint.load):
        with unwritable(tmp_path):
            checkpoint.save(2, weights=torch.zeros(10_000))
            with pytest.raises(CheckpointError, match="rank 0: could not write step 2") as caught:
                call()
        agreed(str(caught.value))
        assert (checkpoint.load() or pytest.fail("nothing saved")).step == 1


@world(2)
def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.touch()
    dist.barrier()
    with pytest.raises(CheckpointError, match="rank 0: could not save step 1") as caught:
        ddp.Checkpoint(folder / "below").save(1)
    assert "Not a directory" in agreed(str(caught.value))


@world(3)
def test_a_rank_whose_file_system_does_not_answer_is_named(tmp_path: Path) -> None:
    """Rank 0 reads from a pipe to which no process writes, until another thread ends that."""
    model = ddp.DistributedDataParallel(nn.Linear(1, 1), stall_timeout_s=2.0)
    owner = tmp_path / "folder" / ".owner"
    owner.parent.mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        os.mkfifo(owner)
        descriptor = os.open(owner, os.O_RDWR)

        def end() -> None:
            owner.unlink()
            os.close(descriptor)

        threading.Timer(10.0, end).start()
    saves = ddp.Checkpoint(owner.parent)
    dist.barrier()  # no one is late but for the files
    with caught_stderr(tmp_path / "stderr") as stderr:
        saves.save(1, model=model)
        saves.wait()
    assert listed(owner.parent) == ["step-0000000001.pt"]
    if dist.get_rank() != 1:
        assert stderr.read_text() == "", "one of those that wait says so"
        return
    (line,) = stderr.read_text().splitlines()
    found = re.fullmatch(
        r"ddp: rank 0 has been at the files of a checkpoint for ([\d.]+) s, in (\S+), at (.+): its file system may not "
        r"answer\. Rank 1 waits for it in the exchange of notes before saving of step \d+, at most ([\d.]+) s more",
        line,
    )
    assert found, line
    for_s, where, at, left_s = found.groups()
    assert 1 < float(for_s) < 10
    assert where == str(owner.parent)
    assert re.search(r"test_ranks\.py:\d+ in test_a_rank_whose_file_system", at)
    assert float(left_s) > 8


def test_each_rank_s_numbers_go_on_in_a_world_of_the_same_size(nursery: Nursery, tmp_path: Path) -> None:
    drawn = nursery.run(2, numbers_after_saving, folder=str(tmp_path))
    assert drawn[0] != drawn[1]
    assert nursery.run(2, numbers_after_loading, folder=str(tmp_path)) == drawn


@pytest.mark.parametrize("world_size", [1, 3])
def test_numbers_of_another_world_are_new_and_repeatable(nursery: Nursery, world_size: int, tmp_path: Path) -> None:
    saved = nursery.run(2, numbers_after_saving, folder=str(tmp_path))
    first, again = (nursery.run(world_size, numbers_after_loading, folder=str(tmp_path)) for _ in range(2))
    assert first == again
    numbers = [number for rank in (*saved, *first) for number in rank]
    assert len(set(numbers)) == len(numbers)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": ddp.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
    "plain": lambda model: model,
    "compiled": lambda model: cast(nn.Module, torch.compile(model, backend="eager")),
}


@world(2)
@pytest.mark.parametrize("saved", ["ddp", "torch"])
def test_wrapped_or_not_a_model_has_the_same_keys(saved: str, tmp_path: Path) -> None:
    model = WRAPPERS[saved](nn.Linear(3, 2))
    ddp.Checkpoint(tmp_path, in_background=False).save(1, model=model)
    for wrap in WRAPPERS.values():
        other = wrap(nn.Linear(3, 2))
        assert ddp.Checkpoint(tmp_path).load(model=other)
        assert all(map(torch.equal, model.parameters(), other.parameters()))


@world(3)
@pytest.mark.parametrize("owner", [0, 2])
def test_hosts_without_a_shared_folder_receive_the_newest(owner: int, tmp_path: Path) -> None:
    """Every rank has a folder of its own; only the owner's has the newest checkpoint."""
    rank, size = dist.get_rank(), 777
    model = nn.Linear(size, 1, bias=False)
    own = tmp_path / str(rank)
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


@pytest.mark.parametrize("hosts", [1, 2])
def test_each_byte_is_read_once_on_a_host(nursery: Nursery, hosts: int, tmp_path: Path) -> None:
    elements = 1 << 23  # 64 MiB: little beside it what else a rank reads meanwhile
    ddp.Checkpoint(tmp_path / "small", in_background=False).save(8, weights=torch.zeros(1))
    for host in range(hosts):
        checkpoint = ddp.Checkpoint(tmp_path / str(host), in_background=False)
        checkpoint.save(8, weights=torch.arange(elements))
    size = (tmp_path / "0" / "step-0000000008.pt").stat().st_size
    case = reads_each_byte_once_per_host
    read = nursery.run(4, case, folder=str(tmp_path), elements=elements, hosts=hosts)
    by_calls, from_disk = (sum(each) / size for each in zip(*read, strict=True))
    assert hosts <= by_calls < hosts + 0.2
    assert from_disk < hosts + 0.2  # none where the folder is in memory


@world(3)
def test_a_rank_that_cannot_open_the_file_receives_it(tmp_path: Path) -> None:
    """Rank 1 sees the folder that rank 0 reads, but not the file that rank 0 has found there."""
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 4.0)
    ddp.Checkpoint(tmp_path, in_background=False).save(4, model=model)
    if dist.get_rank() == 1:
        checkpoint.open_again = lambda *_: None  # type: ignore[attr-defined]  # replaced in this process
    model = nn.Linear(2, 1)
    assert ddp.Checkpoint(tmp_path).load(model=model).step == 4
    assert model.weight.tolist() == [[4.0, 4.0]]


@world(2)
def test_ranks_that_save_different_things_are_named(tmp_path: Path) -> None:
    rank = dist.get_rank()
    checkpoint = ddp.Checkpoint(tmp_path)
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
        with pytest.raises(CheckpointError) as caught:
            save()
        messages.append(str(caught.value))
    assert checkpoint.load() is None
    checkpoint.save(5, model=nn.Linear(1, 1))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(model=nn.Linear(1, 2 if rank else 1))
    messages.append(str(caught.value))
    for message, part in zip(
        agreed(messages),
        [
            "step is 6 on rank 1, but 5 on rank 0",
            "names is ('extra',) on rank 1, but () on rank 0",
            "rank 1: could not save step 5: extra is a builtins.object",
            "rank 0: could not save step 5: model=object has no state_dict()",
            "position of the sampler is",
            "rank 1: could not restore",
        ],
        strict=True,
    ):
        assert part in message


@world(2)
def test_a_file_that_all_ranks_pass_over_is_warned_of_once(tmp_path: Path) -> None:
    checkpoint = ddp.Checkpoint(tmp_path, in_background=False)
    for step in (1, 2):
        checkpoint.save(step)
    if dist.get_rank() == 0:
        damage(tmp_path / "step-0000000002.pt")
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ddp.Checkpoint(tmp_path).load() is not None
    assert len(caught) == (dist.get_rank() == 0)


@world(2)
def test_every_rank_counts_its_reduced_passes_and_checkpoints(tmp_path: Path) -> None:
    """Three reduced passes, one that only accumulates, two checkpoints."""
    counters = tmp_path / str(dist.get_rank())
    counters.write_bytes(bytes(72))
    os.environ["DTRAIN_PROGRESS_FILE"] = str(counters)
    progress._counters.cache_clear()
    model = ddp.DistributedDataParallel(nn.Linear(3, 2))
    for _ in range(3):
        with model.no_sync():
            model(torch.ones(3)).sum().backward()
        model(torch.ones(3)).sum().backward()
    checkpoint = ddp.Checkpoint(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoint.save(step, model=model)
    checkpoint.wait()
    assert struct.unpack("<QQQ", counters.read_bytes()[:24]) == (3, 2, 0)


@world(3)
@pytest.mark.parametrize("has_host_group", [True, False])
def test_all_ranks_hear_a_warning_in_the_same_step(tmp_path: Path, has_host_group: bool) -> None:
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
    made = ddp.Checkpoint(tmp_path)
    answers = []
    for step in range(8):
        answers.append(made.due(step, every=0))
        if dist.get_rank() == 1 and step in (2, 5):
            os.kill(os.getpid(), signal.SIGUSR1)
    assert answers == [step in (4, 7) for step in range(8)]
    assert seen == [("cpu", has_host_group)] * 8
    gc.collect()
    assert not used  # a group that is kept does not end when the process leaves it


@world(3)
def test_the_status_of_a_pass_says_that_a_rank_was_warned(tmp_path: Path) -> None:
    """Rank 1 hears SIGUSR1 twice, once in a step that fails on rank 0: the same calls say so; nothing else is sent."""
    checkpoint.control_group = None  # type: ignore[attr-defined]  # no collective but those of the pass
    model = ddp.DistributedDataParallel(nn.Linear(2, 1))
    first, second = ddp.Checkpoint(tmp_path), ddp.Checkpoint(tmp_path / "second")
    answers = []
    for step in range(8):
        if dist.get_rank() == 1 and step in (2, 5):
            os.kill(os.getpid(), signal.SIGUSR1)
        loss = model(torch.ones(1, 2)).sum()
        hook = model.module.weight.register_hook(_raises) if step == 2 and dist.get_rank() == 0 else None
        with pytest.raises((ValueError, PeerFailedError)) if step == 2 else contextlib.nullcontext():
            loss.backward()
        if hook is not None:
            hook.remove()
        answers.append((first.due(step, every=0), second.due(step, every=0)))
    assert answers == [(step in (2, 5),) * 2 for step in range(8)]
