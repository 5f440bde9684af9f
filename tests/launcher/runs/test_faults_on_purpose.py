"""`--chaos`: workers and hosts fail on purpose in a real training, which ends well, and each fault has its cost."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from testbed.processes import run_dtrain
from testbed.warm import HEADER

pytestmark = pytest.mark.usefixtures("warm")

# Ends as soon as it leaves the function, for a fault after that lets all begin again.
RESILIENT = (
    HEADER
    + """\
import os, sys, time
world = ddp.init()
torch.manual_seed(1)
net = torch.nn.Linear(6, 3)
model = ddp.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = ddp.State(model=model, optimizer=optimizer, step=0)

@ddp.resilient
def train(state):
    while state.step < 200:
        time.sleep(float(sys.argv[1]))
        torch.manual_seed(10 * state.step + world.rank)
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.commit()
    print("result", *[f"{value.double().sum().item():.17g}" for value in net.parameters()], flush=True)

train(state)
os._exit(0)
"""
)

CHECKPOINTS = (
    HEADER
    + """\
import os, time
world = ddp.init()
torch.manual_seed(1)
model = ddp.DistributedDataParallel(torch.nn.Linear(6, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
checkpoint = ddp.Checkpoint("checkpoints", in_background=False)
restored = checkpoint.load(model=model, optimizer=optimizer)
step = 0 if restored is None else restored.step
print("begins", step, flush=True)
while step < 200:
    time.sleep(0.05)
    model(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    print("made", step, flush=True)
    if step % 10 == 0:
        checkpoint.save(step, model=model, optimizer=optimizer)
print("ends", step, flush=True)
"""
)


def run(
    folder: Path, script: str, chaos: str, *options: str, step_s: float = 0.05
) -> tuple[list[dict[str, Any]], str, str]:
    """Return the faults of a run that has ended well, its output and what dtrain said."""
    (folder / "train.py").write_text(script)
    chosen = ["--chaos", chaos] if chaos else []
    result = run_dtrain("run", *chosen, *options, "--error-json", "end.json", "train.py", str(step_s), cwd=folder)
    assert result.returncode == 0, result.stderr
    faults: list[dict[str, Any]] = json.loads((folder / "end.json").read_text())["faults"]
    return faults, result.stdout, result.stderr


def results(stdout: str) -> set[str]:
    return set(re.findall(r"\] result (.*)$", stdout, re.MULTILINE))


def test_killed_and_stopped_workers_change_no_bit(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "3", "--hang", "auto")
    none, undisturbed, _ = run(tmp_path, RESILIENT, "", *options, step_s=0.0)
    assert none == []
    chaos = "kill worker every 2s, stop worker every 5s, seed 7"
    faults, stdout, stderr = run(tmp_path, RESILIENT, chaos, *options)
    assert results(stdout) == results(undisturbed)
    assert len(results(stdout)) == 1
    whole = [fault for fault in faults if fault["recovery_s"] is not None]
    assert {fault["action"] for fault in whole} == {"kill", "stop"}
    assert {fault["steps_lost"] for fault in whole} == {0}
    assert all(0 < fault["detection_s"] < fault["recovery_s"] for fault in whole)
    assert f"--chaos made {len(faults)} faults:" in stderr
    assert re.search(r"stop rank \d on \S+ +[\d.]+ s +[\d.]+ s +[\d.]+ s +0", stderr)
    for fault in whole:
        print(f"{fault['action']}: noticed {fault['detection_s']:.2f} s, training again {fault['recovery_s']:.2f} s")


def test_a_restart_from_a_checkpoint_loses_the_steps_since(tmp_path: Path) -> None:
    faults, stdout, _ = run(
        tmp_path, CHECKPOINTS, "kill worker every 4s, seed 1", "--nproc-per-node", "2", "--grace-s", "1"
    )
    said = [(word, int(step)) for word, step in re.findall(r":0\] (begins|made) (\d+)", stdout)]
    lost = [made - again for (_, made), (word, again) in pairwise(said) if word == "begins"]
    assert len(lost) >= 2
    for fault, steps in zip(faults, lost, strict=False):  # the last may come when all is done
        # A step is said after it is counted, and a checkpoint is durable before.
        counted = {steps - 1, steps, steps + 1, *({9, 10, 11} if steps == 0 else ())}
        assert fault["steps_lost"] in counted, (faults, said)


def test_a_simulated_host_is_lost_and_comes_back(tmp_path: Path) -> None:
    simulated = ("--simulate", "--nnodes", "2", "--nproc-per-node", "1", "--heartbeat-timeout-s", "2", "--grace-s", "1")
    faults, _, stderr = run(tmp_path, CHECKPOINTS, "kill host every 6s, seed 1", *simulated)
    assert re.search(r"attempt 0 failed: host sim\d was lost", stderr)
    assert {(fault["action"], fault["target"].split()[0]) for fault in faults} == {("kill", "host")}
    assert faults[0]["recovery_s"] > faults[0]["detection_s"] > 0
