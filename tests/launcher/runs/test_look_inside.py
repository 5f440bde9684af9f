"""What a run says of its time: who is slow and why, goodput, the status line, `dtrain top`."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from testbed.nvml import build_nvml
from testbed.processes import run_dtrain, started_dtrain, wait_until
from testbed.slow import slow
from testbed.terminal import dtrain_on_terminal
from testbed.typed import dtrain
from testbed.warm import HEADER

from launcher.cli.runs.top import FRAME, screen_of
from launcher.job.events import Answer, Asked, Event, StatusQuestion
from launcher.runs.control import Control, ask
from launcher.runs.registry import entries, place, registered
from launcher.timeline.goodput import PARTS

# Makes steps of some 30 ms. The words are `rank.from.to.what`: who is slow in which steps, in its data or its forward;
# or `rank.step.kill`: who kills itself there, once.
TRAINING = f"""{HEADER}
import os, signal, sys, time
from pathlib import Path
from ddp.monitoring.progress import count_checkpoint
world = ddp.init()
steps, resilient, words = int(sys.argv[1]), sys.argv[2] == "resilient", [word.split(".") for word in sys.argv[3:]]
now = 0

def slow(what):
    for rank, first, last, where in (word for word in words if len(word) == 4):
        if (int(rank), where) == (world.rank, what) and int(first) <= now < int(last):
            time.sleep(0.25)

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
def folder(own_runs: Path) -> Path:
    (own_runs / "train.py").write_text(TRAINING)
    return own_runs


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
    result = dtrain("top", "--json")
    assert result.returncode == 0, result
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_throttled_rank_is_named_and_top_shows_it(folder: Path) -> None:
    """Rank 3 gets its data late for a while, then rank 1 computes slowly to the end."""
    words = ["-v", "--simulate", "--nnodes", "2", "--nproc-per-node", "2", "--run-id", "r"]
    slow = ["3.40.110.data", "1.160.99999.compute"]
    with started_dtrain("run", *words, "train.py", "100000", "plain", *slow) as run:

        def shows_the_second() -> bool:
            assert run.poll() is None
            listed = _runs()
            return bool(listed and listed[0]["step"]) and any(each["ranks"] == [1] for each in _top()["stragglers"])

        wait_until(shows_the_second, "rank 1 is found")
        found = _top()
        assert [(rank["rank"], rank["host"]) for rank in found["ranks"]] == [
            (0, "sim0"), (1, "sim0"), (2, "sim1"), (3, "sim1"),
        ]  # fmt: skip

        def shows_its_times() -> bool:
            fast, slow_one = (_top()["ranks"][rank] for rank in (2, 1))
            return bool(slow_one["own_s"] > 1.5 * fast["own_s"] and fast["wait_s"] > slow_one["wait_s"])

        wait_until(shows_its_times, "its times are those of late")
        assert all(rank["own_s"] + rank["wait_s"] == pytest.approx(rank["step_s"], abs=1e-4) for rank in found["ranks"])
        assert all(rank["resident_bytes"] > 50 << 20 for rank in found["ranks"])
        assert all(psutil.Process(rank["pid"]).name() for rank in found["ranks"])
        assert all(0.0 <= rank["last_step_ago_s"] < 60.0 for rank in found["ranks"])
        assert 0 < found["goodput"] < 1
        once = dtrain("top", "r")  # no terminal: once, and of no terminal's width
        assert once.returncode == 0, once
        assert "rank 1 on sim0 is slow" in once.stdout
        with dtrain_on_terminal("top", "r", cwd=folder) as terminal:
            terminal.read_until("rank 1 on sim0 is slow")
            terminal.read_until("\x1b[1A\x1b[2K")  # it is drawn again
            terminal.type("\x03")
            assert terminal.wait() == 0
        lines = _plain(terminal.shown)
        assert max(map(len, lines)) <= 80
        assert any(line.split()[:6] == ["host", "rank", "pid", "step", "ago", "time"] for line in lines)
        assert dtrain("ps").stdout.count(" %") == 1
        dtrain("stop", "r")
        assert run.wait() == 143
        said = run.stderr.read().decode()
    assert re.search(r"dtrain: rank 3 on sim1 is slow since step \d+ \(data\): \S+ times the others' work\n", said)
    assert re.search(r"dtrain: rank 3 on sim1 is no longer slow, since step \d+, after \d+ s\n", said)
    assert re.search(r"dtrain: goodput \d+ % of \S+ s: start \S+ s, training \S+ s, waiting for stragglers \S+ s", said)
    assert said.count("goodput") == 1
    found = outcome("r")
    slow_then = [each for each in found["stragglers"] if each["from_step"] <= 90 <= (each["to_step"] or 90)]
    assert ([3], "data", "sim1") in [(each["ranks"], each["what"], each["host"]) for each in slow_then]
    slow_at_last = [each for each in found["stragglers"] if each["to_step"] is None]
    assert ([1], "compute", "sim0") in [(each["ranks"], each["what"], each["host"]) for each in slow_at_last]
    spent = check_parts(found)
    assert spent["waiting_s"] > 50 * 0.25 * 0.75 * 0.8  # of three ranks of four, in the first of these steps
    assert dtrain("top", "r").returncode == 1


def _plain(shown: str) -> list[str]:
    """Return the lines that a terminal was sent, without what moves its cursor or colours."""
    return [line.rpartition("\r")[2] for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).split("\r\n")]


@pytest.mark.usefixtures("warm")
def test_steps_made_twice_after_a_restart_are_no_goodput(folder: Path) -> None:
    result = run_dtrain(
        "run", "-v", "--nproc-per-node", "2", "--max-restarts", "1", "--run-id", "r", "--error-json", "end.json",
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
    assert failed["cause"]


@pytest.mark.usefixtures("warm")
def test_where_the_others_live_on_the_recovery_is_no_goodput(folder: Path) -> None:
    result = run_dtrain(
        "run", "-v", "--nproc-per-node", "2", "--max-restarts", "1", "--run-id", "r", "train.py", "80", "resilient",
        "1.40.kill",
    )  # fmt: skip
    assert result.returncode == 0, result
    found = outcome("r")
    assert (found["attempts"], found["worker_restarts"]) == (1, 1)
    spent = check_parts(found)
    assert spent["failures_s"] > 0
    assert spent["training_s"] > 79 * 0.025
    assert "failures" in result.stderr


@pytest.mark.usefixtures("warm")
def test_a_short_run_says_nothing_of_its_time_unless_asked(folder: Path) -> None:
    Path("short.py").write_text("print('short')\n")
    assert "goodput" not in run_dtrain("run", "--run-id", "r", "short.py").stderr
    spent = outcome("r")["goodput"]
    assert (spent["goodput"], spent["training_s"]) == (None, None)
    assert spent["start_s"] + spent["rest_s"] == pytest.approx(outcome("r")["duration_s"], abs=0.01)
    short = run_dtrain("run", "train.py", "30", "plain")
    assert (short.returncode, "goodput" in short.stderr) == (0, False), short
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


@pytest.mark.parametrize("columns", [0, 50])
def test_the_status_line_fits_and_never_mixes_with_lines(folder: Path, columns: int) -> None:
    Path("count.py").write_text(COUNTING)
    with dtrain_on_terminal(
        "run", "--lines", "all", "--nproc-per-node", "2", "count.py", "100000", cwd=folder, columns=columns
    ) as terminal:
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
    # The cursor is above it, where lines are typed, and each line stands alone.
    assert all(re.findall(r"dtrain: step [^\r\n\x1b]*(\x1b\[A\r|\x1b8)?", shown))
    lines = re.split(r"\r\n|\r\x1b\[[JK]|\x1b\[A\r|\x1b7\x1b\[B|\x1b8", shown)
    whole = [line for line in lines if " line " in line]
    assert len(whole) >= 100, "the other rank may be far behind the one that has come to line 100"
    # Python writes a line in pieces, and one may be shown before the next has come.
    assert [line for line in whole if not re.fullmatch(r"\[\S+:[01]\] line \d* ?x{0,30}", line)] == []


def test_without_a_terminal_there_is_no_status_line(folder: Path) -> None:
    Path("count.py").write_text(COUNTING)
    result = run_dtrain("run", "count.py", "100")
    assert result.returncode == 0
    assert "step" not in result.stderr


# What fake_nvml.c does not answer: how busy a card is, and its memory.
BUSY_NVML = """
#include <unistd.h>
struct memory { unsigned long long total, free, used; };
struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetMemoryInfo(struct device *d, struct memory *m) {
  if (*setting("FAKE_HANGS")) sleep(600);
  m->total = 100ull << 30; m->used = (unsigned long long)(10 + d->card) << 30; m->free = m->total - m->used; return OK;
}
int nvmlDeviceGetUtilizationRates(struct device *d, struct utilization *u) {
  if (d->card == 2) return UNSUPPORTED;
  u->gpu = 60 + 20 * (unsigned)d->card; u->memory = 1; return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **d) {
  unsigned card = 0;
  if (sscanf(uuid, "GPU-%x", &card) != 1) return INVALID;
  return nvmlDeviceGetHandleByIndex_v2(card, d);
}
"""


@pytest.fixture
def nvml(folder: Path) -> Path:
    return build_nvml(folder, BUSY_NVML)


@pytest.mark.parametrize("listed", ["", "GPU-00000001,GPU-00000000,GPU-00000002"])
def test_the_use_of_gpus_is_shown_where_nvml_knows_it(nvml: Path, listed: str) -> None:
    Path("count.py").write_text(COUNTING)
    env = {"LD_LIBRARY_PATH": str(nvml), "FAKE_GPUS": "3", "CUDA_VISIBLE_DEVICES": listed or None}
    with started_dtrain("run", "--nproc-per-node", "gpu", "count.py", "100000", env=env):
        wait_until(_runs, "it runs")
        ranks: list[dict[str, Any]] = []

        def was_asked() -> bool:
            ranks[:] = _top()["ranks"]
            return len(ranks) == 3 and all(rank["gpu_percent"] is not None for rank in ranks)

        wait_until(was_asked, "NVML was asked")
        used = {rank["rank"]: (rank["gpu_percent"], rank["gpu_memory_bytes"] >> 30) for rank in ranks}
        first, second = (1, 0) if listed else (0, 1)
        assert used == {first: (60, 10), second: (80, 11), 2: (0, 12)}
        Path("go").touch()


def test_a_driver_that_does_not_answer_holds_nothing_up(nvml: Path) -> None:
    Path("count.py").write_text(COUNTING)
    env = {"LD_LIBRARY_PATH": str(nvml), "FAKE_GPUS": "1", "FAKE_HANGS": "1", "CUDA_VISIBLE_DEVICES": None}
    words = ["--nproc-per-node", "gpu", "--heartbeat-timeout-s", "5"]
    with started_dtrain("run", *words, "count.py", "100000", env=env) as run:
        wait_until(_runs, "it runs")
        wait_until(lambda: (_top()["ranks"] or [{}])[0].get("resident_bytes"), "the agent has looked")
        assert _top()["ranks"][0]["gpu_percent"] is None
        time.sleep(6)  # longer than a silent agent is waited for
        Path("go").touch()
        assert run.wait() == 0


def test_top_counts_restarts_and_faults(folder: Path) -> None:
    fails = 'import os\nif os.environ["TORCHELASTIC_RESTART_COUNT"] + os.environ["RANK"] == "01": raise SystemExit(3)\n'
    Path("count.py").write_text(fails + COUNTING)
    words = ["--nproc-per-node", "2", "--max-restarts", "1", "--run-id", "r"]
    with started_dtrain("run", *words, "count.py", "100000") as run:
        wait_until(lambda: any(each["attempt"] == 1 and each["step"] for each in _runs()), "the second attempt trains")
        found = _top()
        assert [(rank["restarts"], rank["faults"]) for rank in found["ranks"]] == [(1, 0), (1, 1)]
        assert [host["lost"] for host in found["hosts_used"]] == [0]
        Path("go").touch()
        assert run.wait() == 0
    assert outcome("r")["goodput"]["failures_s"] > 0


def _runs() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dtrain("ps", "--json").stdout)
    return found


def test_a_long_answer_comes_whole(folder: Path) -> None:
    place().parent.mkdir(parents=True)
    answer = {"ranks": ["x" * 1000] * 500}

    def put(event: Event) -> None:
        assert event == Asked(1, StatusQuestion(in_full=True))
        control.carry_out(Answer(1, answer))

    control = Control(lambda: registered("long", folder, "", detached=False), print)
    control.start(put)
    assert control.wait_until_listed()
    (entry,) = entries()
    assert ask(entry, "status", in_full=True) == answer
    control.close()


def _many(hosts: int, per_host: int) -> dict[str, Any]:
    rank = {
        "pid": 1234567, "step": 1200, "last_step_ago_s": 70.0,
        "step_s": 0.25, "own_s": 0.2, "wait_s": 0.05, "resident_bytes": 3 << 30, "gpu_percent": 90,
        "gpu_memory_bytes": 1, "gpu_memory_limit_bytes": 2, "restarts": 1, "faults": 1,
    }  # fmt: skip
    names = [f"node{host:03}" for host in range(hosts)]
    ranks = [{**rank, "rank": n, "host": names[n // per_host]} for n in range(hosts * per_host)]
    used = [{"host": name, "memory_bytes": 9 << 30, "memory_limit_bytes": 62 << 30, "lost": 1} for name in names]
    return {
        "state": "running", "hosts": hosts, "workers": len(ranks), "attempt": 0, "step": 1200, "steps_per_s": 4.0,
        "goodput": 0.9, "waits_for": "", "ranks": ranks, "hosts_used": used, "stragglers": [{"line": "rank 3 " * 20}],
    }  # fmt: skip


@pytest.mark.parametrize(("hosts", "per_host"), [(1, 4), slow(2, 4), slow(8, 8), (100, 8)])
def test_what_does_not_fit_the_screen_is_summed_up_by_host(folder: Path, hosts: int, per_host: int) -> None:
    place().parent.mkdir(parents=True)
    run = registered("many", folder, "", detached=False)
    (entry,) = entries()
    written = io.StringIO()
    Console(file=written, width=80, height=24).print(screen_of(entry, _many(hosts, per_host), height=24 - FRAME))
    run.close()
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    rows = [line.split() for line in lines if line.startswith("node") or line.startswith("    ")]
    if hosts == 1:
        assert [row[1] for row in rows] == ["0", "1", "2", "3"]
    elif hosts == 2:
        assert [row[1] if row[0].startswith("node") else row[0] for row in rows] == [
            "0-3", "0", "1", "2", "3", "4-7", "4", "5", "6", "7",
        ]  # fmt: skip
        assert rows[0][-2:] == ["4", "5"]  # restarts; faults, with the loss of the host
    else:
        assert rows[1][:4] == ["node001", "8-15", "1200", "1m10s"]
        assert ("and 83 more hosts; all with --json" in lines) == (hosts == 100)
