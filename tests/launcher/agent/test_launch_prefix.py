"""Workers behind a launch prefix: one that becomes the worker, one that waits for it, and containers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from testbed.left import TEST_CHARS
from testbed.processes import MARK, run_dtrain, run_program, started_dtrain, wait_until
from testbed.require import require
from testbed.sshd import SshHosts
from testbed.typed import dtrain

from launcher.agent.workers.worker import Worker, _find_behind
from launcher.hosts.host import Host, HostKind
from launcher.job.orders import start_workers
from launcher.placement.job_spec import CommandKind, JobSpec, WorkerCommand
from launcher.placement.placement import HostOffer, place
from launcher.protocol.commands import StartWorker
from launcher.protocol.reports import StoreOpened

PREFIXES = {
    "becomes it": "env SHOWN={rank}",
    "waits for it": "sh -c '\"$@\"; exit $?' sh",
    "container": "bwrap --dev-bind / / --unshare-pid --proc /proc",
}
SCRIPT = """\
import os, signal, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[1]
def stop(*_):
    print("saved", flush=True)
    sys.exit(0)
if what == "stop":
    signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
open(f"up-{what}-{rank}", "w").close()
if rank == 1 and what != "stop":
    while not os.path.exists(f"up-{what}-0"):
        time.sleep(0.01)
    # A killed one is known behind its prefix only after the agent has looked for it, and rank 0 sleeps below by then.
    time.sleep(5 if what == "kill" else 0.5)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        sys.exit(7)
    raise ValueError("no")
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
while True:  # not one long sleep: a signal just before it is only handled after it
    time.sleep(0.1)
"""


@pytest.fixture(params=PREFIXES)
def prefix(request: pytest.FixtureRequest) -> str:
    if request.param == "container":
        need_container()
    return PREFIXES[request.param]


def need_container() -> None:
    require(shutil.which("bwrap"), "bwrap", "apt-get install bubblewrap")
    if os.geteuid() != 0:
        pytest.skip("an ordinary user may not make namespaces everywhere")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_braces_in_the_prefix_have_each_worker_s_values() -> None:
    hosts = (Host("a", HostKind.SSH), Host("b", HostKind.SSH))
    command = ("nsys", "-o", "out.{host}.{rank}", "{local_rank}{rank}", "${x} {y}")
    spec = JobSpec(
        WorkerCommand(CommandKind.PROGRAM, "prog"), hosts, run_id="r", python="p", launch_prefix=command, nproc=2
    )
    offers = [
        HostOffer(
            name=name, slots=2, gpus=(), gpus_verified=True, gpu_variable="CUDA_VISIBLE_DEVICES", cores=(), cpu_limit=2
        )
        for name in ("a", "b")
    ]
    store = StoreOpened(attempt=0, address="x", port=1)
    sent = [each.message for each in start_workers(spec, place(offers, nproc=2), store, {}, run_key="", wait_s=1.0)]
    last = sent[-1]
    assert isinstance(last, StartWorker)
    assert last.prefix == ["nsys", "-o", "out.b.3", "13", "${x} {y}"]
    assert last.argv == ["prog"]


def test_exit_codes_signals_and_exceptions_are_the_workers_own(prefix: str, script: Path) -> None:
    def end(what: str) -> tuple[int, str]:
        argv = ["run", "--nproc-per-node", "2", "--grace-s", "3", "--launch-prefix", prefix, str(script), what]
        result = run_dtrain(*argv, cwd=script.parent)
        assert result.stdout.count("] up\n") == 2, result
        assert "0 processes left" in result.stderr
        return result.returncode, result.stderr

    code, said = end("exit")
    assert code == 7
    assert "it called sys.exit at" in said
    assert "rank 0 is at" in said  # its stacks were asked for through the prefix
    code, said = end("kill")
    assert code == 137
    assert "was killed by SIGKILL" in said
    code, said = end("raise")
    assert code == 1
    assert "ValueError: no" in said


def test_a_signal_reaches_workers_and_their_output_is_kept(prefix: str, script: Path) -> None:
    argv = ["run", "--nproc-per-node", "2", "--launch-prefix", prefix, str(script), "stop"]
    with started_dtrain(*argv, cwd=script.parent) as process:
        for _ in range(2):
            assert b"up" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert stdout.count(b"saved") == 2, stderr
    assert b"0 processes left" in stderr


def test_an_agent_that_is_killed_leaves_no_worker_and_no_prefix(prefix: str, script: Path) -> None:
    argv = ["run", "--nproc-per-node", "2", "--launch-prefix", prefix, str(script), "stop"]
    with started_dtrain(*argv, cwd=script.parent) as process:
        for _ in range(2):
            assert b"up" in process.stdout.readline()
        below = psutil.Process(process.pid).children(recursive=True)
        agents = [one for one in below if "launcher.agent" in one.cmdline()]
        max(agents, key=lambda one: (one.create_time(), one.pid)).kill()  # of guard and agent the second
        assert process.wait(60) == 1
    wait_until(lambda: not [one for one in below if one.is_running() and one.status() != "zombie"], "all have ended")


def test_a_missing_program_is_named_before_any_worker_starts(ssh_hosts: SshHosts, script: Path) -> None:
    hosts = ["--hosts", "node1,node2", "--ssh-config", str(ssh_hosts.ssh_config)]
    result = run_dtrain("run", *hosts, "--launch-prefix", "no-such-program -x", script, cwd=script.parent)
    assert "the program no-such-program is not in PATH there; see --launch-prefix" in result.stderr
    assert result.stdout == ""


def test_programs_and_hosts_have_it_too(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    hosts = ["--hosts", "node1,node2", "--ssh-config", str(ssh_hosts.ssh_config)]
    options = ["--launch-prefix", "env SHOWN={host}.{rank}", "--no-python"]
    result = run_dtrain("run", *hosts, *options, "sh", "-c", "echo $SHOWN", cwd=tmp_path)
    assert sorted(result.stdout.splitlines()) == ["[node1:0] node1.0", "[node2:1] node2.1"], result.stderr


def test_a_worker_in_a_container_is_debugged_and_replaced(own_runs: Path) -> None:
    need_container()
    Path("script.py").write_text(
        "import os, pathlib, time\nimport launcher\n"
        "print('up', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "def count():\n    while not pathlib.Path('go').exists():\n        time.sleep(0.02)\n        launcher.step()\n"
        "count()\n"
    )
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--launch-prefix", PREFIXES["container"]]
    started = run_dtrain("run", "--detach", "--run-id", "r", *options, "script.py", outlived=True)
    assert started.returncode == 0, started
    wait_until(lambda: "in count" in dtrain("stacks", "r").stdout, "they count")
    said = run_dtrain("debug", "r", "--rank", "1", stdin="p 40 + 2, os.getpid()\nc\n").stdout
    assert "(42, 2)" in said
    wait_until(lambda: '"step": 0' not in dtrain("ps", "--json").stdout, "steps are counted")
    mark = os.environ[MARK][:TEST_CHARS]
    below = [one for one in psutil.process_iter() if marked_by(one, mark) and "bootstrap.py" in one.cmdline()[2]]
    assert len(below) == 2
    below[0].kill()
    log = Path("runs/r/attempt_1/0/stdout.log")
    wait_until(lambda: log.exists() and "up 1" in log.read_text(), "they are started again")
    Path("go").touch()
    assert dtrain("wait", "r").returncode == 0


def marked_by(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK, "").startswith(mark) and process.cmdline()[0] == sys.executable
    except psutil.Error:
        return False


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_a_reaped_process_does_no_harm(monkeypatch: pytest.MonkeyPatch, signum: signal.Signals) -> None:
    with subprocess.Popen(["sleep", "600"]) as prefix, subprocess.Popen(["true"]) as own:
        own.wait()
        worker = Worker.__new__(Worker)
        worker.status, worker.provoked, worker.pid = None, False, prefix.pid
        monkeypatch.setattr(Worker, "own_pid", property(lambda _: own.pid))
        worker.signal(signum, stop=False)
        if signum != signal.SIGKILL:
            assert prefix.poll() is None
            prefix.kill()
        assert prefix.wait(20) == -signal.SIGKILL


def test_the_process_behind_a_prefix_is_found_by_its_arguments(tmp_path: Path) -> None:
    own = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", "a"]
    script = tmp_path / "prefix"
    script.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    script.chmod(0o755)
    argv = [str(script), *own]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = _find_behind(process.pid, argv, own)
        assert found is not None
        assert found.parent == process.pid
        assert _find_behind(process.pid, ["other", *argv], [*own, "b"]) is None
        assert _find_behind(found.pid, ["env", *own], own) == found


def test_a_full_disk_at_the_start_of_a_worker_is_named(tmp_path: Path) -> None:
    """Of two pages the agent takes one, and the first of two workers the other."""
    (tmp_path / "script.py").touch()
    (tmp_path / "full").mkdir()
    full = 'mount -t tmpfs -o size=8k tmpfs "$TMPDIR" && exec "$@"'
    container = ["unshare", "--map-root-user", "--mount", "sh", "-c", full, "sh"]
    env = {"TMPDIR": str(tmp_path / "full")}
    if run_program(*container, "true", env=env).returncode not in (0, 127):
        pytest.skip("an ordinary user may not make namespaces everywhere")
    argv = [
        sys.executable,
        "-m",
        "launcher",
        "run",
        "--nproc-per-node",
        "2",
        "--launch-prefix",
        "nice -n 1",
        "script.py",
    ]
    result = run_program(*container, *argv, env=env, cwd=tmp_path)
    assert result.returncode == 127, result
    named = rf"could not be started: {tmp_path}/full/dtrain-[0-9a-f]+: No space left on device; see TMPDIR"
    assert re.search(named, result.stderr), result
