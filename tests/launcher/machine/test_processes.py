"""Finding and ending processes, with real ones. Each sweep runs in a process of its own, as the agent's does:
a subreaper whose children are all that it started."""

import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from testbed.present import present
from testbed.processes import Result, run_program, started, wait_until

from launcher.agent.cleanup.run_tag import RunTag
from launcher.machine import processes
from launcher.machine.processes import Process, Sweep, find, has_variable, kill_session, related, send

pytestmark = pytest.mark.ordinary_user

# What the sweeping process does: it starts a script that may leave anything behind, then ends all of that.
SWEEP = """
import os, subprocess, sys, time
from launcher.machine import processes

processes.adopt_orphans()
grace_s, kill_wait_s, script = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
env = {**os.environ, "SWEEP_MARK": "mine"}
child = subprocess.Popen([sys.executable, "-S", "-c", script], env=env, start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()  # everything is there
sweep = processes.Sweep(
    lambda: processes.related(
        ancestor=os.getpid(), ours=lambda process: processes.has_variable(process, b"SWEEP_MARK=mine")
    ),
    grace_s=grace_s, kill_wait_s=kill_wait_s,
)
began = time.monotonic()
while not sweep.step():
    time.sleep(sweep.pause_s)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
child.stdout.close()
child.returncode = 0
print(sweep.ended, len(sweep.left), time.monotonic() - began < grace_s)
"""

LEAVES = {
    "nothing": "print(flush=True)",
    "a child": "import time; print(flush=True); time.sleep(60)",
    "grandchildren": """
import os, time
for _ in range(3):
    if os.fork() == 0:
        break
else:
    print(flush=True)
time.sleep(60)
""",
    "a daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(flush=True)
        time.sleep(60)
os._exit(0)
""",
    "one that ignores TERM": """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
time.sleep(60)
""",
    "a stopped one": """
import os, signal
print(flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
""",
    "one whose main thread alone has ended": """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.CDLL(None).syscall(93 if os.uname().machine == "aarch64" else 60, 0)
""",
    "one without the mark": """
import os
print(flush=True)
if os.fork() == 0:
    os.execve("/bin/sleep", ["sleep", "60"], {})
os._exit(0)
""",
    "one that starts another when it has to end": """
import os, signal, sys, time
def again(*_):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    os._exit(0)
signal.signal(signal.SIGTERM, again)
print(flush=True)
time.sleep(60)
""",
    "one that is a new process each moment": """
import os, time
end = time.monotonic() + 20
if os.fork(): os._exit(0)
os.setsid()
print(flush=True)
while time.monotonic() < end:
    if os.fork(): os._exit(0)
""",
}


def _sweep(script: str, *, grace_s: float = 0.3, kill_wait_s: float = 10) -> Result:
    result = run_program(sys.executable, "-c", SWEEP, str(grace_s), str(kill_wait_s), script)
    assert (result.returncode, result.stderr) == (0, ""), result
    return result


@pytest.mark.parametrize("script", LEAVES.values(), ids=LEAVES.keys())
def test_a_sweep_ends_whatever_was_left(script: str) -> None:
    _, left, _ = _sweep(script).stdout.split()
    assert left == "0"  # and nothing_left_behind looks for itself


def test_a_sweep_counts_what_it_ended_and_does_not_linger() -> None:
    assert _sweep(LEAVES["nothing"], grace_s=30).stdout.endswith(" 0 True\n")
    assert _sweep(LEAVES["grandchildren"], grace_s=30).stdout == "4 0 True\n"
    assert _sweep(LEAVES["a stopped one"], grace_s=30).stdout == "1 0 True\n"
    without_main_thread = _sweep(LEAVES["one whose main thread alone has ended"], grace_s=30)
    assert (without_main_thread.stdout, without_main_thread.wall_s < 30) == ("1 0 True\n", True)
    assert _sweep(LEAVES["one that ignores TERM"], grace_s=0.2).stdout == "1 0 False\n"


def test_what_cannot_be_ended_is_left_and_named_in_bounded_time() -> None:
    immortal = Process(pid=os.getpid(), start=0, parent=1, group=os.getpgrp(), state="D", name="stuck")
    sweep = Sweep(lambda: [immortal], grace_s=0, kill_wait_s=0.2)
    began = time.monotonic()
    while not sweep.step():
        time.sleep(sweep.pause_s)
    assert time.monotonic() - began < 60
    assert (sweep.left, sweep.ended) == ([immortal], 0)
    assert immortal.describe() == f"pid {os.getpid()} (stuck, state D)"


def test_of_a_killed_session_nothing_is_left() -> None:
    """What it has started needs a moment to end, longer with much memory."""
    holds = "import os\nfor _ in range(8):\n    os.fork()\nx = bytearray(1 << 20)\nos.write(1, b'up\\n')\nos.read(0, 1)"
    with subprocess.Popen(
        [sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        for _ in range(1 << 8):
            assert present(child.stdout).readline() == b"up\n"
        kill_session(child)
        assert [each for each in processes.everything() if each.group == child.pid] == []
        kill_session(child)  # its pid may be another's by now


def test_a_sweep_in_a_hurry_kills_at_once() -> None:
    # In a process of its own: a sweep is done when its process has no children, and pytest may have some.
    program = """
import subprocess, sys
from launcher.machine.processes import Sweep, find
ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", ignoring], stdout=subprocess.PIPE)
child.stdout.readline()
sweep = Sweep(lambda: [p for p in [find(child.pid)] if p is not None], grace_s=60)
said = [sweep.step(), child.poll()]
sweep.hurry()
said += [sweep.step(), child.wait(60), sweep.step(), sweep.ended]
print(said)
"""
    result = run_program(sys.executable, "-c", program)
    assert result.stdout == f"[False, None, False, {-signal.SIGKILL}, True, 1]\n", result.stderr


# ---- who is who ----------------------------------------------------------------------------------------------


def test_a_process_is_known_by_pid_and_start_time(tmp_path: Path) -> None:
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    with started(odd, "60") as process:
        wait_until(lambda: (found := find(process.pid)) and found.name == odd.name, "the program runs")
        found = present(find(process.pid))
        assert (found.parent, found.group) == (os.getpid(), process.pid)
        assert found.start / os.sysconf("SC_CLK_TCK") == pytest.approx(time.monotonic(), abs=60)
        process.kill()
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "it is a zombie")
        assert find(process.pid) is None
    assert find(process.pid) is None


def test_a_reused_pid_is_never_signalled() -> None:
    with started("/bin/sleep", "60") as process:
        now = present(find(process.pid))
        earlier = Process(now.pid, now.start - 1, now.parent, now.group, now.state, now.name)
        assert not send(earlier, signal.SIGKILL)
        assert earlier != now
        assert find(process.pid) == now
        assert send(now, signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    assert not send(now, signal.SIGTERM)


def test_only_descendants_and_marked_processes_are_found(tmp_path: Path) -> None:
    def ours(process: Process) -> bool:
        return has_variable(process, b"A_MARK=1")

    with (
        started("/bin/sh", "-c", "sleep 60 & echo; wait", env={"A_MARK": "1"}) as marked,
        started("/bin/sleep", "60", env={"A_MARK": "11", "X": "A_MARK=1"}) as other,
        started("/bin/sh", "-c", "env -i sleep 60 & echo; wait", env={"A_MARK": None}) as parent,
    ):
        for process in (marked, parent):
            process.stdout.readline()
            wait_until(partial(children, process.pid), "the shell has a child")
        (child,) = children(parent.pid)
        (grandchild,) = children(marked.pid)
        found = {process.pid for process in related(ancestor=parent.pid, ours=ours)}
        assert found == {child, marked.pid, grandchild}
        assert {process.pid for process in related(ancestor=None, ours=ours)} == {marked.pid, grandchild}
        assert related(ancestor=parent.pid, ours=ours, spare=[child, marked.pid, grandchild]) == []
        assert {p.pid for p in related(ancestor=None, ours=ours, spare=[marked.pid])} == {grandchild}
        also = related(ancestor=None, ours=lambda _: False, also=[parent.pid, 1 << 22])
        assert {process.pid for process in also} == {parent.pid, child}
        everyone = {process.pid for process in related(ancestor=os.getpid(), ours=lambda _: False)}
        assert everyone >= {marked.pid, other.pid, child, grandchild}


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def test_a_run_tag_stays_whatever_its_process_does_to_itself() -> None:
    put_on = """
import os, signal, sys
from launcher.agent.cleanup.run_tag import RunTag
RunTag(sys.argv[1], None).put_on()
print(flush=True)
if os.fork() == 0:
    os.setsid()
    os.execve("/bin/sleep", ["sleep", "60"], {})
os.wait()
signal.pause()  # whichever of both is killed first
"""
    run_tag, other = RunTag("a" * 32, None), RunTag("b" * 32, None)
    with started(sys.executable, "-c", put_on, "a" * 32) as process:
        wait_until(lambda: "sleep" in {found.name for found in run_tag.members(ancestor=None)}, "the process is found")
        assert {found.pid for found in run_tag.members(ancestor=None)} == {process.pid, *children(process.pid)}
        assert other.members(ancestor=None) == []
        sweep = Sweep(lambda: run_tag.members(ancestor=None), grace_s=0, adopted=False)
        wait_until(sweep.step, "both are gone")
        assert (process.wait(60), sweep.ended, sweep.left) == (-signal.SIGKILL, 2, [])


@pytest.mark.parametrize("hard", [1000, resource.RLIM_INFINITY])
def test_a_limit_of_locks_that_a_user_has_set_hides_nothing(hard: int) -> None:
    run_tag = RunTag("c" * 32, None)
    if resource.getrlimit(10)[1] != resource.RLIM_INFINITY:
        pytest.skip("this machine has such a limit itself")
    with started("sleep", "60", env=run_tag.variables) as process:
        resource.prlimit(process.pid, 10, (1000, hard))
        # Popen returns as soon as the descriptors are closed; the kernel sets the new environment after that.
        wait_until(lambda: run_tag.members(ancestor=None), "it is found")
        assert [found.pid for found in run_tag.members(ancestor=None)] == [process.pid]


def test_a_raised_file_limit_changes_one_variable_of_children() -> None:
    compare = """
import os, resource, sys
from launcher.errors import HostError
from launcher.machine import processes
from launcher.transport.local import start_process

PRINT = "import os, resource; from launcher.machine.processes import take_file_limit; take_file_limit(); " \
    "print(sorted(os.environb.items()), resource.getrlimit(resource.RLIMIT_NOFILE))"
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
said = []
for _ in "12":
    with start_process([sys.executable, "-c", PRINT]) as process:
        said.append(process.communicate()[0])
    processes.raise_file_limit()
assert said[0] == said[1] and said[0], said
try:
    start_process(["/no/such/program"])
except HostError as error:
    print(error)
"""
    result = run_program(sys.executable, "-c", compare, env={"BASH_FUNC_x%%": "() { :; }", "PWD": "/elsewhere"})
    assert result.returncode == 0, result.stderr
    assert "cannot run /no/such/program here: No such file or directory" in result.stdout


def test_a_subreaper_adopts_what_loses_its_parent() -> None:
    adopt = """
import os, subprocess, sys
from launcher.machine import processes
processes.adopt_orphans()
out = subprocess.run(["sh", "-c", "(exec sleep 60) >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True).stdout
orphan = processes.find(int(out))
assert not processes.childless()
print(orphan.parent == os.getpid(), processes.send(orphan, 9))
os.waitpid(orphan.pid, 0)
assert processes.childless()
"""
    assert run_program(sys.executable, "-c", adopt).stdout == "True True\n"


def test_a_process_dies_with_its_parent() -> None:
    die = """
import os, sys, time
from launcher.machine import processes
read, write = os.pipe()
parent = os.getpid()
if os.fork() == 0:
    processes.die_with_parent(parent if sys.argv[1] == "real" else 1 << 22)
    os.write(write, b"lives")
    time.sleep(60)
    os._exit(0)
os.close(write)
print(os.read(read, 9).decode(), flush=True)
"""
    for parent, said in (("real", "lives\n"), ("gone", "\n")):
        assert run_program(sys.executable, "-c", die, parent).stdout == said  # nothing_left_behind sees that it ended


def test_an_unknown_kernel_option_is_an_error_with_its_reason() -> None:
    with pytest.raises(OSError, match="prctl"):
        processes._prctl(-1, 0)


def test_a_kill_never_reaches_our_own_group() -> None:
    kill = """
import os, subprocess
from launcher.machine import processes
child = subprocess.Popen(["sleep", "60"])
processes.kill_group(processes.find(child.pid))
assert child.poll() is None
child.kill()
child.wait()
print("here")
"""
    result = run_program(sys.executable, "-c", kill)
    assert (result.returncode, result.stdout) == (0, "here\n")


def test_a_whole_group_is_killed_at_once() -> None:
    with started("/bin/sh", "-c", "sleep 60 & sleep 60 & echo; wait") as process:
        process.stdout.readline()
        leader = find(process.pid)
        assert leader is not None
        processes.kill_group(leader)
        assert process.wait(60) == -signal.SIGKILL
        processes.kill_group(leader)  # gone: nothing happens
    wait_until(lambda: all(p.group != leader.pid for p in processes.everything()), "its children are gone")
