"""The job driven by hand: events and times go in, commands and one outcome come out. No process, no clock."""

import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from launcher import __version__
from launcher.errors import HostError, PlacementError, StartError, StoreError
from launcher.events import Close, Command, Connected, Event, Lost, Said, Signalled, Tell, Tick, Unread
from launcher.hosts import Host, HostKind
from launcher.job import ANSWER_S, HEARTBEAT_TIMEOUT_S, Job, Phase
from launcher.outcome import FailureKind, Outcome
from launcher.protocol import (
    PROTOCOL,
    Bye,
    Exited,
    Facts,
    Heartbeat,
    Hello,
    OpenStore,
    Prepare,
    Report,
    SignalWorkers,
    Started,
    StartWorker,
    Stop,
    StoreFailed,
    StoreOpened,
)
from launcher.spec import Command as Program
from launcher.spec import CommandKind, JobSpec

PYTHON = "{}.{}.{}".format(*sys.version_info[:3])
M = TypeVar("M")


def spec_for(*names: str, **changes: Any) -> JobSpec:
    return JobSpec(
        **{
            "command": Program(CommandKind.SCRIPT, "train.py", ("--lr", "1")),
            "hosts": tuple(Host(name, HostKind.SSH, slots=2) for name in names),
            "run_id": "r1",
            "workdir": Path("/work"),
            "python": "/usr/bin/python3",
            "grace_s": 10.0,
            "start_timeout_s": 60.0,
            **changes,
        }
    )


class Drive:
    """A job and the time; `clocks` says how far each host's monotonic clock is ahead of ours."""

    def __init__(self, *names: str, clocks: dict[str, float] | None = None, **changes: Any) -> None:
        self.now = 1000.0
        self.names = names
        self.clocks = clocks or {}
        self.commands: list[Command] = []  # all so far
        self.job = Job(spec_for(*names, **changes), self.now)

    def event(self, event: Event, *, after_s: float = 0.0) -> list[Command]:
        self.now += after_s
        commands = self.job.handle(event, self.now)
        self.commands += commands
        return commands

    def say(self, host: str, *messages: Report, after_s: float = 0.0) -> list[Command]:
        self.now += after_s
        return [command for message in messages for command in self.event(Said(host, message))]

    def time(self, host: str) -> float:
        return self.now + self.clocks.get(host, 0.0)

    # ---- what hosts say ----

    def join(self, *names: str) -> None:
        """Let hosts connect and greet."""
        for name in names or self.names:
            self.event(Connected(name, "10.0.0.1"))
            self.say(name, self.hello(name))

    def hello(self, host: str, **changes: Any) -> Hello:
        good = Hello(PROTOCOL, __version__, PYTHON, hostname=host, pid=1, time=self.time(host))
        return replace(good, **changes)

    def facts(self, host: str, **changes: Any) -> Facts:
        good = Facts([], "CUDA_VISIBLE_DEVICES", False, [0, 1], 2, problems=[], time=self.time(host))
        return replace(good, **changes)

    def exited(self, host: str, rank: int, status: int = 0, *, at: float | None = None, **changes: Any) -> Exited:
        """Return the end of a worker; `at` is the time of its end on our clock."""
        time = (self.now if at is None else at) + self.clocks.get(host, 0.0)
        good = Exited(rank, 100 + rank, status, 1.0, provoked=False, error=None, error_file=None, time=time)
        return replace(good, **changes)

    # ---- the usual way ----

    def check(self, *names: str) -> None:
        for name in names or self.names:
            self.say(name, self.facts(name))

    def run(self) -> None:
        """Bring all workers up, two on a host."""
        self.join()
        self.check()
        self.event(Said(self.names[0], StoreOpened("10.0.0.9", 29500)))
        for start in messages(self.commands, StartWorker):
            host = next(tell.host for tell in tells(self.commands) if tell.message is start)
            self.say(host, Started(start.rank, 100 + start.rank, self.time(host)))
        assert self.job.phase is Phase.RUNNING

    def goodbye(self, *names: str, **changes: Any) -> None:
        for name in names or self.names:
            self.say(name, replace(Bye(swept=0, left=[]), **changes))

    def stop_all(self) -> None:
        """Let every worker end as the agents make them, and the agents too."""
        for rank in range(2 * len(self.names)):
            host = self.names[rank // 2]
            self.say(host, self.exited(host, rank, -signal.SIGTERM, provoked=True))
        self.goodbye()

    @property
    def outcome(self) -> Outcome:
        assert self.job.outcome is not None
        return self.job.outcome


def tells(commands: Iterable[Command]) -> list[Tell]:
    return [command for command in commands if isinstance(command, Tell)]


def messages(commands: Iterable[Command], kind: type[M]) -> list[M]:
    return [tell.message for tell in tells(commands) if isinstance(tell.message, kind)]


def told(commands: Iterable[Command], kind: type) -> list[str]:
    return [tell.host for tell in tells(commands) if isinstance(tell.message, kind)]


def closed(commands: Iterable[Command]) -> list[str]:
    return [command.host for command in commands if isinstance(command, Close)]


# ---- the start -----------------------------------------------------------------------------------------------


def test_two_hosts_from_the_first_connection_to_the_end() -> None:
    drive = Drive("a", "b")
    assert drive.event(Connected("a", "10.0.0.1")) == []
    (tell,) = tells(drive.say("a", drive.hello("a")))
    assert (tell.host, tell.message) == (
        "a",
        Prepare("r1", "/work", script="train.py", program=None, export={}, grace_s=10.0, part=0, parts=1),
    )
    assert drive.say("a", drive.facts("a")) == []
    drive.join("b")
    (tell,) = tells(drive.say("b", drive.facts("b")))
    assert (tell.host, tell.message) == ("a", OpenStore("", 29500, exact=False))
    begun = drive.say("a", StoreOpened("10.0.0.9", 29501))
    assert told(begun, StartWorker) == ["a", "a", "b", "b"]
    starts = messages(begun, StartWorker)
    assert [start.rank for start in starts] == [0, 1, 2, 3]
    assert {(start.through, *start.argv) for start in starts} == {("script", "train.py", "--lr", "1")}
    assert {(start.env["MASTER_ADDR"], start.env["MASTER_PORT"]) for start in starts} == {("10.0.0.9", "29501")}
    for rank in range(4):
        host = "ab"[rank // 2]
        drive.say(host, Started(rank, 100 + rank, drive.now))
        assert drive.job.phase is Phase.RUNNING
    for rank in range(4):
        host = "ab"[rank // 2]
        commands = drive.say(host, drive.exited(host, rank), after_s=1)
    assert told(commands, Stop) == ["a", "b"]
    drive.goodbye("a")
    assert drive.job.outcome is None
    drive.goodbye("b")
    assert drive.job.phase is Phase.ENDED
    outcome = drive.outcome
    assert (outcome.exit_code, outcome.error, outcome.signum, outcome.cause) == (0, None, None, None)
    assert (outcome.world_size, outcome.hosts, outcome.stopped, outcome.duration_s) == (4, 2, 0, 4.0)
    assert closed(drive.commands) == ["a", "b"]


def test_hosts_may_answer_in_any_order() -> None:
    drive = Drive("a", "b", "c")
    drive.join("c", "a")
    drive.check("c")
    drive.join("b")
    drive.check("b")
    assert messages(drive.commands, OpenStore) == []
    drive.check("a")
    assert told(drive.commands, OpenStore) == ["a"]


def test_a_host_not_reached_and_a_host_with_a_problem_are_named_in_one_error() -> None:
    drive = Drive("a", "b", "c")
    drive.join("a", "b")
    drive.check("a")
    assert told(drive.say("b", drive.facts("b", problems=["no /work", "no GPU 7"])), Stop) == ["b"]
    assert drive.job.phase is Phase.JOINING, "the third may have a problem as well"
    assert told(drive.event(Lost("c", "connection refused")), Stop) == ["a", "b"]
    drive.goodbye("a", "b")
    error = drive.outcome.error
    assert isinstance(error, StartError)
    assert error.reasons == {"b": "no /work; no GPU 7", "c": "connection refused"}
    assert str(error).startswith("2 of 3 hosts cannot start; no worker was started.\n")
    assert drive.outcome.exit_code == 1
    assert messages(drive.commands, StartWorker) == []


def test_a_refused_host_that_leaves_before_the_others_answer_keeps_its_reason() -> None:
    for leave in (Said("a", Bye(0, [])), Lost("a", "its agent ended with status 0")):
        drive = Drive("a", "b")
        drive.join()
        drive.say("a", drive.facts("a", problems=["no /work"]))
        drive.event(leave)
        drive.check("b")
        drive.goodbye("b")
        assert isinstance(drive.outcome.error, StartError)
        assert drive.outcome.error.reasons == {"a": "no /work"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "9.9"}, "has dtrain 9.9, here it is"),
        ({"protocol": PROTOCOL + 1}, "install the same there: /usr/bin/python3 -m pip install dtrain=="),
        ({"python": "3.9.2"}, "/usr/bin/python3 is Python 3.9.2, here it is"),
    ],
)
def test_another_version_on_a_host_is_found_before_anything_starts(changes: dict[str, Any], reason: str) -> None:
    drive = Drive("a", "b")
    drive.join("a")
    drive.check("a")
    drive.event(Connected("b"))
    drive.say("b", drive.hello("b", **changes))
    drive.goodbye()
    assert isinstance(drive.outcome.error, StartError)
    assert reason in drive.outcome.error.reasons["b"]
    assert told(drive.commands, Prepare) == ["a"]


def test_the_python_of_a_host_does_not_matter_to_a_program() -> None:
    drive = Drive("a", command=Program(CommandKind.PROGRAM, "./train"))
    drive.event(Connected("a"))
    (prepare,) = messages(drive.say("a", drive.hello("a", python="3.9.2")), Prepare)
    assert (prepare.script, prepare.program) == (None, "./train")


def test_workers_that_do_not_fit_end_the_run_as_a_usage_error() -> None:
    drive = Drive("a", "b", nproc=3)
    drive.join()
    drive.check()
    drive.goodbye()
    assert isinstance(drive.outcome.error, PlacementError)
    assert drive.outcome.exit_code == 2
    assert {line.partition(":")[0] for line in str(drive.outcome.error).splitlines()} == {"a", "b"}


@pytest.mark.parametrize("address", [None, "10.9.9.9"])
def test_the_store_is_where_the_other_hosts_reach_it(address: str | None) -> None:
    def store(*hosts: Host) -> OpenStore:
        drive = Drive(*(host.name for host in hosts), hosts=hosts, master_addr=address, master_port=4000)
        drive.join()
        drive.check()
        (found,) = messages(drive.commands, OpenStore)
        assert (found.port, found.exact) == (4000, True)
        return found

    here, there = Host("here", HostKind.LOCAL), Host("there", HostKind.SSH)
    assert store(here).address == (address or "127.0.0.1")
    assert store(Host("sim0", HostKind.SIMULATED), Host("sim1", HostKind.SIMULATED)).address == (address or "127.0.0.1")
    assert store(there).address == (address or ""), "the address by which that host was reached"
    assert store(here, there).address == (address or "10.0.0.1"), "ours, as the other one sees it"


# ---- a start that takes too long -----------------------------------------------------------------------------


def test_hosts_that_are_not_ready_in_time_are_all_named() -> None:
    drive = Drive("a", "b", "c", "d", start_timeout_s=30.0)
    drive.join("a", "b")
    drive.check("a")
    drive.event(Connected("c"))
    assert drive.job.deadline() == 1030.0
    assert drive.event(Tick(), after_s=29.9) == []
    commands = drive.event(Tick(), after_s=0.1)
    assert set(closed(commands)) == {"b", "c", "d"}
    assert told(commands, Stop) == ["a"]
    drive.goodbye("a")
    assert isinstance(drive.outcome.error, StartError)
    limit = "within 30 s (--start-timeout-s)"
    assert drive.outcome.error.reasons == {
        "b": f"did not answer {limit}", "c": f"did not answer {limit}", "d": f"was not reached {limit}",
    }  # fmt: skip


def test_a_store_that_does_not_open_in_time_is_an_error_of_its_host() -> None:
    drive = Drive("a", "b", start_timeout_s=30.0)
    drive.join()
    drive.check()
    assert told(drive.event(Tick(), after_s=30), Stop) == ["a", "b"]
    assert drive.say("a", StoreOpened("10.0.0.9", 29500)) == [], "too late"
    drive.goodbye()
    assert isinstance(drive.outcome.error, HostError)
    assert str(drive.outcome.error).startswith("a: the rendezvous store was not opened within 30 s")


def test_workers_that_do_not_start_in_time_are_named_with_their_host() -> None:
    drive = Drive("a", "b", start_timeout_s=30.0)
    drive.join()
    drive.check()
    drive.say("a", StoreOpened("10.0.0.9", 29500))
    drive.say("a", Started(0, 100, drive.now), Started(1, 101, drive.now))
    drive.say("b", Started(2, 102, drive.now))
    assert drive.job.progress == "3 of 4 workers started"
    assert told(drive.event(Tick(), after_s=30), Stop) == ["a", "b"]
    drive.stop_all()
    assert str(drive.outcome.error) == "b: rank 3 was not started within 30 s (--start-timeout-s)"
    assert drive.outcome.exit_code == 1


def test_a_host_lost_while_joining_leaves_no_deadline_behind_in_the_past() -> None:
    drive = Drive("a", "b", start_timeout_s=500.0)
    drive.join("a")
    drive.check("a")
    drive.event(Lost("a", "the connection broke"))
    assert drive.job.deadline() == 1500.0


# ---- failures ------------------------------------------------------------------------------------------------


def test_the_first_failure_decides_the_exit_code_by_corrected_time() -> None:
    drive = Drive("a", "b", clocks={"a": 5000.0, "b": -900.0})
    drive.run()
    drive.now += 10
    later, first = drive.now - 0.5, drive.now - 2.0
    commands = drive.say("a", drive.exited("a", 1, 7, at=later))
    assert {stop.signum for stop in messages(commands, Stop)} == {signal.SIGTERM}
    assert told(commands, Stop) == ["a", "b"]
    drive.say("b", drive.exited("b", 2, -signal.SIGSEGV, at=first))  # its news took longer
    drive.say("a", drive.exited("a", 0, -signal.SIGTERM, provoked=True))
    drive.say("b", drive.exited("b", 3, 0, provoked=True))
    drive.goodbye()
    outcome = drive.outcome
    assert outcome.cause is not None
    assert (outcome.cause.rank, outcome.cause.host, outcome.cause.kind) == (2, "b", FailureKind.KILLED)
    assert outcome.exit_code == 128 + signal.SIGSEGV
    assert (outcome.other_failures, outcome.stopped) == (1, 2)
    assert outcome.cause.at == pytest.approx(first)


def test_the_clock_of_a_host_is_corrected_by_its_quickest_message() -> None:
    drive = Drive("a", clocks={"a": 5000.0})
    drive.run()
    late = Heartbeat(drive.time("a"))
    drive.say("a", late, after_s=3)  # three seconds on its way: it must not move what is known of the clock
    drive.say("a", drive.exited("a", 0, 1, at=drive.now))
    drive.goodbye()
    assert drive.outcome.cause is not None
    assert drive.outcome.cause.at == drive.now


def test_silence_that_is_our_own_does_not_touch_the_clock_or_lose_the_host() -> None:
    drive = Drive("a", clocks={"a": -5000.0})
    drive.run()
    for _ in range(5):
        assert drive.event(Unread("a"), after_s=HEARTBEAT_TIMEOUT_S - 1) == []
        assert drive.event(Tick()) == []
    drive.say("a", drive.exited("a", 0, 1))
    drive.goodbye()
    assert drive.outcome.cause is not None
    assert drive.outcome.cause.at == drive.now


def test_workers_that_end_because_we_stopped_them_are_no_failures() -> None:
    drive = Drive("a")
    drive.run()
    drive.say("a", drive.exited("a", 0, 3))
    drive.say("a", drive.exited("a", 1, 9, provoked=True))
    drive.goodbye()
    assert (drive.outcome.exit_code, drive.outcome.other_failures, drive.outcome.stopped) == (3, 0, 1)


def test_a_failure_known_from_its_error_file_before_our_stop_is_the_cause() -> None:
    error = {"type": "ValueError", "message": "loss is nan", "where": "train.py:9 in step"}
    drive = Drive("a", "b", clocks={"b": 77.0})
    drive.run()
    drive.now += 2
    raised = drive.now - 1
    drive.say("a", drive.exited("a", 0, 1))  # its peer noticed that it is gone, and ended first
    drive.say("b", drive.exited("b", 2, -signal.SIGTERM, at=raised, provoked=True, error=error))
    drive.say("b", drive.exited("b", 3, -signal.SIGTERM, provoked=True, error=error), after_s=1)  # raised by our signal
    drive.goodbye()
    cause = drive.outcome.cause
    assert cause is not None
    assert (cause.rank, cause.kind, cause.error_type, cause.message, cause.where) == (
        2, FailureKind.RAISED, "ValueError", "loss is nan", "train.py:9 in step",
    )  # fmt: skip
    assert (drive.outcome.exit_code, drive.outcome.other_failures, drive.outcome.stopped) == (1, 1, 1)


def test_a_worker_that_cannot_be_started_ends_the_run() -> None:
    error = {"type": "", "message": "could not be started: ./train: Permission denied", "where": ""}
    drive = Drive("a")
    drive.run()
    drive.say("a", drive.exited("a", 1, 127, pid=0, error=error))
    drive.goodbye()
    assert drive.outcome.cause is not None
    assert (drive.outcome.cause.kind, drive.outcome.exit_code) == (FailureKind.NEVER_STARTED, 127)


def test_a_lost_host_ends_the_run_and_is_the_cause() -> None:
    drive = Drive("a", "b")
    drive.run()
    commands = drive.event(Lost("b", "the connection broke"), after_s=5)
    assert (closed(commands), told(commands, Stop)) == (["b"], ["a"])
    drive.say("a", drive.exited("a", 0, -signal.SIGTERM, provoked=True))
    assert drive.say("b", drive.exited("b", 2, 9)) == [], "nothing is heard from the dead"
    drive.goodbye("a")
    cause = drive.outcome.cause
    assert cause is not None
    assert (cause.kind, cause.host, cause.message) == (FailureKind.HOST_LOST, "b", "the connection broke")
    assert (drive.outcome.exit_code, drive.outcome.other_failures) == (1, 0)


def test_a_silent_host_is_lost_after_a_while() -> None:
    drive = Drive("a", "b")
    drive.run()
    drive.say("a", Heartbeat(drive.now + 50), after_s=50)
    assert drive.job.deadline() == drive.now + 10
    assert drive.event(Tick(), after_s=9) == []
    assert closed(drive.event(Tick(), after_s=1)) == ["b"]
    drive.goodbye("a")
    assert drive.outcome.cause is not None
    assert "nothing was heard from it for 60 s" in drive.outcome.cause.message


def test_an_agent_that_somebody_else_ends_is_a_lost_host() -> None:
    drive = Drive("a", "b")
    drive.run()
    drive.say("b", drive.exited("b", 2, 0, provoked=True), drive.exited("b", 3, -15, provoked=True))
    assert told(drive.say("b", Bye(0, [])), Stop) == ["a"]
    drive.goodbye("a")
    assert drive.outcome.cause is not None
    assert (drive.outcome.cause.kind, drive.outcome.exit_code) == (FailureKind.HOST_LOST, 1)


def test_a_store_that_cannot_be_opened_is_an_error_before_any_worker() -> None:
    drive = Drive("a", "b")
    drive.join()
    drive.check()
    assert told(drive.say("a", StoreFailed("port 29500 is in use by pid 7", drive.now)), Stop) == ["a", "b"]
    drive.goodbye()
    assert isinstance(drive.outcome.error, StoreError)
    assert str(drive.outcome.error) == "a: port 29500 is in use by pid 7"
    assert (drive.outcome.exit_code, messages(drive.commands, StartWorker)) == (1, [])


def test_a_store_that_ends_while_workers_run_is_the_cause() -> None:
    drive = Drive("a", "b", clocks={"a": 33.0})
    drive.run()
    drive.now += 5
    died = drive.time("a") - 1
    drive.say("b", drive.exited("b", 2, 1))  # a consequence, and quicker here
    drive.say("a", StoreFailed("the store's process ended: Killed", died))
    drive.stop_all()
    assert drive.outcome.cause is not None
    assert (drive.outcome.cause.kind, drive.outcome.cause.host) == (FailureKind.STORE_LOST, "a")
    assert (drive.outcome.exit_code, drive.outcome.other_failures) == (1, 1)


def test_a_store_that_ends_after_the_workers_is_nothing() -> None:
    drive = Drive("a")
    drive.run()
    drive.say("a", drive.exited("a", 0), drive.exited("a", 1))
    drive.say("a", StoreFailed("the store's process ended", drive.now))
    drive.goodbye()
    assert (drive.outcome.exit_code, drive.outcome.cause, drive.outcome.error) == (0, None, None)


# ---- signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_is_passed_on_and_decides_the_exit_code(signum: signal.Signals) -> None:
    drive = Drive("a", "b")
    drive.run()
    commands = drive.event(Signalled(signum))
    assert [(tell.host, tell.message) for tell in tells(commands)] == [
        (name, Stop(signum=signum, grace_s=10.0)) for name in ("a", "b")
    ]
    drive.say("a", drive.exited("a", 0, 1))  # the script's own answer to the signal
    drive.stop_all()
    assert (drive.outcome.exit_code, drive.outcome.signum, drive.outcome.cause) == (128 + signum, signum, None)


def test_a_second_ctrl_c_kills_at_once_and_more_of_them_delay_nothing() -> None:
    drive = Drive("a", "b")
    drive.run()
    drive.event(Signalled(signal.SIGINT))
    assert drive.job.deadline() == drive.now + 10 + ANSWER_S
    second = drive.event(Signalled(signal.SIGINT), after_s=1)
    assert {(stop.signum, stop.grace_s) for stop in messages(second, Stop)} == {(signal.SIGKILL, 0.0)}
    give_up_at = drive.now + ANSWER_S
    for _ in range(100):
        drive.event(Signalled(signal.SIGINT), after_s=0.1)
    assert drive.job.deadline() == give_up_at
    drive.now = give_up_at
    drive.event(Tick())
    assert drive.outcome.exit_code == 130


def test_ctrl_c_while_a_failure_is_cleaned_up_kills_and_keeps_the_cause() -> None:
    drive = Drive("a")
    drive.run()
    drive.say("a", drive.exited("a", 1, 5))
    assert [stop.signum for stop in messages(drive.event(Signalled(signal.SIGINT)), Stop)] == [signal.SIGKILL]
    drive.stop_all()
    assert (drive.outcome.exit_code, drive.outcome.signum) == (5, None)


def test_a_signal_after_the_last_worker_ended_well_changes_nothing() -> None:
    drive = Drive("a")
    drive.run()
    drive.say("a", drive.exited("a", 0), drive.exited("a", 1))
    drive.event(Signalled(signal.SIGTERM))
    drive.goodbye()
    assert (drive.outcome.exit_code, drive.outcome.signum) == (0, None)


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_are_passed_on_and_end_nothing(signum: signal.Signals) -> None:
    drive = Drive("a", "b")
    drive.join("a")
    assert drive.event(Signalled(signum)) == []
    drive = Drive("a", "b")
    drive.run()
    assert [(tell.host, tell.message) for tell in tells(drive.event(Signalled(signum)))] == [
        ("a", SignalWorkers(signum)), ("b", SignalWorkers(signum)),
    ]  # fmt: skip
    assert drive.job.phase is Phase.RUNNING


def test_a_stop_while_hosts_still_connect_waits_for_none_of_them() -> None:
    drive = Drive("a", "b", "c")
    drive.join("a")
    drive.event(Connected("b"))
    commands = drive.event(Signalled(signal.SIGINT))
    assert (told(commands, Stop), closed(commands)) == (["a"], ["b", "c"])
    assert drive.event(Connected("c")) == [Close("c")]
    assert drive.say("b", drive.hello("b")) == []
    drive.goodbye("a")
    assert (drive.outcome.exit_code, drive.outcome.error, drive.outcome.world_size) == (130, None, 0)


def test_a_stop_before_any_host_connects_ends_at_once() -> None:
    drive = Drive("a", "b")
    assert closed(drive.event(Signalled(signal.SIGTERM))) == ["a", "b"]
    assert drive.outcome.exit_code == 143
    assert drive.event(Connected("a")) == []


# ---- the end -------------------------------------------------------------------------------------------------


def test_a_host_that_does_not_answer_is_given_up_after_the_grace_period_and_a_bound() -> None:
    drive = Drive("a", "b", grace_s=20.0)
    drive.run()
    drive.event(Signalled(signal.SIGTERM))
    drive.goodbye("a")
    assert drive.job.deadline() == drive.now + 20 + ANSWER_S
    assert drive.event(Tick(), after_s=20 + ANSWER_S - 0.1) == []
    assert closed(drive.event(Tick(), after_s=0.1)) == ["b"]
    assert drive.outcome.left == (("b", ("unknown: it did not say that its workers are gone",)),)
    assert drive.outcome.exit_code == 143


def test_a_host_lost_after_it_was_told_to_start_may_have_left_workers() -> None:
    drive = Drive("a", "b")
    drive.join()
    drive.check()
    drive.say("a", StoreOpened("10.0.0.9", 29500))
    drive.event(Signalled(signal.SIGTERM))  # no host has said yet that it started any
    drive.event(Lost("b", "the connection broke"))
    drive.goodbye("a")
    assert drive.outcome.left == (("b", ("unknown: the connection broke",)),)


def test_a_host_lost_before_workers_were_started_left_none() -> None:
    drive = Drive("a", "b")
    drive.join()
    drive.check("a")
    drive.event(Signalled(signal.SIGTERM))
    drive.event(Lost("a", "the connection broke"))
    drive.goodbye("b")
    assert drive.outcome.left == ()


def test_what_a_host_could_not_end_is_named() -> None:
    drive = Drive("a", "b")
    drive.run()
    for rank in range(4):
        drive.say("ab"[rank // 2], drive.exited("ab"[rank // 2], rank))
    drive.goodbye("a", swept=2)
    drive.goodbye("b", swept=1, left=["pid 9 (python, state D)"])
    assert (drive.outcome.swept, drive.outcome.left) == (3, (("b", ("pid 9 (python, state D)",)),))


def test_progress_says_what_is_waited_for() -> None:
    drive = Drive("a", "b", "c", "d", "e")
    assert drive.job.progress == "0 of 5 hosts ready; waiting for a, b, c and 2 more"
    drive.join()
    drive.check("a", "b", "c", "d")
    assert drive.job.progress == "4 of 5 hosts ready; waiting for e"
    drive.check("e")
    assert drive.job.progress == "opening the rendezvous store"
    drive.say("a", StoreOpened("10.0.0.9", 29500))
    assert drive.job.progress == "0 of 10 workers started"
    drive.event(Signalled(signal.SIGINT))
    drive.goodbye("a", "b", "c", "d")
    assert drive.job.progress == "stopping; waiting for e"
    drive.goodbye("e")
    assert drive.job.progress == ""


def test_nothing_happens_after_the_end() -> None:
    drive = Drive("a")
    drive.event(Signalled(signal.SIGTERM))
    outcome = drive.outcome
    for event in (Connected("a"), Said("a", drive.hello("a")), Lost("a", "x"), Signalled(signal.SIGINT), Tick()):
        assert drive.event(event, after_s=100) == []
    assert drive.outcome is outcome
