"""Scripts that train without `ddp`: their steps are seen all the same, but not what ranks do in a step."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from testbed.processes import run_dtrain, started_dtrain, wait_until
from testbed.typed import dtrain

# Trains with torch's own DistributedDataParallel until there is a file `end`. Rank `slow` takes longer for each step;
# rank 1 hangs in step `hang`, kills itself in step `kill`, and computes for 10 s before step `evaluates`, then ends.
TRAINING = """\
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

slow, hang, kill, evaluates = map(int, sys.argv[1:])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0
ends = torch.zeros(1)
while not ends:
    step += 1
    time.sleep(0.06 if rank == slow else 0.01)
    if (rank, step) == (1, hang):
        time.sleep(600)
    if (rank, step, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (1, kill, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.monotonic() + 10 * ((rank, step) == (1, evaluates))
    while time.monotonic() < until:
        sum(range(1000))
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ends = torch.tensor(float(os.path.exists("end") or step == evaluates))
    dist.all_reduce(ends)
print("steps:", step)
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def folder(own_runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (own_runs / "train.py").write_text(TRAINING)
    return own_runs


def _answer(*words: str) -> Any:
    result = dtrain(*words, "--json")
    assert result.returncode == 0, result
    return json.loads(result.stdout)


def _outcome() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("runs/r/run.json").read_text())["outcome"]
    return found


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_steps_are_shown_and_no_one_is_called_slow(folder: Path, method: str) -> None:
    words = ["-v", "--nproc-per-node", "2", "--run-id", "r", "--start-method", method]
    with started_dtrain("run", *words, "train.py", "1", "0", "0", "0") as run:

        def is_shown() -> bool:
            assert run.poll() is None
            listed = _answer("ps")
            if not (listed and listed[0]["step"] and listed[0]["steps_per_s"] and listed[0]["goodput"]):
                return False
            ranks = _answer("top", "r")["ranks"]
            return len(ranks) == 2 and all(rank["step"] and rank["step_s"] for rank in ranks)

        wait_until(is_shown, "steps are shown")
        found = _answer("top", "r")
        assert found["stragglers"] == []
        assert [(rank["own_s"], rank["wait_s"]) for rank in found["ranks"]] == [(None, None)] * 2
        fast, slow = (rank["step_s"] for rank in found["ranks"])
        assert slow > 0.06
        assert fast > 0.03, "it may have been late in the first of those that were counted"
        Path("end").touch()
        assert run.wait() == 0
        output, said = run.stdout.read().decode(), run.stderr.read().decode()
    assert "slow" not in said
    assert "waiting" not in said
    assert re.search(r"dtrain: goodput \d+ % of \S+ s: start \S+ s, training \S+ s", said)
    found = _outcome()
    assert found["stragglers"] == []
    assert found["goodput"]["training_s"] > 0
    assert found["goodput"]["waiting_s"] == 0
    steps = int(re.findall(r"steps: (\d+)", output)[0])
    with open("runs/r/timeline.jsonl") as file:
        recorded = [line for line in [*map(json.loads, file)][1:] if line[0] == "steps" and line[2] == 0]
    assert recorded[-1][3] == steps
    firsts = [line[3] - line[4] for line in recorded]
    assert firsts[1:] == [line[3] for line in recorded[:-1]], "no step is missing between two records"
    assert dtrain("trace", "r").returncode == 0
    if find_spec("matplotlib"):
        assert dtrain("plot", "r", "-o", "out.svg").returncode == 0
        text = Path("out.svg").read_text()
        assert ("step, ms" in text, "own work" in text) == (True, False)


def test_a_rank_that_hangs_is_named(folder: Path) -> None:
    result = run_dtrain(
        "run", "--nproc-per-node", "2", "--hang", "3s", "--run-id", "r", "train.py", "9", "50", "0", "0"
    )
    line = TRAINING[: TRAINING.index("time.sleep(600)")].count("\n") + 1
    assert result.returncode == 1, result
    assert re.search(
        rf"rank 1 on \S+ \(pid \d+\) hung .*no sign of life for \d+ s at {folder}/train.py:{line}", result.stderr
    )


def test_a_rank_that_evaluates_alone_does_not_hang(folder: Path) -> None:
    """It makes no step, and dtrain does not know why; but it computes. One that sleeps so long is named above."""
    result = run_dtrain("run", "--nproc-per-node", "2", "--hang", "3s", "train.py", "9", "0", "0", "50")
    assert result.returncode == 0, result
    assert "hangs" not in result.stderr


def test_steps_are_training_also_where_they_are_made_again(folder: Path) -> None:
    """What such a script saves is not known, nor then what it makes twice."""
    with started_dtrain(
        "run", "-v", "--nproc-per-node", "2", "--max-restarts", "1", "--run-id", "r", "train.py", "9", "0", "300", "0"
    ) as run:
        wait_until(
            lambda: (listed := _answer("ps")) and listed[0]["attempt"] == 1 and listed[0]["step"], "it trains again"
        )
        Path("end").touch()
        assert run.wait() == 0
        assert "made twice" not in run.stderr.read().decode()
    spent = _outcome()["goodput"]
    assert spent["repeated_s"] == 0
    assert spent["failures_s"] > 0
    assert spent["training_s"] > 300 * 0.01 * 0.5


def test_without_torch_the_script_counts_by_itself(folder: Path) -> None:
    Path("count.py").write_text(
        "import os, sys, time\nimport launcher\n"
        "while not os.path.exists('end'):\n    time.sleep(0.01)\n    launcher.step()\n"
        "print('torch' in sys.modules)\n"
    )
    with started_dtrain("run", "--nproc-per-node", "2", "--run-id", "r", "count.py") as run:
        wait_until(
            lambda: (listed := _answer("ps")) and listed[0]["step"] and listed[0]["steps_per_s"], "steps are shown"
        )
        Path("end").touch()
        assert run.wait() == 0
        assert run.stdout.read().decode().count("False") == 2
    assert _outcome()["goodput"]["training_s"] > 0


def test_a_program_that_is_started_as_it_is_counts_nothing(folder: Path) -> None:
    Path("plain.py").write_text(
        "import os\nimport torch\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)\n"
        "for _ in range(5):\n    optimizer.step()\n"
        "print(open(os.environ['DTRAIN_PROGRESS_FILE'], 'rb').read() == bytes(72))\n"
    )
    result = run_dtrain("run", "--no-python", sys.executable, "plain.py")
    assert result.returncode == 0, result
    assert "True" in result.stdout
