"""A process that said that its failure is its own: it alone starts again, or the others go on without it."""

import json
import re
import signal
from pathlib import Path

import pytest
from testbed.processes import run_dtrain, started_dtrain, wait_until
from testbed.sshd import SshHosts

# What ddp.monitoring.progress.set_restart_policy does, without the seconds that torch takes to be imported.
STAND = """\
import os, signal, struct, subprocess, sys, time
rank, count = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def stand(kind):
    with open(os.environ["DTRAIN_PROGRESS_FILE"], "r+b") as file:
        file.seek(16)
        file.write(struct.pack("<Q", kind))

def await_file(name):
    deadline = time.monotonic() + 90
    while not os.path.exists(name):
        assert time.monotonic() < deadline, name
        time.sleep(0.01)

def lives(pid, start):
    try:
        fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return fields[19] == start and fields[0] not in "ZX"
"""
COMES_BACK = """
stand(1)
print("begun", count, os.getpid(), os.environ["MASTER_PORT"], os.environ["DTRAIN_ROLES"], flush=True)
if rank == 1 and count == 0:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    start = open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[19]
    with open("child", "w") as file:
        file.write(f"{child.pid} {start}")
    sys.stdout.write("half a line")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
elif rank == 1:
    print("its child lives", lives(*open("child").read().split()), flush=True)
    open("back", "w").close()
await_file("back")
print("ended", count, os.getpid(), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


@pytest.fixture(params=["here", "simulated", "ssh"])
def three(request: pytest.FixtureRequest) -> list[str]:
    """Options for three workers: on this machine, on three simulated hosts, on three SSH hosts."""
    if request.param == "here":
        return ["--nproc-per-node", "3"]
    if request.param == "simulated":
        return ["--simulate", "--nnodes", "3", "--nproc-per-node", "1"]
    hosts: SshHosts = request.getfixturevalue("ssh_hosts")
    return ["--hosts", "node1,node2,node3", "--ssh-config", str(hosts.ssh_config)]


def _said(stdout: str, rank: int, word: str) -> list[list[str]]:
    """Return what a rank said after a word, by line."""
    lines = (line.partition("] ") for line in stdout.splitlines())
    return [text.split()[1:] for prefix, _, text in lines if prefix.endswith(f":{rank}") and text.startswith(word)]


def test_it_alone_starts_again_and_the_others_never_notice(three: list[str], script: Path) -> None:
    script.write_text(STAND + COMES_BACK)
    result = run_dtrain("run", "--run-id", "r", "--max-restarts", "3", *three, script, cwd=script.parent)
    assert result.returncode == 0, result.stdout + result.stderr
    begun = [_said(result.stdout, rank, "begun") for rank in range(3)]
    ended = [_said(result.stdout, rank, "ended") for rank in range(3)]
    assert [[life[0] for life in lives] for lives in begun] == [["0"], ["0", "1"], ["0"]]
    assert [[life[:2] for life in lives[-1:]] for lives in begun] == ended, "the same processes to the end"
    assert len({life[2] for lives in begun for life in lives}) == 1, "the same store"
    assert {life[3] for lives in begun for life in lives} == {"default:3"}
    assert "its child lives False" in result.stdout
    assert ":1] half a line\n" in result.stdout
    log = (script.parent / "runs/r/attempt_0/1/stdout.log").read_text()
    assert log.index("begun 0") < log.index("begun 1"), "the log goes on"
    assert "rank 1 on " in result.stderr
    assert " was killed by SIGKILL after " in result.stderr
    assert "; only this worker restarts (restart 1 of 3)" in result.stderr
    assert "all 3 workers finished successfully after " in result.stderr
    assert ", 1 restart; 0 processes left on " in result.stderr
    assert "(1 process outlived the workers and were ended)" in result.stderr


def test_without_restarts_left_the_others_go_on_without_it(script: Path) -> None:
    script.write_text(
        STAND + "stand(1)\nif rank == 1:\n    print('last words', flush=True)\n    open('gone', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\nawait_file('gone')\ntime.sleep(3)\nprint('ended', flush=True)\n"
    )
    options = ["--nproc-per-node", "3", "--error-json", "end.json", "--run-id", "r"]
    result = run_dtrain("run", *options, script, cwd=script.parent)
    assert result.returncode == 137, result.stdout + result.stderr
    assert result.stdout.count("ended") == 2
    notice, report, *more = [line for line in result.stderr.splitlines() if "rank 1 on " in line]
    assert notice.endswith("; the other workers continue without it")
    assert "was killed by SIGKILL (" in report
    assert not more
    assert "the other workers continued without it to the end" in result.stderr
    assert "| last words" in result.stderr
    assert "runs/r/attempt_0/1/stdout.log" in result.stderr
    reported = json.loads((script.parent / "end.json").read_text())
    assert (reported["ended"], reported["exit_code"], reported["cause"]["rank"], reported["stopped"]) == (
        "failed",
        137,
        1,
        0,
    )
    assert [(failure["rank"], failure["signal"]) for failure in reported["left_out"]] == [(1, "SIGKILL")]


def test_without_restarts_the_others_end_if_they_wait_for_it(script: Path) -> None:
    script.write_text(STAND + "stand(2)\nprint('begun', flush=True)\nif rank == 1: sys.exit(5)\ntime.sleep(600)\n")
    result = run_dtrain("run", "--nproc-per-node", "2", "--grace-s", "1", script, cwd=script.parent)
    assert result.returncode == 5, result.stderr
    assert "1 worker stopped by dtrain" in result.stderr


@pytest.mark.parametrize("kind", [1, 2])
def test_a_loop_of_deaths_at_the_start_ends(script: Path, kind: int) -> None:
    """The restart_policy that the first life said is that of those which die before they can say anything."""
    script.write_text(
        STAND + "print('begun', flush=True)\n"
        f"if rank == 1 and count == 0: stand({kind})\n"
        "if rank == 1 and count == 4: open('last', 'w').close()\n"
        "if rank == 1: sys.exit(7)\n"
        f"await_file('last')\ntime.sleep(3 if {kind} == 1 else 600)\nprint('ended', flush=True)\n"
    )
    options = ["--nproc-per-node", "2", "--max-restarts", "100", "--grace-s", "1"]
    result = run_dtrain("run", *options, script, cwd=script.parent)
    assert result.returncode == 7, result.stderr
    assert len(_said(result.stdout, 1, "begun")) == 5
    assert len(_said(result.stdout, 0, "begun")) == 1
    assert "only this worker restarts in 2 s (restart 4 of 100)" in result.stderr
    assert "the same failure came 5 times in a row, without any progress" in result.stderr
    assert ("ended" in result.stdout) == (kind == 1), "the others go on, or end with it"


def test_signals_reach_the_new_process_as_any_other(script: Path) -> None:
    script.write_text(
        STAND + "stand(2)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('usr1', count, flush=True))\n"
        "if rank == 1 and count == 0: raise ValueError('once')\n"
        "try:\n    print('begun', count, flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('told', count, flush=True)\n"
    )

    def said(*words: str) -> bool:
        logs = [script.parent / f"runs/r/attempt_0/{rank}/stdout.log" for rank in (0, 1)]
        return all(log.exists() and word in log.read_text() for log, word in zip(logs, words, strict=True))

    options = ["--run-id", "r", "--nproc-per-node", "2", "--max-restarts", "1"]
    with started_dtrain("run", *options, script, cwd=script.parent) as process:
        wait_until(lambda: said("begun 0", "begun 1"), "the second life has begun")
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: said("usr1 0", "usr1 1"), "it was passed on")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert sorted(line.partition("] ")[2] for line in stdout.decode().splitlines() if "told" in line) == [
        "told 0",
        "told 1",
    ]
    assert re.search(rb"raised ValueError after \d+\.\d s: once; only this worker restarts", stderr), stderr
    assert b"0 processes left on 1 host" in stderr
