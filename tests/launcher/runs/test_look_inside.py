"""What a run says of its time: who is slow and why, goodput, the status line, `dtrain top`."""

import fcntl
import json
import re
import struct
import termios
from pathlib import Path
from typing import Any

import pytest
from testbed.processes import run_dtrain, started_dtrain, wait_until
from testbed.terminal import Terminal, dtrain_on_terminal

from launcher.timeline.goodput import PARTS

# Makes steps of some 30 ms. The words are `rank.from.to.what`: who is slow in which steps, in its data or its forward;
# or `rank.step.kill`: who kills itself there, once.
TRAINING = """
import os, signal, sys, time
from pathlib import Path
import torch, ddp
from ddp.monitoring.progress import count_checkpoint
world = ddp.init()
steps, resilient, words = int(sys.argv[1]), sys.argv[2] == "resilient", [word.split(".") for word in sys.argv[3:]]
now = 0

def slow(what):
    for rank, first, last, where in (word for word in words if len(word) == 4):
        if (int(rank), where) == (world.rank, what) and int(first) <= now < int(last):
            time.sleep(0.08)

class Net(torch.nn.Linear):
    def forward(self, inputs):
        time.sleep(0.02)
        slow("compute")
        return super().forward(inputs)

model = ddp.DistributedDataParallel(Net(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = ddp.State(model=model, optimizer=optimizer, step=0)

def train(state):
    global now
    while state.step < steps:
        now = state.step + 1
        time.sleep(0.005)
        slow("data")
        loss = model(torch.ones(2, 8)).square().mean()
        for word in words:
            if word[2] == "kill" and (world.rank, now) == (int(word[0]), int(word[1])) and not os.path.exists("killed"):
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        if resilient:
            state.commit()
        elif state.step == 20:
            count_checkpoint()

(ddp.resilient(train) if resilient else train)(state)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text(TRAINING)
    return tmp_path


def outcome(run_id: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("runs", run_id, "run.json").read_text())
    found: dict[str, Any] = content["outcome"]
    return found


def check_parts(found: dict[str, Any]) -> dict[str, float]:
    """Return the parts of a run's wall time, which must add up to it."""
    spent: dict[str, float] = found["goodput"]
    assert sum(spent[f"{name}_s"] for name in PARTS) == pytest.approx(found["duration_s"], rel=0.01)
    assert spent["goodput"] == pytest.approx(spent["training_s"] / found["duration_s"], rel=0.01)
    return spent


def _top() -> dict[str, Any]:
    result = run_dtrain("top", "last", "--json")
    assert result.returncode == 0, result
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_throttled_rank_is_named_with_what_is_slow_and_top_shows_it(folder: Path) -> None:
    """Rank 3 gets its data late for a while, then rank 1 computes slowly to the end."""
    words = ["--simulate", "--nnodes", "2", "--nproc-per-node", "2", "--run-id", "r"]
    slow = ["3.60.140.data", "1.220.99999.compute"]
    with started_dtrain("run", *words, "train.py", "100000", "plain", *slow) as run:

        def shows_the_second() -> bool:
            assert run.poll() is None
            listed = json.loads(run_dtrain("ps", "--json").stdout)
            return bool(listed and listed[0]["step"]) and any(each["ranks"] == [1] for each in _top()["stragglers"])

        wait_until(shows_the_second, "rank 1 is found")
        found = _top()
        assert [(rank["rank"], rank["host"]) for rank in found["ranks"]] == [
            (0, "sim0"), (1, "sim0"), (2, "sim1"), (3, "sim1"),
        ]  # fmt: skip
        fast, slow_one = found["ranks"][2], found["ranks"][1]
        assert slow_one["own_s"] > 1.5 * fast["own_s"]
        assert fast["wait_s"] > slow_one["wait_s"]
        assert all(rank["own_s"] + rank["wait_s"] == pytest.approx(rank["step_s"], abs=1e-4) for rank in found["ranks"])
        assert all(rank["resident_bytes"] > 50 << 20 for rank in found["ranks"])
        assert 0 < found["goodput"] < 1
        once = run_dtrain("top", "r")  # no terminal: once, and of no terminal's width
        assert once.returncode == 0, once
        assert "rank 1 on sim0 is slow" in once.stdout
        with dtrain_on_terminal("top", "r", cwd=folder) as terminal:
            terminal.read_until("rank 1 on sim0 is slow")
            terminal.read_until("\x1b[1A\x1b[2K")  # it is drawn again
            terminal.type("\x03")
            assert terminal.wait() == 0
        lines = _plain(terminal.shown)
        assert max(map(len, lines)) <= 80
        assert any(line.split()[:6] == ["host", "rank", "step", "time", "work", "wait"] for line in lines)
        assert run_dtrain("ps").stdout.count(" %") == 1
        run_dtrain("stop", "r")
        assert run.wait() == 143
        assert run.stderr is not None
        said = run.stderr.read().decode()
    assert re.search(r"dtrain: rank 3 on sim1 is slow since step \d+ \(data\): \S+ times the others' work\n", said)
    assert re.search(r"dtrain: rank 3 on sim1 is no longer slow, since step \d+, after \d+ s\n", said)
    assert re.search(r"dtrain: goodput \d+ % of \S+ s: start \S+ s, training \S+ s, waiting for stragglers \S+ s", said)
    assert said.count("goodput") == 1
    found = outcome("r")
    first = next(each for each in found["stragglers"] if each["ranks"] == [3])
    last = next(each for each in found["stragglers"] if each["ranks"] == [1])
    assert (first["what"], first["host"], last["what"], last["host"]) == ("data", "sim1", "compute", "sim0")
    assert 50 <= first["from_step"] <= 90 <= first["to_step"]
    assert 210 <= last["from_step"] <= 250
    assert last["to_step"] is None
    assert first["times"] > 1.5
    spent = check_parts(found)
    assert spent["waiting_s"] > 80 * 0.08 * 0.75 * 0.8  # of three ranks of four, in the first of these steps
    assert run_dtrain("top", "r").returncode == 1


def _plain(shown: str) -> list[str]:
    """Return the lines that a terminal was sent, without what moves its cursor or colours."""
    return [line.rpartition("\r")[2] for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).split("\r\n")]


def test_steps_made_twice_after_a_restart_are_no_goodput(folder: Path) -> None:
    result = run_dtrain(
        "run", "--nproc-per-node", "2", "--max-restarts", "1", "--run-id", "r", "--error-json", "end.json",
        "train.py", "60", "plain", "1.50.kill",
    )  # fmt: skip
    assert result.returncode == 0, result
    found = json.loads(Path("end.json").read_text())
    assert found == outcome("r")
    spent = check_parts(found)
    # The 29 steps since the checkpoint of step 20, and all that it took until the first step of the next attempt.
    assert 29 * 0.025 <= spent["repeated_s"] < spent["failures_s"]
    assert spent["training_s"] > 80 * 0.025
    assert "of steps made twice)" in result.stderr
    (failed, _) = json.loads(Path("runs/r/run.json").read_text())["attempts"]
    assert spent["failures_s"] - spent["repeated_s"] > 0.5  # two processes import torch
    assert failed["cause"]


def test_where_the_others_live_on_the_recovery_is_no_goodput(folder: Path) -> None:
    result = run_dtrain(
        "run", "--nproc-per-node", "2", "--max-restarts", "1", "--run-id", "r", "train.py", "80", "resilient",
        "1.40.kill",
    )  # fmt: skip
    assert result.returncode == 0, result
    found = outcome("r")
    assert (found["attempts"], found["worker_restarts"]) == (1, 1)
    spent = check_parts(found)
    assert spent["failures_s"] > 0.1
    assert spent["training_s"] > 79 * 0.025
    assert "failures" in result.stderr


def test_quiet_says_nothing_of_its_time_and_a_short_script_without_ddp_neither(folder: Path) -> None:
    Path("short.py").write_text("print('short')\n")
    assert "goodput" not in run_dtrain("run", "--run-id", "r", "short.py").stderr
    spent = outcome("r")["goodput"]
    assert (spent["goodput"], spent["training_s"]) == (None, None)
    assert spent["start_s"] + spent["rest_s"] == pytest.approx(outcome("r")["duration_s"], abs=0.01)
    quiet = run_dtrain("run", "-q", "train.py", "30", "plain")
    assert (quiet.returncode, quiet.stderr) == (0, "")


# Counts steps as ddp does, and writes lines, without ddp.
COUNTING = """
import os, struct, sys, time
for step in range(1, 1 + int(sys.argv[1])):
    with open(os.environ["DTRAIN_PROGRESS_FILE"], "r+b") as file:
        file.write(struct.pack("<Q", step))
    print("line", step, "x" * 30, flush=True)
    time.sleep(0.05)
    if os.path.exists("go"):
        break
"""


def _narrow(terminal: Terminal, columns: int) -> None:
    fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


@pytest.mark.parametrize("columns", [0, 50])
def test_the_status_line_fits_the_terminal_and_never_mixes_with_lines(folder: Path, columns: int) -> None:
    Path("count.py").write_text(COUNTING)
    with dtrain_on_terminal("run", "--nproc-per-node", "2", "count.py", "100000", cwd=folder) as terminal:
        if columns:
            _narrow(terminal, columns)
        terminal.read_until("step/s")
        if not columns:
            terminal.read_until(", memory ")
        terminal.read_until("line 100 ")
        Path("go").touch()
        assert terminal.wait() == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.shown)
    drawn = re.findall(r"dtrain: (step [^\r\n\x1b]*)", shown)
    assert drawn
    assert max(map(len, drawn)) + len("dtrain: ") <= (columns or 80) - 1
    # Each is removed by what comes after it, and each line stands alone.
    assert all(match[1] == "\r\x1b[K" for match in re.finditer(r"dtrain: step [^\r\n\x1b]*(.{4})", shown))
    lines = re.split(r"\r\n|\r\x1b\[K", shown)
    whole = [line for line in lines if " line " in line]
    assert len(whole) >= 150
    assert all(re.fullmatch(r"\[\S+:[01]\] line \d+ x{30}", line) for line in whole)


def test_without_a_terminal_there_is_no_status_line(folder: Path) -> None:
    Path("count.py").write_text(COUNTING)
    result = run_dtrain("run", "count.py", "100")
    assert result.returncode == 0
    assert "step" not in result.stderr
