"""`dtrain stacks`: where the ranks of a living run are, for who asks; the run goes on and its own terminal is left."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from testbed.another_user import ask_as_another_user
from testbed.processes import Result, run_dtrain, started_dtrain, wait_until
from testbed.require import require
from testbed.sshd import SshHosts
from testbed.typed import dtrain

from launcher.agent.observation.evidence import find_py_spy
from launcher.runs.control import question
from launcher.runs.registry import entries, place


def detached(*words: str | Path, workers: int = 1) -> None:
    result = run_dtrain("run", "--detach", "--run-id", "r", *words, outlived=True)
    assert result.returncode == 0, result
    wait_until(lambda: len([*Path().glob("tick*")]) == workers, "the ranks are there")


def stacks(*words: str) -> Result:
    return dtrain("stacks", "r", *words)


def ranks(*words: str) -> list[dict[str, Any]]:
    result = stacks("--json", *words)
    assert result.returncode == 0, result
    found: list[dict[str, Any]] = json.loads(result.stdout)["ranks"]
    return found


def end(exit_code: int = 0) -> None:
    Path("go").touch()
    assert dtrain("wait", "r").returncode == exit_code


def test_ranks_are_shown_by_groups_and_the_run_goes_on(folder: Path) -> None:
    detached("--nproc-per-node", "3", "script.py", workers=3)
    shown = stacks()
    assert (shown.returncode, shown.stderr) == (0, ""), shown
    assert f"{folder}/script.py:" in shown.stdout
    assert "in count" in shown.stdout
    assert "bootstrap.py" not in shown.stdout
    of_one = stacks("--rank", "1")
    assert "rank 1 (pid" in of_one.stdout
    assert "rank 2" not in of_one.stdout
    found = ranks()
    assert [each["rank"] for each in found] == [0, 1, 2]
    assert {each["pid"] for each in found} <= {*psutil.pids()}
    assert all("File " in each["stack"] for each in found)
    unknown = stacks("--rank", "7")
    assert (unknown.returncode, unknown.stdout) == (1, ""), unknown
    assert "there is no rank 7; the run has ranks 0 to 2" in unknown.stderr
    end()
    assert "in count" not in (folder / "runs/r/console.log").read_text()
    assert not [*(folder / "runs/r/attempt_0").glob("evidence*")]
    gone = stacks()
    assert gone.returncode == 1
    assert "run r has ended: finished" in gone.stderr


def test_several_who_ask_at_once_are_all_answered(counting: Path) -> None:
    (entry,) = entries()
    with question(entry, "stacks") as one, question(entry, "stacks") as two, question(entry, "stacks") as three:
        for asked in (three, two, one):
            answer = asked.receive(60.0)
            assert isinstance(answer, dict)
            assert [each["rank"] for each in answer["evidence"]] == [0, 1]
            assert asked.receive(60.0) is None


def test_a_silent_host_is_named_and_the_others_are_shown(counting: Path) -> None:
    stopped = psutil.Process(ranks("--rank", "1")[0]["pid"]).parent()
    assert stopped is not None
    stopped.suspend()
    try:
        shown = stacks()
    finally:
        stopped.resume()
    assert shown.returncode == 1, shown
    assert "rank 0 is at" in shown.stdout
    assert "rank 1 on" in shown.stderr
    assert "did not answer within 2 s" in shown.stderr


def test_a_run_that_is_ending_says_so() -> None:
    Path("deaf.py").write_text(
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n"
        + Path("script.py").read_text()
    )
    detached("--grace-s", "60", "deaf.py")
    with started_dtrain("stop", "r") as stop:
        wait_until(lambda: "told" in dtrain("logs", "r").stdout, "the worker has the signal")
        refused = stacks()
        assert (refused.returncode, refused.stdout) == (1, ""), refused
        assert "no worker can be looked at now: stopping; waiting for" in refused.stderr
        Path("go").touch()
        stop.communicate(timeout=60)


def test_native_frames_are_shown_where_py_spy_may_look(counting: Path) -> None:
    require(find_py_spy(), "py-spy", "pip install py-spy")
    found = ranks("--native")[0]
    if found["no_native"] is not None:
        assert found["no_native"].startswith("ptrace is not permitted"), found
        pytest.skip("this user may not look into processes")
    assert "libc" in found["native"], found
    assert "count (" in found["native"]
    assert "libc" in stacks("--native").stdout


@pytest.fixture
def bin_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an interpreter beside which there is no py-spy, and a PATH without one."""
    (folder / "bin").mkdir()
    for name in ("python3", "python"):
        (folder / "bin" / name).symlink_to(sys.executable)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return folder / "bin"


def test_without_py_spy_python_stacks_are_shown_with_the_reason(bin_folder: Path) -> None:
    detached("--python", str(bin_folder / "python"), "script.py")
    (found,) = ranks("--native")
    assert "count" in found["stack"]
    assert found["no_native"] == "py-spy is not installed there: pip install py-spy"
    assert "no native frames: py-spy is not installed there" in stacks("--native", "--rank", "0").stdout
    end()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a right that py-spy can lack")
def test_without_ptrace_python_stacks_are_shown_with_the_reason(bin_folder: Path) -> None:
    program = find_py_spy()
    require(program, "py-spy", "pip install py-spy")
    # A process may not look into one that has a right it lacks. Containers often have no sys_ptrace, so chown as well.
    lacking = "setpriv --bounding-set=-sys_ptrace,-chown --inh-caps=-sys_ptrace,-chown"
    (bin_folder / "py-spy").write_text(f'#!/bin/sh\nexec {lacking} {program} "$@"\n')
    (bin_folder / "py-spy").chmod(0o755)
    detached("--python", str(bin_folder / "python"), "script.py")
    (found,) = ranks("--native")
    assert "count" in found["stack"]
    assert found["no_native"].startswith("ptrace is not permitted there: "), found
    assert "no native frames: ptrace is not permitted there" in stacks("--native", "--rank", "0").stdout
    end()


def test_a_controller_that_is_stopped_is_said_to_be(counting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.cli.runs.stacks.LIMIT_S", 1.0)
    from launcher.cli.runs.stacks import ask_stacks
    from launcher.errors import RunError

    (entry,) = entries()
    os.kill(entry.pid, signal.SIGSTOP)
    try:
        with pytest.raises(RunError, match=f"kill -CONT {entry.pid}"):
            ask_stacks(entry)
    finally:
        os.kill(entry.pid, signal.SIGCONT)


@pytest.mark.ordinary_user
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_gets_no_answer(counting: Path) -> None:
    (entry,) = entries()
    answer = ask_as_another_user(place() / entry.socket, '{"ask": "stacks"}')
    assert (answer.returncode, answer.stdout) == (0, "b''\n"), answer


def test_the_ranks_of_hosts_reached_by_ssh_are_shown(ssh_hosts: SshHosts) -> None:
    where = ["--hosts", "node1,node2", "--ssh-config", str(ssh_hosts.ssh_config)]
    detached(*where, "--nproc-per-node", "1", "script.py", workers=2)
    began = time.monotonic()
    assert [each["host"] for each in ranks()] == ["node1", "node2"]
    assert time.monotonic() - began < 60
    end()
