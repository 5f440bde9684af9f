"""The job driven by hand: events and times go in, commands and one outcome come out. No process, no clock."""

import json
import signal
from typing import Any

import pytest
from testbed.job_drive import Drive, T, closed, messages, notices, opened, receivers, running, tells
from testbed.outcomes import STOOD
from testbed.present import present

from launcher.errors import HostError, PlacementError, StoreError
from launcher.hangs.watch import HangPolicy
from launcher.hosts.folding import StartError
from launcher.hosts.host import Host, HostKind
from launcher.job.ending import ANSWER_S, CHECK_S, SLOW_S, MissingRank
from launcher.job.events import (
    AgentMessage,
    Close,
    Command,
    Connected,
    Lost,
    Notice,
    ReaderBlocked,
    SaveEvidence,
    Send,
    Sending,
    Signalled,
    Slept,
    SuspendSelf,
    Tick,
)
from launcher.job.failures.failure import FailureKind, first_cause
from launcher.job.fleet import HostPhase
from launcher.job.inspection import COLLECT_S
from launcher.job.lifecycle import ROOT_WAIT_S
from launcher.job.run import Phase
from launcher.placement.job_spec import CommandKind
from launcher.placement.job_spec import WorkerCommand as Program
from launcher.placement.roles import Role, Roles
from launcher.protocol.commands import (
    Collect,
    EndAttempt,
    OpenStore,
    Prepare,
    RestartWorker,
    SharePrefixes,
    SignalWorkers,
    StartWorker,
    Stop,
    Suspend,
)
from launcher.protocol.message import PROTOCOL
from launcher.protocol.reports import (
    Bye,
    Collected,
    Failing,
    PortsReserved,
    Started,
    StoreFailed,
    StoreOpened,
    Swept,
)
from launcher.protocol.two_way import Heartbeat

OFF = HangPolicy(watches=False)

# ---- the start -----------------------------------------------------------------------------------------------


def test_two_hosts_from_the_first_connection_to_the_end() -> None:
    drive = Drive("a", "b")
    assert drive.connect("a") == []
    (tell,) = tells(drive.say("a", drive.hello("a")))
    assert isinstance(tell.message, Prepare)
    prepare = tell.message
    assert (tell.host, prepare.run_id, prepare.workdir, prepare.script, prepare.program) == (
        "a", "r1", "/work", "train.py", None,
    )  # fmt: skip
    assert (prepare.grace_s, prepare.lease_s, prepare.lost_agents, prepare.workers) == (10.0, T, [], "2")
    assert drive.say("a", drive.facts("a")) == []
    drive.join("b")
    (tell,) = tells(drive.say("b", drive.facts("b")))
    assert (tell.host, tell.message) == ("a", OpenStore(0, "", "b", 29500, exact=False))
    begun = drive.say("a", StoreOpened(0, "10.0.0.9", 29501))
    assert receivers(begun, StartWorker) == ["a", "a", "b", "b"]
    starts = messages(begun, StartWorker)
    assert [start.rank for start in starts] == [0, 1, 2, 3]
    assert {(start.through, *start.argv) for start in starts} == {("script", "train.py", "--lr", "1")}
    assert {(start.env["MASTER_ADDR"], start.env["MASTER_PORT"]) for start in starts} == {("10.0.0.9", "29501")}
    assert all({*start.env} <= {*prepare.names} for start in starts)
    for rank in range(4):
        host = "ab"[rank // 2]
        drive.say(host, Started(0, rank, 100 + rank, drive.now))
        assert drive.job.phase is Phase.RUNNING
    for rank in range(4):
        host = "ab"[rank // 2]
        commands = drive.say(host, drive.exited(host, rank), after_s=1)
    assert receivers(commands, Stop) == ["a", "b"]
    drive.goodbye("a", swept=2)
    assert drive.job.outcome is None
    drive.goodbye("b", swept=1)
    assert drive.job.phase is Phase.ENDED
    outcome = drive.outcome
    assert (outcome.exit_code, outcome.error, outcome.signum, outcome.cause) == (0, None, None, None)
    assert (outcome.world_size, outcome.hosts, outcome.stopped, outcome.duration_s) == (4, 2, 0, 4.0)
    assert (outcome.swept, outcome.left) == (3, ())
    assert closed(drive.commands) == ["a", "b"]


def test_all_hosts_that_cannot_start_are_in_one_error() -> None:
    drive = Drive("a", "b", "c")
    drive.join("a", "b")
    drive.check("a")
    assert receivers(drive.say("b", drive.facts("b", problems=["no /work", "no GPU 7"])), Stop) == ["b"]
    assert drive.job.phase is Phase.GATHERING, "the third may have a problem as well"
    assert receivers(drive.lose("c", "connection refused"), Stop) == ["a"]
    drive.goodbye("a", "b")
    error = drive.outcome.error
    assert isinstance(error, StartError)
    assert error.reasons == {"b": "no /work; no GPU 7", "c": "connection refused"}
    assert notices(drive.commands) == [], "it is in the error"
    assert str(error).startswith("2 of 3 hosts cannot start; no worker was started.\n")
    assert drive.outcome.exit_code == 1
    assert messages(drive.commands, StartWorker) == []


def test_a_refused_host_that_leaves_keeps_its_reason() -> None:
    for leave in (AgentMessage("a", 1, Bye(0, [], "")), Lost("a", 1, "its agent ended with status 0")):
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
        ({"protocol": PROTOCOL + 1}, "install the same there: /usr/bin/python3 -m pip install "),
        ({"python": "3.9.2"}, "/usr/bin/python3 is Python 3.9.2, here it is"),
    ],
)
def test_another_version_on_a_host_is_found_first(changes: dict[str, Any], reason: str) -> None:
    drive = Drive("a", "b")
    drive.join("a")
    drive.check("a")
    drive.connect("b")
    drive.say("b", drive.hello("b", **changes))
    drive.goodbye()
    assert isinstance(drive.outcome.error, StartError)
    assert reason in drive.outcome.error.reasons["b"]
    assert receivers(drive.commands, Prepare) == ["a"]


def test_only_ordinary_workers_are_bound_to_processors() -> None:
    roles = Roles(others=(Role("evaluator", 1, ("eval.py",)),))
    drive = Drive("a", numa_binding="node", roles=roles)
    drive.join()
    drive.check()
    starts = messages(drive.say("a", drive.opened()), StartWorker)
    assert [(start.argv[0], start.numa_binding) for start in starts] == [
        ("train.py", "node"),
        ("train.py", "node"),
        ("eval.py", ""),
    ]


def test_a_variable_too_long_for_all_processes_is_an_error() -> None:
    workers = 9000
    drive = Drive("a", hosts=(Host("a", HostKind.SSH, slots=workers),), env_for=("tf",))
    drive.join()
    drive.say("a", drive.facts("a"), StoreOpened(0, "10.0.0.9", 29501))
    ports = [*range(10_000, 10_000 + workers)]
    assert messages(drive.say("a", PortsReserved(0, "10.0.0.9", ports)), StartWorker) == []
    drive.goodbye()
    assert isinstance(drive.outcome.error, PlacementError)
    assert "TF_CONFIG names every process, and would need " in str(drive.outcome.error)


def test_tensorflow_s_cluster_is_sent_to_each_host_once() -> None:
    drive = Drive("a", "b", env_for=("tf",))
    drive.join()
    drive.say("a", drive.facts("a"))
    drive.say("b", drive.facts("b"), PortsReserved(0, "b", [5, 6]))
    drive.say("a", PortsReserved(0, "a", [3, 4]))
    commands = drive.say("a", StoreOpened(0, "10.0.0.9", 29501))
    sent = [(c.host, type(c.message)) for c in commands if isinstance(c, Send)]
    assert [host for host, kind in sent if kind is SharePrefixes] == ["a", "b"]
    assert all(sent.index((host, SharePrefixes)) < sent.index((host, StartWorker)) for host in "ab")
    (prefix,) = {prefixes.prefixes["TF_CONFIG"] for prefixes in messages(commands, SharePrefixes)}
    starts = messages(commands, StartWorker)
    configs = [json.loads(prefix + start.env["TF_CONFIG"]) for start in starts]
    assert [config["cluster"] for config in configs] == 4 * [{"worker": ["a:3", "a:4", "b:5", "b:6"]}]
    assert [config["task"]["index"] for config in configs] == [0, 1, 2, 3]


def test_the_python_of_a_host_does_not_matter_to_a_program() -> None:
    drive = Drive("a", command=Program(CommandKind.PROGRAM, "./train"))
    drive.connect("a")
    (prepare,) = messages(drive.say("a", drive.hello("a", python="3.9.2")), Prepare)
    assert (prepare.script, prepare.program) == (None, "./train")


def test_workers_that_do_not_fit_end_the_run_as_a_usage_error() -> None:
    drive = Drive("a", "b", nproc=3)
    drive.join()
    drive.check()
    drive.goodbye()
    assert isinstance(drive.outcome.error, PlacementError)
    assert drive.outcome.exit_code == 2
    assert str(drive.outcome.error).partition(":")[0] == "a, b"


@pytest.mark.parametrize("address", [None, "10.9.9.9"])
def test_the_store_is_where_the_other_hosts_reach_it(address: str | None) -> None:
    def store(*hosts: Host, our_address: str | None = "10.0.0.1") -> OpenStore:
        drive = Drive(*(host.name for host in hosts), hosts=hosts, master_addr=address, master_port=4000)
        for host in hosts:
            drive.connect(host.name, our_address)
            drive.say(host.name, drive.hello(host.name))
        drive.check()
        (found,) = messages(drive.commands, OpenStore)
        assert (found.port, found.exact) == (4000, True)
        return found

    here, there = Host("here", HostKind.LOCAL), Host("there", HostKind.SSH)
    assert store(here).address == (address or "127.0.0.1")
    assert store(Host("sim0", HostKind.SIMULATED), Host("sim1", HostKind.SIMULATED)).address == (address or "127.0.0.1")
    assert store(there).address == (address or ""), "the address by which that host was reached"
    assert store(here, there).address == (address or "10.0.0.1"), "ours, as the other one sees it"
    assert store(here, there, our_address=None).address == (address or ""), "that of the route, behind a jump host"


# ---- a start that takes too long -----------------------------------------------------------------------------


def test_hosts_that_are_not_ready_in_time_are_all_named() -> None:
    drive = Drive("a", "b", "c", "d", start_timeout_s=20.0)
    drive.join("a", "b")
    drive.check("a")
    drive.connect("c")
    assert receivers(drive.wait(19.9, heard="ab"), Stop) == []
    commands = drive.wait(0.1)
    assert closed(commands) == ["c", "d"]
    assert receivers(commands, Stop) == ["a", "b"]
    drive.goodbye("a", "b")
    assert isinstance(drive.outcome.error, StartError)
    limit = "within 20 s (--start-timeout-s)"
    assert drive.outcome.error.reasons == {
        "b": f"did not answer {limit}",
        "c": f"let us in, but no agent answered {limit}; does a start-up file of its shell, such as .bashrc, wait for "
        "something?",
        "d": f"was not reached {limit}",
    }  # fmt: skip


def test_a_store_that_opens_too_late_is_an_error_of_its_host() -> None:
    drive = Drive("a", "b", start_timeout_s=20.0)
    drive.join()
    drive.check()
    assert receivers(drive.wait(20, heard="ab"), Stop) == ["a", "b"]
    assert drive.say("a", drive.opened()) == [], "too late"
    drive.goodbye()
    assert isinstance(drive.outcome.error, HostError)
    assert str(drive.outcome.error).startswith("a: the rendezvous store was not opened within 20 s")


def test_workers_that_start_too_late_are_named_with_their_host() -> None:
    drive = Drive("a", "b", start_timeout_s=20.0)
    drive.join()
    drive.check()
    drive.say("a", drive.opened())
    drive.say("a", Started(0, 0, 100, drive.now), Started(0, 1, 101, drive.now))
    drive.say("b", Started(0, 2, 102, drive.now))
    assert drive.job.progress == "3 of 4 workers started"
    assert receivers(drive.wait(20, heard="ab"), Stop) == ["a", "b"]
    drive.stop_all()
    assert str(drive.outcome.error) == "b: rank 3 was not started within 20 s (--start-timeout-s)"
    assert drive.outcome.exit_code == 1


def test_heartbeats_go_out_though_event_follows_event() -> None:
    drive = running("a")
    sent = [c for _ in range(100) for c in drive.say("a", Heartbeat(drive.time("a")), after_s=0.1)]
    assert 6 <= len(messages(sent, Heartbeat)) <= 7, "every 1.5 s, though there was no Tick"


# ---- failures ------------------------------------------------------------------------------------------------


def test_the_first_failure_by_corrected_time_is_the_exit_code() -> None:
    drive = running("a", "b", clocks={"a": 5000.0, "b": -900.0})
    drive.now += 10
    later, first = drive.now - 0.5, drive.now - 2.0
    assert messages(drive.say("a", drive.exited("a", 1, 7, at=later)), Stop) == []
    drive.say("b", drive.exited("b", 2, -signal.SIGSEGV, at=first))  # its news took longer
    commands = drive.collected()
    assert [stop.signum for stop in messages(commands, Stop)] == 2 * [signal.SIGTERM]
    drive.say("a", drive.exited("a", 0, -signal.SIGTERM, provoked=True))
    drive.say("b", drive.exited("b", 3, 0, provoked=True))
    drive.goodbye()
    outcome = drive.outcome
    assert (drive.cause.rank, drive.cause.host, drive.cause.kind) == (
        2,
        "b",
        FailureKind.KILLED,
    )
    assert outcome.exit_code == 128 + signal.SIGSEGV
    assert (len(outcome.secondary_failures), outcome.stopped) == (1, 2)
    assert drive.cause.at == pytest.approx(first)


def test_silence_of_our_own_reader_loses_no_host() -> None:
    drive = running("a", clocks={"a": -5000.0})
    for _ in range(5):
        assert closed(drive.event(ReaderBlocked("a"), after_s=T - 1)) == []
        assert closed(drive.event(Tick())) == []
    drive.fail(0)
    drive.goodbye()
    assert drive.cause.at == drive.now


def test_an_exception_raised_before_our_stop_is_the_cause() -> None:
    error = {"type": "ValueError", "message": "loss is nan", "where": "train.py:9 in step"}
    drive = running("a", "b", clocks={"b": 77.0})
    drive.now += 2
    raised = drive.now - 1
    drive.fail(0)  # its peer noticed that it is gone, and ended first
    drive.say("b", drive.exited("b", 2, -signal.SIGTERM, at=raised, provoked=True, error=error))
    drive.say("b", drive.exited("b", 3, -signal.SIGTERM, provoked=True, error=error), after_s=1)  # raised by our signal
    drive.goodbye()
    cause = drive.cause
    assert (cause.rank, cause.kind, cause.error_type, cause.message, cause.where) == (
        2, FailureKind.RAISED, "ValueError", "loss is nan", "train.py:9 in step",
    )  # fmt: skip
    assert (drive.outcome.exit_code, len(drive.outcome.secondary_failures), drive.outcome.stopped) == (1, 1, 1)


@pytest.mark.parametrize(("quiet_s", "was_quiet"), [(1.9, False), (2.1, True)])
def test_a_lost_host_ends_the_run_and_is_the_cause(quiet_s: float, was_quiet: bool) -> None:
    drive = running("a", "b")
    heard = drive.now
    commands = drive.lose("b", after_s=quiet_s)
    assert closed(commands) == ["b"]
    assert receivers(drive.collected("a"), Stop) == ["a"]
    drive.say("a", drive.exited("a", 0, -signal.SIGTERM, provoked=True))
    assert drive.event(AgentMessage("b", 1, drive.exited("b", 2, 9))) == [], "nothing is heard from the dead"
    drive.goodbye("a")
    drive.wait(CHECK_S)
    cause = drive.cause
    assert (cause.kind, cause.host, cause.message) == (FailureKind.HOST_LOST, "b", "the connection broke")
    assert (drive.outcome.exit_code, drive.outcome.secondary_failures) == (1, ())
    assert cause.at == (heard if was_quiet else heard + quiet_s)


def test_a_silent_host_was_lost_when_it_was_last_heard() -> None:
    drive = running("a", "b")
    last = drive.now
    assert closed(drive.wait(T - 1, heard="a")) == []
    commands = drive.wait(1, heard="a")
    assert closed(commands) == ["b"]
    drive.collected("a")
    drive.goodbye("a")
    drive.wait(CHECK_S)
    cause = drive.cause
    assert (cause.message, cause.at) == ("nothing was heard from it for 30 s", last)
    assert cause.ran_s == pytest.approx(last + T - 1000.0), "until that was noticed"


def test_an_agent_that_someone_else_ends_is_a_lost_host() -> None:
    drive = running("a", "b")
    drive.say("b", drive.exited("b", 2, 0, provoked=True), drive.exited("b", 3, -15, provoked=True))
    at = drive.now
    drive.say("b", Bye(0, [], "it received SIGTERM"), after_s=7)
    assert receivers(drive.collected("a"), Stop) == ["a"]
    drive.goodbye("a")
    cause = drive.cause
    assert (cause.kind, cause.message) == (FailureKind.HOST_LOST, "it received SIGTERM")
    assert cause.at == at, "when the first of its workers was ended, not when it was done"
    assert (drive.outcome.exit_code, drive.outcome.unchecked) == (1, ())


def test_a_host_whose_workers_have_ended_well_may_go() -> None:
    drive = running("a", "b")
    drive.say("b", drive.exited("b", 2), drive.exited("b", 3))
    drive.lose("b")
    assert drive.job.phase is Phase.RUNNING
    drive.say("a", drive.exited("a", 0), drive.exited("a", 1))
    drive.goodbye("a")
    drive.wait(CHECK_S)
    assert (drive.outcome.exit_code, drive.outcome.cause) == (0, None)


def test_a_store_that_cannot_open_is_an_error_before_any_worker() -> None:
    drive = Drive("a", "b")
    drive.join()
    drive.check()
    assert receivers(drive.say("a", StoreFailed(0, "port 29500 is in use by pid 7", drive.now)), Stop) == ["a", "b"]
    drive.goodbye()
    assert isinstance(drive.outcome.error, StoreError)
    assert str(drive.outcome.error) == "a: port 29500 is in use by pid 7"
    assert (drive.outcome.exit_code, messages(drive.commands, StartWorker)) == (1, [])


def test_a_store_that_ends_while_workers_run_is_the_cause() -> None:
    drive = running("a", "b", clocks={"a": 33.0})
    drive.now += 5
    died = drive.time("a") - 1
    drive.say("b", drive.exited("b", 2, 1))  # a consequence, and quicker here
    drive.say("a", StoreFailed(0, "the store's process ended: Killed", died))
    drive.collected()
    drive.stop_all()
    assert (drive.cause.kind, drive.cause.host) == (FailureKind.STORE_LOST, "a")
    assert (drive.outcome.exit_code, len(drive.outcome.secondary_failures)) == (1, 1)


# ---- evidence, before anything is stopped --------------------------------------------------------------------


def test_where_the_others_stand_is_asked_before_they_are_stopped() -> None:
    drive = running("a", "b")
    commands = drive.say("a", drive.exited("a", 0, 1))
    assert (receivers(commands, Collect), receivers(commands, Stop)) == (["a", "b"], [])
    assert drive.say("a", drive.evidence(1), Collected(1)) == []
    commands = drive.say("b", drive.evidence(3), drive.evidence(2), Collected(1))
    (keep,) = [command for command in commands if isinstance(command, SaveEvidence)]
    assert [found.rank for found in keep.evidence] == [1, 2, 3]
    assert (keep.attempt, keep.asked, receivers(commands, Stop)) == (0, False, ["a", "b"])
    drive.stop_all()
    assert drive.outcome.evidence == keep.evidence


@pytest.mark.parametrize("restarts", [0, 1])
def test_what_failed_is_named_early_if_the_others_end_slowly(restarts: int) -> None:
    drive = running("a", "b", max_restarts=restarts)
    bad = {"type": "ValueError", "message": "bad batch", "where": ""}
    assert notices(drive.fail(2, error=bad)) == []
    assert notices(drive.wait(SLOW_S - 0.01, heard="ab")) == []
    (said,) = notices(drive.wait(0.02, heard="ab"))
    assert said == (
        "waiting for the workers on a, b to end, because rank 2 on b raised ValueError after 1.0 s: bad batch; what "
        "still runs in 9 s is killed (--grace-s)"
    )
    assert notices(drive.wait(5, heard="ab")) == [], "once"


def test_a_lost_host_is_named_before_it_is_fenced() -> None:
    drive = running("a", "b", "c", nnodes=(2, 3))
    drive.lose("b")
    drive.collected("a", "c")
    (said,) = notices(drive.wait(SLOW_S, heard="ac"))
    assert said == (
        "waiting until the workers on b are certainly gone (--heartbeat-timeout-s), because host b was lost after 0.0 "
        "s: the connection broke"
    )


LATE = {
    "type": "RuntimeError",
    "message": "Timed out waiting 5000ms for recv operation to complete",
    "where": "train.py:5 in main",
    "inside": "all_reduce",
}


def test_what_the_failed_ranks_had_waited_for_is_missing() -> None:
    drive = running("a", "b")
    for rank in (0, 1):
        drive.say("a", drive.exited("a", rank, 1, error=LATE))
    waits, loads = STOOD[1].stack, STOOD[2].stack
    drive.say("a", drive.evidence(1, stack=loads), Collected(1))  # it is about to raise
    drive.say("b", drive.evidence(2, stack=waits), drive.evidence(3, stack=loads), Collected(1))
    drive.wait(ROOT_WAIT_S, heard="ab")
    drive.stop_all()
    assert drive.outcome.missing == (MissingRank(3, "b", "/home/me/train.py:7 in load", "all_reduce"),)


def test_timed_out_ranks_in_another_collective_are_missing() -> None:
    drive = running("a", "b")
    for rank in range(4):
        error = {**LATE, "inside": "barrier", "where": "train.py:9 in main"} if rank == 3 else LATE
        drive.say(drive.host_of(rank), drive.exited(drive.host_of(rank), rank, 1, error=error))
    drive.collected()
    drive.wait(ROOT_WAIT_S, heard="ab")
    drive.goodbye()
    assert drive.outcome.missing == (MissingRank(3, "b", "train.py:9 in main, inside barrier", "all_reduce"),)


def test_sigquit_shows_where_the_ranks_stand_and_the_run_goes_on() -> None:
    drive = running("a", "b")
    assert receivers(drive.event(Signalled(signal.SIGQUIT)), Collect) == ["a", "b"]
    assert drive.event(Signalled(signal.SIGQUIT)) == [], "one at a time"
    drive.say("a", drive.evidence(0), Collected(1))
    (keep,) = [c for c in drive.wait(COLLECT_S, heard="ab") if isinstance(c, SaveEvidence)]
    assert (keep.asked, len(keep.evidence)) == (True, 1)
    assert drive.job.phase is Phase.RUNNING
    assert receivers(drive.event(Signalled(signal.SIGQUIT)), Collect) == ["a", "b"]
    drive.say("a", drive.evidence(0))
    commands = drive.say("b", drive.exited("b", 2, 1))
    assert [type(command) for command in commands] == [SaveEvidence, Send, Send], (
        "what was asked for is shown, then it is again"
    )


def test_a_lost_connection_waits_a_little_for_its_cause() -> None:
    closed_by_peer = {"type": "RuntimeError", "message": "Connection closed by peer [10.0.0.2]:1", "where": ""}
    drive = running("a", "b", "c")
    drive.say("a", drive.exited("a", 0, 1, error=closed_by_peer))
    assert receivers(drive.collected(), Stop) == []
    commands = drive.say("b", drive.exited("b", 2, -9), after_s=ROOT_WAIT_S / 2)
    assert receivers(commands, Stop) == ["a", "b", "c"]
    drive.goodbye()
    assert (drive.cause.rank, drive.outcome.exit_code) == (2, 137)


def test_a_host_that_is_silent_meanwhile_is_the_cause() -> None:
    drive = running("a", "b", "c", nnodes=(1, 3))
    drive.say("a", drive.exited("a", 0, -6), after_s=1)
    drive.collected("a", "b")
    commands = drive.wait(T - 2, heard="ab")
    assert receivers(commands, EndAttempt) == []
    commands = drive.wait(2, heard="ab")
    assert receivers(commands, EndAttempt) == ["a", "b"], "it costs no restart: there were none"
    drive.swept("a", "b")
    drive.wait(drive.job.fleet.fence_s, heard="ab")
    (ended, *_) = [text for text in notices(drive.commands) if "failed" in text]
    assert ended == f"attempt 0 failed: host c was lost after {T:.1f} s: nothing was heard from it for 30 s"


def test_what_a_host_sent_before_it_was_lost_proves_no_life() -> None:
    drive = running("a", "b", "c", nnodes=(1, 3))
    delayed = Heartbeat(drive.time("c") + 1)
    drive.say("a", drive.exited("a", 0, -6), after_s=2)
    drive.collected("a", "b")
    assert receivers(drive.wait(11, heard="ab"), EndAttempt) == []
    assert receivers(drive.say("c", delayed), EndAttempt) == [], "it was under way all the time"
    assert receivers(drive.lose("c"), EndAttempt) == ["a", "b"]
    cause = present(first_cause(present(drive.job.attempt).failures))
    assert (cause.kind, cause.at) == (FailureKind.HOST_LOST, drive.now - 12), "when it last sent something"


def test_a_host_that_sends_something_meanwhile_is_not_the_cause() -> None:
    drive = running("a", "b", "c", nnodes=(1, 3))
    drive.say("a", drive.exited("a", 0, -6), after_s=2)
    drive.collected("a", "b")
    assert receivers(drive.wait(11, heard="ab"), EndAttempt) == []
    assert receivers(drive.say("c", Heartbeat(drive.time("c") - 10)), Stop) == ["a", "b", "c"]


def test_a_host_whose_clock_stood_still_counts_as_silent() -> None:
    drive = running("a", "b", "c", nnodes=(1, 3))
    drive.clocks["c"] = -60.0
    drive.say("a", drive.exited("a", 0, -6), after_s=2)
    drive.collected("a", "b")
    assert receivers(drive.wait(T, heard="abc"), EndAttempt) == []
    assert receivers(drive.wait(ROOT_WAIT_S, heard="abc"), Stop) == ["a", "b", "c"]


def test_a_stall_is_a_failure_of_its_own() -> None:
    drive = running("a", "b", stall_timeout_s=20.0, start_timeout_s=10.0, hang=OFF)
    for progress in range(30):
        drive.say("a", Heartbeat(drive.time("a"), progress), after_s=1)
        drive.say("b", Heartbeat(drive.time("b"), 7))
        assert messages(drive.event(Tick()), Collect) == []
    assert receivers(drive.wait(20, heard="ab"), Collect) == [], "its own number has changed back, once"
    assert receivers(drive.wait(20, heard="ab"), Collect) == ["a", "b"]
    drive.collected()
    drive.stop_all()
    cause = drive.cause
    assert (cause.kind, cause.host, cause.rank) == (FailureKind.STALLED, "", None)
    assert (cause.message, drive.outcome.exit_code) == ("no rank has made progress for 20 s", 1)


def test_the_time_until_the_first_step_does_not_count_as_a_stall() -> None:
    """But no longer than --start-timeout-s; after a step each silence counts."""
    drive = Drive("a", "b", stall_timeout_s=12.0, start_timeout_s=60.0, hang=OFF)
    drive.run()
    drive.say("a", Heartbeat(drive.time("a"), progress=17))  # what importing has printed
    assert receivers(drive.wait(59, heard="ab"), Collect) == []
    drive.say("a", Heartbeat(drive.time("a"), progress=18, steps=1))
    drive.say("b", Started(0, 2, 200, drive.time("b")))  # in place of one that failed
    assert receivers(drive.wait(59, heard="ab"), Collect) == []
    drive.say("a", Heartbeat(drive.time("a"), progress=19, steps=2))
    assert receivers(drive.wait(11.5, heard="b"), Collect) == []
    assert receivers(drive.wait(0.5, heard="b"), Collect) == ["a", "b"]


def test_a_run_without_a_step_stalls_after_its_start() -> None:
    drive = running("a", "b", stall_timeout_s=12.0, start_timeout_s=60.0, hang=OFF)
    assert receivers(drive.wait(59.5, heard="ab"), Collect) == []
    assert receivers(drive.wait(0.5, heard="ab"), Collect) == ["a", "b"]


# ---- a worker that has failed and whose process goes on ------------------------------------------------------


def failing(drive: Drive, rank: int, status: int = 1, *, at: float, raised: bool = True) -> Failing:
    error = {"type": "ValueError", "message": "bad batch", "where": "t.py:9", "inside": ""} if raised else None
    clock = drive.clocks.get(drive.host_of(rank), 0.0)
    return Failing(drive.number, rank, 100 + rank, status, ran_s=at - 1000.0, error=error, time=at + clock)


@pytest.mark.parametrize("raised", [True, False])
def test_a_failure_counts_though_its_process_goes_on(raised: bool) -> None:
    drive = running("a", "b", clocks={"b": 500.0})
    at = drive.now
    commands = drive.say("b", failing(drive, 3, 3, at=at, raised=raised), after_s=1)
    assert receivers(commands, Collect) == ["a", "b"]
    drive.collected()
    drive.say("b", drive.exited("b", 3, 3, at=at, error=failing(drive, 3, at=at, raised=raised).error), after_s=10)
    drive.stop_all()
    cause = drive.cause
    kind = FailureKind.RAISED if raised else FailureKind.EXITED
    assert (cause.kind, cause.rank, cause.at, cause.status) == (kind, 3, at, 3)
    assert (drive.outcome.secondary_failures, drive.outcome.stopped, drive.outcome.exit_code) == ((), 3, 3)


def test_how_a_failing_process_ends_by_itself_is_its_exit_code() -> None:
    drive = running("a", "b")
    said = failing(drive, 3, at=drive.now)
    drive.say("b", said, after_s=1)
    drive.collected()
    drive.say("b", drive.exited("b", 3, 17, at=said.time, error=said.error), after_s=1)
    drive.stop_all()
    assert (drive.cause.rank, drive.outcome.exit_code) == (3, 17)
    assert drive.outcome.secondary_failures == ()


def test_a_failing_process_that_has_to_stop_is_left_to_its_end() -> None:
    drive = running("a", "b")
    drive.fail(0)
    assert drive.say("b", failing(drive, 3, at=drive.now), after_s=0.5) == []
    drive.stop_all()
    assert drive.cause.rank == 0
    assert drive.outcome.secondary_failures == ()


# ---- back at work --------------------------------------------------------------------------------------------


def test_another_attempt_begins_once_all_workers_are_gone() -> None:
    drive = running("a", "b", max_restarts=1)
    assert receivers(drive.fail(0, 7), EndAttempt) == ["a", "b"]
    assert drive.swept("a") == []
    commands = drive.swept("b")
    assert notices(commands) == [
        "attempt 0 failed: rank 0 on a exited with code 7 after 1.0 s",
        "attempt 1 begins on 2 hosts",
    ]
    assert messages(commands, OpenStore) == [OpenStore(1, "", "b", 29500, exact=False)]
    starts = messages(drive.say("a", StoreOpened(0, "10.0.0.9", 1), StoreOpened(1, "10.0.0.9", 29501)), StartWorker)
    assert [(start.attempt, start.rank) for start in starts] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert {start.env["TORCHELASTIC_RESTART_COUNT"] for start in starts} == {"1"}
    assert {start.env["MASTER_PORT"] for start in starts} == {"29501"}
    drive.end_well()
    assert (drive.outcome.exit_code, drive.outcome.attempts, drive.outcome.cause) == (0, 2, None)


def test_restarts_are_used_up_and_the_last_cause_decides() -> None:
    drive = running("a", max_restarts=2)
    pauses = []
    for status in (3, 4):
        drive.fail(0, status)
        ended = drive.now
        drive.swept()
        while drive.phase() is Phase.GATHERING:
            drive.wait(0.125, heard="a")
        pauses.append(drive.now - ended)
        drive.begin()
    assert pauses == [0.0, 0.5], "it backs off"
    assert receivers(drive.fail(1, 5), Stop) == ["a"], "for good"
    drive.goodbye()
    outcome = drive.outcome
    assert (outcome.exit_code, outcome.attempts) == (5, 3)
    assert outcome.no_restart_reason == "all 2 restarts (--max-restarts) were used"


def test_what_no_restart_can_mend_is_not_tried_again() -> None:
    drive = running("a", max_restarts=5)
    assert receivers(drive.fail(0, 127, pid=0), Stop) == ["a"]
    drive.goodbye()
    assert drive.cause.kind is FailureKind.NEVER_STARTED
    assert drive.outcome.no_restart_reason == "not tried again: a restart cannot fix that"
    assert drive.outcome.exit_code == 127


@pytest.mark.parametrize("saved", [0, 1])
def test_a_crash_loop_without_progress_ends_early(saved: int) -> None:
    drive = running("a", max_restarts=100)
    for _ in range(4):
        drive.fail(0, 1)
        drive.swept(saved=saved)
        drive.wait(30, heard="a")
        drive.begin()
    assert receivers(drive.fail(0, 1), EndAttempt) == ["a"], "whether it made progress is not known before it has ended"
    commands = drive.swept(saved=saved)
    if saved:
        assert drive.job.phase is Phase.OPENING_STORE
        return
    assert receivers(commands, Stop) == ["a"]
    drive.goodbye()
    assert (
        drive.outcome.no_restart_reason
        == "not tried again: the same failure came 5 times in a row, without any progress"
    )
    assert (drive.outcome.attempts, drive.outcome.exit_code) == (5, 1)


def test_too_few_hosts_end_the_run_with_the_last_cause() -> None:
    drive = running("a", "b", max_restarts=3, start_timeout_s=20.0)
    drive.lose("b", "no route to host")
    drive.collected("a")
    drive.swept("a")
    commands = drive.wait(100, heard="a")
    assert receivers(commands, Stop) == ["a"]
    drive.goodbye("a")
    drive.wait(CHECK_S)
    assert drive.outcome.no_restart_reason.startswith(
        "1 of at least 2 hosts were ready for another attempt within 20 s"
    )
    assert "b: " in drive.outcome.no_restart_reason
    assert (drive.outcome.exit_code, drive.outcome.cause is not None) == (1, True)


def test_a_host_is_fenced_by_the_end_of_its_lease() -> None:
    drive = running("a", "b", nnodes=(1, 2))
    drive.lose("b")
    drive.collected("a")
    drive.swept("a")
    drive.event(Tick())
    assert drive.job.phase is Phase.ENDING, "its workers may live"
    heard = drive.job.fleet.states["b"].heard
    fenced_at = heard + T + drive.job.fleet.fence_s
    commands = drive.wait(fenced_at - drive.now - 0.1, heard="a")
    assert messages(commands, OpenStore) == []
    drive.lose("b", "no route to host")
    commands = drive.wait(0.1, heard="a")
    assert receivers(commands, OpenStore) == ["a"], (
        "its agent has heard no heartbeat for so long that it has ended them"
    )
    drive.begin()
    drive.end_well()
    drive.wait(CHECK_S)
    ((name, reason),) = drive.outcome.unchecked
    assert (name, drive.outcome.exit_code) == ("b", 0)
    assert reason == (
        "no route to host; a host ends its workers by itself 30 s after it last heard from dtrain, "
        "one that is stopped, frozen, paused or asleep when it goes on"
    )


def test_a_host_that_was_suspended_and_lost_is_never_fenced() -> None:
    drive = running("a", "b", nnodes=(1, 2))
    drive.event(Signalled(signal.SIGTSTP))
    drive.event(Slept(100), after_s=100)
    drive.event(Signalled(signal.SIGCONT))
    drive.lose("b")
    drive.collected("a")
    drive.swept("a")
    commands = drive.wait(200, heard="a")
    assert messages(commands, OpenStore) == []
    drive.goodbye("a")
    drive.wait(CHECK_S)
    assert drive.outcome.no_restart_reason == "no further attempt: workers of the last one may still live on b"
    assert [name for name, _ in drive.outcome.unchecked] == ["b"]


def test_a_host_that_is_never_fenced_has_time_to_come_back() -> None:
    drive = running("a", "b", nnodes=(1, 2), max_restarts=1)
    drive.event(Signalled(signal.SIGTSTP))
    drive.event(Slept(100), after_s=100)
    drive.event(Signalled(signal.SIGCONT))
    drive.say("a", drive.exited("a", 0, 7))
    drive.collected("a")
    drive.wait(COLLECT_S, heard="a")
    drive.swept("a")
    while "b" not in closed(drive.commands):
        drive.wait(0.5, heard="a")
    assert receivers(drive.wait(T - 1, heard="a"), Stop) == []
    assert receivers(drive.wait(1, heard="a"), Stop) == ["a"]


@pytest.mark.parametrize("left", [[], ["pid 9 (python, state D)"]])
def test_only_what_is_left_of_an_earlier_run_is_an_error(left: list[str]) -> None:
    drive = Drive("a")
    drive.join("a")
    commands = drive.say("a", drive.facts("a", killed_runs=1, ended=2, not_ended=left))
    (notice,) = (command for command in commands if isinstance(command, Notice))
    assert (notice.is_error, "; still there on a: pid 9" in notice.text) == (bool(left), bool(left))


def test_what_cannot_be_ended_keeps_its_host_out() -> None:
    drive = running("a", "b", "c", nnodes=(1, 2), max_restarts=1)
    drive.fail(0, 7)
    commands = drive.swept("a", left=["pid 9 (python, state D)"])
    assert receivers(commands, Stop) == ["a"]
    assert notices(commands) == ["a cannot be used for now: processes cannot be ended there: pid 9 (python, state D)"]
    drive.goodbye("a", left=["pid 9 (python, state D)"])
    assert receivers(drive.swept("b"), OpenStore) == ["c"]
    assert drive.members == ("c", "b")
    drive.begin()
    drive.end_well()
    assert drive.outcome.left == (("a", ("pid 9 (python, state D)",)),)


def test_leftovers_that_a_new_agent_cannot_end_are_named() -> None:
    drive = running("a", "b", nnodes=(1, 2))
    drive.lose("a")
    drive.collected("b")
    drive.swept("b")
    drive.event(Tick())
    drive.join("a")
    commands = drive.say("a", drive.facts("a", left=["pid 9 (python, state D)"]))
    assert receivers(commands, Stop) == ["a"]
    assert receivers(commands, OpenStore) == ["b"]
    drive.goodbye("a")
    drive.begin()
    drive.end_well()
    assert drive.outcome.left == (("a", ("pid 9 (python, state D)",)),)


def test_the_host_of_an_agent_that_left_something_is_not_used() -> None:
    drive = running("a", "b", nnodes=(1, 2))
    drive.say("b", Bye(0, ["pid 9 (python, state D)"], "it received SIGTERM"))
    drive.collected("a")
    assert receivers(drive.swept("a"), OpenStore) == ["a"]
    drive.begin()
    assert opened(drive.wait(60, heard="a")) == []
    drive.end_well()
    assert drive.outcome.left == (("b", ("pid 9 (python, state D)",)),)


def test_the_only_host_lost_while_the_store_opens_ends_the_run() -> None:
    drive = Drive("a")
    drive.join()
    drive.check()
    drive.lose("a")
    drive.wait(CHECK_S)
    assert (drive.cause.kind, drive.outcome.exit_code) == (FailureKind.HOST_LOST, 1)


def test_a_long_grace_period_is_not_cut_short_by_the_lease() -> None:
    drive = running("a", grace_s=300.0, max_restarts=1)
    drive.fail(0, 7)
    assert len(messages(drive.wait(290, heard="a"), Heartbeat)) > 90
    drive.event(Signalled(signal.SIGTERM))
    assert len(messages(drive.wait(290, heard="a"), Heartbeat)) > 90
    drive.goodbye()
    assert drive.outcome.exit_code == 7


# ---- elastic -------------------------------------------------------------------------------------------------


def lose_and_leave(drive: Drive, name: str) -> None:
    """Lose a host that answers no more, and let the others begin the next attempt."""
    drive.lose(name)
    others = [member for member in drive.members if member != name]
    if drive.job.phase is Phase.EVIDENCE_ROUND:
        drive.collected(*others)
    drive.swept(*others)
    drive.event(Tick())
    drive.lose(name, "connection refused")
    while drive.job.phase is not Phase.OPENING_STORE:
        drive.wait(1, heard="".join(state.name for state in drive.job.fleet if state.greeted))
        if drive.job.fleet.states[name].phase.name == "CONNECTING":
            drive.lose(name, "connection refused")


def test_a_lost_host_costs_no_restart_and_the_others_go_on() -> None:
    drive = running("a", "b", "c", nnodes=(2, 3))
    lose_and_leave(drive, "a")
    assert drive.members == ("b", "c")
    assert notices(drive.commands)[-1] == "attempt 1 begins on 2 hosts, without a"
    drive.begin()
    drive.end_well()
    drive.wait(CHECK_S)
    assert (drive.outcome.exit_code, drive.outcome.attempts, drive.outcome.world_size) == (0, 2, 4)


def test_a_spare_takes_the_place_of_a_lost_host() -> None:
    drive = running("a", "b", "c", nnodes=(2, 2), max_restarts=0)
    assert drive.members == ("a", "b")
    lose_and_leave(drive, "a")
    assert drive.members == ("c", "b")
    assert notices(drive.commands)[-1] == "attempt 1 begins on 2 hosts, without a, with c"


def test_a_returned_host_is_used_at_once_with_grow_only() -> None:
    for grow in (False, True):
        drive = running("a", "b", nnodes=(1, 2), grow=grow)
        lose_and_leave(drive, "a")
        drive.begin()
        while drive.job.fleet.states["a"].phase.name != "CONNECTING":
            drive.wait(0.5, heard="b")
        commands = drive.back("a")
        if not grow:
            assert commands[1:] == []
            assert drive.job.phase is Phase.RUNNING
            continue
        assert notices(commands) == ["a has come; attempt 1 ends so that the next one can use it"]
        assert receivers(commands, EndAttempt) == ["b"]
        assert receivers(drive.swept("b"), OpenStore) == ["b"]
        assert drive.members == ("b", "a"), "who stayed keeps its rank"


def without_the_last(*names: str, **changes: Any) -> Drive:
    """Return a job that is to grow and opens its store on all hosts but the last, which is not reached."""
    drive = Drive(*names, grow=True, **changes)
    drive.join(*names[:-1])
    drive.check(*names[:-1])
    drive.lose(names[-1], "connection refused")
    return drive


def test_a_host_that_comes_while_workers_start_is_used_later() -> None:
    drive = without_the_last("a", "b", nnodes=(1, 2))
    drive.say("a", drive.opened())
    drive.wait(1)
    drive.back("b")
    assert drive.say("a", Started(0, 0, 100, drive.now)) == []
    assert receivers(drive.say("a", Started(0, 1, 101, drive.now)), EndAttempt) == ["a"]


def test_a_run_about_to_end_does_not_grow() -> None:
    drive = without_the_last("a", "b", nnodes=(1, 2))
    drive.begin()
    drive.say("a", drive.exited("a", 0))
    drive.wait(1)
    drive.back("b")
    assert drive.job.phase is Phase.RUNNING


def test_a_run_that_wanted_to_grow_and_has_too_few_hosts_failed() -> None:
    drive = without_the_last("a", "b", "c", nnodes=(2, 3), start_timeout_s=20.0)
    drive.begin()
    drive.wait(1)
    drive.back("c")
    drive.swept("a")
    drive.lose("c")
    drive.say("b", Swept(0, 0, 0, ["pid 9 (python, state D)"]))
    drive.goodbye("b")
    commands = drive.wait(30, heard="a")
    assert receivers(commands, Stop) == ["a"]
    drive.goodbye("a")
    assert (drive.cause.kind, drive.cause.host) == (FailureKind.HOST_LOST, "b")
    assert (drive.outcome.exit_code, drive.outcome.no_restart_reason != "") == (1, True)


def test_a_host_that_never_joins_when_it_may_is_left_out() -> None:
    drive = without_the_last("a", "b", nnodes=(1, 2))
    for _ in range(2):
        drive.begin()
        while drive.job.fleet.states["b"].phase.name != "CONNECTING":
            drive.wait(0.5, heard="a")
        assert receivers(drive.back("b"), EndAttempt) == ["a"]
        drive.lose("b")
        drive.swept("a")
        assert drive.members == ("a",)
        drive.wait(4, heard="a")
    assert (
        notices(drive.commands)[-1]
        == "b is excluded from further attempts: for 2 attempts that ended for it, it was gone again"
    )
    drive.begin()
    assert opened(drive.wait(60, heard="a")) == []


def test_a_host_that_ends_two_attempts_in_a_row_is_left_out() -> None:
    drive = running("a", "b", nnodes=(1, 2), max_restarts=5)
    drive.fail(2, 7)
    drive.swept()
    drive.begin()
    drive.fail(2, 8)
    commands = drive.swept()
    assert "b is excluded from further attempts: it ended 2 attempts in a row" in notices(commands)
    assert receivers(commands, Stop) == ["b"]
    drive.wait(1, heard="a")
    assert drive.members == ("a",)


def test_a_host_that_is_left_out_is_tried_until_it_is_clean() -> None:
    drive = running("a", "b", nnodes=(1, 2), max_restarts=5)
    drive.fail(2, 7)
    drive.swept()
    drive.begin()
    drive.lose("b")
    drive.collected("a")
    drive.swept("a")
    b, excluded = drive.job.fleet.states["b"], "b is excluded from further attempts: it ended 2 attempts in a row"
    while excluded not in notices(drive.commands):
        drive.wait(0.5, heard="a")
        if b.phase is HostPhase.CONNECTING:
            drive.lose("b", "connection refused")
    tried = opened(drive.commands).count("b")
    drive.wait(11.0, heard="a")
    assert opened(drive.commands).count("b") == tried + 1


def test_a_host_is_not_left_out_where_it_is_needed() -> None:
    drive = running("a", "b", max_restarts=5)
    for status in (7, 8, 9):
        drive.fail(2, status)
        drive.swept()
        drive.wait(1, heard="ab")
        drive.begin()
    assert drive.members == ("a", "b")


def test_a_run_begins_with_enough_hosts_after_a_last_call() -> None:
    drive = Drive("a", "b", "c", nnodes=(2, 3))
    drive.join("a", "b")
    drive.check("a", "b")
    assert messages(drive.wait(14.9, heard="ab"), OpenStore) == []
    assert receivers(drive.wait(0.1, heard="ab"), OpenStore) == ["a"]
    assert drive.members == ("a", "b")


def test_a_run_begins_at_once_with_the_hosts_named_first() -> None:
    for ready, phase in (("ac", Phase.GATHERING), ("ab", Phase.OPENING_STORE)):
        drive = Drive("a", "b", "c", nnodes=(1, 2))
        drive.join(*ready)
        drive.check(*ready)
        assert drive.phase() is phase, "the third host is on its way"


def test_half_of_the_time_left_for_the_start_is_for_imports() -> None:
    drive = Drive("a", "b", start_timeout_s=60.0)
    drive.wait(20.0)
    drive.join()
    drive.check()
    starts = messages(drive.say("a", drive.opened()), StartWorker)
    assert {start.wait_s for start in starts} == {20.0}


def test_a_last_call_leaves_time_for_the_start() -> None:
    drive = Drive("a", "b", "c", nnodes=(2, 3), start_timeout_s=10.0)
    drive.join("a", "b")
    drive.check("a", "b")
    assert receivers(drive.wait(10, heard="ab"), OpenStore) == ["a"], "c did not answer in all that time"
    drive.wait(5, heard="ab")
    drive.begin()


def test_a_host_that_a_run_begins_without_is_named() -> None:
    drive = Drive("a", "b", nnodes=(1, 2))
    drive.join()
    commands = drive.say("b", drive.facts("b", problems=["no /work"]))
    assert notices(commands) == ["b cannot be used for now: no /work"]
    assert receivers(drive.check("a"), OpenStore) == ["a"]


def test_a_host_that_workers_do_not_fit_is_left_out_of_enough() -> None:
    hosts = (Host("a", HostKind.SSH), Host("b", HostKind.SSH))
    drive = Drive("a", "b", hosts=hosts, nnodes=(1, 2), nproc="gpu")
    drive.join()
    drive.say("a", drive.facts("a", gpus=["0", "1"], gpus_verified=True))
    commands = drive.check("b")
    assert "b is excluded from further attempts: one worker for each GPU, but it has none" in notices(commands)
    assert receivers(commands, OpenStore) == ["a"]
    assert drive.members == ("a",)


def test_below_the_least_number_the_run_waits_and_then_ends() -> None:
    drive = Drive("a", "b", "c", nnodes=(2, 3), start_timeout_s=20.0)
    drive.join("a")
    drive.check("a")
    drive.lose("b", "connection refused")
    drive.lose("c", "connection refused")
    assert "b" in opened(drive.wait(10, heard="a")), "it is tried again"
    assert receivers(drive.wait(10, heard="a"), Stop) == ["a"]
    drive.goodbye("a")
    assert isinstance(drive.outcome.error, StartError)
    assert drive.outcome.error.reasons["b"] == "connection refused"


# ---- signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_decides_the_exit_code(signum: signal.Signals) -> None:
    drive = running("a", "b")
    commands = drive.event(Signalled(signum))
    assert [(tell.host, tell.message) for tell in tells(commands)] == [
        (name, Stop(signum=signum)) for name in ("a", "b")
    ]
    drive.say("a", drive.exited("a", 0, 1))  # the script's own answer to the signal
    drive.stop_all()
    assert (drive.outcome.exit_code, drive.outcome.signum, drive.outcome.cause) == (128 + signum, signum, None)


def test_a_signal_between_two_attempts_ends_the_run() -> None:
    drive = running("a", max_restarts=5)
    drive.fail(0, 7)
    drive.swept()
    drive.begin()
    drive.say("a", drive.exited("a", 0, 7))
    number = messages(drive.commands, Collect)[-1].number
    drive.say("a", drive.evidence(1), Collected(number))
    drive.say("a", drive.exited("a", 1, -signal.SIGTERM, provoked=True))
    drive.swept()
    assert drive.job.phase is Phase.GATHERING
    assert drive.job.attempt is not None
    assert drive.job.attempt.evidence
    assert receivers(drive.event(Signalled(signal.SIGINT)), Stop) == ["a"]
    drive.goodbye()
    assert (drive.outcome.exit_code, drive.outcome.signum, drive.outcome.cause) == (130, 2, None)
    assert drive.outcome.evidence == (), "where the ranks of an earlier attempt stood is history as well"


def test_a_second_ctrl_c_kills_at_once_and_more_delay_nothing() -> None:
    drive = running("a", "b")
    drive.event(Signalled(signal.SIGINT))
    second = drive.event(Signalled(signal.SIGINT), after_s=1)
    assert {stop.signum for stop in messages(second, Stop)} == {signal.SIGKILL}
    give_up_at = drive.now + ANSWER_S
    for _ in range(100):
        drive.event(Signalled(signal.SIGINT), after_s=0.1)
    drive.wait(give_up_at - drive.now - 0.1, heard="ab")
    assert drive.job.outcome is None
    drive.wait(0.1)
    assert drive.outcome.exit_code == 130


def test_after_a_ctrl_c_it_is_said_what_is_waited_for() -> None:
    def words(signum: int) -> list[str]:
        drive = running("a", "b", grace_s=10.0)
        commands = [*drive.event(Signalled(signum)), *drive.wait(0.5, heard="ab")]
        drive.goodbye("a")
        return [each.text for each in [*commands, *drive.wait(5, heard="b")] if isinstance(each, Notice)]

    assert words(signal.SIGTERM) == []
    (said,) = words(signal.SIGINT)
    assert "waiting for the workers on b to end; what still runs in 9 s is killed (--grace-s); a second Ctrl-C" in said


def test_a_second_ctrl_c_looks_at_no_lost_host_again() -> None:
    drive = running("a", "b")
    drive.lose("b")
    drive.event(Signalled(signal.SIGINT))
    drive.event(Tick())
    drive.connect("b")
    second = drive.event(Signalled(signal.SIGINT))
    assert (receivers(second, Stop), closed(second)) == (["a"], ["b"]), (
        "nothing is sent to an agent that has not greeted"
    )
    drive.goodbye("a")
    assert [name for name, _ in drive.outcome.unchecked] == ["b"]


def test_ctrl_c_after_a_failure_kills_and_keeps_the_cause() -> None:
    drive = running("a")
    drive.fail(1, 5)
    assert [stop.signum for stop in messages(drive.event(Signalled(signal.SIGINT)), Stop)] == [signal.SIGKILL]
    drive.stop_all()
    assert (drive.outcome.exit_code, drive.outcome.signum) == (5, None)


def test_nothing_after_the_last_worker_changes_the_outcome() -> None:
    drive = running("a")
    drive.say("a", drive.exited("a", 0), drive.exited("a", 1))
    drive.say("a", StoreFailed(0, "the store's process ended", drive.now))
    drive.event(Signalled(signal.SIGTERM))
    drive.goodbye()
    outcome = drive.outcome
    assert (outcome.exit_code, outcome.signum, outcome.cause, outcome.error) == (0, None, None, None)


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_are_passed_on_and_end_nothing(signum: signal.Signals) -> None:
    drive = Drive("a", "b")
    drive.join("a")
    assert drive.event(Signalled(signum)) == []
    drive = running("a", "b")
    assert [(tell.host, tell.message) for tell in tells(drive.event(Signalled(signum)))] == [
        ("a", SignalWorkers(signum)), ("b", SignalWorkers(signum)),
    ]  # fmt: skip
    assert drive.job.phase is Phase.RUNNING


def test_a_run_that_is_to_make_room_ends_at_its_next_checkpoint() -> None:
    drive = running("a", "b", requeue=True)
    drive.say("a", Heartbeat(drive.time("a"), saved=1))
    drive.event(Signalled(signal.SIGUSR1))
    assert receivers(drive.say("a", Heartbeat(drive.time("a"), saved=1)), Stop) == []
    assert receivers(drive.say("b", Heartbeat(drive.time("b"), saved=1)), Stop) == ["a", "b"]
    drive.stop_all()
    assert (drive.outcome.preempted, drive.outcome.exit_code) == (True, 75)


def test_a_suspended_run_goes_on_where_it_was() -> None:
    drive = running("a", "b", stall_timeout_s=20.0)
    commands = drive.event(Signalled(signal.SIGTSTP))
    assert messages(commands, Suspend) == 2 * [Suspend(suspended=True)]
    assert isinstance(commands[-1], SuspendSelf)
    drive.event(Slept(3600), after_s=3600)
    assert messages(drive.event(Signalled(signal.SIGCONT)), Suspend) == 2 * [Suspend(suspended=False)]
    commands = drive.event(Tick())
    assert (closed(commands), messages(commands, Collect)) == ([], [])
    assert drive.event(Signalled(signal.SIGCONT)) == [], "it was not suspended"
    drive.end_well()
    assert drive.outcome.exit_code == 0


def test_the_start_waits_as_long_as_files_are_sent() -> None:
    drive = Drive("a", "b", start_timeout_s=20.0)
    drive.join("a")
    for _ in range(100):
        drive.event(Sending(1.0), after_s=1.0)
        drive.say("a", Heartbeat(drive.time("a")))
    drive.join("b")
    drive.run()
    assert drive.phase() is Phase.RUNNING


def test_a_stop_while_hosts_still_connect_waits_for_none_of_them() -> None:
    drive = Drive("a", "b", "c")
    drive.join("a")
    drive.connect("b")
    commands = drive.event(Signalled(signal.SIGINT))
    assert (receivers(commands, Stop), closed(commands)) == (["a"], ["b", "c"])
    assert drive.connect("c") == []
    assert drive.say("b", drive.hello("b")) == []
    drive.goodbye("a")
    assert (drive.outcome.exit_code, drive.outcome.error, drive.outcome.world_size) == (130, None, 0)


# ---- the end -------------------------------------------------------------------------------------------------


def test_a_host_that_does_not_answer_is_given_up() -> None:
    drive = running("a", "b", grace_s=20.0)
    drive.event(Signalled(signal.SIGTERM))
    drive.goodbye("a")
    assert closed(drive.wait(20 + ANSWER_S - 0.1, heard="b")) == []
    assert closed(drive.wait(0.1)) == ["b"]
    ((name, reason),) = drive.outcome.unchecked
    assert name == "b"
    assert reason == (
        "it did not say that its workers are gone; if it still runs, it ends its workers by itself within 32 s"
    )
    assert drive.outcome.exit_code == 143


def test_a_lost_host_is_looked_at_once_more_before_the_end() -> None:
    drive = running("a", "b")
    drive.event(Signalled(signal.SIGTERM))
    drive.lose("b")
    drive.goodbye("a")
    assert drive.job.outcome is None
    assert opened(drive.event(Tick())) == ["b"]
    drive.join("b")
    assert messages(drive.commands, Prepare)[-1].lost_agents == ["b1"]
    assert receivers(drive.check("b"), Stop) == ["b"]
    drive.goodbye("b")
    assert (drive.outcome.unchecked, drive.outcome.exit_code) == ((), 143)


def test_what_an_older_link_still_says_is_ignored() -> None:
    drive = running("a", "b", max_restarts=1)
    drive.lose("b")
    drive.event(Tick())
    for late in (
        AgentMessage("b", 1, Bye(0, [], "")),
        Lost("b", 1, "late"),
        AgentMessage("b", 1, Swept(0, 0, 0, [])),
        Connected("b", 1),
    ):
        assert drive.event(late) == []
    assert drive.job.fleet.dirty(drive.job.fleet.states["b"])


def test_progress_says_what_is_waited_for() -> None:
    drive = Drive("a", "b", "c", "d", "e")
    assert drive.job.progress == "0 of 5 hosts ready; waiting for a, b, c and 2 more"
    drive.join()
    drive.check("a", "b", "c", "d")
    assert drive.job.progress == "4 of 5 hosts ready; waiting for e"
    drive.check("e")
    assert drive.job.progress == "opening the rendezvous store"
    drive.say("a", drive.opened())
    assert drive.job.progress == "0 of 10 workers started"
    drive.event(Signalled(signal.SIGINT))
    drive.goodbye("a", "b", "c", "d")
    assert drive.job.progress == "stopping; waiting for e"
    drive.goodbye("e")
    assert drive.job.progress == ""


def test_nothing_happens_after_the_end() -> None:
    drive = Drive("a")
    assert closed(drive.event(Signalled(signal.SIGTERM))) == ["a"]
    outcome = drive.outcome
    assert outcome.exit_code == 143
    late = (
        Connected("a", 1),
        AgentMessage("a", 1, drive.hello("a")),
        Lost("a", 1, "x"),
        Signalled(signal.SIGINT),
        Tick(),
    )
    for event in late:
        assert drive.event(event, after_s=100) == []
    assert drive.outcome is outcome


# ---- processes that fail alone -------------------------------------------------------------------------------

PEER_LOST = {"type": "RuntimeError", "message": "Connection closed by peer", "where": "t.py:3", "inside": ""}


def fails_alone(drive: Drive, rank: int, restart_policy: int = 1, status: int = -9, **changes: Any) -> list[Command]:
    host = drive.host_of(rank)
    return drive.say(host, drive.exited(host, rank, status, restart_policy=restart_policy, **changes))


def test_a_process_that_stands_alone_starts_again_alone() -> None:
    drive = running("a", "b", max_restarts=3)
    commands = fails_alone(drive, 3, ran_s=12.3)
    assert [(tell.host, tell.message) for tell in tells(commands)] == [("b", RestartWorker(3, 0, restart=1))]
    assert notices(commands) == [
        "rank 3 on b was killed by SIGKILL after 12.3 s; only this worker restarts (restart 1 of 3)"
    ]
    drive.say("b", Started(0, 3, 200, drive.time("b")))
    assert messages(fails_alone(drive, 2, restart_policy=2, status=1), RestartWorker) == [
        RestartWorker(2, 0, restart=1)
    ]
    again = fails_alone(drive, 3) + drive.wait(0.5, heard="ab")
    assert messages(again, RestartWorker) == [RestartWorker(3, 0, restart=2)]
    assert notices(again) == [
        "rank 3 on b was killed by SIGKILL after 1.0 s; only this worker restarts in 0.5 s (restart 3 of 3)"
    ]
    assert drive.job.phase is Phase.RUNNING
    assert messages(drive.commands, Collect) == []
    drive.end_well()
    assert (drive.outcome.exit_code, drive.outcome.attempts, drive.outcome.worker_restarts) == (0, 1, 3)


def test_what_looks_like_a_consequence_waits_for_its_cause() -> None:
    drive = running("a", "b", max_restarts=1)
    assert messages(fails_alone(drive, 3, status=1, error=PEER_LOST), RestartWorker) == []
    drive.wait(0.5, heard="ab")
    drive.fail(0, 7, at=drive.now - 0.5)
    assert drive.job.phase is Phase.ENDING
    drive.swept()
    assert messages(drive.commands, RestartWorker) == []
    assert "rank 0 on a exited with code 7" in notices(drive.commands)[-2]
    assert receivers(drive.commands, OpenStore) == ["a", "a"], "it took the one restart, not two"
    drive.begin()
    fails_alone(drive, 3)
    drive.end_well()
    assert (drive.outcome.exit_code, drive.outcome.worker_restarts) == (137, 0)


def test_others_that_cannot_do_without_it_end_the_attempt() -> None:
    drive = running("a", "b", max_restarts=1)
    assert messages(fails_alone(drive, 3), RestartWorker) == [RestartWorker(3, 0, restart=1)]
    drive.say("b", Started(0, 3, 200, drive.time("b")), after_s=0.1)
    drive.fail(0, 1, error=PEER_LOST)
    drive.swept()
    assert notices(drive.commands)[-2].startswith("attempt 0 failed: rank 3 on b was killed by SIGKILL after 1.0 s")
    drive.begin()
    drive.end_well()
    assert (drive.outcome.exit_code, drive.outcome.attempts, drive.outcome.worker_restarts) == (0, 2, 0)


def test_a_later_failure_by_itself_is_the_cause() -> None:
    drive = running("a", "b", max_restarts=0)
    fails_alone(drive, 3)
    drive.now += 0.5
    drive.fail(0, 7)
    drive.stop_all()
    assert drive.outcome.exit_code == 7
    assert [failure.rank for failure in drive.outcome.left_out] == [3]


def test_a_process_left_out_is_the_cause_of_a_run_that_ended() -> None:
    drive = running("a", "b", "c", max_restarts=0)
    for rank in (4, 5):
        commands = fails_alone(drive, rank, status=-9 - rank)
        assert tells(commands) == []
        assert notices(commands)[0].endswith("; the other workers continue without it")
    assert drive.lose("c") == [Close("c")], "nothing lives there any more"
    drive.end_well()
    drive.wait(10.0)
    outcome = drive.outcome
    assert (outcome.exit_code, outcome.cause and outcome.cause.rank) == (128 + 13, 4)
    assert [failure.rank for failure in outcome.left_out] == [4, 5]


def test_the_last_of_those_that_the_run_waits_for_ends_it() -> None:
    drive = running("a", max_restarts=0)
    fails_alone(drive, 0, status=3)
    drive.now += 50
    assert receivers(fails_alone(drive, 1, status=4), Collect) == ["a"]
    drive.collected()
    drive.goodbye()
    outcome = drive.outcome
    assert (outcome.exit_code, outcome.left_out, len(outcome.secondary_failures)) == (3, (), 1)


def test_the_last_may_be_left_out_where_another_has_finished() -> None:
    drive = running("a", max_restarts=0)
    drive.say("a", drive.exited("a", 0))
    assert receivers(fails_alone(drive, 1), Stop) == ["a"]
    drive.goodbye()
    assert drive.outcome.exit_code == 137


def test_one_that_others_wait_for_ends_a_run_without_restarts() -> None:
    drive = running("a", "b", max_restarts=1)
    fails_alone(drive, 3, restart_policy=2)
    drive.say("b", Started(0, 3, 200, drive.time("b")), after_s=40)
    fails_alone(drive, 3, restart_policy=2, status=-11, ran_s=40.0)
    drive.collected()
    assert drive.job.phase is Phase.STOPPING
    drive.stop_all()
    assert (drive.outcome.exit_code, drive.outcome.no_restart_reason) == (
        139,
        "the one restart (--max-restarts) was used",
    )


def test_steps_are_progress_of_a_process_alone() -> None:
    drive = running("a", "b", max_restarts=100)
    for _ in range(12):
        commands = fails_alone(drive, 3, steps=1)
        assert len(messages(commands, RestartWorker)) == 1, "at once, each time"
        drive.say("b", Started(0, 3, 200, drive.time("b")))


def test_nothing_starts_again_while_the_attempt_ends_or_the_run() -> None:
    drive = running("a", "b", max_restarts=3)
    drive.say("a", drive.exited("a", 0, 7))
    assert messages(fails_alone(drive, 3), RestartWorker) == []
    drive.collected()
    assert messages(fails_alone(drive, 2), RestartWorker) == []
    drive.swept()
    drive.begin()
    fails_alone(drive, 3, status=1, error=PEER_LOST)
    drive.event(Signalled(signal.SIGINT))
    assert messages(drive.wait(3.0, heard="ab") + fails_alone(drive, 2), RestartWorker) == []
    drive.stop_all()
    assert drive.outcome.exit_code == 130


def test_a_run_does_not_stall_while_one_starts_again() -> None:
    drive = running("a", "b", max_restarts=9, stall_timeout_s=1.0, start_timeout_s=1.0)
    for _ in range(3):
        fails_alone(drive, 3, restart_policy=2, status=3)
        drive.wait(1.1, heard="ab")
        drive.say("b", Started(0, 3, 200, drive.time("b")))
    fails_alone(drive, 3, restart_policy=2, status=3)
    drive.wait(1.9, heard="ab")
    assert drive.job.phase is Phase.RUNNING
    drive.wait(10.0, heard="ab")  # sweeping what it left takes a while
    assert drive.job.phase is Phase.RUNNING
    drive.say("b", Started(0, 3, 200, drive.time("b")))
    drive.wait(1.1, heard="ab")
    assert drive.phase() is Phase.EVIDENCE_ROUND


def test_time_asleep_does_not_count_for_a_restart() -> None:
    drive = running("a", "b", max_restarts=1)
    fails_alone(drive, 3, status=1, error=PEER_LOST)
    drive.event(Slept(100.0), after_s=100.0)
    assert messages(drive.wait(0.9, heard="ab"), RestartWorker) == []
    assert len(messages(drive.wait(0.2, heard="ab"), RestartWorker)) == 1


def test_one_that_makes_room_is_not_started_again() -> None:
    drive = running("a", "b", max_restarts=3, requeue=True)
    drive.event(Signalled(signal.SIGUSR1))
    assert messages(fails_alone(drive, 3, status=75), RestartWorker) == []
    drive.collected()
    drive.stop_all()
    assert drive.outcome.exit_code == 75


def test_the_run_s_key_is_in_no_text() -> None:
    drive = Drive("a")
    drive.job.run.run_key = "canary"
    drive.run()
    starts = messages(drive.commands, StartWorker)
    assert {start.env["DTRAIN_RUN_KEY"] for start in starts} == {"canary"}
    assert "canary" not in repr(drive.commands)


def test_a_rank_that_finished_while_others_waited_is_known() -> None:
    drive = running("a", "b")
    drive.say("b", drive.exited("b", 3))
    lost = {"type": "RuntimeError", "message": "Connection closed by peer"}
    drive.fail(0, error=lost)
    drive.wait(ROOT_WAIT_S, heard="ab")
    drive.stop_all()
    assert drive.outcome.cause is not None
    assert (drive.cause.rank, drive.outcome.finished_ranks) == (0, (3,))


@pytest.mark.parametrize("by_user", [False, True])
def test_what_fails_after_our_stop_is_shown(by_user: bool) -> None:
    drive = running("a", "b")
    if by_user:
        drive.event(Signalled(signal.SIGTERM))
    else:
        drive.fail(0, 7)
    assert drive.phase() is Phase.STOPPING
    drive.now += 0.1
    drive.say("b", drive.exited("b", 3, 9))
    drive.stop_all()
    assert [failure.rank for failure in drive.outcome.secondary_failures] == ([] if by_user else [3])
