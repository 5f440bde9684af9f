"""Where the ranks stand: looked up before a failed run is stopped, when a run hangs, and when someone asks."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from testbed.once import once
from testbed.processes import MARK, marked, run_dtrain, started_dtrain, wait_until, wait_up
from testbed.sshd import SshHosts
from testbed.warm import HEADER

pytestmark = pytest.mark.usefixtures("warm")

# Says that it lives until all are there, which on a busy machine takes longer than these tests have patience. A thread
# would not do: an import can keep it from running.
CHATTER = (
    HEADER
    + """\
import subprocess, time
chatter = subprocess.Popen(["sh", "-c", "while echo .; do sleep 0.3; done"])
def quiet():
    chatter.kill()
    chatter.wait()
"""
)

ONE_MISSING = (
    CHATTER
    + """\
dist.init_process_group("gloo")
dist.barrier()

def load_batch():
    print("up", flush=True)
    time.sleep(600)

def train_step():
    print("up", flush=True)
    dist.all_reduce(torch.ones(4))

quiet()
if dist.get_rank() == 1:
    load_batch()
else:
    train_step()
"""
)
LOAD, STEP = (ONE_MISSING[: ONE_MISSING.index(what)].count("\n") + 1 for what in ("time.sleep(600)", "dist.all_reduce"))


@pytest.fixture(params=["here", "ssh"])
def where(request: pytest.FixtureRequest) -> list[str]:
    """Options for three workers: on this machine, on two SSH hosts."""
    if request.param == "here":
        return ["--nproc-per-node", "3"]
    hosts: SshHosts = request.getfixturevalue("ssh_hosts")
    return ["--hosts", "node1:2,node2:1", "--ssh-config", str(hosts.ssh_config)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(ONE_MISSING)
    return path


def test_a_stalled_run_ends_and_names_the_odd_rank(where: list[str], script: Path) -> None:
    start_s = (
        "15" if "--nproc-per-node" in where else "30"
    )  # which a stall lasts at least; on SSH hosts nothing is warm
    options = ["--stall-timeout-s", "5", "--start-timeout-s", start_s, "--run-id", "r", "--error-json", "e.json"]
    result = run_dtrain("run", *options, *where, script, cwd=script.parent)
    assert result.returncode == 1, result.stderr
    assert "no rank has made progress for 5 s" in result.stderr
    assert f"rank 1 is at {script}:{LOAD} in load_batch" in result.stderr
    assert f"ranks 0,2 are at {script}:{STEP} in train_step, inside all_reduce" in result.stderr
    assert "rank 1 first" in result.stderr
    (stacks,) = (script.parent / "runs/r/attempt_0").glob("evidence-*.txt")
    text = stacks.read_text()
    assert text.count("in <module>") >= 3
    assert str(stacks.relative_to(script.parent)) in result.stderr
    assert json.loads((script.parent / "e.json").read_text())["cause"]["kind"] == "stalled"


def test_stacks_of_an_earlier_attempt_are_not_those_of_the_last(own_runs: Path) -> None:
    (own_runs / "script.py").write_text(
        "import os, time\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    time.sleep(600)\nos._exit(3)\n"
    )
    options = ["--stall-timeout-s", "1", "--start-timeout-s", "10", "--max-restarts", "1", "--error-json", "e.json"]
    result = run_dtrain("run", *options, "--run-id", "r", "script.py")
    assert [path.name for path in Path("runs/r").glob("attempt_*/evidence-*.txt")] == ["evidence-1.txt"], result
    facts = json.loads(Path("e.json").read_text())
    assert (facts["cause"]["attempt"], facts["cause"]["exit_status"]) == (1, 3)
    assert facts["evidence_file"] is None
    assert "evidence-1.txt" not in result.stderr


def test_a_stall_in_a_library_names_what_was_called(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from concurrent.futures import Future\n\nFuture().result()\n")
    result = run_dtrain("run", "--stall-timeout-s", "1", "--start-timeout-s", "10", script, cwd=tmp_path)
    assert f"rank 0 is at {script}:3 in <module>, in concurrent.futures._base.result, inside wait" in result.stderr


def test_a_run_that_prints_now_and_then_is_not_stalled(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nfor n in range(15):\n    print(n, flush=True)\n    time.sleep(0.5)")
    result = run_dtrain("run", "--stall-timeout-s", "5", "--nproc-per-node", "2", script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_a_silent_run_with_steps_of_ddp_is_not_stalled(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        CHATTER + "ddp.init()\nmodel = ddp.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "for _ in range(30):\n    model(torch.ones(1, 2)).sum().backward()\n    quiet()\n    time.sleep(0.25)\n"
    )
    result = run_dtrain("run", "--stall-timeout-s", "5", "--nproc-per-node", "2", script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_quit_shows_where_the_ranks_stand_and_the_run_goes_on(where: list[str], script: Path) -> None:
    with started_dtrain("run", "--run-id", "r", *where, script, cwd=script.parent) as process:
        wait_up(process, 3)
        numbers = itertools.count(1)

        def all_are_there() -> bool:
            process.send_signal(signal.SIGQUIT)
            said = b""
            while b"stacks of all ranks" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            assert (script.parent / f"runs/r/attempt_0/evidence-{next(numbers)}.txt").exists()
            return (
                f"rank 1 is at {script}:{LOAD} in load_batch".encode() in said
                and f"ranks 0,2 are at {script}:{STEP} in train_step".encode() in said
            )

        wait_until(all_are_there, "two are in the collective")
        assert all_are_there()  # the look has moved no one
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 143


def test_where_the_others_stood_when_one_failed_is_quoted(where: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nrank = os.environ['RANK']\n"
        "def wait():\n    open(f'there{rank}', 'w').close(); time.sleep(600)\n"
        "if rank != '2': wait()\nwhile not (os.path.exists('there0') and os.path.exists('there1')): time.sleep(0.01)\n"
        "raise RuntimeError('out of luck')"
    )
    result = run_dtrain("run", *where, script, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert "rank 2 on " in result.stderr
    assert "RuntimeError: out of luck" in result.stderr
    assert f"ranks 0-1 are at {script}:4 in wait" in result.stderr


def test_victims_are_counted_by_what_they_say(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        HEADER + "import os, signal\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "if dist.get_rank() == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "while True: dist.all_reduce(torch.ones(4))"
    )
    result = run_dtrain("run", "--nproc-per-node", "4", script, cwd=tmp_path)
    assert result.returncode == 137, result.stderr
    assert "rank 3 on " in result.stderr
    assert "was killed by SIGKILL (by another process or by itself" in result.stderr
    # On a busy machine they may be stopped before one of them has noticed.
    said = r"[1-3] others? failed in all_reduce: .*onnection|where the other ranks were:(.|\n)*all_reduce"
    assert re.search(said, result.stderr), result.stderr
    assert len(result.stderr[result.stderr.index("dtrain: rank 3") :].splitlines()) < 40  # one screen


def test_a_rank_that_the_others_timed_out_for_is_named_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        HEADER + "import datetime, time\ndist.init_process_group('gloo')\n"
        "group = dist.new_group(timeout=datetime.timedelta(seconds=5))\ndist.barrier()\n"
        "def load_shard():\n    time.sleep(600)\n"
        "if dist.get_rank() == 2: load_shard()\ndist.all_reduce(torch.ones(4), group=group)"
    )
    result = run_dtrain("run", "--simulate", "--nnodes", "3", "--nproc-per-node", "1", script, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    first = next(line for line in result.stderr.splitlines() if line.startswith("dtrain: rank"))
    line = script.read_text()[: script.read_text().index("time.sleep")].count("\n") + 1
    cause = f"rank 2 on sim2 did not come to all_reduce: it was at {script}:{line} in load_shard"
    assert first == f"dtrain: {cause}"
    (manifest,) = tmp_path.glob("runs/*/run.json")
    assert json.loads(manifest.read_text())["attempts"][0]["cause"] == cause
    assert f"{cause[:41]}..." in run_dtrain("history", cwd=tmp_path).stdout


def test_ctrl_z_suspends_every_process_and_continue_resumes(where: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time\\n"
        "while True: time.sleep(0.01)'])\nprint('up', flush=True)\nimport os, time\n"
        "while not os.path.exists('end'): time.sleep(0.01)\nchild.kill()"
    )
    # The lease is shorter than the pause: it rests meanwhile.
    with started_dtrain("run", "--heartbeat-timeout-s", "2", *where, script, cwd=tmp_path) as process:
        wait_up(process, 3)
        process.send_signal(signal.SIGTSTP)
        dtrain = psutil.Process(process.pid)
        wait_until(lambda: dtrain.status() == psutil.STATUS_STOPPED, "dtrain stops itself")
        wait_until(lambda: len(_stopped()) == 6, "three workers and their children are stopped")
        time.sleep(3)
        assert len(_stopped()) == 6
        process.send_signal(signal.SIGCONT)
        (tmp_path / "end").touch()
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr


def _stopped() -> list[psutil.Process]:
    found = []
    for process in marked({os.environ[MARK]}):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "RANK" in process.environ() and process.status() == psutil.STATUS_STOPPED:
                found.append(process)
    return found


# A rank hangs that is silent for ten times longer than ever before: on a busy machine that may be a minute.
LONG_S = 200.0

# ---- --hang ----------------------------------------------------------------------------------------------------

# A progress bar that a thread goes on drawing, as tqdm's monitor does.
BAR = """\
import sys, threading, time

def draw():
    while True:
        sys.stderr.write("\\rstep 40 of 60")
        sys.stderr.flush()
        time.sleep(1)

def draw_bar():
    threading.Thread(target=draw, daemon=True).start()

"""

RESILIENT = (
    HEADER
    + BAR
    + """\
import os, signal
world = ddp.init()
torch.manual_seed(1)
net = torch.nn.Linear(6, 3)
model = ddp.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = ddp.State(model=model, optimizer=optimizer, step=0)
if sys.argv[1] == "start" and world.rank == 1 and os.path.exists("hung") and not os.path.exists("again"):
    open("again", "w").close()
    os.kill(os.getpid(), signal.SIGSTOP)

def load():
    step = 0 if sys.argv[1] == "stop" else 40
    if state.step == step and world.rank == 1 and not os.path.exists("hung") and sys.argv[1] != "well":
        open("hung", "w").write(str(time.monotonic()))
        if sys.argv[1] == "start":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        draw_bar()
        time.sleep(600)
    if sys.argv[1] != "well":
        time.sleep(0.05)
    torch.manual_seed(10 * state.step + world.rank)
    return torch.randn(4, 6)

@ddp.resilient
def train(state):
    while state.step < 60:
        model(load()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.commit()

train(state)
print("result", *[f"{value.double().sum().item():.17g}" for value in net.parameters()], flush=True)
"""
)
SLEEP = RESILIENT[: RESILIENT.index("time.sleep(600)")].count("\n") + 1


def results(stdout: str) -> set[str]:
    found = re.findall(r"^\[\S+\] result (.*)$", stdout, re.MULTILINE)
    assert len(found) == 3, stdout
    return set(found)


@pytest.mark.parametrize("how", ["stop", "sleep", "start"])
def test_a_hung_resilient_rank_is_replaced_and_no_bit_differs(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, how: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(RESILIENT)
    restarts = 2 if how == "start" else 1
    options = ("--nproc-per-node", "3", "--max-restarts", str(restarts))
    hang = "2s" if how == "sleep" else "auto"
    result = run_dtrain("run", *options, "--hang", hang, script, how, cwd=tmp_path, timeout=LONG_S)
    assert result.returncode == 0, result
    if how != "sleep":
        assert "a signal stopped it, and no SIGCONT followed, while 2 other ranks run" in result.stderr
    else:
        assert f"at {script}:{SLEEP} in load, while 2 other ranks wait for it; treated as failed" in result.stderr
    assert re.search(
        rf"rank 1 on \S+ hung after .*only this worker restarts \(restart {restarts} of {restarts}\)", result.stderr
    )

    def make() -> set[str]:
        return results(run_dtrain("run", *options, script, "well", cwd=tmp_path).stdout)

    undisturbed = once(tmp_path_factory, "undisturbed by hangs", make)
    assert len(undisturbed) == 1
    assert results(result.stdout) == undisturbed


def test_a_stopped_rank_is_named_at_once_and_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RESILIENT)
    with started_dtrain("run", "-q", "--nproc-per-node", "3", script, "stop", cwd=tmp_path) as process:
        said = b""
        while b"hangs: " not in said:
            said = process.stderr.readline()
            assert said
        took_s = time.monotonic() - float((tmp_path / "hung").read_text())
        print(f"named {took_s:.2f} s after the SIGSTOP")
        assert re.search(rb"rank 1 on \S+ \(pid \d+\) hangs: a signal stopped it.*--hang auto", said)
        (stopped,) = _stopped()
        stopped.send_signal(signal.SIGCONT)
        stopped.kill()  # it would sleep
        process.communicate(timeout=60)
        assert process.returncode == 137


SERVED = """\
import os, sys, time
import torch, ddp
from ddp.strategies.parameter_server.server import Server

def sleeps_at(times):
    calls = []
    def here(*args, **kwargs):
        calls.append(0)
        if len(calls) == times and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(600)
    return here

strategy = ddp.strategy("parameter_server")
hangs_here = sleeps_at(30)
net = torch.nn.Linear(6, 3)
if strategy.role != "worker" and sys.argv[1] == "server":
    really = Server._handle
    Server._handle = lambda self, *args: (hangs_here(), really(self, *args))[1]
model, optimizer = strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
for step in range(60):
    optimizer.zero_grad()
    model(torch.ones(2, 6)).sum().backward()
    if sys.argv[1] == "worker" and strategy.replica == 1:
        hangs_here()
    optimizer.step()
    time.sleep(0.05)
"""


@pytest.mark.parametrize(("who", "rank"), [("server", 2), ("worker", 1)])
def test_a_hung_parameter_server_is_not_an_idle_one(tmp_path: Path, who: str, rank: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SERVED)
    options = ("--nproc-per-node", "2", "--ps", "1", "--max-restarts", "1", "--hang", "2s", "--grace-s", "1")
    result = run_dtrain("run", *options, script, who, cwd=tmp_path)
    line = SERVED[: SERVED.index("time.sleep(600)")].count("\n") + 1
    assert re.search(
        rf"rank {rank} on \S+ \(pid \d+\) hangs: .* at {script}:{line} in here, while 2 other ranks wait for it",
        result.stderr,
    ), result.stderr
    assert result.returncode == 0, result.stderr


SILENT = (
    HEADER
    + BAR
    + """\
import os
dist.init_process_group("gloo")

def step(number):
    if number == 50 and dist.get_rank() == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        draw_bar()
        time.sleep(600)
    dist.all_reduce(torch.ones(4))

for number in range(60):
    time.sleep(0.2)
    step(number)
    print("step", number, flush=True)
dist.destroy_process_group()
"""
)
HANG = SILENT[: SILENT.index("time.sleep(600)")].count("\n") + 1


def test_a_script_without_ddp_that_stops_printing_is_made_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SILENT)
    options = ("--nproc-per-node", "3", "--max-restarts", "1", "--hang", "2s", "--grace-s", "1")
    result = run_dtrain("run", *options, script, cwd=tmp_path, timeout=LONG_S)
    assert result.returncode == 0, result.stderr
    assert re.search(
        rf"rank 2 on \S+ hung after .* at {script}:{HANG} in step, while 2 other ranks wait", result.stderr
    )
    assert "attempt 1 begins" in result.stderr


def test_a_rank_at_a_breakpoint_does_not_hang(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SILENT.replace("draw_bar()\n        time.sleep(600)", "breakpoint()"))
    options = ("--nproc-per-node", "3", "--stdin", "2", "--hang", "2s", "--grace-s", "1", "--run-id", "r")
    with started_dtrain("run", *options, script, cwd=tmp_path, stdin=subprocess.PIPE) as process:
        log = tmp_path / "runs/r/attempt_0/2/stdout.log"
        wait_until(lambda: log.exists() and "(Pdb) " in log.read_text(), "the debugger waits")
        time.sleep(40)
        assert process.poll() is None
        _, err = process.communicate(b"c\n", timeout=60)
        assert (process.returncode, b"hung" in err) == (0, False), err


def test_a_hung_run_that_is_stopped_shows_where_its_ranks_stood(script: Path) -> None:
    """After ten seconds without a sign of life; the exit code stays that of the signal."""
    options = ["--run-id", "r", "--nproc-per-node", "3", "--grace-s", "600"]
    with started_dtrain("run", *options, script, cwd=script.parent) as process:
        wait_up(process, 3)
        time.sleep(15)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)  # which is less than the grace period
    assert process.returncode == 128 + signal.SIGTERM
    text = said.decode()
    assert "stopped by SIGTERM" in text
    assert f"rank 1 is at {script}:{LOAD} in load_batch" in text
    assert f"ranks 0,2 are at {script}:{STEP} in train_step, inside all_reduce" in text
    assert "look at rank 1 first" in text
    assert "runs/r/attempt_0/evidence-1.txt" in text


APART = """
import os, pathlib, time
import torch.distributed as dist

def prepare():
    while not pathlib.Path("go").exists():
        time.sleep(0.1)

rank = os.environ["RANK"]
if rank == "1":
    prepare()
pathlib.Path(f"came-{rank}").touch()
while rank != "1" and not (pathlib.Path("came-0").exists() and pathlib.Path("came-2").exists()):
    time.sleep(0.01)
dist.init_process_group("gloo")
dist.destroy_process_group()
"""


def test_ranks_waiting_in_init_process_group_are_named_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(APART)
    with started_dtrain("run", "--nproc-per-node", "3", "--hang", "4s", "script.py", cwd=tmp_path) as process:
        said: list[bytes] = []
        while not said or b"stacks of all ranks" not in said[-1]:
            said.append(process.stderr.readline())
            assert said[-1], said
        (tmp_path / "go").touch()
        rest = process.stderr.read()
        process.wait(60)
    text = b"".join(said).decode()
    assert process.returncode == 0
    assert re.search(r"2 ranks \(0, 2\) have waited in init_process_group for \d+ s or more", text), text
    assert re.search(r"rank 1 on \S+ has not called it yet", text), text
    assert re.search(r"rank 1 is at .*script.py:\d+ in prepare", text), text
    assert b"init_process_group" not in rest
