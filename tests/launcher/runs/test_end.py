"""How a run ends: exit codes, signals, what is killed, and that nothing of it is left on any host."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from testbed.present import present
from testbed.processes import MARK, marked, run_dtrain, started_dtrain, wait_until, wait_up
from testbed.sshd import SshHosts
from testbed.terminal import dtrain_on_terminal

from launcher.machine.processes import find

# A worker with a child, a child in a session of its own without our environment, and a daemon that ignores TERM.
FAMILY = """\
import os, signal, subprocess, sys, time
def ignore():
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
if "stubborn" in sys.argv:
    ignore()
mark = {k: v for k, v in os.environ.items() if k == "DTRAIN_TEST_MARK"}
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True, env=mark)
if os.fork() == 0:
    os.setsid()
    ignore()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("up", flush=True)
for word in sys.argv:
    if word.startswith("exit="):
        sys.exit(int(word[5:]))
time.sleep(600)
"""


@pytest.fixture
def family(tmp_path: Path) -> Path:
    path = tmp_path / "family.py"
    path.write_text(FAMILY)
    return path


def test_normal_end_leaves_nothing(where: list[str], family: Path, tmp_path: Path) -> None:
    result = run_dtrain("run", "-v", "--grace-s", "0.5", *where, family, "exit=0", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "outlived the workers and were ended" in result.stderr


def test_failing_worker_stops_the_others_and_its_code_is_ours(where: list[str], family: Path, tmp_path: Path) -> None:
    script = tmp_path / "one_fails.py"
    script.write_text("import os, sys\nif os.environ['RANK'] == '1': sys.argv.append('exit=7')\n" + FAMILY)
    result = run_dtrain("run", "--grace-s", "0.5", *where, script, cwd=tmp_path)
    assert result.returncode == 7, result.stderr
    assert "rank 1 on " in result.stderr
    assert "exited with code 7" in result.stderr
    assert "1 worker stopped by dtrain" in result.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_everything(where: list[str], family: Path, tmp_path: Path, signum: signal.Signals) -> None:
    with started_dtrain("run", "--grace-s", "0.2", *where, family, cwd=tmp_path) as process:
        wait_up(process)
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 128 + signum, stderr


def test_stubborn_workers_are_killed_after_the_grace_period(where: list[str], family: Path, tmp_path: Path) -> None:
    with started_dtrain("run", "--grace-s", "1", *where, family, "stubborn", cwd=tmp_path) as process:
        wait_up(process)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert time.monotonic() - began > 0.9


def test_second_interrupt_kills_at_once(where: list[str], family: Path, tmp_path: Path) -> None:
    tells = "import signal\nfor s in (2, 15): signal.signal(s, lambda *_: print('told', flush=True))\n"
    family.write_text(tells + FAMILY)
    with started_dtrain("run", "--grace-s", "600", *where, family, cwd=tmp_path) as process:
        wait_up(process)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().endswith(b"told\n")  # two at once could count as one
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT


def test_killed_dtrain_leaves_nothing(where: list[str], family: Path, tmp_path: Path) -> None:
    """The conftest's check finds what would be left; here only dtrain itself is killed."""
    with started_dtrain("run", "--grace-s", "0.5", *where, family, "stubborn", cwd=tmp_path) as process:
        wait_up(process)
        process.kill()
        process.wait()


@pytest.mark.parametrize("victim", ["agent", "guard", "agent and guard"])
def test_killed_agent_is_reported_and_leaves_nothing(
    where: list[str], family: Path, tmp_path: Path, victim: str
) -> None:
    argv = ["run", "--grace-s", "0.5", *where, str(family)]
    with started_dtrain(*argv, cwd=tmp_path) as process:
        wait_up(process)
        agent = agents()[0]
        guard = agent.parent()
        assert guard is not None
        if "guard" in victim:
            guard.suspend()  # so that it cannot act before both are dead
        for chosen in [agent] * ("agent" in victim) + [guard] * ("guard" in victim):
            chosen.kill()
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1, stderr
        assert b"was lost" in stderr
        assert b"0 processes left on " in stderr


def test_the_next_run_ends_what_a_killed_one_left_and_no_other(family: Path, tmp_path: Path) -> None:
    temp, gate, other = tmp_path / "temp", tmp_path / "gate", tmp_path / "other.py"
    temp.mkdir()
    env = {"TMPDIR": str(temp)}
    other.write_text(
        "import os, sys, time\nprint('up', flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"
    )
    (tmp_path / "empty.py").write_text("")
    with (
        started_dtrain("run", family, cwd=tmp_path, env=env) as process,
        started_dtrain("run", other, gate, cwd=tmp_path, env=env) as living,
    ):
        wait_up(process, 1)
        wait_up(living, 1)
        (agent,) = agents()
        guard = agent.parent()
        assert guard is not None
        strays = agent.children(recursive=True)
        (folder,) = [
            path for path in temp.glob("dtrain-*") if f'"agent": [{agent.pid}, ' in (path / "agent.json").read_text()
        ]
        for victim in (guard, agent):
            victim.suspend()  # so that none can act before all are dead
        process.kill()
        for victim in (guard, agent):
            victim.kill()
        process.wait()
        assert any(find(stray.pid) for stray in strays)
        result = run_dtrain("run", "empty.py", cwd=tmp_path, env=env)
        assert result.returncode == 0, result.stderr
        assert "removed what " in result.stderr
        assert " killed had left on " in result.stderr
        assert not folder.exists()
        gate.touch()
        assert living.wait(60) == 0
        assert not any(find(stray.pid) for stray in strays)


def test_killed_session_of_sshd_is_reported_and_leaves_nothing(
    ssh_hosts: SshHosts, family: Path, tmp_path: Path
) -> None:
    argv = ["run", "--grace-s", "0.5", "--hosts", "node1,node2", "--ssh-config", str(ssh_hosts.ssh_config), str(family)]
    with started_dtrain(*argv, cwd=tmp_path) as process:
        wait_up(process)
        guard = present(agents()[0].parent())
        session = present(guard.parent())
        assert "sshd" in session.name()
        session.kill()
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1, stderr
        assert b"was lost" in stderr
        assert b"0 processes left on 2 hosts" in stderr


def agents() -> list[psutil.Process]:
    """The agents of the run: parents of its workers."""
    found = []
    for worker in marked({os.environ[MARK]}):
        with contextlib.suppress(psutil.Error):
            parent = worker.parent()
            if (
                "family.py" in " ".join(worker.cmdline())
                and parent is not None
                and "launcher.agent" in parent.cmdline()
            ):
                found.append(parent)
    return sorted(set(found), key=lambda agent: agent.pid)


def test_user_signals_reach_every_worker_and_the_run_goes_on(where: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, time\nseen = []\n"
        "for s in (signal.SIGUSR1, signal.SIGUSR2): signal.signal(s, lambda n, f: seen.append(n))\n"
        "print('up', flush=True)\nend = time.monotonic() + 60\n"
        "while len(seen) < 2 and time.monotonic() < end: time.sleep(0.01)\nprint(sorted(seen))"
    )
    with started_dtrain("run", *where, script, cwd=tmp_path) as process:
        wait_up(process)
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGUSR2)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
        assert stdout.count(b"[10, 12]") == 2


def test_hangup_is_ignored_under_nohup(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(1)\nprint('done')")
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with started_dtrain("run", script, cwd=tmp_path) as process:
            wait_up(process, 1)
            process.send_signal(signal.SIGHUP)
            stdout, _ = process.communicate(timeout=60)
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert process.returncode == 0
    assert b"done" in stdout


def test_graceful_worker_may_finish_its_checkpoint(tmp_path: Path) -> None:
    """TERM goes to the worker alone: a child that it needs for the checkpoint is not signalled before it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, subprocess, sys, time\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "def save(*_):\n"
        "    time.sleep(0.3)\n    print('helper is', helper.poll(), flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    with started_dtrain("run", script, cwd=tmp_path) as process:
        wait_up(process, 1)
        process.send_signal(signal.SIGTERM)
        stdout, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert b"helper is None" in stdout


def test_interrupt_while_connecting_ends_at_once(tmp_path: Path) -> None:
    # 198.51.100.0/24 is for documentation; here a listening socket that never speaks stands in for a slow host.
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = tmp_path / "ssh_config"
        config.write_text(f"Host slow\n  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\n")
        (tmp_path / "script.py").write_text("")
        argv = ["run", "--ssh-config", str(config), "--hosts", "slow", "script.py"]
        with started_dtrain(*argv, cwd=tmp_path) as process:
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                _, stderr = process.communicate(timeout=60)
            assert process.returncode == 130
            assert b"there were only ranks" not in stderr


def test_interrupt_during_its_imports_ends_it_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)")
    with started_dtrain("run", "script.py", cwd=tmp_path) as process:
        wait_up(process, 1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_agents_start_ends_the_run_with_a_report(tmp_path: Path, signum: signal.Signals) -> None:
    (tmp_path / "queue.py").write_text(  # imported after agents were started, before the loop
        "import os, time\nfrom _queue import Empty, SimpleQueue\nprint('up', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.02)"
    )
    (tmp_path / "script.py").write_text("")
    with started_dtrain("run", "script.py", cwd=tmp_path) as process:
        wait_up(process, 1)
        process.send_signal(signum)
        (tmp_path / "go").touch()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert f"dtrain: stopped by {signum.name} after ".encode() in stderr


def test_the_first_failure_is_the_cause_not_the_first_end(tmp_path: Path) -> None:
    """Rank 0 raises first but takes a second to end; rank 1 fails after it and is gone at once."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os, signal, sys, time\nfrom pathlib import Path\n"
        "if os.environ['RANK'] == '0':\n"
        "    atexit.register(time.sleep, 1)\n    atexit.register(Path('raised').touch)\n"
        "    raise ValueError('the cause')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while not Path('raised').exists(): time.sleep(0.01)\n"
        "os._exit(9)"
    )
    result = run_dtrain("run", "--nproc-per-node", "2", script, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert "ValueError: the cause" in result.stderr
    assert "dtrain: rank 0 on " in result.stderr
    assert "1 other exited with code 9" in result.stderr


def test_if_all_abort_the_one_with_its_own_fault_is_named(tmp_path: Path) -> None:
    """All end by SIGABRT, as with NCCL's watchdog, and the one with the fault last: what they wrote decides."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "peer = 'Last error:\\nsocketProgress: Connection closed by remote peer n2<4711>'\n"
        "own = 'CUDA error: uncorrectable ECC error encountered'\n"
        "error = own if rank == 1 else peer\n"
        "open(f'there-{rank}', 'w').close()\n"
        "while not all(os.path.exists(f'there-{other}') for other in range(3)): time.sleep(0.01)\n"
        "time.sleep(0.3 * (rank == 1))\n"
        "print(f'[rank{rank}] watchdog thread terminated with exception: {error}', file=sys.stderr, flush=True)\n"
        "os.abort()\n"
    )
    result = run_dtrain("run", "--nproc-per-node", "3", script, cwd=tmp_path)
    assert result.returncode == 134
    first = next(line for line in result.stderr.splitlines() if line.startswith("dtrain: rank"))
    assert "rank 1 on " in first
    assert "SIGABRT (it aborted itself: CUDA error: uncorrectable ECC error encountered)" in first
    assert "2 others were killed by SIGABRT: socketProgress: Connection closed by remote peer" in result.stderr


def test_report_names_cause_place_and_file(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import json\ndef load(path):\n    return json.loads(path)\nload('nothing')")
    result = run_dtrain("run", "--run-id", "r1", script, cwd=tmp_path)
    report = [line for line in result.stderr.splitlines() if re.match("dtrain: (?!waiting )", line)]
    assert result.returncode == 1
    assert "(pid " in report[0]
    assert "raised an exception" in report[0]
    assert "JSONDecodeError: Expecting value" in report[1]
    assert f"{script}:3 in load, inside raw_decode" in report[2]
    assert "0 processes left on 1 host" in report[-3]
    assert "its whole output: runs/r1/attempt_0/0/stdout.log, stderr.log" in report[-2]
    assert "see it: less runs/r1/attempt_0/0/stderr.log" in report[-1]
    assert (tmp_path / "runs/r1/attempt_0/0/stderr.log").read_text().startswith("Traceback")


def test_interrupt_typed_at_a_terminal_reaches_the_workers_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, time\nseen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('up', flush=True)\n"
        "while not seen: time.sleep(0.01)\ntime.sleep(0.3)\nprint('interrupts:', len(seen), flush=True)"
    )
    with dtrain_on_terminal("run", script, cwd=tmp_path) as terminal:
        terminal.read_until("up")
        terminal.type("\x03")
        assert terminal.wait() == 130
    assert "interrupts: 1" in terminal.shown


def test_stopped_and_continued_dtrain_goes_on(tmp_path: Path) -> None:
    """By SIGSTOP, which no one here sees, for longer than a host may be silent."""
    (tmp_path / "script.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(5)\nprint('done')")
    with started_dtrain("run", "--heartbeat-timeout-s", "2", "script.py", cwd=tmp_path) as process:
        wait_up(process, 1)
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        process.send_signal(signal.SIGCONT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert b"done" in stdout


def test_a_stopped_worker_obeys_as_any_other(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nprint('up', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)")
    with started_dtrain("run", "--grace-s", "600", script, cwd=tmp_path) as process:
        wait_up(process, 1)
        wait_until(lambda: [p for p in marked({os.environ[MARK]}, RANK="0") if p.status() == "stopped"], "it stops")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 143


def test_an_excepthook_that_exits_decides_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.excepthook = lambda *_: sys.exit(17)\nraise ValueError('told elsewhere')")
    result = run_dtrain("run", script, cwd=tmp_path)
    assert result.returncode == 17, result.stderr
    assert "ValueError: told elsewhere" in result.stderr


def test_quiet_shows_the_report_of_a_failure_and_nothing_else(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nsys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else int(sys.argv[1]))"
    )
    for exit_code in (0, 4):
        options = ["--max-restarts", "1", "--nproc-per-node", "1", str(script), str(exit_code)]
        loud = run_dtrain("run", *options, cwd=tmp_path)
        assert (loud.returncode, "attempt 1 begins" in loud.stderr) == (exit_code, True), loud
        quiet = run_dtrain("run", "-q", *options, cwd=tmp_path)
        assert quiet.returncode == exit_code
        assert "attempt 1 begins" not in quiet.stderr, quiet.stderr
        assert ("exited with code 4" in quiet.stderr) if exit_code else quiet.stderr == "", quiet.stderr
