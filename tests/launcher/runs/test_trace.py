"""dtrain trace and dtrain plot, of a real training on two hosts in which a rank is killed and replaced."""

import itertools
import json
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from testbed.once import once
from testbed.processes import run_dtrain, run_program
from testbed.require import require
from testbed.typed import dtrain

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
import ddp

world = ddp.init()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
model = ddp.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = ddp.State(model=model, optimizer=optimizer, step=0)
checkpoint = ddp.Checkpoint("checkpoints", in_background=False)


@ddp.resilient
def train(state):
    while state.step < 40:
        time.sleep(0.05)  # data
        x = torch.randn(4, 8)
        if world.rank == 3 and state.step == 20 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        if state.step == 30:
            checkpoint.save(state.step, model=model)


train(state)
"""
PHASES = {"data", "forward", "backward", "optimizer"}
Event = dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def run() -> Path:
        folder = tmp_path_factory.mktemp("trained")
        (folder / "train.py").write_text(SCRIPT)
        result = run_dtrain(
            "run", "--simulate", "--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1", "--run-id", "traced",
            "--log-dir", "logs", "train.py", cwd=folder, timeout=300, env={"XDG_STATE_HOME": str(folder / "state")},
        )  # fmt: skip
        assert result.returncode == 0, result
        assert "only this worker restarts" in result.stderr
        return folder

    return once(tmp_path_factory, "trained and traced", run)


@pytest.fixture
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    monkeypatch.setenv("XDG_STATE_HOME", str(trained / "state"))
    return trained


def test_the_trace_has_all_phases_of_each_rank_in_order(folder: Path) -> None:
    result = dtrain("trace", "-o", "out.json")
    assert (result.returncode, result.stdout) == (0, ""), result
    events: list[Event] = json.loads((folder / "out.json").read_text())["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(processes) == {"run", "sim0", "sim1"}
    slices: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        slices[event["pid"], event["tid"]].append(event)
    began = {}
    for rank in range(4):
        own = slices[processes[f"sim{rank // 2}"], rank]
        names = [event["name"] for event in own]
        assert names[:2] == ["start", "import"]
        assert own[1]["ts"] == own[0]["ts"] + own[0]["dur"]
        assert set(names) >= PHASES | {"save"}
        assert any(name.startswith("wait for bucket") for name in names)
        steps = [event for event in own if event["name"].startswith("step")]
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(steps))
        assert sum(step["args"]["steps"] for step in steps) >= (39 if rank < 3 else 20)
        began[rank] = {event["args"]["step"]: event for event in own if event["args"].get("phase") == "optimizer"}
        _check_order(own)
    both = set(began[0]) & set(began[2])  # of different hosts, at an all-reduce of which no rank is a step ahead
    for step in both:
        assert abs(began[0][step]["ts"] - began[2][step]["ts"]) < 5_000_000
    for host in ("sim0", "sim1"):
        names = [event["name"] for event in slices[processes[host], 1_000_000]]
        assert names[:3] == ["connect", "agent", "check"]
    assert "rendezvous" in [event["name"] for event in slices[processes["sim0"], 1_000_000]]


def _check_order(own: list[Event]) -> None:
    """The parts of each step that is known in detail begin in this order."""
    by_step = defaultdict(list)
    for event in own:
        if (phase := event["args"].get("phase")) is not None:
            by_step[event["args"]["step"]].append(phase)
    whole = [phases for phases in by_step.values() if set(phases) >= PHASES | {"wait"}]
    assert whole
    assert any(
        phases.index("data") < phases.index("forward") < phases.index("backward") < phases.index("wait")
        < phases.index("optimizer")
        for phases in whole
    )  # fmt: skip


def test_a_killed_rank_and_its_recovery_are_in_the_trace(folder: Path) -> None:
    result = dtrain("trace", "traced", "-o", "-")
    events: list[Event] = json.loads(result.stdout)["traceEvents"]
    instants = {event["args"].get("kind"): event for event in events if event["ph"] == "i" and event["tid"] == 3}
    fault, restart = instants["fault"], instants["restart"]
    assert fault["name"] == "rank 3: killed by SIGKILL"
    assert fault["ts"] <= restart["ts"]
    recoveries = {event["tid"]: event for event in events if event["name"] == "recovery"}
    assert set(recoveries) == {0, 1, 2, 3}
    assert all(event["ts"] + event["dur"] > restart["ts"] for event in recoveries.values())
    starts = [event["ts"] for event in events if event["name"] == "start" and event["tid"] == 3]
    assert len(starts) == 2


def test_the_plot_is_a_picture_with_the_restart(folder: Path) -> None:
    require(find_spec("matplotlib"), "matplotlib", "pip install matplotlib")
    result = dtrain("plot", "tra", "-o", "out.svg")
    assert result.returncode == 0, result
    text = (folder / "out.svg").read_text()
    assert "<svg" in text
    assert [words in text for words in ("own work, ms a step", "waiting for others, ms a step")] == [True, True]
    assert (dtrain("plot", "traced").returncode, (folder / "traced.png").read_bytes()[1:4]) == (0, b"PNG")


def test_without_matplotlib_the_plot_says_what_to_install(folder: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import launcher.cli.main as m; m.main()"
    result = run_program(sys.executable, "-c", code, "plot")
    assert result.returncode != 0
    assert "pip install matplotlib" in result.stderr, result


@pytest.mark.parametrize("command", ["trace", "plot"])
def test_an_unwritable_file_and_an_unknown_run_are_errors(folder: Path, command: str) -> None:
    if command == "plot":
        require(find_spec("matplotlib"), "matplotlib", "pip install matplotlib")
    result = dtrain(command, "last", "-o", "nowhere/out.json" if command == "trace" else "nowhere/out.png")
    assert result.returncode == 2, result
    assert "cannot be written" in result.stderr
    assert dtrain(command, "unknown").returncode != 0


def test_a_run_without_ddp_has_a_trace_of_its_start_and_end(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('wrong')")
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert run_dtrain("run", "--run-id", "plain", "--log-dir", "logs", "fails.py", cwd=tmp_path, env=env).returncode
    result = run_dtrain("trace", "plain", "-o", "-", cwd=tmp_path, env=env)
    names = [event["name"] for event in json.loads(result.stdout)["traceEvents"]]
    assert {"connect", "check", "start", "rank 0: ValueError: wrong", "attempt 0"} <= {*names}
    assert "no rank has reported a step" in run_dtrain("plot", "plain", cwd=tmp_path, env=env).stderr
