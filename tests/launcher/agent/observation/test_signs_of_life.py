"""What an agent sees of its workers: how long each has been silent, and who is stopped, by a signal or a debugger."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import psutil
import pytest
from testbed.processes import wait_until

from launcher.agent.observation.signs_of_life import OUTPUTS, SignsOfLife, is_traced
from launcher.agent.workers.worker import Worker
from launcher.protocol.two_way import START, STEPS

STEP = 0


class FakeWorker:
    """What is read of a worker."""

    def __init__(self, rank: int, pid: int = 0) -> None:
        self.rank = self.number = rank
        self.own_pid = pid or os.getpid()
        self.progress = (0, 0)
        self.phase = 0
        self.began = 1000.0
        self.takes_over = False
        self.output_lines = 0
        self.uses_ddp = True

    @property
    def is_known_by_output(self) -> bool:
        return self.progress[0] == 0 or not self.uses_ddp


class Looks:
    """Looks at workers, one a second."""

    def __init__(self, *workers: FakeWorker) -> None:
        self.signs = SignsOfLife()
        self.now = 1000.0
        self._workers = cast("list[Worker]", [*workers])

    @property
    def longest_s(self) -> list[float]:
        """By phase, without starts."""
        return self.signs.longest_s[:START]

    def look(self, *, after_s: float = 1.0, **options: Any) -> SignsOfLife:
        self.now += after_s
        self.signs.look(self._workers, self.now, pause_s=1.0, **options)
        return self.signs


def test_silence_counts_from_the_last_step_after_the_first_one() -> None:
    a, b = FakeWorker(0), FakeWorker(1)
    looks = Looks(a, b)
    for _ in range(50):  # it starts
        assert looks.look().silent_s == 0
    a.progress = (1, 0)
    assert looks.look().silent_s == 0
    for silent_s in (1, 2, 3):
        assert (looks.look().silent_s, looks.longest_s) == (silent_s, [0, 0, 0])
    assert looks.signs.of(cast(Worker, b), looks.now) == (54 - 1, 0, 0)
    a.progress = (2, 0)
    assert (looks.look().silent_s, looks.longest_s) == (0, [4, 0, 0])


def test_the_wait_for_a_replacement_teaches_nothing() -> None:
    worker = FakeWorker(0)
    looks = Looks(worker)
    worker.progress = (1, 0)
    looks.look()
    worker.progress = (20, 0)
    looks.look()
    worker.progress = (30, 0)  # no one has looked since
    looks.signs.regroup(cast("list[Worker]", [worker]))
    worker.progress = (31, 0)
    looks.look()
    looks.look(after_s=300)
    worker.output_lines = 9  # it says that it begins again
    looks.look()
    looks.look(after_s=60)  # its first batch
    worker.progress = (35, 0)
    looks.look()
    assert looks.longest_s == [1, 0, 0]
    looks.look(after_s=2)
    worker.progress = (36, 0)
    looks.look()
    assert looks.longest_s == [3, 0, 0], "it learns again"


def test_a_successor_is_watched_from_its_start() -> None:
    first, second = FakeWorker(0), FakeWorker(1)
    looks = Looks(first, second)
    first.progress = (STEPS, 0)
    assert looks.look(after_s=30).longest_s[START] == 30
    second.takes_over = True
    looks.look()
    first.progress = (STEPS + 1, 0)
    looks.look()
    assert (looks.look().silent_s, looks.signs.silent_in) == (3, START)
    second.progress = (STEPS - 1, 0)
    assert looks.look().silent_in == STEP
    assert looks.signs.of(cast(Worker, second), looks.now) == (0, START, STEPS - 1)
    second.progress = (STEPS, 0)
    looks.look(after_s=7)
    assert looks.signs.of(cast(Worker, second), looks.now) == (0, STEP, STEPS)
    assert looks.signs.longest_s[START] == 30 + 4 + 7


def test_output_is_no_sign_of_life_once_there_was_a_step() -> None:
    worker = FakeWorker(0)
    looks = Looks(worker)
    worker.progress = (5, 0)
    looks.look()
    for lines in range(1, 16):  # a thread that logs
        worker.output_lines = lines
        assert (looks.look().silent_s, looks.longest_s) == (lines, [0, 0, 0])


def test_without_ddp_steps_and_output_are_signs_of_life() -> None:
    """When such a script evaluates is not known: what it writes says that it goes on."""
    worker = FakeWorker(0)
    worker.uses_ddp = False
    looks = Looks(worker)
    worker.progress = (5, 0)
    looks.look()
    assert looks.look(after_s=2).silent_s == 2
    worker.output_lines = 1
    assert (looks.look().silent_s, looks.longest_s) == (0, [3, 0, 0])
    assert looks.look(after_s=3).silent_s == 3
    worker.progress = (6, 0)
    assert (looks.look().silent_s, looks.longest_s) == (0, [4, 0, 0])


def test_each_phase_has_its_longest_silence() -> None:
    worker = FakeWorker(0)
    looks = Looks(worker)
    worker.progress = (5, 0)
    looks.look()
    worker.phase = 3 + 1
    looks.look()
    for _ in range(6):
        looks.look()
    assert (looks.signs.silent_s, looks.signs.silent_in) == (6, 1)
    worker.phase = 6 + 0
    looks.look()
    assert (looks.signs.silent_s, looks.signs.silent_in, looks.longest_s) == (0, 0, [1, 7, 0])


def test_without_steps_output_counts_once_there_was_some() -> None:
    worker = FakeWorker(0)
    looks = Looks(worker)
    looks.look()
    for number in range(1, OUTPUTS + 1):
        looks.look(after_s=3)
        assert looks.signs.silent_s == 0, "not watched yet"
        worker.output_lines = number
        looks.look(after_s=0)
    assert looks.look(after_s=3).silent_s == 3


def test_time_in_which_nothing_was_to_run_does_not_count() -> None:
    worker = FakeWorker(0)
    looks = Looks(worker)
    worker.progress = (1, 0)
    looks.look()
    assert looks.look(after_s=2).silent_s == 2
    for _ in range(100):  # Ctrl-Z
        looks.look(counts=False)
    assert looks.signs.silent_s == 2
    looks.look(after_s=500)  # the machine slept
    assert looks.signs.silent_s <= 2 + 3


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_stopped_worker_is_named_at_the_second_look(sleeper: "subprocess.Popen[bytes]") -> None:
    worker = FakeWorker(7, sleeper.pid)
    looks = Looks(worker)
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
    assert looks.look().stopped == []
    assert looks.look().stopped == [7], "before its first step"
    worker.progress = (1, 0)
    assert looks.look().stopped == [7]
    assert looks.look(counts=False).stopped == [], "all are to rest"
    looks.look()
    assert looks.look().stopped == [7]
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: psutil.Process(sleeper.pid).status() != psutil.STATUS_STOPPED, "it goes on")
    assert looks.look().stopped == []


def test_one_that_a_debugger_has_is_not_stopped_by_a_signal() -> None:
    traced = "import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19)"  # PTRACE_TRACEME
    with subprocess.Popen([sys.executable, "-c", traced]) as process:
        try:
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_TRACING_STOP, "it is traced")
            worker = FakeWorker(0, process.pid)
            worker.progress = (9, 0)
            looks = Looks(worker)
            looks.look()
            assert (looks.look().stopped, is_traced(process.pid), is_traced(os.getpid())) == ([], True, False)
        finally:
            os.kill(process.pid, signal.SIGKILL)  # Popen takes a stop that its tracer sees for the end
            while not os.WIFSIGNALED(os.waitpid(process.pid, 0)[1]):
                pass
            process.returncode = -signal.SIGKILL
