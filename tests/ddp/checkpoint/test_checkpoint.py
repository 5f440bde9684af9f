"""A checkpoint holds all that a run needs, is there as a whole or not at all, and fails on every rank or on none."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from testbed.checkpoints import damage, listed
from testbed.nursery import ROOT, Nursery
from testbed.present import present
from testbed.processes import run_program
from testbed.resilient import run as run_script
from testbed.resilient import said
from testbed.seeds import Seeds
from torch import nn
from torch.utils.data import BatchSampler

import ddp
from ddp.checkpoint import file as checkpoint_file
from ddp.checkpoint import kept_copy, loading
from ddp.checkpoint.atomic_file import remove_unfinished
from ddp.checkpoint.folder_owner import FolderOwner
from ddp.errors import ArgumentError, CheckpointError

KILLED_WRITER = ROOT / "tests" / "programs" / "killed_writer.py"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small checkpoint, of step 7."""
    folder = tmp_path_factory.mktemp("whole")
    ddp.Checkpoint(folder, in_background=False).save(7, weight=torch.arange(5.0))
    return (folder / "step-0000000007.pt").read_bytes()


class Run:
    """A training that needs everything: dropout and numbers of all generators, momenta, a schedule, a loss scale."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=40)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.sampler = ddp.DistributedSampler(range(23), seed=5)
        self.parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "sampler": self.sampler,
        }

    def steps(self) -> Iterator[float]:
        """The losses of one step after another: five batches and a bit an epoch."""
        for epoch in itertools.count(self.sampler.epoch):
            self.sampler.set_epoch(epoch)
            for indices in BatchSampler(self.sampler, 4, drop_last=True):
                noise = random.random() * float(numpy.random.random())
                x = torch.randn(4, 3, dtype=torch.float64) * noise + torch.tensor(indices)[:, None]
                loss = self.model(x).square().mean()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.sampler.advance(len(indices))
                yield loss.item()


@pytest.mark.parametrize("stop", [0, 1, 5, 7])
def test_a_run_goes_on_as_if_it_had_not_stopped(stop: int, tmp_path: Path) -> None:
    first = Run()
    losses = first.steps()
    before = list(itertools.islice(losses, stop))
    ddp.Checkpoint(tmp_path).save(stop, **first.parts, losses=before, nested={"a": [None, 1j, b"x", {2, 3}]})
    expected = list(itertools.islice(losses, 8))

    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    second = Run()
    restored = present(ddp.Checkpoint(tmp_path).load(**second.parts))
    assert (restored.step, restored.path) == (stop, tmp_path / f"step-000000000{stop}.pt")
    assert restored.values == {"losses": before, "nested": {"a": [None, 1j, b"x", {2, 3}]}}
    assert list(itertools.islice(second.steps(), 8)) == expected
    assert second.scaler.get_scale() == first.scaler.get_scale()


def test_a_file_can_be_read_without_ddp(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    ddp.Checkpoint(tmp_path, in_background=False).save(3, model=model, best=0.5)
    content = torch.load(tmp_path / "step-0000000003.pt", weights_only=True)
    assert list(content) == ["step", "world_size", "model", "random", "values"]
    assert content["values"] == {"best": 0.5}
    assert torch.equal(content["model"]["weight"], model.weight)
    mapped = torch.load(tmp_path / "step-0000000003.pt", weights_only=True, mmap=True)
    assert torch.equal(mapped["model"]["bias"], model.bias)


def test_an_empty_or_missing_folder_is_a_new_run(tmp_path: Path) -> None:
    assert ddp.Checkpoint(tmp_path).load() is None
    assert ddp.Checkpoint(tmp_path / "not" / "yet").load(model=nn.Linear(1, 1)) is None
    assert listed(tmp_path) == []


def test_the_last_ones_are_kept_and_what_others_wrote(tmp_path: Path) -> None:
    foreign = ["step-0000000001.pt", "step-0000000002.pt", "step-1.pt.bak", "notes.txt", ".step-0000000001.pt.abc.tmp"]
    for name in foreign:
        (tmp_path / name).write_bytes(b"not ours")
    checkpoint = ddp.Checkpoint(tmp_path / "." / "", keep=2)
    for step in (3, 7, 20, 100):
        checkpoint.save(step)
    checkpoint.wait()
    assert sorted(listed(tmp_path)) == sorted([*foreign, "step-0000000020.pt", "step-0000000100.pt"])
    checkpoint.save(100)  # the same step again takes the place of the first
    checkpoint.wait()
    assert sorted(listed(tmp_path)) == sorted([*foreign, "step-0000000020.pt", "step-0000000100.pt"])


def test_a_damaged_file_does_not_count_as_kept(tmp_path: Path) -> None:
    _save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-0000000003.pt")
    checkpoint = ddp.Checkpoint(tmp_path, keep=2, in_background=False)
    with pytest.warns(UserWarning, match=r"skipped: .*step-0000000003.pt"):
        assert checkpoint.load().step == 2  # type: ignore[union-attr]
    checkpoint.save(4)
    assert sorted(listed(tmp_path)) == [f"step-000000000{n}.pt" for n in (2, 3, 4)]
    checkpoint.save(5)
    assert sorted(listed(tmp_path)) == [f"step-000000000{n}.pt" for n in (3, 4, 5)]


@pytest.mark.parametrize("keep", [0, -1])
def test_nothing_to_keep_is_an_error(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ArgumentError, match=f"keep={keep}"):
        ddp.Checkpoint(tmp_path, keep=keep)


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    _save_steps(tmp_path, 5, 9)
    with pytest.raises(CheckpointError, match=r"step-0000000009.pt is later than step 6"):
        ddp.Checkpoint(tmp_path).save(6)
    assert len(listed(tmp_path)) == 2


# Files that are not whole


def test_a_second_owner_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    first, second, third = (ddp.Checkpoint(tmp_path, in_background=False) for _ in range(3))
    first.save(1)
    with pytest.raises(CheckpointError, match=rf"another Checkpoint of this process .*pid {os.getpid()} on "):
        second.save(2)
    assert second.load() is not None
    first.save(3)
    del first  # which ends it
    second.save(4)
    second.wait()  # which does as well
    third.save(5)
    with pytest.raises(CheckpointError, match="another Checkpoint of this process"):
        second.save(6)
    assert sorted(listed(tmp_path)) == [f"step-000000000{n}.pt" for n in (3, 4, 5)]


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_folder_is_free_again_when_its_owner_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", _no_locks)
    with _owner_in_a_process(tmp_path, {"TORCHELASTIC_RUN_ID": "first"}) as pid:
        with pytest.raises(CheckpointError, match=rf"run 'first', rank 0, pid {pid} on .*end the other fir"):
            FolderOwner(tmp_path, {"TORCHELASTIC_RUN_ID": "second"}).claim(0)
        with pytest.raises(CheckpointError, match="another run"):  # no later attempt
            FolderOwner(tmp_path, {"TORCHELASTIC_RUN_ID": "first"}).claim(0)
    second = FolderOwner(tmp_path, {"TORCHELASTIC_RUN_ID": "second"})
    second.claim(0)
    second.claim(0)


def test_a_later_attempt_takes_over_from_one_that_hangs(tmp_path: Path) -> None:
    run = {"TORCHELASTIC_RUN_ID": "one"}
    earlier, later, last = (FolderOwner(tmp_path, {**run, "TORCHELASTIC_RESTART_COUNT": str(n)}) for n in range(3))
    with _owner_in_a_process(tmp_path, run):
        later.claim(0)
    with pytest.raises(CheckpointError, match="another Checkpoint"):
        earlier.claim(0)
    last.claim(0)
    with pytest.raises(CheckpointError, match=r"has taken it over \(run 'one', rank 0"):
        later.claim(0)


def test_a_later_generation_takes_over_from_a_lost_host(tmp_path: Path) -> None:
    """Whose locks a server of files keeps for a while; a process that goes on within the attempt stays the owner."""
    run = {"TORCHELASTIC_RUN_ID": "one", "DTRAIN_ATTEMPT": "one/1", "TORCHELASTIC_RESTART_COUNT": "3"}
    with _owner_in_a_process(tmp_path, run):
        with pytest.raises(CheckpointError, match="another run"):
            FolderOwner(tmp_path, {**run, "TORCHELASTIC_RESTART_COUNT": "4"}, lambda: 0).claim(0)
        later = FolderOwner(tmp_path, run, lambda: 1)
        later.claim(0)
    later.claim(0)
    with pytest.raises(CheckpointError, match="another Checkpoint"):
        FolderOwner(tmp_path, run, lambda: 2).claim(0)


@pytest.mark.parametrize(("attempt", "lives", "is_taken"), [(0, True, False), (0, False, True), (1, True, True)])
def test_a_kept_copy_is_taken_unless_its_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: int, lives: bool, is_taken: bool
) -> None:
    """Of the same attempt: another process of the rank, whose file is still being written. Private: else it is rare."""
    for name, value in (("DTRAIN_COPY_NOTE", tmp_path / "note"), ("DTRAIN_COPY_FILE", tmp_path / "memory")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("DTRAIN_ATTEMPT", f"one/{attempt}")
    (tmp_path / "memory").write_bytes(b"content")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    note = kept_copy.Note.new(checkpoint_file.path_of(tmp_path / "saved", 3), 3, 0)
    replace(note, pid=os.getpid() if lives else ended.pid).put(kept_copy.note_path())
    with contextlib.ExitStack() as opened:
        assert (loading._open_kept(opened, tmp_path / "saved") is not None) is is_taken


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_late_file_of_an_ended_process_of_the_run_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """It was kept in memory when the process was killed, and this one has saved before it is written."""
    monkeypatch.setenv("DTRAIN_COPY_NOTE", str(tmp_path / "note"))
    folder = tmp_path / "saved"
    late = checkpoint_file.path_of(folder if is_ours else tmp_path / "elsewhere", 3)
    kept_copy.Note.new(late, 3, 0).put(kept_copy.note_path())
    checkpoint = ddp.Checkpoint(folder, in_background=False)
    checkpoint.save(4)
    checkpoint_file.write(folder, 3, {})
    if is_ours:
        checkpoint.save(5)
        return
    with pytest.raises(CheckpointError, match=r"step-0000000003\.pt was saved by another run"):
        checkpoint.save(5)


def test_without_locks_between_hosts_one_of_two_owners_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    first, second = ddp.Checkpoint(tmp_path, in_background=False), ddp.Checkpoint(tmp_path, in_background=False)
    first.save(1)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    second.save(2)
    with pytest.raises(CheckpointError, match=r"has taken it over .* on elsewhere"):
        first.save(3)
    first.wait()  # gives up what is not its own any more
    second.save(4)
    assert json.loads((tmp_path / ".owner").read_bytes())["host"] == "elsewhere"


def _no_locks(*_: object) -> None:
    raise OSError(errno.ENOTSUP, "no locks")


@contextlib.contextmanager
def _owner_in_a_process(folder: Path, environ: dict[str, str]) -> Iterator[int]:
    """Another process owns the folder; it is killed at the end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        owner = FolderOwner(folder, environ)
        owner.claim(0)
        os.write(writing, b"owned")
        signal.pause()
    try:
        os.close(writing)
        assert os.read(reading, 5) == b"owned"
        yield pid
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_every_truncation_is_noticed(whole: bytes) -> None:
    for length in range(len(whole)):
        with pytest.raises(CheckpointError):
            checkpoint_file.verify(io.BytesIO(whole[:length]))
    assert checkpoint_file.verify(io.BytesIO(whole)).step == 7


def test_every_changed_byte_is_noticed(whole: bytes, seeds: Seeds) -> None:
    rng = random.Random(*seeds(1))
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        with pytest.raises(CheckpointError):
            checkpoint_file.verify(io.BytesIO(damaged))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[:1], "not a checkpoint of ddp"),
        (lambda data: data[:100], "is cut short at 100 bytes"),
        (lambda data: data[:-1], "is cut short at"),
        (lambda data: data[:-60], "is cut short at"),  # the archive of torch.save as a whole
        (lambda data: data + b"\0", "is cut short at"),
        (lambda data: data[1:], "says that its state has"),
        (lambda data: data + data, "says that its state has"),
        (lambda data: data[:-61] + bytes([data[-61] ^ 1]) + data[-60:], "other content than its checksum"),
        (lambda data: data[:-52] + b"\2" + data[-51:], "is of format 2"),
        (lambda data: b"#!/bin/sh\n" * 100, "not a checkpoint of ddp"),
    ],
)
def test_a_broken_file_is_passed_over_with_its_reason(
    whole: bytes, damage: Callable[[bytes], bytes], reason: str, tmp_path: Path
) -> None:
    _save_steps(tmp_path, 4, 6)
    path = tmp_path / "step-0000000007.pt"
    path.write_bytes(damage(whole))
    checkpoint = ddp.Checkpoint(tmp_path)
    with pytest.warns(UserWarning, match=rf"skipped: {path}: .*{reason}"):
        restored = present(checkpoint.load())
    assert restored.step == 6
    with pytest.raises(CheckpointError, match=rf"{path}: .*{reason}"):
        checkpoint.load(path)
    checkpoint.save(7)  # the broken one is no later checkpoint
    assert ddp.Checkpoint(tmp_path).load(path).step == 7  # type: ignore[union-attr]


def test_a_renamed_file_is_not_taken_for_a_later_step(tmp_path: Path) -> None:
    _save_steps(tmp_path, 4, 6)
    shutil.copy(tmp_path / "step-0000000004.pt", tmp_path / "step-0000000009.pt")
    with pytest.warns(UserWarning, match="was saved as step 4"):
        assert ddp.Checkpoint(tmp_path).load().step == 6  # type: ignore[union-attr]


def test_if_none_is_whole_all_are_named(tmp_path: Path) -> None:
    _save_steps(tmp_path, 4, 6)
    damage(tmp_path / "step-0000000004.pt")
    (tmp_path / "step-0000000006.pt").unlink()
    (tmp_path / "step-0000000006.pt").mkdir()
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint is whole.*06.pt.*directory.*04.pt.*checksum"):
        ddp.Checkpoint(tmp_path).load()


def test_a_folder_that_is_none_is_an_error_not_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: cannot be read: Not a directory"):
        ddp.Checkpoint(tmp_path / "file").load()
    with pytest.raises(CheckpointError, match="could not save step 1"):
        ddp.Checkpoint(tmp_path / "file").save(1)


def test_a_path_that_is_given_must_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"other.pt: cannot be read: No such file"):
        ddp.Checkpoint(tmp_path).load(tmp_path / "other.pt")


def test_an_older_file_can_be_loaded_by_its_path(tmp_path: Path) -> None:
    _save_steps(tmp_path, 4, 6)
    assert ddp.Checkpoint("elsewhere").load(tmp_path / "step-0000000004.pt").step == 4  # type: ignore[union-attr]


# What fits and what may be saved


def test_what_is_given_must_be_what_was_saved(tmp_path: Path) -> None:
    run = Run()
    checkpoint = ddp.Checkpoint(tmp_path)
    checkpoint.save(1, model=run.model, optimizer=run.optimizer)
    with pytest.raises(CheckpointError, match="the file holds optimizer, which is not given"):
        checkpoint.load(model=run.model)
    with pytest.raises(CheckpointError, match="scheduler is given, but the file only holds model, optimizer"):
        checkpoint.load(model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)


@pytest.mark.parametrize(
    ("other", "differences"),
    [
        (nn.Linear(3, 1), r"weight has shape \(1, 3\) here and \(1, 2\) in the file$"),
        (nn.Linear(2, 1, bias=False), "bias is only in the file$"),
        (nn.Bilinear(1, 1, 2), r"weight has shape \(2, 1, 1\) here .*; bias has shape"),
        (nn.BatchNorm1d(1), "running_mean is missing in the file; .*; and 1 more"),
    ],
)
def test_another_model_is_named_and_not_changed(other: nn.Module, differences: str, tmp_path: Path) -> None:
    ddp.Checkpoint(tmp_path).save(1, model=nn.Linear(2, 1))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"is not the saved one: {differences}"):
        ddp.Checkpoint(tmp_path).load(model=other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_an_optimizer_of_another_model_is_named(tmp_path: Path) -> None:
    ddp.Checkpoint(tmp_path).save(1, optimizer=torch.optim.SGD(nn.Linear(2, 1).parameters()))
    with pytest.raises(CheckpointError, match="optimizer: loaded state dict contains a parameter group"):
        ddp.Checkpoint(tmp_path).load(optimizer=torch.optim.SGD(nn.PReLU().parameters()))


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "extra is a builtins.object"),
        ({"a": [1, Path()]}, r"extra\['a'\]\[1\] is a pathlib"),
        (numpy.float64(1), "extra is a numpy.float64"),
        (numpy.zeros(2), "extra is a numpy.ndarray"),
        (Point(1, 2), "Point"),
        ({(1, 2): 3}, r"the key extra\[\(1, 2\)\] is a tuple"),
        ([torch.empty(2, device="meta")], r"extra\[0\] is a meta tensor"),
        (torch.ones(2, 2).to_mkldnn(), "extra is a mkldnn tensor"),
    ],
)
def test_values_that_could_not_be_loaded_are_refused(value: object, named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        ddp.Checkpoint(tmp_path).save(1, extra=value)
    assert listed(tmp_path) == []


def test_all_that_is_accepted_can_be_loaded(tmp_path: Path) -> None:
    atoms = [None, True, 1 << 70, 0.5, 1j, "text", b"bytes", torch.bfloat16, torch.device("cpu"), torch.Size([2])]
    containers = [(1, (2,)), {3}, {"a": {4: 5.0, None: 6}}, {}, []]
    tensors = [torch.zeros(2, dtype=torch.bfloat16), nn.Parameter(torch.ones(1)), torch.zeros(0), torch.tensor(3)]
    checkpoint = ddp.Checkpoint(tmp_path)
    checkpoint.save(1, atoms=atoms, containers=containers, tensors=tensors)
    values = checkpoint.load().values  # type: ignore[union-attr]
    assert (values["atoms"], values["containers"]) == (atoms, containers)
    assert all(torch.equal(a, b) for a, b in zip(values["tensors"], tensors, strict=True))


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_a_step_is_a_number_of_steps(step: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step is"):
        ddp.Checkpoint(tmp_path).save(step)


def test_torch_s_sampler_has_no_place(tmp_path: Path) -> None:
    sampler: Any = torch.utils.data.DistributedSampler(range(4), 1, 0)  # type: ignore[arg-type]  # torch wants a Dataset
    with pytest.raises(CheckpointError, match=r"sampler=DistributedSampler has no state_dict.*ddp.DistributedSampler"):
        ddp.Checkpoint(tmp_path).save(1, sampler=sampler)


# Writers that die or fail


@pytest.mark.timeout(200)
@pytest.mark.parametrize("in_background", [False, True])
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, in_background: bool, seeds: Seeds
) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    (seed,), kills = seeds(1), 40
    words = (str(kills), str(seed), str(int(in_background)))
    result = run_program(sys.executable, "-W", "error", KILLED_WRITER, tmp_path, *words, env=environment)
    assert result.returncode == 0, result.stderr
    in_the_middle = json.loads(result.stdout)["in_the_middle"]
    assert in_the_middle > 1  # while it writes; how many depends on the machine


def test_only_a_dead_writer_s_file_is_removed(tmp_path: Path) -> None:
    dead, living = (tmp_path / f".step-0000000009.pt.{digit * 8}.tmp" for digit in "ab")
    dead.write_bytes(b"half")
    with open(living, "xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ddp.Checkpoint(tmp_path, in_background=False).save(1)
        assert sorted(listed(tmp_path)) == [living.name, "step-0000000001.pt"]
    ddp.Checkpoint(tmp_path, in_background=False).save(2)
    assert sorted(listed(tmp_path)) == ["step-0000000001.pt", "step-0000000002.pt"]


class Interrupted:
    """Its state is asked for when a signal comes, as when a worker of a DataLoader has died."""

    def state_dict(self) -> dict[str, Any]:
        signal.raise_signal(signal.SIGUSR2)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGUSR2)


def test_what_a_signal_handler_raises_passes_through_a_save(tmp_path: Path) -> None:
    def died(*_: object) -> None:
        raise RuntimeError("DataLoader worker is killed")

    checkpoint = ddp.Checkpoint(tmp_path)
    before = signal.signal(signal.SIGUSR2, died)
    try:
        with pytest.raises(RuntimeError, match=r"^DataLoader worker is killed"):
            checkpoint.save(1, scheduler=Interrupted())
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        checkpoint.save(1, scheduler=Interrupted())
        checkpoint.wait()
        signal.signal(signal.SIGUSR2, died)
        with pytest.raises(RuntimeError, match=r"^DataLoader worker is killed"):
            checkpoint.load(scheduler=Interrupted())
    finally:
        signal.signal(signal.SIGUSR2, before)


def raise_signal(*_: object) -> None:
    signal.raise_signal(signal.SIGUSR2)


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("newest_first", lambda checkpoint: checkpoint.load()),
        ("verify", lambda checkpoint: checkpoint.load()),
        ("newest_first", lambda checkpoint: checkpoint.save(2)),
        ("write", lambda checkpoint: checkpoint.save(2)),
    ],
    ids=["load newest_first", "load verify", "save newest_first", "save write"],
)
def test_a_timer_that_expires_is_no_error_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, call: Callable[[ddp.Checkpoint], object]
) -> None:
    """Its TimeoutError is an OSError, like those of files. No file is left out by it, and no save counts as failed."""
    with _timer_expires():
        checkpoint = ddp.Checkpoint(tmp_path, in_background=False)
        checkpoint.save(1)
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_file, place, raise_signal)
            with pytest.raises(TimeoutError, match="no time left"):
                call(checkpoint)
        assert present(checkpoint.load()).step == 1
        checkpoint.save(3)
        assert present(checkpoint.load()).step == 3


@contextlib.contextmanager
def _timer_expires() -> Iterator[None]:
    def expired(*_: object) -> None:
        raise TimeoutError("no time left")

    before = signal.signal(signal.SIGUSR2, expired)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


RESILIENT = """
import os, resource
import torch
import ddp
world = ddp.init()
model = ddp.DistributedDataParallel(torch.nn.Linear(100, 100))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = ddp.Checkpoint("saved")
state = ddp.State(model=model, optimizer=optimizer, step=0)
entered = 0

@ddp.resilient
def train(state):
    global entered
    entered += 1
    while state.step < 5:
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.commit()
        least = 20_000 if state.step == 3 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, resource.RLIM_INFINITY))
        checkpoint.save(state.step, model=model)
        if world.is_main:
            ddp.checkpoint.writer._thread.join()

train(state)
checkpoint.wait()
print("result", entered, os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""


@pytest.mark.usefixtures("warm")
def test_a_full_disk_restarts_no_rank_of_a_resilient_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RESILIENT)
    result = run_script(script, tmp_path)
    assert said(result, "result") == {0: "1 0", 1: "1 0"}
    assert result.stderr.count("could not write step 3 to") == 1, result.stderr
    assert "rank 0 could not write step 3 to" in result.stderr
    assert sorted(listed(tmp_path / "saved")) == [f"step-{step:010d}.pt" for step in (2, 4, 5)]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    """Although a process that it has forked lives."""
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from ddp.checkpoint.atomic_file import replacing\n"
        "with replacing(Path('step-0000000001.pt')):\n"
        "    if os.fork():\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    print('forked', flush=True)\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
    )
    words = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    ) as writer:
        assert present(writer.stdout).readline() == "forked\n"
        assert writer.wait(60) == -signal.SIGKILL
        assert len(listed(tmp_path)) == 1
        remove_unfinished(tmp_path, re.compile(r"step-([0-9]+)\.pt"))
        assert listed(tmp_path) == []
        assert writer.communicate(timeout=60)[0] == ""  # the forked process ends


def _save_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        ddp.Checkpoint(folder, keep=9, in_background=False).save(step)


def test_the_signal_s_own_handler_is_called_as_well(nursery: Nursery, tmp_path: Path) -> None:
    program = (
        "import os, signal\nseen = []\nsignal.signal(signal.SIGUSR1, lambda *_: seen.append('own'))\n"
        "from ddp import Checkpoint\ncheckpoint = Checkpoint('saved')\n"
        "assert checkpoint.due(1, every=0) is False and checkpoint.due(2, every=2) is True\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "assert checkpoint.due(3, every=0) is True and checkpoint.due(4, every=0) is False\nprint(seen)"
    )
    done = nursery.program(program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "['own']\n"), done.stderr
