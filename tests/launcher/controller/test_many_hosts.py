"""Many simulated hosts: their agents are forked from one process, and dtrain needs few threads and files for each."""

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path

import psutil
import pytest
from testbed.processes import Program, Result, run_dtrain, run_program, started_dtrain, wait_until

from launcher.machine.processes import find

HOSTS = 100
PREFORKED = "--simulated"


def options(hosts: int, tmp_path: Path) -> list[str]:
    return ["run", "--simulate", "--nnodes", str(hosts), "--nproc-per-node", "1", "--log-dir", str(tmp_path)]


def with_files(limit: int, *words: str, soft: bool) -> Result:
    kind = "-S" if soft else ""
    line = f'ulimit {kind} -n {limit}; exec "$@"'
    return run_program("sh", "-c", line, "sh", sys.executable, "-m", "launcher", *words)


def preforked_of(dtrain: Program) -> psutil.Process:
    """The process that the agents are forked from; its children are their guards."""
    found = []
    for child in psutil.Process(dtrain.pid).children():
        with contextlib.suppress(psutil.Error):  # another program of dtrain's has just ended
            found += [child] if PREFORKED in child.cmdline() else []
    (preforked,) = found
    return preforked


def await_running(dtrain: Program, name: str, count: int) -> None:
    def running() -> int:
        found = 0
        for process in psutil.Process(dtrain.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += process.name() == name
        return found

    wait_until(lambda: running() == count, f"{count} workers run")


def test_a_hundred_hosts_keep_below_the_limit_of_open_files(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 8 * HOSTS
    result = with_files(100, *options(HOSTS, tmp_path), "--no-python", "true", soft=True)
    assert result.returncode == 0, result.stderr
    assert f"0 processes left on {HOSTS} hosts" in result.stderr


def test_their_workers_have_the_users_own_limit_of_open_files(tmp_path: Path) -> None:
    result = with_files(200, *options(2, tmp_path), "--no-python", "sh", "-c", "ulimit -Sn", soft=True)
    assert sorted(result.stdout.splitlines()) == ["[sim0:0] 200", "[sim1:1] 200"], result.stderr


def test_so_have_those_of_an_agent_that_is_started_later(tmp_path: Path) -> None:
    line = 'ulimit -Sn; [ "$TORCHELASTIC_RESTART_COUNT" = 1 ] || { kill -9 $PPID; sleep 60; }'
    result = with_files(200, *options(2, tmp_path), "--max-restarts", "1", "--no-python", "sh", "-c", line, soft=True)
    assert result.returncode == 0, result.stderr
    assert {line.split()[-1] for line in result.stdout.splitlines()} == {"200"}, result.stdout


def test_where_they_need_more_the_error_says_so(tmp_path: Path) -> None:
    result = with_files(100, *options(HOSTS, tmp_path), "--no-python", "true", soft=False)
    assert result.returncode == 1
    assert "Too many open files; raise the limit of open files (ulimit -n" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_host_takes_two_threads_and_a_session_of_its_own(tmp_path: Path) -> None:
    with started_dtrain(*options(20, tmp_path), "--no-python", "sleep", "60") as dtrain:
        await_running(dtrain, "sleep", 20)
        assert psutil.Process(dtrain.pid).num_threads() <= 2 * 20 + 8
        guards = preforked_of(dtrain).children()
        assert len({os.getsid(guard.pid) for guard in guards}) == 20
        dtrain.send_signal(signal.SIGTERM)
        assert dtrain.wait(60) == 143


def test_an_agent_that_is_killed_is_named_and_the_others_end(tmp_path: Path) -> None:
    with started_dtrain(*options(3, tmp_path), "--no-python", "sleep", "60") as dtrain:
        await_running(dtrain, "sleep", 3)
        preforked_of(dtrain).children()[0].children()[0].kill()
        _, err = dtrain.communicate(timeout=60)
        assert dtrain.returncode == 1
        assert b": its agent was killed" in err
        assert b"0 processes left on 3 hosts" in err


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_forking_process_they_go_on_and_it_ends(tmp_path: Path, signum: int) -> None:
    gate = tmp_path / "gate"
    line = f"while [ ! -e {gate} ]; do sleep 0.05; done; exit 7"
    with started_dtrain(*options(3, tmp_path), "--no-python", "sh", "-c", line) as dtrain:
        await_running(dtrain, "sh", 3)
        preforked = preforked_of(dtrain)
        preforked.send_signal(signum)
        gate.touch()
        _, err = dtrain.communicate(timeout=60)
        assert dtrain.returncode == 7, err
        assert b"0 processes left on 3 hosts" in err
        assert find(preforked.pid) is None


@pytest.mark.parametrize("python", ["/nowhere/python", "/usr/bin/false"])
def test_a_python_that_cannot_start_them_is_an_error(python: str, tmp_path: Path) -> None:
    result = run_dtrain(*options(3, tmp_path), "--python", python, "--no-python", "true")
    assert result.returncode == 1
    assert python in result.stderr or "did not start (status 1)" in result.stderr
    assert "Traceback" not in result.stderr
