"""What stands before an agent: a shell line (--setup) and a program around it (--agent-prefix), on all transports."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from testbed.ports import free_port
from testbed.processes import run_dtrain, started, started_dtrain, wait_until
from testbed.require import require
from testbed.slurm import SlurmCluster
from testbed.sshd import SshHosts

from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import CommandKind, JobSpec, WorkerCommand
from launcher.transport.not_started import why_not_started
from launcher.transport.setup import first_bytes, host_command
from launcher.transport.stream import shell_line

MODULES = Path("/usr/share/modules/init/bash")
CONTAINER = "bwrap --dev-bind / / --unshare-pid --proc /proc"
SHOW = "import os, sys\nprint(repr(os.environ.get('SHOWN')), os.environ.get('DTRAIN_TEST_HOST'), os.getcwd())\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SHOW)
    return path


@pytest.fixture(params=["here", "paramiko", "openssh"])
def where(request: pytest.FixtureRequest) -> list[str]:
    """Options for two workers."""
    if request.param == "here":
        return ["--nproc-per-node", "2"]
    hosts: SshHosts = request.getfixturevalue("ssh_hosts")
    client = ["--ssh-command", "ssh"] if request.param == "openssh" else []
    return [*client, "--hosts", "node1,node2", "--ssh-config", str(hosts.ssh_config)]


def test_an_agent_that_lacks_processes_or_files_names_the_limits() -> None:
    for words in ("OSError: [Errno 11] Resource temporarily unavailable", "OSError: [Errno 24] Too many open files"):
        reason = why_not_started("python3", 1, f"Traceback (most recent call last):\n{words}\n", b"")
        limits = "this user's limits there are too low, see ulimit -n and ulimit -u"
        assert reason == f"the agent did not start (status 1): {words}; {limits}"


def test_workers_get_the_environment_that_the_line_leaves(where: list[str], script: Path) -> None:
    (script.parent / "env.sh").write_text('echo "it is read"\ndeclare -x SHOWN="$# a\\\\b"\ncat\nset -- x\ncd /tmp\n')
    line = "source ./env.sh\n  export SHOWN=\"$SHOWN \\t %s 'é'\""
    result = run_dtrain("run", *where, "--setup", line, script, cwd=script.parent)
    assert result.returncode == 0, result.stderr
    said = [part.partition("] ")[2] for part in result.stdout.splitlines()]
    assert len(said) == 2
    for each in said:
        assert each.startswith(repr("0 a\\b \\t %s 'é'"))
        assert each.endswith(str(script.parent))
    assert "it is read" not in result.stdout + result.stderr


def test_its_failure_is_an_error_with_its_output_and_the_host(where: list[str], script: Path) -> None:
    result = run_dtrain(
        "run", *where, "--setup", "echo reads; echo 'no licence' >&2; (exit 3)", script, cwd=script.parent
    )
    assert result.returncode == 1
    assert ": --setup ended there with status 3: reads; no licence" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("set -e; echo one; false; echo two", ": --setup ended there with status 1: one\n"),
        ("module load cuda", "write --setup 'source /etc/profile; module load ...'"),
        (f"source {MODULES}; module load missing", "status 1: ERROR: Unable to locate a modulefile for 'missing'"),
    ],
)
def test_where_the_line_ends_is_the_failure(script: Path, line: str, said: str) -> None:
    require("source" not in line or MODULES.exists(), "environment-modules", "apt-get install environment-modules")
    result = run_dtrain("run", "--setup", line, script, cwd=script.parent)
    assert result.returncode == 1
    assert said in result.stderr


def test_python_is_found_after_it_by_a_module(where: list[str], script: Path, tmp_path: Path) -> None:
    require(MODULES.exists(), "environment-modules", "apt-get install environment-modules")
    (tmp_path / "modules").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "the-python").symlink_to(sys.executable)
    (tmp_path / "modules" / "site").write_text(
        f"#%Module\nsetenv SHOWN loaded\nprepend-path PATH {tmp_path}/bin\nprepend-path PYTHONPATH {os.getcwd()}\n"
        f"prepend-path PYTHONPATH {':'.join(path for path in sys.path if path.endswith('-packages'))}\n"
    )
    line = f"source {MODULES}; module use {tmp_path}/modules; module load site"
    options = ["--setup", line, "--python", "the-python"]
    result = run_dtrain("run", *where, *options, script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("'loaded'") == 2


def test_its_text_is_in_no_command_line(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, glob\n"
        "seen = b''\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: seen += open(path, 'rb').read()\n"
        "    except OSError: continue\n"
        "stays = os.environ['DTRAIN_HOST'] != 'node1' or 'DTRAIN_SETUP' not in os.environ\n"
        "print(os.environ['KEY'], stays, 'leaked' if b'canary' + b'-8' in seen else 'hidden')"
    )
    hosts = ["--hosts", "localhost,node1", "--ssh-config", str(ssh_hosts.ssh_config)]
    result = run_dtrain("run", *hosts, script, env={"DTRAIN_SETUP": "export KEY=canary-8"}, cwd=tmp_path)
    assert sorted(line.partition("] ")[2] for line in result.stdout.splitlines()) == ["canary-8 True hidden"] * 2, (
        result
    )


def test_sh_runs_it_where_there_is_no_bash(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to(present_sh())
    (tmp_path / "env").symlink_to("/usr/bin/env")
    spec = JobSpec(
        WorkerCommand(CommandKind.SCRIPT, "t.py"), (Host("here", HostKind.LOCAL),), run_id="r", python="env",
        setup="SHOWN='a\\nb'; export SHOWN", workdir=tmp_path,
    )  # fmt: skip
    command = [word for word in host_command(spec) if word != "-m"]
    command[-1] = command[-1].removesuffix(" -m")
    done = subprocess.run(
        command, input=first_bytes(spec) + b"rest", env={"PATH": str(tmp_path)}, capture_output=True, check=True
    )
    assert b"SHOWN=a\\nb\n" in done.stdout, done
    assert "\n" not in shell_line(command)  # which csh would not take


def present_sh() -> str:
    found = shutil.which("dash") or shutil.which("sh")
    assert found is not None
    return found


def test_each_node_started_by_hand_runs_its_own(script: Path, tmp_path: Path) -> None:
    node = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--nproc-per-node", "1"]
    command = [sys.executable, "-m", "launcher", "run", *node]
    argv = [[*command, "--node-rank", k, "--setup", f"export SHOWN=node{k}", str(script)] for k in "01"]
    env = {"DTRAIN_TOKEN": "canary-0123456789-canary"}
    with started(*argv[0], cwd=tmp_path, env=env) as first, started(*argv[1], cwd=tmp_path, env=env) as second:
        stdout, stderr = first.communicate(timeout=60)
        assert second.wait(60) == 0
    assert stdout.count(b"'node0'") == stdout.count(b"'node1'") == 1, stderr


def test_nodes_of_a_slurm_job_run_it(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    log = tmp_path / "log"

    def ended(line: str, state: str) -> str:
        run = [sys.executable, "-m", "launcher", "run", "--nproc-per-node", "1", "--setup", line, "train.py"]
        job = slurm.submit(f"#!/bin/bash\nexec {shlex.join(run)}\n", f"--output={log}", "-N2", cwd=tmp_path)
        assert slurm.await_state(job, "COMPLETED", "FAILED")["JobState"] == state
        return log.read_text()

    assert ended("echo noise; export SHOWN=$SLURMD_NODENAME", "COMPLETED").count("] 'node") == 2
    assert "--setup ended there with status 5: no licence" in ended("echo no licence; (exit 5)", "FAILED")


# ---- a program around the agent ----


@pytest.mark.parametrize("container", [CONTAINER, "unshare --pid --fork --mount-proc", "env -u NOTHING"])
def test_all_of_a_host_runs_behind_the_prefix(where: list[str], tmp_path: Path, container: str) -> None:
    require(shutil.which(container.split()[0]), container.split()[0], "apt-get install bubblewrap util-linux")
    if os.geteuid() != 0:
        pytest.skip("an ordinary user may not make namespaces everywhere")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nprint('pid', os.getpid() < 100, flush=True)\nif os.environ['RANK'] == '0':\n"
        "    open('said', 'w').close()\n    sys.exit()\n"
        "while not os.path.exists('said'):\n    time.sleep(0.01)\nsys.exit(7)"
    )
    result = run_dtrain("run", *where, "--agent-prefix", container, "--setup", "true", script, cwd=tmp_path)
    assert result.returncode == 7
    assert result.stdout.count("pid True") == (0 if container.startswith("env") else 2), result.stderr
    assert "0 processes left" in result.stderr


def test_a_prefix_that_is_missing_is_named(where: list[str], script: Path) -> None:
    result = run_dtrain("run", *where, "--agent-prefix", "no-such-container run", script, cwd=script.parent)
    assert result.returncode != 0
    assert "no-such-container" in result.stderr
    assert "--agent-prefix" in result.stderr


def test_an_agent_that_is_killed_before_it_has_started_is_named(script: Path) -> None:
    result = run_dtrain("run", "--agent-prefix", "sh -c 'kill -KILL $$'", script, cwd=script.parent)
    assert result.returncode == 1
    assert result.stderr.endswith(": the agent was killed before it had started\n")


def test_an_agent_that_is_killed_in_its_namespace_leaves_nothing(tmp_path: Path) -> None:
    require(shutil.which("bwrap"), "bwrap", "apt-get install bubblewrap")
    if os.geteuid() != 0:
        pytest.skip("an ordinary user may not make namespaces everywhere")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"
        "print('here', 0, os.environ['RANK'], 2, 0, '', flush=True)\ntime.sleep(600)"
    )
    argv = ["run", "--nproc-per-node", "2", "--agent-prefix", CONTAINER, str(script)]
    with started_dtrain(*argv, cwd=tmp_path) as process:
        for _ in range(2):
            process.stdout.readline()
        below = psutil.Process(process.pid).children(recursive=True)
        agents = [one for one in below if one.cmdline()[:1] != ["bwrap"] and "launcher.agent" in one.cmdline()]
        max(agents, key=lambda one: (one.create_time(), one.pid)).kill()  # of guard and agent the second
        assert process.wait(60) == 1
        stderr = process.stderr.read().decode()
    assert "was lost" in stderr
    wait_until(lambda: not [one for one in below if one.is_running() and one.status() != "zombie"], "all have ended")
