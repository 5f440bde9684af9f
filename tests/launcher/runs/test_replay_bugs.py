"""Trainings that fail on one rank of many, and the same failure in one process: by `dtrain replay`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from testbed.imports import ROOT
from testbed.processes import run_dtrain

SCRIPT = ROOT / "tests/programs/seeded_bugs.py"
# What the report says of each.
BUGS = {
    "nan_of_one_sample": "NonFiniteError",
    "shape_of_one_sample": "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    "augmentation_draws_too_often": "ValueError: drew 3 times",
    "overflow_in_half_precision": "NonFiniteError",
    "wrong_labels_on_one_host": "IndexError: Target 9 is out of bounds",
    "parameter_changed_by_hand": "DriftError",
    "optimizer_changed_by_hand": "DriftError",
    "dropout_of_a_late_step": "ValueError: all dropped",
    "token_beyond_the_table": "IndexError: index out of range in self",
    "sample_cannot_be_read": "OSError: sample 77 is damaged",
    "batch_cannot_be_collated": "ValueError: 2 samples of 3 and 6 tokens",
    "loss_jumps": "AssertionError: the loss is",
    "gradients_explode": "RuntimeError: the norm of the gradients is",
    "schedule_ends_early": "ZeroDivisionError",
    "metric_of_no_sample": "ZeroDivisionError",
    "logarithm_of_zero": "NonFiniteError",
    "square_root_at_zero": "NonFiniteError",
    "changed_in_place": "RuntimeError: one of the variables needed for gradient computation has been modified",
    "crop_beyond_the_edge": "ValueError: high <= 0",
    "name_that_is_never_set": "UnboundLocalError",
    "norm_of_one_value": "ValueError: Expected more than 1 value per channel when training",
    "class_without_a_name": "KeyError: 3",
    "weights_beyond_a_limit": "OverflowError: math range error",
    "recursion_without_end": "RecursionError",
}
USUAL = ("nan_of_one_sample", "dropout_of_a_late_step", "optimizer_changed_by_hand")
EIGHT = ("shape_of_one_sample", "optimizer_changed_by_hand", "logarithm_of_zero", "crop_beyond_the_edge")


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug in USUAL else pytest.mark.slow) for bug in BUGS])
def test_one_process_reproduces_a_bug_of_many(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    hosts = ["--simulate", "--nnodes", "2", "--nproc-per-node", "4" if bug in EIGHT else "2"]
    failed = run_dtrain("run", "--run-id", "first", *hosts, "--on-nonfinite", "stop", SCRIPT, bug, cwd=tmp_path)
    assert failed.returncode == 1, failed
    assert BUGS[bug] in failed.stderr
    assert failed.stderr.endswith("dtrain:   replay it: dtrain replay first\n")
    again = run_dtrain("replay", "first", cwd=tmp_path, env={"LABELS_OF": "sim1"})
    assert again.returncode == 1, again
    verdict = again.stderr.splitlines()[-1]
    if bug.endswith("_changed_by_hand"):  # on rank 1, after its gradients of step 19: those of step 20 differ
        assert "'out.weight' is the first parameter that differs, on rank 1 of" in failed.stderr
        assert re.search(r"steps 17 to 19 have the same bits .*not as in run first: step 20: the gradient of", verdict)
    else:
        assert BUGS[bug].partition(":")[0] in verdict
        assert "; the recorded exception came again: " in verdict, verdict
        assert "not as in run" not in verdict


RESILIENT = """\
import torch, ddp

torch.manual_seed(0)
ddp.init()
model = ddp.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ddp.StepLoader(torch.randn(32, 4), global_batch_size=8, micro_batch_size=2)

@ddp.resilient
def train(state):
    for step in loader.epochs(1):
        step.mean([backward(x) for x in step])
        optimizer.step(); optimizer.zero_grad(); state.commit()

def backward(x):
    loss = model(x).square().mean()
    loss.backward()
    return loss.item()

train(ddp.State(model=model, optimizer=optimizer, loader=loader))
"""


def test_several_workers_replay_a_resilient_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text(RESILIENT)
    assert (
        run_dtrain("run", "--run-id", "first", "train.py", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}).returncode == 0
    )
    again = run_dtrain("replay", "--step", "3", "--nproc-per-node", "2", cwd=tmp_path)
    assert again.returncode == 0, again
    assert again.stderr.splitlines()[-1].startswith("dtrain: replay: steps 1 to 3 have the same bits")


LATE = """\
import os, time, torch, ddp

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 20:
            raise ValueError("a bad sample")
        return torch.full((4,), float(index))

torch.manual_seed(0)
ddp.init()
model = ddp.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = ddp.StepLoader(Data(), shuffle=False, global_batch_size=8, micro_batch_size=2)
for step in loader.epochs(1):
    for x in step:
        model(x).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
    if loader.steps == 2 and os.environ["RANK"] == "0" and "DTRAIN_REPLAY" not in os.environ:
        time.sleep(60)
"""


@pytest.mark.usefixtures("warm")
def test_a_failure_that_the_first_rank_never_reached_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 fails in step 3 while rank 0, which writes the ledger, is stopped before it has written step 2."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text(LATE)
    failed = run_dtrain("run", "--run-id", "first", "--nproc-per-node", "2", "train.py", cwd=tmp_path)
    assert "ValueError: a bad sample" in failed.stderr
    again = run_dtrain("replay", "first", cwd=tmp_path)
    assert again.returncode == 1, again
    assert "replay of run first to step 3, from step 1" in again.stderr
    assert "; the recorded exception came again: ValueError" in again.stderr.splitlines()[-1]
