"""A save in the background keeps every promise of one in the foreground, while training goes on."""

from __future__ import annotations

import re
import signal
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_worlds.checkpoint_cases import listed
from testbed.nursery import Nursery
from testbed.processes import Result
from testbed.seeds import Seeds
from torch import nn

import ddp
from ddp.checkpoint.copies import HostCopy

CASES = "ddp_worlds.background_save_cases"


@pytest.mark.parametrize(
    "case",
    [
        "training_goes_on_while_rank_zero_writes",
        "one_save_after_the_other",
        "ranks_that_differ_in_how_they_save_are_told",
    ],
)
def test_several_ranks(nursery: Nursery, case: str, tmp_path: Path) -> None:
    nursery.run(2, f"{CASES}:{case}", folder=str(tmp_path))


def test_a_failed_save_is_raised_by_all_ranks_in_their_next_call(nursery: Nursery, tmp_path: Path) -> None:
    messages = nursery.run(3, f"{CASES}:a_failed_save_is_everybodys_error", folder=str(tmp_path / "folder"))
    assert messages[1:] == [messages[0]] * 2
    for step, text in zip((2, 4, 5), messages[0], strict=True):
        assert f"could not write step {step} to {tmp_path}/folder: " in text
        assert "File too large" in text


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


def test_a_copy_shares_no_memory_with_the_original_and_keeps_what_is_shared() -> None:
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


@pytest.mark.parametrize(
    "case",
    [
        "copies_from_a_device_share_blocks_that_are_kept_and_are_saved_apart",
        "pinned_blocks_take_little_more_than_the_state",
        "where_no_more_memory_can_be_pinned_ordinary_memory_is_taken",
    ],
)
def test_a_device(nursery: Nursery, seeds: Seeds, case: str, tmp_path: Path) -> None:
    nursery.run(1, f"{CASES}:{case}", folder=str(tmp_path), seed=seeds(1)[0])


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
def test_a_process_that_fails_does_not_wait_for_a_disk_without_end(
    end: str, code: int, run: Callable[..., Result], tmp_path: Path
) -> None:
    program = f"from ddp.checkpoint import writer\nwriter._LONGEST_WAIT_S = 0.2\n{end}"
    done = run(program, GATE=str(tmp_path / "never"))
    assert done.returncode == code, done
    assert "ends before its last checkpoint is written; the previous one is whole" in done.stderr


def test_a_state_that_cannot_be_copied_is_printed_and_an_error_of_the_next_call(
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


def test_a_process_that_is_forked_meanwhile_leaves_the_save_to_its_parent(
    run: Callable[..., Result], tmp_path: Path
) -> None:
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


def test_after_the_warning_that_time_is_nearly_up_a_save_is_durable_when_it_returns(
    run: Callable[..., Result], tmp_path: Path
) -> None:
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
