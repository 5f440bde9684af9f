"""Replays: steps of a training again, in one process, as DTRAIN_REPLAY_PLAN says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from testbed.nursery import Nursery
from testbed.processes import Result, run_program
from testbed.step_training import lines_of

RUN = """
import os, sys, torch, ddp
from torch import nn

ddp.init()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
loader = ddp.StepLoader([torch.randn(4) for _ in range(40)], global_batch_size=8, micro_batch_size=2)
model = ddp.DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)

def mean_loss(step):
    losses = []
    for x in step:
        loss = (model(x) ** 2).mean()
        loss.backward()
        losses.append(loss.item())
        if loader.steps == 13 and os.environ.get("BREAKS"):
            raise ValueError("13")
    return step.mean(losses)
"""
PLAIN = f"""{RUN}
checkpoint = ddp.Checkpoint("saved")
parts = {{"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": loader}}
restored = checkpoint.load(**parts)
print("from", restored and restored.step)
for step in loader.epochs(3):
    mean_loss(step)
    optimizer.step(); scheduler.step(); optimizer.zero_grad()
    if loader.steps % 5 == 0:
        checkpoint.save(loader.steps, **parts)
checkpoint.wait()
print("to the end")
"""
RESILIENT = f"""{RUN}
state = ddp.State(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, sum=0.0, seen=[])

@ddp.resilient
def train(state):
    print("from", loader.steps, len(state.seen))
    for step in loader.epochs(3):
        state.sum += mean_loss(step)
        state.seen = [*state.seen, step.number]
        optimizer.step(); scheduler.step(); optimizer.zero_grad(); state.commit()

train(state)
print("to the end", state.sum, state.seen)
"""


class Runs:
    """A training in a folder of its own, and its replays."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder

    def run(self, text: str, ledger: str, **variables: str) -> Result:
        return self._nursery.program(
            text,
            self._folder,
            deadline_s=100.0,
            **{"DTRAIN_LEDGER_FILE": str(self._folder / ledger), "OMP_NUM_THREADS": "1", **variables},
        )

    def replay(self, text: str, *, code: int = 0, **plan: Any) -> str:
        """Replay, check that its lines are those of the run, and return its output."""
        given = {"folder": str(self._folder / "replay"), **plan}
        (self._folder / "again").unlink(missing_ok=True)
        result = self.run(text, "again", DTRAIN_REPLAY_PLAN=json.dumps(given))
        assert result.returncode == code, result
        again, before = self.lines("again"), self.lines("ledger")
        assert again
        for step, line in again.items():
            was = before[step]
            assert line["every"] == 1
            assert line["loss"] == was["loss"]
            assert {name: line["hashes"][name] for name in was["hashes"]} == was["hashes"]
        assert [*again] == [*range(min(again), max(again) + 1)]
        return f"{result.stdout}steps {min(again)} to {max(again)}"

    def lines(self, name: str) -> dict[int, dict[str, Any]]:
        return {line["step"]: line for line in lines_of(self._folder / name) if "hashes" in line}


@pytest.fixture
def runs(nursery: Nursery, tmp_path: Path) -> Runs:
    return Runs(nursery, tmp_path)


def test_it_begins_at_a_checkpoint_and_ends_after_its_step(runs: Runs, tmp_path: Path) -> None:
    full = PLAIN.replace("micro_batch_size=2", 'micro_batch_size=2, ledger="full"')
    assert runs.run(full, "ledger").stdout == "from None\nto the end\n"
    files = sorted((tmp_path / "saved").iterdir())
    assert [*runs.lines("ledger")] == [*range(1, 16)]
    assert len(runs.lines("ledger")[15]["hashes"]) == 6
    assert (
        runs.replay(full, step=7, checkpoint=str(tmp_path / "saved" / "step-0000000005.pt")) == "from 5\nsteps 6 to 7"
    )
    assert runs.replay(full, step=3) == "from None\nsteps 1 to 3"
    assert runs.replay(full) == "from None\nto the end\nsteps 1 to 15"
    assert sorted((tmp_path / "saved").iterdir()) == files
    there = {path.name for path in (tmp_path / "replay").glob("*.pt")}
    assert there == {path.name for path in files if path.suffix == ".pt"}


def test_it_ends_after_a_step_in_which_the_loop_was_left(runs: Runs) -> None:
    parts = "itertools.chain(itertools.islice(loader.epochs(3), 4), loader.epochs(3))"
    left = PLAIN.replace("for step in loader.epochs(3):", f"import itertools\nfor step in {parts}:")
    assert runs.run(left, "ledger").stdout == "from None\nto the end\n"
    assert runs.replay(left, step=4) == "from None\nsteps 1 to 4"


def test_it_begins_at_a_snapshot_of_a_state(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "replayable"
    folder.mkdir()
    variables = {"DTRAIN_REPLAYABLE": "4", "DTRAIN_REPLAYABLE_FOLDER": str(folder)}
    ended = runs.run(RESILIENT, "ledger", **variables).stdout
    assert ended.startswith("from 0 0\nto the end ")
    found = sorted(path.name for path in folder.glob("*.pt"))
    assert len(found) == 2, found
    for name in found:
        last = int(name[5:-3])
        said = runs.replay(RESILIENT, state=str(folder / name), step=last + 1)
        assert said == f"from {last} {last}\nsteps {last + 1} to {last + 1}"
    said = runs.replay(RESILIENT, state=str(folder / found[0]))
    assert said.splitlines()[1] == ended.splitlines()[1]


def test_a_snapshot_of_another_script_is_refused(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "replayable"
    folder.mkdir()
    runs.run(RESILIENT, "ledger", DTRAIN_REPLAYABLE="1", DTRAIN_REPLAYABLE_FOLDER=str(folder))
    file = next(iter(folder.glob("*.pt")))
    other = RESILIENT.replace("scheduler=scheduler, loader", "loader")
    plan = {"folder": str(tmp_path), "state": str(file)}
    result = runs.run(other, "again", DTRAIN_REPLAY_PLAN=json.dumps(plan))
    assert result.returncode == 1
    assert "the script is not that of the run" in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RESILIENT.replace("loader=loader, ", ""), "it needs a ddp.StepLoader in the State"),
        (RESILIENT, "it needs that this host sees /nowhere"),
    ],
    ids=["loader", "folder"],
)
def test_why_there_are_no_snapshots_is_said_once(runs: Runs, text: str, said: str) -> None:
    result = runs.run(text, "ledger", DTRAIN_REPLAYABLE="1", DTRAIN_REPLAYABLE_FOLDER="/nowhere")
    assert result.returncode == 0
    assert result.stderr.count("--replayable takes no snapshots") == 1
    assert said in result.stderr


def _debugged(text: str, tmp_path: Path, commands: str, **plan: Any) -> Result:
    (tmp_path / "script.py").write_text(text)
    variables = {
        "DTRAIN_LEDGER_FILE": str(tmp_path / "again"),
        "DTRAIN_REPLAY_PLAN": json.dumps({"folder": str(tmp_path), "pdb": True, **plan}),
        "BREAKS": "1",
    }
    return run_program(sys.executable, "script.py", cwd=tmp_path, env=variables, stdin=commands)


def test_the_debugger_opens_before_a_micro_batch(tmp_path: Path) -> None:
    result = _debugged(PLAIN, tmp_path, "p loader.steps, len(losses), x.shape\nw\nc\n", step=7, micro_batch=3)
    assert result.returncode == 0, result
    assert "(7, 3, torch.Size([2, 4]))" in result.stdout
    assert "-> loss = (model(x) ** 2).mean()" in result.stdout
    stopped, last = lines_of(tmp_path / "again")[-2:]
    assert (stopped, last["step"]) == ({"stopped": 7, "micro_batch": 3}, 7)


def test_the_debugger_opens_where_an_exception_ends_the_script(tmp_path: Path) -> None:
    result = _debugged(PLAIN, tmp_path, "p loader.steps, step.number\nq\n")
    assert result.returncode == 1, result
    assert "ValueError: 13" in result.stderr
    assert "(13, 2)" in result.stdout
