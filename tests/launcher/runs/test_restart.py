"""A failed attempt, and the next one: what is tried again, what is not, and that two attempts never meet."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from testbed.present import present
from testbed.processes import MARK, marked, run_dtrain, started_dtrain, wait_up
from testbed.warm import HEADER

GLOO = f"""{HEADER}
import os, signal, time
dist.init_process_group("gloo")
dist.barrier()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("through", attempt, flush=True)
dist.barrier()
if attempt == "0" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""

# Each worker leaves a child in a session of its own, and looks for those of the former attempt.
CHILDREN = """\
import os, signal, subprocess, sys, time
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
for name in os.listdir("."):
    if name.startswith("child-") and int(name.split("-")[1]) < attempt:
        pid, start = open(name).read().split()
        try:
            fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        if fields[19] == start and fields[0] not in "ZX":
            print("alive from a former attempt:", name, flush=True)
            sys.exit(99)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
start = open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[19]
with open(f"child-{attempt}-{rank}", "w") as file:
    file.write(f"{child.pid} {start}")
print("up", flush=True)
open(f"up-{attempt}-{rank}", "w").close()
if attempt == 2:
    time.sleep(0.3)
    os._exit(0)
if rank == "1":
    while not os.path.exists(f"up-{attempt}-0"):
        time.sleep(0.01)
    os._exit(5)
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


@pytest.mark.usefixtures("warm")
def test_workers_meet_in_a_new_store_after_one_was_killed(where: list[str], script: Path) -> None:
    script.write_text(GLOO)
    result = run_dtrain("run", "--run-id", "r", "--max-restarts", "2", *where, script, cwd=script.parent)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("through 0") == 2
    assert result.stdout.count("through 1") == 2
    assert "attempt 0 failed: " in result.stderr
    assert "rank 1 on " in result.stderr
    assert "was killed by SIGKILL" in result.stderr
    assert "1 restart" in result.stderr
    for attempt, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        log = (script.parent / f"runs/r/attempt_{attempt}/{rank}/stdout.log").read_text()
        assert f"through {attempt}" in log


def test_what_an_attempt_left_is_gone_before_the_next_one_starts(where: list[str], script: Path) -> None:
    script.write_text(CHILDREN)
    options = ["--max-restarts", "3", "--grace-s", "0.2"]
    result = run_dtrain("run", *options, *where, script, cwd=script.parent)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("up") == 6
    assert "2 restarts" in result.stderr


def test_restart_counts_are_those_of_torchrun(script: Path) -> None:
    script.write_text(
        "import os, sys\ncount = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('count', count, 'of', os.environ['TORCHELASTIC_MAX_RESTARTS'], flush=True)\nsys.exit(count < 3)"
    )
    result = run_dtrain("run", "--max-restarts", "3", script, cwd=script.parent)
    assert result.returncode == 0, result.stderr
    assert [line.split("] ")[1] for line in result.stdout.splitlines()] == [f"count {n} of 3" for n in range(4)]


def test_when_all_restarts_are_used_the_last_cause_decides(script: Path) -> None:
    script.write_text("import os, sys\nprint('up')\nsys.exit(10 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))")
    result = run_dtrain("run", "--max-restarts", "2", script, cwd=script.parent)
    assert result.returncode == 12, result.stderr
    assert "all 2 restarts (--max-restarts) were used" in result.stderr
    assert "attempt_2/0/std" in result.stderr


def test_what_no_restart_can_mend_is_not_tried_again(script: Path) -> None:
    script.write_text("import argparse\nprint('begun', flush=True)\nargparse.ArgumentParser().parse_args(['--what'])\n")
    result = run_dtrain("run", "--max-restarts", "5", script, cwd=script.parent)
    assert result.returncode == 2, result.stderr
    assert result.stdout.count("begun") == 1
    assert "a restart cannot fix that" in result.stderr


def test_a_killed_store_is_the_cause_and_replaced(script: Path) -> None:
    script.write_text(
        "import os, time\nimport torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "print('up', flush=True)\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': time.sleep(600)\n"
        "dist.barrier()"
    )
    options = ["--max-restarts", "1", "--nproc-per-node", "2"]
    with started_dtrain("run", *options, script, cwd=script.parent) as process:
        wait_up(process, 2)
        (store,) = [
            p
            for p in psutil.Process(process.pid).children(recursive=True)
            if "launcher.agent.store_process" in _argv(p)
        ]
        store.kill()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert b"the rendezvous store on " in stderr
    assert b"was lost" in stderr


@pytest.mark.parametrize("victims", [["agent"], ["guard"], ["guard", "agent"]], ids=" and ".join)
def test_a_killed_agent_is_replaced_and_what_it_left_is_ended(
    where: list[str], script: Path, victims: list[str]
) -> None:
    script.write_text(
        "import os, subprocess, time\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print('up', flush=True)\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': time.sleep(600)"
    )
    with started_dtrain("run", "--max-restarts", "1", *where, script, cwd=script.parent) as process:
        wait_up(process, 2)
        guard, agent = _guard_and_agent()
        guard.suspend()  # so that it cannot act before both are dead
        for victim in victims:
            {"agent": agent, "guard": guard}[victim].kill()
        if "guard" not in victims:
            guard.resume()
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert stdout.count(b"up") == 2
    assert b" was lost after " in stderr
    assert b"0 processes left on " in stderr


def test_interrupt_between_two_attempts_ends_the_run(script: Path) -> None:
    script.write_text("import os, sys, time\nprint('up', flush=True)\nraise ValueError(time.monotonic())")
    with started_dtrain("run", "--max-restarts", "100", script, cwd=script.parent) as process:
        while b"the next one begins in 2 s" not in (line := process.stderr.readline()):
            assert line, "it ended before"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert b"stopped by SIGINT" in stderr


def test_error_json_has_what_the_screen_shows(script: Path) -> None:
    script.write_text(
        "import os\nif os.environ['RANK'] == '1': raise ValueError('bad batch')\nimport time\ntime.sleep(60)"
    )
    options = ["--nproc-per-node", "2", "--error-json", "e.json", "--run-id", "r"]
    result = run_dtrain("run", *options, script, cwd=script.parent)
    assert result.returncode == 1
    reported = json.loads((script.parent / "e.json").read_text())
    cause = reported["cause"]
    assert (reported["run_id"], reported["exit_code"], reported["ended"]) == ("r", 1, "failed")
    assert (cause["kind"], cause["rank"], cause["error_type"]) == ("raised", 1, "ValueError")
    assert cause["message"] == "bad batch"
    assert cause["where"].startswith(f"{script}:2")


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _guard_and_agent() -> tuple[psutil.Process, psutil.Process]:
    """Those of rank 1's host."""
    (worker,) = [p for p in marked({os.environ[MARK]}, RANK="1") if "script.py" in " ".join(_argv(p))]
    agent = present(worker.parent())
    guard = agent.parent()
    assert guard is not None
    assert "launcher.agent" in _argv(guard)
    return guard, agent
