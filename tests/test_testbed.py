"""The test bed itself: what it promises to find, it finds."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from threading import Thread

import psutil
import pytest
from testbed import REPOSITORY, processes
from testbed.forked_dtrain import ForkedDtrain
from testbed.processes import (
    MARK,
    everyone,
    kill,
    left_behind,
    marked,
    run_dtrain,
    run_program,
    started_dtrain,
    wait_until,
)
from testbed.quick import is_heavy
from testbed.require import require
from testbed.seeds import Seeds
from testbed.slow import Share
from testbed.sshd import SshHosts


def _ssh(hosts: SshHosts, *command: str) -> subprocess.CompletedProcess[str]:
    argv = ["ssh", "-F", str(hosts.ssh_config), *command]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def test_a_process_that_left_its_parent_and_session_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    before = everyone()
    subprocess.run(["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 &"], check=True)
    wait_until(
        lambda: left_behind(before, {mark}), "its environment can be read, as in the middle of an exec it cannot"
    )
    (left,) = left_behind(before, {mark})
    wait_until(lambda: left.cmdline() == ["sleep", "60"] and left.parent() != psutil.Process(), "it is a stray")
    assert left_behind(before, {mark}) == [left]
    kill([left])
    assert left_behind(before, {mark}) == []


def test_a_timeout_kills_the_whole_tree_and_keeps_the_output() -> None:
    result = run_program("sh", "-c", "echo begun; sleep 600; true", timeout=2)
    assert result.timed_out
    assert result.stdout == "begun\n"
    assert result.wall_s < 60


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "by_exec", False)


def test_a_forked_dtrain_is_a_process_of_its_own(tmp_path: Path, forks: None) -> None:
    with started_dtrain("run", "--no-python", "sleep", "600", cwd=tmp_path, env={"OWN": "1"}) as process:
        assert isinstance(process, ForkedDtrain)
        ours = {os.environ[MARK]}
        wait_until(lambda: [each for each in marked(ours, OWN="1") if each.name() == "sleep"], "the worker is there")
        assert process.pid in {each.pid for each in marked(ours)}
        assert (os.getsid(process.pid), os.readlink(f"/proc/{process.pid}/cwd")) == (process.pid, str(tmp_path))
        assert psutil.Process(process.pid).cmdline()[1:] == ["-m", "launcher", "run", "--no-python", "sleep", "600"]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert process.poll() is None
        waiting = Thread(target=process.wait, daemon=True)
        waiting.start()
        assert process.poll() is None, "another thread's wait holds up no one"
        process.kill()
        assert process.wait() == process.poll() == -signal.SIGKILL
        waiting.join()
    assert run_dtrain("--version").returncode == 0
    assert run_dtrain("run", "none.py", cwd=tmp_path).returncode == 2


def test_what_goes_wrong_with_a_forked_dtrain_is_said(tmp_path: Path, forks: None) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        run_dtrain("--version", cwd=tmp_path / "none")
    for name in ("tomllib", "tomli"):  # of which one is imported where there is a file
        (tmp_path / f"{name}.py").write_text("raise ValueError('broken')")
    (tmp_path / "dtrain.toml").write_text("")
    with started_dtrain("env", cwd=tmp_path) as process:
        assert isinstance(process, ForkedDtrain)
        assert b"ValueError: broken" in process.communicate(timeout=60)[1]
        assert process.returncode == 1
    server = processes.dtrain_server()
    ended = server.pid
    kill([psutil.Process(ended)])
    assert run_dtrain("--version").returncode == 0
    assert server.pid != ended


@pytest.mark.parametrize(
    ("variable", "module"),
    [
        ("PYTHONHASHSEED", ""),
        ("LD_PRELOAD", ""),
        ("PYTHONPATH", "sitecustomize"),
        ("PYTHONPATH", "click"),
        ("", "rich"),
    ],
)
def test_a_dtrain_that_starts_in_another_way_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: None, variable: str, module: str
) -> None:
    if module:
        (tmp_path / f"{module}.py").write_text("from os import _exit\n_exit(5)")
    if variable:
        monkeypatch.setenv(variable, {"PYTHONHASHSEED": "1", "LD_PRELOAD": "", "PYTHONPATH": str(tmp_path)}[variable])
    with started_dtrain("--version", cwd=None if variable else tmp_path) as process:
        assert not isinstance(process, ForkedDtrain)
        assert process.wait(60) == (5 if module in {"sitecustomize", "click"} else 0)


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_a_missing_part_skips_at_home_and_fails_in_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="a lathe is missing; buy one"):
        require(None, "a lathe", "buy one")
    require("/usr/bin/lathe", "a lathe", "buy one")


def test_ssh_hosts_are_hosts_of_their_own(ssh_hosts: SshHosts) -> None:
    for i, name in enumerate(ssh_hosts.names, 1):
        session = _ssh(ssh_hosts, name, "echo $HOME ${SSH_CONNECTION}")
        home, _, _, address, port = session.stdout.split()
        assert home.endswith(f"/{name}/home"), session
        assert (address, port) == (ssh_hosts.address(i), str(ssh_hosts.port))


def test_a_stopped_host_takes_everything_with_it_and_comes_back(ssh_hosts: SshHosts) -> None:
    before = everyone()
    assert _ssh(ssh_hosts, "node2", "setsid sleep 60 >/dev/null 2>&1 &").returncode == 0
    wait_until(lambda: left_behind(before, {ssh_hosts.mark}, ssh_hosts.pids), "it is found")
    ssh_hosts.stop(2)
    assert not left_behind(before, {ssh_hosts.mark}, ssh_hosts.pids)
    assert _ssh(ssh_hosts, "node2", "true").returncode == 255
    ssh_hosts.start(2)
    assert _ssh(ssh_hosts, "node2", "true").returncode == 0


@pytest.mark.parametrize(
    ("text", "heavy"),
    [
        ("import torch", True),
        ("from ddp.world import init", True),
        ('S = """\nimport torch\n"""', False),
        ("import os", False),
    ],
)
def test_a_file_that_imports_torch_is_heavy(tmp_path: Path, text: str, heavy: bool) -> None:
    (tmp_path / "test_it.py").write_text(text)
    assert is_heavy(tmp_path / "test_it.py") is heavy


def test_quick_tests_are_found_without_torch() -> None:
    result = run_program(sys.executable, "-m", "pytest", "--quick", "--collect-only", "-q", cwd=REPOSITORY)
    assert result.returncode == 0, result


def test_each_slow_test_is_in_one_share_and_all_others_in_each() -> None:
    ordinary, first, second, both = (
        _collected(*option) for option in ([], *(["--slow", x] for x in ("1/2", "2/2", "1/1")))
    )
    assert ordinary < first < both
    assert ordinary < second < both
    assert first | second == both
    assert first & second == ordinary


@pytest.mark.parametrize("share", ["0/5", "6/5", "2", "a/b", ""])
def test_what_is_no_share_is_refused(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="give a share like 2/5"):
        Share.of_option(share)


def test_seeds_are_new_in_each_run_and_can_be_repeated() -> None:
    drawn = Seeds(1, "a")(3, kept=[17])
    assert drawn[0] == 17
    assert drawn == Seeds(1, "a")(3, kept=[17])
    assert len({*drawn, *Seeds(2, "a")(3), *Seeds(1, "b")(3)}) == 10


def _collected(*options: str) -> set[str]:
    """The cases of one file of tests, of which some are slow; it imports no torch."""
    file = REPOSITORY / "tests/launcher/runs/test_end.py"
    argv = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options, str(file)]
    listed = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return {line for line in listed.stdout.splitlines() if "::" in line}
