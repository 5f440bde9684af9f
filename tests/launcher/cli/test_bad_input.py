"""Whatever is typed wrong gets a clear error that says what to do, exit code 2, and starts nothing."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from syrupy.assertion import SnapshotAssertion
from testbed.processes import run_dtrain, run_program, started
from testbed.typed import message_of, typed

from launcher.cli.caller import error_file
from launcher.cli.request import check_here, check_script, read_request
from launcher.cli.run_node import commands_of_nodes
from launcher.errors import UsageError
from launcher.placement.job_spec import CommandKind, WorkerCommand

WRONG = [
    "",
    "--nnodes 2 script.py",
    "--nnodes 0 script.py",
    "--nnodes x script.py",
    "--nnodes 3 --hosts a,b script.py",
    "--nnodes 3:2 --hosts a,b script.py",
    "--nnodes 0:2 --hosts a,b script.py",
    "--nnodes 2: --hosts a,b script.py",
    "--nnodes 3:4 --hosts a,b script.py",
    "--max-restarts -1 script.py",
    "--grow script.py",
    "--grow --simulate --nnodes 2 script.py",
    "--heartbeat-timeout-s 0.5 script.py",
    "--heartbeat-timeout-s nan script.py",
    "--stall-timeout-s 0 script.py",
    "--stall-timeout-s inf script.py",
    "--hosts= script.py",
    "--hosts a,b,a script.py",
    "--hosts a --simulate script.py",
    "--simulate script.py",
    "--nproc-per-node x script.py",
    "--gpus-per-proc 0 script.py",
    "--start-timeout-s 0 script.py",
    "--grace-s -1 script.py",
    "--master-port 70000 script.py",
    "--run-id ../up script.py",
    "--only-rank first script.py",
    "--only-rank -1 script.py",
    "--export NOT_SET_HERE script.py",
    "--workdir /no/such/folder script.py",
    "-m --no-python script.py",
    "--keep-warm 10x script.py",
    "--keep-warm 5m --hosts node1,node2 script.py",
    "--node-rank 1 script.py",
    "--node-rank 2 --nnodes 2 --master-addr 127.0.0.1 script.py",
    "--node-rank 1 --nnodes 2 script.py",
    "--node-rank 0 --nnodes 2 --hosts a,b script.py",
    "--node-rank 0 --nnodes 1 --include a script.py",
    "--standalone --hosts a,b script.py",
    "--keep-warm 1m --launch-prefix 'env A=1' script.py",
    "--keep-warm 1m --setup true script.py",
    "--setup true --simulate --nnodes 2 script.py",
    '--agent-prefix "a \'b" script.py',
    '--ssh-command "ssh \'x" --hosts node1 script.py',
    "--ssh-command ' ' --hosts node1 script.py",
    "--ssh-command ssh --accept-new-host-keys --hosts node1 script.py",
    "--ssh-command 'tsh ssh' --ssh-config conf --hosts node1 script.py",
    "--sync --nnodes 2 --node-rank 0 --master-addr localhost script.py",
    "--fetch x --nnodes 2 --node-rank 0 --master-addr localhost script.py",
    "--hosts-script true script.py",
    "--requeue script.py",
    "--stdin first script.py",
    "--stdin 0 --detach script.py",
    "--stdin none /dev/stdin",
    "package.train",
    "train",
    "scripts/trian.py",
    "python3 script.py",
    "bin/python script.py",
    "bin/python3.12 script.py",
    "bash.sh",
    "env.sh",
]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("print('ran')")
    return path


@pytest.fixture
def folder(tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of what is typed: it has files that are no scripts, and a script named python3.12."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/train.py").touch()
    (tmp_path / "bin").mkdir()
    for name in ("python", "python3.12"):
        (tmp_path / "bin" / name).symlink_to(sys.executable)
    (tmp_path / "python3.12").touch()
    for name, first in (("bash", "#!/bin/bash"), ("env", "#! /usr/bin/env bash")):
        (tmp_path / f"{name}.sh").write_text(f"{first}\nset -e; echo gone $1\n")
    (tmp_path / "both.py").write_text("#!/bin/sh\n''''exec python3 \"$0\" # '''\nprint('python')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PWD", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # without a token
    return tmp_path


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_says_what_is_allowed(folder: Path, line: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises((UsageError, click.UsageError)) as refused:
        check_here(read_request(typed(*shlex.split(line))).spec)
    assert message_of(refused.value).replace(str(folder), "FOLDER") == snapshot


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-restarts", "-1"], "--max-restarts is -1; it must be 0 to 1000000"),
        (["--max-restarts", "x"], "'x' is not a valid integer"),
        (["--nprocpernode", "2"], "Did you mean"),
        (["--nproc", "2"], "dtrain's option for --nproc is --nproc-per-node"),
    ],
)
def test_after_wrong_input_nothing_was_started(script: Path, options: list[str], message: str) -> None:
    result = run_dtrain("run", *options, "script.py", cwd=script.parent)
    assert (result.returncode, result.stdout) == (2, ""), result
    assert message in result.stderr
    assert not (script.parent / "runs").exists()


@pytest.mark.parametrize(
    "line", ["--nnodes 1 script.py", "--simulate --nnodes 2 script.py", "--fetch x --nnodes 2 a.py"]
)
def test_commands_to_print_need_several_nodes_and_no_files(line: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UsageError) as refused:
        commands_of_nodes(typed("--print-commands", *line.split()))
    assert str(refused.value) == snapshot


@pytest.mark.parametrize(("file", "said"), [("/no/such/folder/e.json", "does not exist"), ("/proc", "is a folder")])
def test_the_file_of_error_json_needs_a_folder(file: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"--error-json: .*{said}"):
        error_file(file)


@pytest.mark.parametrize("name", ["./python3.12", "python3.12", "both.py"])
def test_a_script_may_have_any_name_and_first_line(folder: Path, name: str) -> None:
    check_here(read_request(typed(name)).spec)


def test_an_interpreter_is_left_out_before_any_host_is_asked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave out python3: dtrain starts the interpreter"):
        check_script(WorkerCommand(CommandKind.SCRIPT, "python3"), tmp_path, is_seen=False)


def test_the_command_for_a_shell_script_runs_it(folder: Path) -> None:
    result = run_dtrain("run", "--nproc-per-node", "1", "--no-python", "bash", "env.sh", "far", cwd=folder)
    assert (result.returncode, "gone far" in result.stdout) == (0, True), result


def test_missing_module_is_the_workers_own_error(tmp_path: Path) -> None:
    result = run_dtrain("run", "-m", "no.such.module", cwd=tmp_path)
    assert result.returncode == 1
    assert "No module named" in result.stderr


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


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_standard_output_on_a_full_disk_is_an_error_in_one_line(script: Path, unbuffered: str) -> None:
    command = 'exec "$0" -m launcher plan script.py >/dev/full'
    env = {"PYTHONUNBUFFERED": unbuffered}
    result = run_program("sh", "-c", command, sys.executable, env=env, cwd=script.parent)
    said = "dtrain: standard output cannot be written: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, said)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--nproc-per-node 2", ["--nproc-per-node"]),
        ("--nproc_per_node=2 --hosts=a --hosts b", ["--nproc_per_node", "--hosts"]),
        ("-- --nproc-per-node 2", []),
        ("--verbose --workdir w --max_restarts=3", []),
    ],
)
def test_options_behind_the_script_are_warned_of(folder: Path, argv: str, named: list[str]) -> None:
    """Those that the script may have itself are not: its folder's files mention them."""
    (folder / "arguments.py").write_text("options = ['--workdir', '--max-restarts']")
    notices = read_request(typed("script.py", *argv.split())).notices
    warned = [
        re.findall(r"(\S+) comes after script.py, .* dtrain run (\S+) \.\.\. script.py", each) for each in notices
    ]
    assert warned == [[(name, name)] for name in named]


def test_what_may_be_a_mistake_is_said_and_the_run_goes_on(script: Path) -> None:
    variables = {"PWD": "/no/such/folder", "TMPDIR": "/no/such/folder", "DTRAIN_NPROC_PER_NOD": "2"}
    result = run_dtrain("run", "--only-rank", "3", script, "--hosts", "a", cwd=script.parent, env=variables)
    assert result.returncode == 0, result
    for said in (
        "DTRAIN_NPROC_PER_NOD is not known and does nothing; did you mean DTRAIN_NPROC_PER_NODE?",
        "--only-rank 3: there were only ranks 0 to 0",
        f"--hosts comes after {script}",
    ):
        assert said in result.stderr
