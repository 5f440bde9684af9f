"""Whatever is typed wrong gets a clear error that says what to do, exit code 2, and starts nothing."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from testbed.processes import run_dtrain, run_program, started
from testbed.sshd import SshHosts

from launcher.cli.request import check_here
from launcher.errors import UsageError
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import CommandKind, JobSpec, WorkerCommand


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("print('ran')")
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes", "2"], "--nnodes 2, but no hosts are known. Name them: --hosts a,b (or DTRAIN_HOSTS"),
        (["--nnodes", "0"], "--nnodes is 0; it must be 1 or more"),
        (["--nnodes", "x"], "--nnodes is 'x'; it must be a number of hosts, or MIN:MAX"),
        (["--nnodes", "3", "--hosts", "a,b"], "--nnodes 3, but only 2 hosts are named: a, b"),
        (["--nnodes", "3:2", "--hosts", "a,b"], "--nnodes is 3:2; in MIN:MAX, MAX must be at least MIN"),
        (["--nnodes", "0:2", "--hosts", "a,b"], "--nnodes is 0:2; it must be 1 or more"),
        (["--nnodes", "2:", "--hosts", "a,b"], "--nnodes is '2:'; it must be a number of hosts, or MIN:MAX"),
        (["--nnodes", "3:4", "--hosts", "a,b"], "--nnodes 3, but only 2 hosts are named: a, b"),
        (["--max-restarts", "-1"], "--max-restarts is -1; it must be 0 to 1000000"),
        (["--max-restarts", "x"], "'x' is not a valid integer"),
        (["--grow"], "--grow needs room to grow: write --nnodes MIN:MAX"),
        (["--grow", "--simulate", "--nnodes", "2"], "--grow needs room to grow: write --nnodes MIN:MAX"),
        (["--heartbeat-timeout-s", "0.5"], "--heartbeat-timeout-s is 0.5; it must be 1 second or more"),
        (["--heartbeat-timeout-s", "nan"], "--heartbeat-timeout-s is nan; it must be 1 second or more"),
        (["--stall-timeout-s", "0"], "--stall-timeout-s is 0; it must be 1 second or more, at most 2.592e+06"),
        (["--stall-timeout-s", "inf"], "--stall-timeout-s is inf; it must be 1 second or more"),
        (["--error-json", "/no/such/folder/e.json"], "--error-json: the folder /no/such/folder does not exist"),
        (["--error-json", "/proc"], "--error-json: /proc is a folder; name a file"),
        (["--hosts", "a,b,a"], "host a is named twice; give it more slots instead: a:2"),
        (["--hosts", "a:0"], "'a:0' has no slots"),
        (["--hosts", ""], "--hosts is empty; name hosts as in --hosts a,b, or leave it out"),
        (["--only-rank", "-1"], "--only-rank is '-1'; it must be numbers"),
        (["--hosts", "a b"], "'a b' is not a host; write NAME, NAME:SLOTS"),
        (["--hosts", "-oProxyCommand=true"], "is not a host; write NAME"),
        (["--hosts", "a", "--simulate"], "--simulate divides this machine"),
        (["--simulate"], "--simulate needs the number of hosts to divide this machine into: --nnodes N"),
        (["--nproc-per-node", "0"], "--nproc-per-node is '0'; it must be a number from 1, or auto, gpu or cpu"),
        (["--nproc-per-node", "-1"], "--nproc-per-node is '-1'; it must be a number from 1"),
        (["--nproc-per-node", "x"], "--nproc-per-node is 'x'; it must be a number from 1"),
        (["--nproc-per-node", "gpu"], "one worker for each GPU, but it has none"),
        (["--gpus-per-proc", "0"], "--gpus-per-proc is 0"),
        (["--start-timeout-s", "0"], "--start-timeout-s is 0; it must be more than 0 seconds"),
        (["--start-timeout-s", "nan"], "--start-timeout-s is nan"),
        (["--grace-s", "-1"], "--grace-s is -1; it must be 0 seconds or more"),
        (["--master-port", "70000"], "--master-port is 70000; a port is 1 to 65535"),
        (["--run-id", "../up"], "run id '../up' names a folder"),
        (["--only-rank", "first"], "--only-rank is 'first'; it must be numbers such as 0 or 0,4"),
        (["--export", "NOT_SET_HERE"], "--export NOT_SET_HERE: it is not set here; write NOT_SET_HERE=VALUE"),
        (["--export", "1X=2"], "'1X' is not the name of a variable"),
        (["--workdir", "/no/such/folder"], "the working directory /no/such/folder does not exist; see --workdir"),
        (["-m", "--no-python"], "--module and --no-python exclude each other"),
        (["--nprocpernode", "2"], "Did you mean"),
        (["--nproc", "2"], "dtrain's option for --nproc is --nproc-per-node"),
        (["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--token-file", "/"], "> ~/"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_option_says_what_is_allowed(script: Path, options: list[str], message: str) -> None:
    result = run_dtrain("run", *options, "script.py", cwd=script.parent)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stdout == ""
    assert not (script.parent / "runs").exists()


def test_missing_script_here_is_found_before_anything_starts(tmp_path: Path) -> None:
    result = run_dtrain("run", "train.py", cwd=tmp_path)
    assert result.returncode == 2
    assert f"the script {tmp_path}/train.py does not exist" in result.stderr
    result = run_dtrain("run", "package.train", cwd=tmp_path)
    assert "for a module write -m" in run_dtrain("run", "train", cwd=tmp_path).stderr
    assert result.returncode == 2


def test_interpreter_in_the_place_of_the_script_is_left_out(tmp_path: Path, script: Path) -> None:
    for hosts in ([], ["--hosts", "a,b"]):  # before any host is asked
        result = run_dtrain("run", *hosts, "python3", script, cwd=tmp_path)
        assert result.returncode == 2
        assert "leave out python3: dtrain starts the interpreter by itself (--python)" in result.stderr
    here = (Host("here", HostKind.LOCAL),)
    (tmp_path / "bin").mkdir()
    for name in ("python", "python3", "python3.12"):
        (tmp_path / "bin" / name).symlink_to(sys.executable)
        for path in (f"bin/{name}", f"{tmp_path}/bin/{name}"):
            with pytest.raises(UsageError, match=f"leave out {path}: dtrain starts the interpreter"):
                check_here(JobSpec(WorkerCommand(CommandKind.SCRIPT, path), here, run_id="r", workdir=tmp_path))
    (tmp_path / "python3").write_text("")  # a script of that name
    command = WorkerCommand(CommandKind.SCRIPT, "./python3")
    check_here(JobSpec(command, here, run_id="r", workdir=tmp_path))


def test_nothing_to_run_says_how(tmp_path: Path) -> None:
    result = run_dtrain("run", cwd=tmp_path)
    assert result.returncode == 2
    assert "nothing to run: name a script, as in `dtrain run train.py`" in result.stderr


def test_missing_program_is_named(tmp_path: Path) -> None:
    result = run_dtrain("run", "--no-python", "no-such-program", cwd=tmp_path)
    assert result.returncode == 1
    assert "the program no-such-program is not in PATH there" in result.stderr


def test_missing_module_is_the_workers_own_error(tmp_path: Path) -> None:
    result = run_dtrain("run", "-m", "no.such.module", cwd=tmp_path)
    assert result.returncode == 1
    assert "No module named" in result.stderr


def test_more_workers_than_slots(ssh_hosts: SshHosts, script: Path) -> None:
    options = ["--ssh-config", str(ssh_hosts.ssh_config), "--hosts", "node1:2,node2:4", "--nproc-per-node", "3"]
    result = run_dtrain("run", *options, script, cwd=script.parent)
    assert result.returncode == 2
    assert "node1: 3 workers, but its entry in the host list has 2 slots" in result.stderr
    assert "node2" not in result.stderr


def test_named_port_in_use_names_its_holder_in_one_line(script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        os.set_inheritable(taken.fileno(), True)
        code = "import sys\nsys.stdin.read()"
        holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[taken.fileno()])
    with holder:  # which ends with its input
        result = run_dtrain("run", "--master-port", str(port), script, cwd=script.parent)
    assert result.returncode == 1
    held = rf"port {port} on 127\.0\.0\.1 is in use by pid {holder.pid} \([^\n]+\); name another"
    assert re.search(held, result.stderr), result
    assert "--master-port" in result.stderr
    assert result.stdout == ""


def test_address_that_is_not_here_is_named(script: Path) -> None:
    result = run_dtrain("run", "--master-addr", "203.0.113.7", script, cwd=script.parent)
    assert result.returncode == 1
    assert "no interface here has the address 203.0.113.7" in result.stderr


def test_agent_that_never_answers_meets_the_deadline(script: Path, tmp_path: Path) -> None:
    silent = tmp_path / "silent_python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    options = ["--python", str(silent), "--start-timeout-s", "0.5"]
    with started(sys.executable, "-m", "launcher", "run", *options, str(script), cwd=script.parent) as process:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert b"did not answer within 0.5 s (--start-timeout-s)" in stderr


def test_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    command = f'mkdir {gone}; cd {gone}; rmdir {gone}; exec "$0" -m launcher run script.py'
    result = run_program("sh", "-c", command, sys.executable)
    assert result.returncode == 2
    assert "the current folder no longer exists" in result.stderr


def test_wrong_pwd_variable_does_no_harm(script: Path) -> None:
    assert run_dtrain("run", script, cwd=script.parent, env={"PWD": "/no/such/folder"}).returncode == 0


def test_temporary_folder_that_is_missing_is_replaced(script: Path) -> None:
    result = run_dtrain("run", script, cwd=script.parent, env={"TMPDIR": "/no/such/folder"})
    assert result.returncode == 0, result.stderr


def test_misspelt_variable_is_named(script: Path) -> None:
    result = run_dtrain("run", script, cwd=script.parent, env={"DTRAIN_NPROC_PER_NOD": "2"})
    assert result.returncode == 0
    assert "DTRAIN_NPROC_PER_NOD is not known and does nothing; did you mean DTRAIN_NPROC_PER_NODE?" in result.stderr


def test_rank_to_show_that_does_not_exist_is_said(script: Path) -> None:
    result = run_dtrain("run", "--only-rank", "3", script, cwd=script.parent)
    assert "--only-rank 3: there were only ranks 0 to 0" in result.stderr


@pytest.mark.parametrize("first", ["#!/bin/bash", "#! /usr/bin/env bash"])
def test_a_shell_script_in_the_place_of_the_script_is_named_with_what_to_type(tmp_path: Path, first: str) -> None:
    (tmp_path / "go.sh").write_text(f"{first}\nset -e; echo gone $1\n")
    result = run_dtrain("run", "go.sh", "far", cwd=tmp_path)
    shell = "bash" if "env" in first else "/bin/bash"
    assert (result.returncode, result.stdout) == (2, ""), result
    assert f"go.sh is not a Python script but one for {shell}: dtrain run --no-python {shell} go.sh" in result.stderr
    right = run_dtrain("run", "--nproc-per-node", "1", "--no-python", shell, "go.sh", "far", cwd=tmp_path)
    assert (right.returncode, "gone far" in right.stdout) == (0, True), right


def test_a_script_that_shell_and_python_read_is_started(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text("#!/bin/sh\n''''exec python3 \"$0\" # '''\nprint('python')\n")
    result = run_dtrain("run", "--nproc-per-node", "1", "both.py", cwd=tmp_path)
    assert (result.returncode, "python" in result.stdout) == (0, True), result


def test_a_misspelt_script_is_named_as_it_is_spelt_here(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/train.py").touch()
    for typed, hint in (("scripts/trian.py", "did you mean scripts/train.py?"), ("scripts/x", "for a module write -m")):
        result = run_dtrain("run", typed, cwd=tmp_path)
        assert (result.returncode, hint in result.stderr) == (2, True), result


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--nproc-per-node", "2"], ["--nproc-per-node"]),
        (["--nproc_per_node=2", "--hosts=a", "--hosts", "b"], ["--nproc_per_node", "--hosts"]),
        (["--", "--nproc-per-node", "2"], []),
        (["--verbose", "--workdir", "w", "--max_restarts=3"], []),
    ],
)
def test_options_of_dtrain_behind_the_script_are_warned_of(tmp_path: Path, words: list[str], named: list[str]) -> None:
    """Not of those that the script may have itself: its folder's files mention them."""
    (tmp_path / "train.py").write_text("import sys; import arguments; print(sys.argv[1:])")
    (tmp_path / "arguments.py").write_text("options = ['--workdir', '--max-restarts']")
    result = run_dtrain("run", "--nproc-per-node", "1", "train.py", *words, cwd=tmp_path)
    assert (result.returncode, repr(words) in result.stdout) == (0, True), result
    warned = re.findall(r"(\S+) comes after train.py, .* dtrain run (\S+) \.\.\. train.py", result.stderr)
    assert warned == [(name, name) for name in named]
