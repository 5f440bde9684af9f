"""The agent on its own: attempts one after another, the lease, suspension, and that nothing is left after a kill.

A real agent is driven over its pipes. Every process of a test's workers holds a lock: only when all are gone, whatever
became of their environment, session or parent, can it be had.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from testbed.agent import AgentProcess
from testbed.present import present
from testbed.processes import wait_until

from launcher.agent.cleanup.run_tag import IDENTITY
from launcher.machine import processes
from launcher.protocol.commands import (
    Collect,
    EndAttempt,
    NextGeneration,
    RestartWorker,
    SharePrefixes,
    SignalWorkers,
    StartWorker,
    Stop,
    Suspend,
)
from launcher.protocol.reports import (
    Bye,
    Collected,
    Evidence,
    Exited,
    Failing,
    Output,
    Started,
    StoreFailed,
    StoreOpened,
    Swept,
)
from launcher.protocol.two_way import Heartbeat

# argv[1] names the lock's file, the rest are members of the family; "up" is written when all of them are there.
FAMILY = """\
import fcntl, os, signal, subprocess, sys, time
lock = os.open(sys.argv[1], os.O_RDONLY)
os.set_inheritable(lock, True)
fcntl.flock(lock, fcntl.LOCK_SH)
members = sys.argv[2:]
ready, done = os.pipe()

def ignore():
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)

def child(name):
    def begin(function):
        if name in members and os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            function()
            os.write(done, b".")
            time.sleep(600)
            os._exit(0)
    return begin

@child("child")
def _(): pass

@child("own session")
def _(): os.setsid()

@child("ignores TERM")
def _(): ignore()

@child("daemon")
def _():
    os.setsid()
    if os.fork(): os._exit(0)

@child("cleared daemon")
def _():
    os.setsid()
    if os.fork(): os._exit(0)
    os.write(done, b".")
    os.execve("/bin/sleep", ["sleep", "600"], {})

@child("respawner")
def _():
    os.setsid()
    def again(*_):
        if os.fork() == 0:
            os.setsid()
            ignore()
            time.sleep(600)
        os._exit(0)
    signal.signal(signal.SIGTERM, again)

@child("loaders")
def _():
    import multiprocessing
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=time.sleep, args=(600,)) for _ in range(2)]
    for worker in workers: worker.start()

if "stubborn" in members:
    ignore()
for _ in range(len(set(members) - {"stubborn", "exit"})):
    os.read(ready, 1)
print("up", flush=True)
if "exit" in members:
    os._exit(0)
time.sleep(600)
"""
CHILDREN = ["child", "own session", "ignores TERM", "daemon", "cleared daemon", "respawner", "loaders"]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path) as process:
        yield process


class Family:
    """Workers with children of all kinds, and whether one of them is still there."""

    def __init__(self, folder: Path) -> None:
        self.lock = folder / "lock"
        self.lock.touch()

    def start(self, agent: AgentProcess, *members: str, rank: int = 0, attempt: int = 0) -> int:
        pid = agent.start(FAMILY, str(self.lock), *members, rank=rank, attempt=attempt)
        agent.expect_output(b"up", with_beats=True)
        return pid

    def is_gone(self) -> bool:
        with self.lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family(tmp_path)


def temp_folder_of(agent: AgentProcess) -> Path:
    return agent.temp / f"dtrain-{run_tag_of(agent)[:16]}"


def run_tag_of(agent: AgentProcess) -> str:
    return agent.hello.agent_identity.partition('"run_tag": "')[2].partition('"')[0]


def cgroup_of(agent: AgentProcess) -> Path | None:
    path = agent.hello.agent_identity.partition('"cgroup": "')[2].partition('"')[0]
    return Path(path) if path and Path(path).exists() else None


def nothing_is_left(agent: AgentProcess, family: Family) -> None:
    """Check it for an agent that has ended."""
    wait_until(family.is_gone, "all that the workers started is gone")
    wait_until(lambda: not temp_folder_of(agent).exists(), "the folder is removed")
    wait_until(lambda: cgroup_of(agent) is None, "the control group is removed")


# ---- attempts ------------------------------------------------------------------------------------------------


def test_attempts_follow_each_other_and_leave_nothing(agent: AgentProcess, family: Family) -> None:
    agent.prepare()
    port = 0
    for attempt in (0, 1, 4):
        port = agent.open_store(attempt, port).port  # the same port each time: the last attempt has released it
        family.start(agent, *CHILDREN, attempt=attempt)
        swept = agent.end_attempt(attempt)
        assert swept.attempt == attempt
        assert swept.swept >= len(CHILDREN)
        assert swept.left == []
        assert family.is_gone()
        assert [path.name for path in temp_folder_of(agent).iterdir()] == [IDENTITY]
    exited = [message for message in agent.seen if isinstance(message, Exited)]
    assert [(each.attempt, each.status, each.provoked) for each in exited] == [
        (attempt, -signal.SIGTERM, True) for attempt in (0, 1, 4)
    ]
    assert agent.stop() == Bye(swept=0, left=[], reason="")
    nothing_is_left(agent, family)


def test_end_of_an_attempt_without_workers_is_answered_at_once(agent: AgentProcess) -> None:
    agent.prepare(grace_s=60)
    assert agent.end_attempt(3) == Swept(attempt=3, swept=0, saved=0, left=[])
    store = agent.open_store(4)
    assert agent.end_attempt(4).attempt == 4
    assert agent.open_store(5, store.port).port == store.port
    agent.stop()
    assert not [message for message in agent.seen if isinstance(message, StoreFailed)]


def test_a_store_is_closed_with_its_attempt_and_not_reported(agent: AgentProcess) -> None:
    agent.prepare(grace_s=60)
    store = agent.open_store()
    with socket.create_connection((store.address, store.port)):
        wait_until(lambda: len(psutil.Process(agent.pid).children()) == 1, "the store's process runs")
        assert agent.end_attempt() == Swept(attempt=0, swept=0, saved=0, left=[])
    assert agent.open_store(1, store.port).port == store.port
    agent.stop()
    assert not [message for message in agent.seen if isinstance(message, StoreFailed)]


def test_workers_that_obey_are_gone_in_a_moment(agent: AgentProcess, family: Family) -> None:
    agent.prepare(grace_s=60)
    for rank in range(3):
        family.start(agent, rank=rank)
    began = time.monotonic()
    agent.end_attempt()
    assert time.monotonic() - began < 30  # far from the grace period; how near to nothing is for a benchmark
    assert family.is_gone()


def test_stubborn_workers_have_their_grace_period_and_no_more(agent: AgentProcess, family: Family) -> None:
    agent.prepare()
    family.start(agent, "stubborn", "ignores TERM")
    began = time.monotonic()
    assert agent.end_attempt().swept == 1
    assert time.monotonic() - began >= 0.5
    assert [m.status for m in agent.seen if isinstance(m, Exited)] == [-signal.SIGKILL]


def test_a_failed_worker_has_half_of_the_grace_period(agent: AgentProcess, tmp_path: Path) -> None:
    agent.prepare(grace_s=8)
    agent.start(
        "import os, signal, threading, time\n"
        f"def save(*_):\n    open({str(tmp_path / 'saved')!r}, 'w').close()\n    os._exit(4)\n"
        "signal.signal(signal.SIGTERM, save)\nimport atexit\natexit.register(time.sleep, 600)\nraise ValueError"
    )
    agent.expect(Failing)
    agent.tell(EndAttempt(attempt=0, signum=signal.SIGTERM))
    assert present(agent.expect(Exited).error)["type"] == "ValueError"
    assert (tmp_path / "saved").exists(), "it was not killed before"
    agent.expect(Swept)


def test_a_failed_worker_is_stopped_before_the_grace_period_ends(agent: AgentProcess) -> None:
    agent.prepare(grace_s=600)
    agent.start("import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\nraise ValueError")
    agent.expect(Failing)
    agent.tell(EndAttempt(attempt=0, signum=signal.SIGTERM))
    exited = agent.expect(Exited)
    assert (exited.status, exited.provoked, present(exited.error)["type"]) == (1, False, "ValueError")
    agent.expect(Swept)


def test_a_second_word_makes_the_end_quicker(agent: AgentProcess, family: Family) -> None:
    agent.prepare(grace_s=60)
    family.start(agent, "stubborn", "ignores TERM")
    agent.tell(EndAttempt(attempt=0, signum=signal.SIGTERM), EndAttempt(attempt=0, signum=signal.SIGKILL))
    assert agent.expect(Swept).attempt == 0
    agent.stop()
    assert len([message for message in agent.seen if isinstance(message, Swept)]) == 1


def test_stop_while_an_attempt_ends_is_answered_after_it(agent: AgentProcess, family: Family) -> None:
    agent.prepare(grace_s=60)
    family.start(agent, "stubborn")
    agent.tell(EndAttempt(attempt=0, signum=signal.SIGTERM))
    agent.stop(signal.SIGKILL)
    kinds = [type(message) for message in agent.seen if not isinstance(message, Heartbeat)]
    assert kinds[-3:] == [Exited, Swept, Bye]
    nothing_is_left(agent, family)


def test_output_of_what_a_worker_leaves_is_passed_on_to_the_end(agent: AgentProcess) -> None:
    agent.prepare(grace_s=5)
    agent.start(
        "import os, signal, sys, time\nread, write = os.pipe()\n"
        "if os.fork():\n    os.read(read, 1); sys.exit(3)\n"
        "def late(*_):\n    print('last words', flush=True); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, late)\nos.write(write, b'.')\ntime.sleep(600)"
    )
    assert agent.expect(Exited).status == 3
    agent.end_attempt()
    assert b"".join(message.data for message in agent.seen if isinstance(message, Output)) == b"last words\n"


def test_a_signal_reaches_the_workers_and_changes_nothing_else(agent: AgentProcess) -> None:
    agent.prepare()
    agent.start(
        "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))\n"
        "print('up', flush=True)\ntime.sleep(600)"
    )
    agent.expect_output(b"up")
    agent.tell(SignalWorkers(signum=signal.SIGUSR1))
    exited = agent.expect(Exited)
    assert (exited.status, exited.provoked) == (5, False)


def test_steps_saves_and_output_are_progress(agent: AgentProcess) -> None:
    agent.prepare()
    agent.start(
        "import mmap, os, struct, time\n"
        "with open(os.environ['DTRAIN_PROGRESS_FILE'], 'r+b') as file:\n    counts = mmap.mmap(file.fileno(), 16)\n"
        "struct.pack_into('<QQ', counts, 0, 7, 2)\nprint('up', flush=True)\n"
        "time.sleep(600)"
    )
    agent.expect_output(b"up")
    agent.expect(Heartbeat, lambda beat: beat.progress == 7 + 2 + len("up\n"))
    assert agent.end_attempt().saved == 2


def test_redrawn_progress_bars_are_no_sign_of_life(agent: AgentProcess) -> None:
    agent.prepare()
    agent.start(
        "import os, struct, time\n"
        "with open(os.environ['DTRAIN_PROGRESS_FILE'], 'r+b') as file:\n"
        "    file.write(struct.pack('<6Q', *[0] * 5, 7))\n"  # steps counted without ddp
        "while True:\n"
        "    for text in b'\\n', b'\\rbar', b'\\x1b[A':\n"
        "        os.write(2, text)\n        time.sleep(0.05)\n"
    )
    agent.expect_output(b"bar")
    agent.expect(Heartbeat, lambda beat: beat.silent_s > 2)


def test_a_progress_file_that_a_worker_spoils_harms_no_one(agent: AgentProcess) -> None:
    agent.prepare()
    agent.start("import os\nopen(os.environ['DTRAIN_PROGRESS_FILE'], 'w').close()\nprint('up', flush=True)")
    assert agent.expect(Exited).status == 0
    agent.expect(Heartbeat, lambda beat: beat.progress == len("up\n"))
    assert agent.end_attempt().saved == 0


# ---- whoever is killed ---------------------------------------------------------------------------------------


def _kill_worker(agent: AgentProcess) -> None:
    os.kill(next(message.pid for message in agent.seen if isinstance(message, Started)), signal.SIGKILL)
    exited = agent.expect(Exited)
    assert (exited.status, exited.provoked) == (-signal.SIGKILL, False)
    agent.stop()


def _kill_agent(agent: AgentProcess) -> None:
    os.kill(agent.pid, signal.SIGKILL)


def _kill_guard(agent: AgentProcess) -> None:
    agent.process.kill()
    assert "guard was killed" in agent.expect(Bye).reason


def _kill_store(agent: AgentProcess) -> None:
    store = next(message for message in agent.seen if isinstance(message, StoreOpened))
    before = {child.pid for child in psutil.Process(agent.pid).children()}
    with socket.create_connection((store.address, store.port)):
        wait_until(lambda: len(psutil.Process(agent.pid).children()) > len(before), "the store's process runs")
    (child,) = (child for child in psutil.Process(agent.pid).children() if child.pid not in before)
    child.kill()
    assert agent.expect(StoreFailed).attempt == 0
    agent.stop()


def _hang_up(agent: AgentProcess) -> None:
    agent.hang_up()


def _hang_up_frozen(agent: AgentProcess) -> None:
    """The agent was stopped and cannot see that its input has ended: its guard does."""
    os.kill(agent.pid, signal.SIGSTOP)
    agent.hang_up()


def _terminate_guard(agent: AgentProcess) -> None:
    agent.process.terminate()
    assert agent.expect(Bye).reason == "it received SIGTERM"


@pytest.mark.parametrize(
    "end",
    [_kill_worker, _kill_agent, _kill_guard, _kill_store, _hang_up, _hang_up_frozen, _terminate_guard],
    ids=lambda end: end.__name__.strip("_"),
)
def test_nothing_is_left_whichever_process_is_killed(
    agent: AgentProcess, family: Family, end: Callable[[AgentProcess], None]
) -> None:
    agent.prepare(grace_s=0.3)
    agent.open_store()
    family.start(agent, *CHILDREN)
    end(agent)
    assert agent.has_ended()
    nothing_is_left(agent, family)


def test_the_next_agent_cleans_up_after_agent_and_guard(agent: AgentProcess, family: Family, tmp_path: Path) -> None:
    agent.prepare()
    family.start(agent, *CHILDREN)
    family.start(agent, "cleared daemon", "exit", rank=1)  # its parent, and all ways up to it, are gone
    agent.expect(Exited)
    _kill_both(agent)
    assert not family.is_gone()
    with AgentProcess(tmp_path) as successor:
        assert successor.prepare(lost_agents=["junk", agent.hello.agent_identity, "{}"]).left == []
        nothing_is_left(agent, family)
        successor.start("print('works')")
        assert successor.expect(Exited).status == 0
        successor.stop()


@pytest.mark.parametrize("way", ["control group", "limit"])
def test_a_daemon_that_cleared_its_environment_is_found(
    agent: AgentProcess, family: Family, tmp_path: Path, way: str
) -> None:
    """In both ways, each on its own: the next agent does not know of the other."""
    agent.prepare()
    family.start(agent, "cleared daemon", "exit")
    agent.expect(Exited)
    _kill_both(agent)
    identity, group = agent.hello.agent_identity, cgroup_of(agent)
    if way == "control group":
        if group is None:
            pytest.skip("no control group can be made here")
        for pid in group.joinpath("cgroup.procs").read_text().split():
            import resource

            resource.prlimit(int(pid), processes._RLIMIT_LOCKS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif group is not None:
        identity = identity.replace(str(group), "")
    with AgentProcess(tmp_path, temp=tmp_path / "elsewhere") as successor:
        assert successor.prepare(lost_agents=[identity]).left == []
        assert family.is_gone()
        successor.stop()
    if way == "limit" and group is not None:
        group.rmdir()


@pytest.mark.parametrize("state", ["alive", "stopped", "without its guard"])
def test_an_agent_that_still_lives_is_ended_by_the_next_one(
    agent: AgentProcess, family: Family, tmp_path: Path, state: str
) -> None:
    agent.prepare(grace_s=60)
    family.start(agent, "stubborn", *CHILDREN)
    if state == "stopped":
        os.kill(agent.pid, signal.SIGSTOP)
    elif state == "without its guard":
        agent.process.kill()
        agent.process.wait()
    with AgentProcess(tmp_path) as successor:
        assert successor.prepare(lost_agents=[agent.hello.agent_identity]).left == []
        assert processes.find(agent.pid) is None
        nothing_is_left(agent, family)
        successor.stop()


def _kill_both(agent: AgentProcess) -> None:
    agent.process.send_signal(signal.SIGSTOP)  # the guard: it must not act before both are dead
    os.kill(agent.pid, signal.SIGKILL)
    agent.process.kill()
    agent.process.wait()


# ---- the lease -----------------------------------------------------------------------------------------------

LEASE_S = 2.0


def test_a_host_that_hears_nothing_ends_everything_by_itself(agent: AgentProcess, family: Family) -> None:
    agent.prepare(grace_s=60, lease_s=LEASE_S)
    family.start(agent, "stubborn", *CHILDREN)
    _beat_for(agent, 2 * LEASE_S)
    assert not family.is_gone()
    assert agent.expect(Bye).reason == f"it received nothing from dtrain for {LEASE_S:g} s"
    assert agent.has_ended()
    nothing_is_left(agent, family)


def test_the_lease_holds_while_an_attempt_ends(agent: AgentProcess, family: Family) -> None:
    agent.prepare(grace_s=60, lease_s=LEASE_S)
    family.start(agent, "stubborn", *CHILDREN)
    agent.beat()
    agent.tell(EndAttempt(attempt=0, signum=signal.SIGTERM))
    agent.hang_up()
    assert agent.has_ended()
    nothing_is_left(agent, family)


def test_a_heartbeat_that_was_long_under_way_prolongs_nothing(agent: AgentProcess, family: Family) -> None:
    agent.prepare(lease_s=LEASE_S)
    family.start(agent)
    sent = time.monotonic()

    def gives_up() -> bool:
        with contextlib.suppress(BrokenPipeError):
            agent.beat(ago_s=time.monotonic() - sent)
        return any(isinstance(message, Bye) for message in agent.listen(0.1))

    wait_until(gives_up, "all that it still hears was sent long ago")
    assert time.monotonic() - sent > LEASE_S


def test_a_stopped_agent_is_ended_by_its_guard_after_the_lease(agent: AgentProcess, family: Family) -> None:
    agent.prepare(grace_s=60, lease_s=LEASE_S)
    family.start(agent, "stubborn", *CHILDREN)
    agent.beat()
    os.kill(agent.pid, signal.SIGSTOP)
    wait_until(family.is_gone, "the guard has ended everything")
    assert agent.process.wait(60) == 128 + signal.SIGKILL
    assert agent.errors == "the guard ended this host's agent, which had not acted in time (stopped by a signal)\n"
    nothing_is_left(agent, family)


def test_the_lease_rests_while_the_run_is_suspended(agent: AgentProcess, family: Family) -> None:
    agent.prepare(lease_s=LEASE_S)
    worker = family.start(agent)
    agent.beat()
    agent.tell(Suspend(True))
    agent.listen(LEASE_S + 1.5)  # longer than the guard would wait, too
    assert psutil.Process(worker).status() == psutil.STATUS_STOPPED
    agent.tell(Suspend(False))
    assert agent.expect(Bye).reason.startswith("it received nothing")


def test_the_guard_sleeps_where_there_is_no_lease(agent: AgentProcess) -> None:
    agent.prepare()
    guard = psutil.Process(agent.process.pid)

    def sleeps() -> bool:
        before = guard.num_ctx_switches().voluntary
        agent.listen(1.5)
        return bool(guard.num_ctx_switches().voluntary == before)

    wait_until(sleeps, "it has learned that there is none, and sleeps")
    agent.stop()


def _beat_for(agent: AgentProcess, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        agent.beat()
        agent.listen(0.1)


# ---- suspension ----------------------------------------------------------------------------------------------


def test_everything_is_stopped_and_goes_on(agent: AgentProcess, family: Family) -> None:
    agent.prepare()
    agent.open_store()
    family.start(agent, *CHILDREN)
    ours = psutil.Process(agent.pid).children(recursive=True)
    assert len(ours) > len(CHILDREN)
    agent.tell(Suspend(True))
    wait_until(
        lambda: {each.status() for each in ours} - {psutil.STATUS_ZOMBIE} == {psutil.STATUS_STOPPED}, "all are stopped"
    )
    agent.tell(Suspend(False))
    wait_until(lambda: psutil.STATUS_STOPPED not in {each.status() for each in ours}, "all go on")
    agent.end_attempt()
    assert family.is_gone()


def test_what_is_found_later_is_stopped_as_well(agent: AgentProcess, family: Family) -> None:
    agent.prepare()
    family.start(agent)
    agent.tell(Suspend(True))
    environment = {**os.environ, "DTRAIN_AGENT": run_tag_of(agent)}
    with subprocess.Popen(["sleep", "600"], env=environment) as late:
        wait_until(lambda: psutil.Process(late.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
        agent.stop()
        assert late.wait(60) < 0


def test_workers_of_a_suspended_run_end_as_they_like(agent: AgentProcess) -> None:
    agent.prepare(grace_s=20)
    agent.start(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print('up', flush=True)\ntime.sleep(600)"
    )
    agent.expect_output(b"up")
    agent.tell(Suspend(True))
    agent.end_attempt()
    assert [message.status for message in agent.seen if isinstance(message, Exited)] == [9]
    agent.stop()


# ---- where they stand ----------------------------------------------------------------------------------------


def test_every_worker_is_described(agent: AgentProcess, family: Family) -> None:
    agent.prepare()
    pids = [family.start(agent, rank=rank) for rank in (0, 1)]
    agent.tell(Collect(number=7, limit_s=5.0))
    assert agent.expect(Collected).number == 7
    evidence = [message for message in agent.seen if isinstance(message, Evidence)]
    assert sorted((each.number, each.rank, each.pid) for each in evidence) == [(7, 0, pids[0]), (7, 1, pids[1])]
    agent.stop()


def test_every_collection_is_answered_and_none_delays_the_end(agent: AgentProcess) -> None:
    agent.prepare()
    agent.tell(Collect(number=1, limit_s=30.0))
    assert agent.expect(Collected).number == 1  # there is no worker
    agent.start("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\nwhile True: signal.pause()")
    agent.tell(Collect(number=2, limit_s=30.0), Collect(number=3, limit_s=30.0), Stop(signal.SIGKILL))
    assert [agent.expect(Collected).number for _ in range(2)] == [2, 3]
    agent.expect(Bye)


# ---- what cannot be ended ------------------------------------------------------------------------------------


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A group of the first kind, whose frozen members are in state D: not even KILL ends them."""
    folder = Path(f"/sys/fs/cgroup/freezer/dtrain-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "freezer.state").write_text("THAWED")
    except OSError:
        pytest.skip("no freezer to be had: it needs root and cgroup v1")
    yield folder
    (folder / "freezer.state").write_text("THAWED")
    wait_until(lambda: not (folder / "cgroup.procs").read_text(), "all have ended")
    folder.rmdir()


def test_what_cannot_be_killed_is_named_and_the_agent_goes_on(
    agent: AgentProcess, family: Family, freezer: Path
) -> None:
    agent.prepare()
    worker = family.start(agent)
    (freezer / "cgroup.procs").write_text(str(worker))
    (freezer / "freezer.state").write_text("FROZEN")
    wait_until(lambda: (freezer / "freezer.state").read_text() == "FROZEN\n", "it is frozen")
    agent.tell(EndAttempt(attempt=0, signum=signal.SIGKILL))
    (left,) = agent.expect(Swept).left
    assert left.startswith(f"pid {worker} (python")
    assert "state D" in left
    agent.start("print('works')", attempt=1, rank=1)
    assert agent.expect(Exited).rank == 1
    (freezer / "freezer.state").write_text("THAWED")
    agent.stop()


# ---- runs that were killed whole -----------------------------------------------------------------------------
# Runs of other tests that were killed meanwhile may be found, too.


def test_the_next_run_ends_what_a_killed_run_left(agent: AgentProcess, family: Family, tmp_path: Path) -> None:
    agent.prepare()
    family.start(agent, *CHILDREN)
    _kill_both(agent)
    assert not family.is_gone()
    assert temp_folder_of(agent).is_dir()
    with AgentProcess(tmp_path) as other:
        facts = other.prepare()
        assert family.is_gone()
        assert facts.killed_runs >= 1
        assert (facts.not_ended, facts.left) == ([], [])
        assert facts.ended >= len(CHILDREN) - 1
        nothing_is_left(agent, family)
        other.stop()


@pytest.mark.parametrize("other_folder", [False, True])
def test_a_killed_run_whose_own_run_lives_is_not_touched(
    agent: AgentProcess, family: Family, tmp_path: Path, other_folder: bool
) -> None:
    agent.prepare()
    family.start(agent, "own session")
    _kill_both(agent)
    env = {"DTRAIN_AGENT": run_tag_of(agent)}  # what it has started has this variable
    with contextlib.ExitStack() as nested:
        if other_folder:
            nested.enter_context(AgentProcess(tmp_path, temp=tmp_path / "elsewhere", env=env))
            env = {}
        other = nested.enter_context(AgentProcess(tmp_path, env=env))
        other.prepare()
        assert temp_folder_of(agent).is_dir()
        assert not family.is_gone()
        other.stop()
    with AgentProcess(tmp_path) as last:
        assert last.prepare().killed_runs >= 1
    nothing_is_left(agent, family)


# ---- the folder and the group --------------------------------------------------------------------------------


def test_a_control_group_holds_the_workers_and_is_removed(agent: AgentProcess) -> None:
    agent.prepare()
    group = cgroup_of(agent)
    if group is None:
        pytest.skip("no control group can be made here")
    worker = agent.start(
        "import os, sys, time\nos.mkdir(sys.argv[1])\nwith open(sys.argv[1] + '/cgroup.procs', 'w') as procs:\n"
        "    procs.write('0')\nprint('up', flush=True)\ntime.sleep(600)",
        str(group / "inner"),
    )
    agent.expect_output(b"up")
    assert (group / "inner" / "cgroup.procs").read_text().split() == [str(worker)]
    agent.stop()
    assert not group.exists()


def test_a_worker_s_own_folder_among_its_files_is_removed(agent: AgentProcess) -> None:
    agent.prepare()
    agent.start(
        "import os\npath = os.environ['DTRAIN_PROGRESS_FILE'] + '.d/deep'\nos.makedirs(path)\n"
        "open(path + '/file', 'w').close()"
    )
    agent.expect(Exited)
    assert temp_folder_of(agent).is_dir()
    agent.stop()
    assert not temp_folder_of(agent).exists()


def test_the_progress_file_has_its_format(agent: AgentProcess, tmp_path: Path) -> None:
    """72 bytes, so that a program in any language can map them."""
    agent.prepare()
    agent.start("import os\nprint(os.environ['DTRAIN_PROGRESS_FILE'], flush=True)\nimport time; time.sleep(600)")
    path = Path(agent.expect(Output).data.decode().strip())
    assert path.read_bytes() == bytes(72)
    assert path.parent == temp_folder_of(agent)
    agent.stop()


def test_values_begin_with_the_prefixes_that_were_sent_before(agent: AgentProcess) -> None:
    agent.prepare()
    agent.tell(SharePrefixes(attempt=0, prefixes={"LONG": "a long "}))
    agent.start(
        "import os; os.write(1, os.environb[b'LONG'] + os.environb[b'OTHER'])", env={"LONG": "st", "OTHER": "ory"}
    )
    assert agent.expect(Output).data == b"a long story"


def test_a_restarted_worker_keeps_only_its_restart_policy(
    agent: AgentProcess,
) -> None:
    agent.prepare(grace_s=0.2)
    others = "import time\nprint('other', flush=True)\ntime.sleep(600)"
    bystander = agent.start(others, rank=0)
    script = """
import os, signal, struct, subprocess, sys
life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
file = os.open(os.environ["DTRAIN_PROGRESS_FILE"], os.O_RDWR)
print(struct.unpack("<QQQ", os.read(file, 24)), flush=True)
if life == 0:
    os.pwrite(file, struct.pack("<QQQ", 3, 1, 2), 0)
    stubborn = "trap '' TERM; sleep 600"
    subprocess.Popen(["sh", "-c", stubborn], start_new_session=True, env={}, stdout=subprocess.DEVNULL)
    raise ValueError("once")
os.kill(os.getpid(), signal.SIGKILL)
"""
    agent.start(script, rank=1)
    agent.expect_output(b"(0, 0, 0)")
    first = agent.expect(Exited)
    assert (first.status, first.restart_policy, first.steps, first.saved) == (1, 2, 3, 1)
    assert first.error is not None
    agent.tell(RestartWorker(rank=1, attempt=0, restart=1))
    began = agent.expect(Started)
    assert len(psutil.Process(agent.pid).children()) <= 2, "the stubborn child was ended before"
    agent.expect_output(b"(0, 0, 2)")
    second = agent.expect(Exited)
    assert (second.pid, second.status, second.restart_policy, second.saved, second.error) == (began.pid, -9, 2, 0, None)
    agent.tell(RestartWorker(rank=0, attempt=0, restart=1), RestartWorker(rank=7, attempt=0, restart=1))  # of no sense
    agent.tell(RestartWorker(rank=1, attempt=3, restart=1))
    assert psutil.Process(bystander).is_running()
    swept = agent.end_attempt()
    assert (swept.swept, swept.saved) == (2, 1), "a shell, and its sleep"
    assert sum(isinstance(message, Started) for message in agent.seen) == 3
    agent.stop()


def test_a_restart_that_failed_can_be_ordered_again(agent: AgentProcess) -> None:
    agent.prepare(grace_s=0.2)
    script = """
import os, struct
file = os.open(os.environ["DTRAIN_PROGRESS_FILE"], os.O_RDWR)
os.pwrite(file, struct.pack("<QQQ", 3, 1, 2), 0)
raise SystemExit(3)
"""
    agent.start(script)
    assert agent.expect(Exited).status == 3
    away = agent.folder.rename(agent.folder.with_name("away"))
    agent.tell(RestartWorker(rank=0, attempt=0, restart=1))
    failed = agent.expect(Exited)
    assert (failed.pid, failed.status, failed.restart_policy) == (0, 127, 2)
    away.rename(agent.folder)
    agent.tell(RestartWorker(rank=0, attempt=0, restart=2))
    assert agent.expect(Started).pid > 0
    assert agent.expect(Exited).status == 3
    agent.stop()


def test_a_worker_that_was_never_started_can_be_ordered_again(agent: AgentProcess) -> None:
    agent.prepare(grace_s=0.2)
    script = agent.folder / "script.py"
    script.write_text("import os\nprint('{DTRAIN_GENERATION} {TORCHELASTIC_RESTART_COUNT}'.format(**os.environ))")
    away = agent.folder.rename(agent.folder.with_name("away"))
    agent.tell(
        StartWorker(
            rank=2, attempt=0, through="script", argv=[str(script)], env={}, defaults={}, generation=2, restart_policy=3
        )
    )
    failed = agent.expect(Exited)
    assert (failed.pid, failed.status, failed.restart_policy) == (0, 127, 3)
    away.rename(agent.folder)
    agent.tell(NextGeneration(attempt=0, number=3), RestartWorker(rank=2, attempt=0, restart=1))
    assert agent.expect(Started).rank == 2
    agent.expect_output(b"3 1")
    ended = agent.expect(Exited)
    assert (ended.status, ended.restart_policy) == (0, 3)
    agent.stop()


def test_systemd_tmpfiles_leaves_the_folder_of_a_long_run(tmp_path: Path) -> None:
    program = shutil.which("systemd-tmpfiles")
    if program is None or os.getuid() != 0:
        pytest.skip("needs systemd-tmpfiles, as root")
    with AgentProcess(tmp_path) as agent:
        agent.prepare()
        (other := agent.temp / "other").mkdir()
        rules = tmp_path / "rules.conf"
        rules.write_text(f"d {agent.temp} 0777 root root 10ms\n")

        def cleaned() -> bool:
            subprocess.run([str(program), "--clean", str(rules)], check=True)
            return not other.exists()

        wait_until(cleaned, "it removes what is not locked")
        assert [path.name for path in temp_folder_of(agent).iterdir()] == [IDENTITY]
