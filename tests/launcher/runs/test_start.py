"""The start of a run with many hosts or bad ones, and with more workers than a host can hold."""

import json
import os
import resource
import sys
from pathlib import Path

import pytest
from testbed.job_drive import Drive, messages, notices, opened
from testbed.processes import run_dtrain, run_program

from launcher.agent import host_facts
from launcher.errors import PlacementError
from launcher.hosts.folding import StartError, fold, lines_by_reason
from launcher.hosts.host import Host, HostKind
from launcher.hosts.ranges import expand
from launcher.job.events import Notice
from launcher.job.fleet import CONNECT_AT_ONCE
from launcher.job.gathering import OTHER_REASONS_S, SHOW_S
from launcher.protocol.commands import StartWorker

MANY = tuple(f"n{k}" for k in range(1, 1001))


def test_many_hosts_are_written_as_ranges() -> None:
    for text in ("node[08-11]", "a[1-2,5-9]b", "login, gpu[0-3]"):
        assert fold(expand(text)) == text
    assert fold(["node098", "node099", "node100"]) == "node[098-100]"
    assert fold(["10.0.0.1", "10.0.0.2", "b1", "b2", "c", "d"]) == "10.0.0.1, 10.0.0.2, b1 and 3 others"
    assert len(fold([f"n{k}" for k in range(0, 5000, 2)])) < 120


def test_equal_reasons_are_one_line() -> None:
    reasons = {name: f"DNS lookup of {name} timed out; is DNS working?" for name in MANY[1:197]}
    reasons["n7"] = "10.0.0.7 port 22: connection refused; try: ssh n7 true"
    reasons["n9"] = "10.0.0.9 port 22: connection refused; try: ssh n9 true"
    assert lines_by_reason(reasons) == [
        "n[2-6,8,10-197]: DNS lookup timed out; is DNS working?",
        "n7, n9: 10.0.0.7 port 22: connection refused; try: ssh n7 true",
    ]
    assert len(lines_by_reason({"a": "has Python 3.9.1", "b": "has Python 3.9.2"})) == 2


def test_a_hopeless_start_ends_soon_and_names_untried_hosts() -> None:
    drive = Drive(*MANY)
    assert opened(drive.commands) == list(MANY[:CONNECT_AT_ONCE])
    drive.lose("n2", "DNS lookup of n2 failed: no such name")
    assert opened(drive.commands)[CONNECT_AT_ONCE:] == [MANY[CONNECT_AT_ONCE]], "one place is free"
    drive.lose("n3", "DNS lookup of n3 failed: no such name")
    far, wrong = (command for command in drive.wait(SHOW_S[0]) if isinstance(command, Notice))
    assert ("0 of 1000 hosts ready; waiting for " in far.text, far.is_error) == (True, False)
    assert (wrong.text, wrong.is_error) == ("n2, n3: DNS lookup failed: no such name", True)
    assert drive.job.outcome is None
    drive.wait(OTHER_REASONS_S - SHOW_S[0])
    drive.wait(5)
    error = drive.outcome.error
    assert isinstance(error, StartError)
    lines = str(error).splitlines()
    assert len(lines) == 4
    assert lines[0] == "1000 of 1000 hosts cannot start; no worker was started."
    assert lines[3] == "  n[259-1000]: was not tried before the start was given up because of the other hosts"


def test_all_hosts_of_a_large_run_get_their_turn() -> None:
    drive = Drive(*MANY, nproc=1)
    for name in MANY:
        assert name in opened(drive.commands[-40:]) or drive.link(name) == 1
        drive.join(name)
        drive.check(name)
    drive.begin()
    assert len(messages(drive.commands, StartWorker)) == 1000


def test_an_elastic_run_says_many_unusable_hosts_at_once() -> None:
    drive = Drive(*MANY[:100], nnodes=(2, 100))
    for name in MANY[2:100]:
        assert notices(drive.lose(name, f"DNS lookup of {name} failed: no such name")) == []
    assert "n[3-100] cannot be used for now: DNS lookup failed: no such name" in notices(drive.wait(SHOW_S[0]))


def test_names_that_do_not_resolve_are_few_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    result = run_dtrain("run", "--hosts", "nosuch[1-200].invalid", "train.py", cwd=tmp_path)
    lines = result.stderr.splitlines()
    assert result.returncode == 1
    assert "200 of 200 hosts cannot start; no worker was started." in result.stderr
    assert "].invalid: DNS lookup " in result.stderr
    assert len(lines) <= 10, result


# ---- the limits of a host ------------------------------------------------------------------------------------

FEW_FILES = """\
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (130, 130))
os.execv(sys.executable, [sys.executable, "-m", "launcher", *sys.argv[1:]])
"""


NO_THREAD = """\
import sys, threading
threading.stack_size(1 << 46)  # more than a process can map, so that no thread starts
sys.argv = ["dtrain", "run", *sys.argv[1:]]
from launcher.cli.main import main
main()
"""


def test_a_machine_without_threads_is_an_error_with_the_limit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    refused = run_program(sys.executable, "-c", NO_THREAD, "train.py", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (
        1, "dtrain: this machine has no thread left for dtrain itself; raise the limit of processes (ulimit -u)\n",
    )  # fmt: skip


@pytest.mark.parametrize("command", ["run", "plan"])
def test_too_many_workers_are_refused_with_the_limit(tmp_path: Path, command: str) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    argv = [sys.executable, "-c", FEW_FILES, command, "--nproc-per-node"]
    refused = run_program(*argv, "14", "train.py", cwd=tmp_path)
    assert refused.returncode == 2, refused
    assert "14 workers are too many for its limit of open files, 130 (`ulimit -Hn`; raise it in" in refused.stderr
    assert "there is room for 9" in refused.stderr
    assert not (tmp_path / "started").exists()
    assert run_program(*argv, "2", "train.py", cwd=tmp_path).returncode == 0


def test_processes_are_limited_by_user_and_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pids.max").write_text("100\n")
    (tmp_path / "pids.current").write_text("72\n")
    monkeypatch.setattr(host_facts, "folders_of", lambda _: [tmp_path, tmp_path / "none"])
    room, said = host_facts.room_for_workers(2)
    assert room == 10
    assert said.startswith("the limit of processes in its control group, 100 with 72 in use (pids.max in ")
    (tmp_path / "pids.max").write_text("max\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 50))
    monkeypatch.setattr(host_facts, "_threads_of", lambda _: 45)
    monkeypatch.setattr(host_facts, "_files", lambda: None)
    room, said = host_facts.room_for_workers(1)
    assert (room, said.partition(" (")[0]) == (0, "the user's limit of processes, 50 with 45 in use")


def test_room_is_counted_with_the_processes_of_other_roles() -> None:
    drive = Drive("a", nproc=3, hosts=(Host("a", HostKind.SSH),))
    drive.join()
    drive.say("a", drive.facts("a", room=2, room_limit="its limit of open files, 70"))
    drive.goodbye()
    assert isinstance(drive.outcome.error, PlacementError)
    assert str(drive.outcome.error).endswith(
        "a: 3 workers are too many for its limit of open files, 70; there is room for 2"
    )


# ---- what a host offers --------------------------------------------------------------------------------------


def test_check_plan_and_run_agree_on_the_gpus_that_were_chosen(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])")
    env = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    argv = ["--hosts", "localhost:4", "--include", "localhost:1,3"]
    run = run_dtrain("run", *argv, "train.py", cwd=tmp_path, env=env)
    plan = run_dtrain("plan", "--json", *argv, "train.py", cwd=tmp_path, env=env)
    check = run_dtrain("check", "--json", "--no-allreduce", *argv, "train.py", cwd=tmp_path, env=env)
    assert run.stdout.count("sees 5,7") == 2, run
    assert [row["gpus"] for row in json.loads(plan.stdout)] == [["5"], ["7"]]
    (host,) = json.loads(check.stdout)["hosts"]
    assert host["facts"]["gpu_ids"] == ["5", "7"]
    argv += ["--gpus-per-proc", "2", "--nproc-per-node", "2"]
    for command in ("run", "plan", "check"):
        refused = run_dtrain(command, *argv, "train.py", cwd=tmp_path, env=env)
        assert "--gpus-per-proc 2 needs 4 GPUs, it has 2" in refused.stdout + refused.stderr
