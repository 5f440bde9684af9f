"""What the job does about a rank that hangs: nothing, tell the user once, or have it killed and take that as failed."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from testbed.job_drive import Drive, messages, notices, receivers, running, tells
from testbed.outcomes import STOOD
from testbed.present import present

from launcher.hangs.watch import BUSY, QUIET_S, Blame, HangPolicy, WaitingRanks
from launcher.job.events import Command, Notice, SaveEvidence, Signalled, Tick
from launcher.job.failures.failure import FailureKind
from launcher.job.inspection import COLLECT_S
from launcher.job.recovery.hangs import Hangs
from launcher.job.run import Phase
from launcher.protocol.commands import Collect, KillWorker, RestartWorker, Stop
from launcher.protocol.reports import Collected, Collective, Collectives, Evidence
from launcher.protocol.two_way import Heartbeat

AUTO, REPORT, OFF = HangPolicy(acts=True), HangPolicy(), HangPolicy(watches=False)


def beat(drive: Drive, host: str, *, stopped: tuple[int, ...] = ()) -> list[Command]:
    return drive.say(host, Heartbeat(drive.time(host), steps=50, longest_s=[0.5, 0.0, 0.0], stopped=[*stopped]))


def called(number: int, operation: str = "all_reduce") -> Collectives:
    return Collectives(["default_pg"], [Collective("default_pg", number, operation, "Float[4]", 4, done=False)])


def hang(drive: Drive) -> list[Command]:
    beat(drive, "a")
    assert receivers(beat(drive, "b", stopped=(3,)), Collect) == ["a", "b"]
    return look(drive, stopped=(3,))


def beats(drive: Drive, hosts: str, *, stopped: tuple[int, ...] = (), silent_s: float = 0.0) -> list[Command]:
    """Let hosts of resilient workers send heartbeats; those of `stopped` are of the last one."""
    commands = []
    for host in hosts:
        known: dict[str, Any] = {"stopped": [*stopped], "silent_s": silent_s} if host == hosts[-1] else {}
        commands += drive.say(host, Heartbeat(drive.time(host), steps=50, resilient=True, **known))
    return commands


def look(
    drive: Drive, *, stopped: tuple[int, ...] = (), pids: dict[int, int] | None = None, last: Sequence[int] = ()
) -> list[Command]:
    """Let the hosts answer the newest look; `last` is the number of the last collective of each rank, if known."""
    commands = []
    for row in present(drive.job.attempt).ranks:
        rank = row.number
        known = {"state": "T" if rank in stopped else "S", "pid": (pids or {}).get(rank, 100 + rank)}
        found = drive.evidence(rank, **known, silent_s=1.5, steps=25)
        commands += drive.say(row.host, replace(found, collectives=called(last[rank])) if last else found)
    return commands + drive.collected()


def without(drive: Drive, host: str, *, others: str) -> None:
    """Lose a host; the others go on once it is fenced."""
    drive.lose(host)
    for _ in range(34):
        beats(drive, others)
        drive.wait(1.0)
    assert (drive.job.phase, drive.members) == (Phase.RUNNING, tuple(others))


def three(policy: HangPolicy = AUTO) -> Drive:
    drive = running("a", "b", "c", hang=policy, nnodes=(1, 3), max_restarts=3)
    beats(drive, "abc")
    return drive


def killed(drive: Drive, *, restart_policy: int = 0) -> list[Command]:
    return drive.say("b", drive.exited("b", 3, -signal.SIGKILL, restart_policy=restart_policy, steps=25))


def test_a_resilient_rank_that_hangs_is_replaced_alone() -> None:
    drive = running("a", "b", hang=AUTO, max_restarts=1)
    commands = hang(drive)
    (order,) = messages(commands, KillWorker)
    assert (order.rank, order.attempt, order.signum, receivers(commands, KillWorker)) == (3, 0, signal.SIGKILL, ["b"])
    (keep,) = [command for command in commands if isinstance(command, SaveEvidence)]
    assert (len(keep.evidence), keep.asked) == (4, False)
    assert beat(drive, "b", stopped=(3,)) == [], "one at a time"
    commands = killed(drive, restart_policy=3)
    (said,) = notices(commands)
    assert said.startswith("rank 3 on b hung after 1.0 s: a signal stopped it")
    assert said.endswith("only this worker restarts (restart 1 of 1)")
    assert [order.rank for order in messages(commands, RestartWorker)] == [3]
    assert drive.job.phase is Phase.RUNNING


def test_another_rank_that_hangs_ends_the_attempt() -> None:
    drive = running("a", "b", hang=AUTO)
    hang(drive)
    commands = killed(drive)
    assert receivers(commands, Collect) == [], "all were looked at before"
    assert receivers(commands, Stop) == ["a", "b"]
    drive.stop_all()
    cause = drive.cause
    assert (cause.kind, cause.rank, drive.outcome.exit_code) == (FailureKind.HUNG, 3, 1)
    assert [each.rank for each in drive.outcome.evidence] == [0, 1, 2, 3]


def test_the_user_is_notified_once() -> None:
    drive = running("a", "b", hang=REPORT)
    commands = hang(drive)
    (said,) = notices(commands)
    assert said.startswith("rank 3 on b (pid 103) hangs: a signal stopped it")
    assert "--hang auto" in said
    assert [c.asked for c in commands if isinstance(c, SaveEvidence)] == [True]
    drive.wait(60, heard="ab")
    assert receivers(beat(drive, "b", stopped=(3,)), Collect) == ["a", "b"]
    assert notices(look(drive, stopped=(3,))) == []
    drive.end_well()
    assert drive.outcome.exit_code == 0


def test_the_collective_that_the_others_wait_in_is_said_with_it() -> None:
    for policy in (REPORT, AUTO):
        drive = running("a", "b", hang=policy)
        beat(drive, "a")
        beat(drive, "b", stopped=(3,))
        first, second = sorted(notices(look(drive, stopped=(3,), last=(9, 9, 9, 8))))
        assert first.startswith("rank 3 has not called all_reduce 9 (Float[4]) of group default_pg; ranks 0, 1, 2 have")
        assert second.startswith("rank 3 on b (pid 103) hangs: ")


def test_ranks_in_different_collectives_are_reported_once() -> None:
    drive = running("a", "b", hang=REPORT)
    attempt, hangs = drive.job.attempt, Hangs(REPORT)
    assert attempt is not None
    found = tuple(
        Evidence(7, 0, rank, 100 + rank, "S", "", 1, 0.0, "", collectives=called(5, operation))
        for rank, operation in enumerate(("all_reduce", "broadcast", "all_reduce", "all_reduce"))
    )
    said, keep = hangs.report_circle(attempt, Blame((), found, 300.0), 7)
    assert said == Notice(
        "all ranks wait, without a sign of life for 300 s\n  collective 5 of group default_pg is not the same: "
        "ranks 0, 2, 3 called all_reduce of Float[4], rank 1 called broadcast of Float[4]",
        is_error=True,
    )
    assert keep == SaveEvidence(0, 7, found, asked=True)
    assert hangs.report_circle(attempt, Blame((), found, 330.0), 8) == []
    same = tuple(replace(each, pid=1, collectives=called(5)) for each in found)
    assert hangs.report_circle(attempt, Blame((), same, 300.0), 9) == [], "they may wait for something else"


@pytest.mark.parametrize("policy", [AUTO, REPORT])
def test_ranks_that_all_wait_end_the_attempt_with_hang_auto(policy: HangPolicy) -> None:
    drive = running("a", "b", hang=policy)
    silent_s = BUSY * QUIET_S
    for _ in range(100):
        for host in "ab":
            if drive.say(host, Heartbeat(drive.time(host), steps=50, silent_s=silent_s)):
                for rank in range(4):
                    waits = drive.evidence(rank, stack=STOOD[0].stack, silent_s=silent_s, steps=25)
                    drive.say(drive.host_of(rank), waits)
                drive.collected()
        drive.wait(1.0)
    if policy.acts:
        assert (drive.cause.kind, drive.outcome.exit_code) == (FailureKind.STALLED, 1)
    else:
        assert drive.job.phase is Phase.RUNNING


def test_no_one_looks_if_that_was_asked_for() -> None:
    drive = running("a", "b", hang=OFF)
    assert beat(drive, "b", stopped=(3,)) == []


@pytest.mark.parametrize("stopped", [(), (0, 1, 2, 3)])
def test_a_look_that_finds_nothing_is_forgotten(stopped: tuple[int, ...]) -> None:
    drive = running("a", "b", hang=AUTO)
    beat(drive, "b", stopped=(3,))
    assert look(drive, stopped=stopped) == []
    assert drive.job.phase is Phase.RUNNING


def test_a_look_gives_way_to_the_user_and_to_a_failure() -> None:
    drive = running("a", "b", hang=AUTO)
    beat(drive, "b", stopped=(3,))
    assert receivers(drive.event(Signalled(signal.SIGQUIT)), Collect) == ["a", "b"]
    (shown,) = [c for c in look(drive, stopped=(3,)) if isinstance(c, SaveEvidence)]
    assert shown.asked
    drive.wait(60, heard="ab")
    assert receivers(beat(drive, "b", stopped=(3,)), Collect) == ["a", "b"]
    assert receivers(drive.say("a", drive.exited("a", 0, 1)), Collect) == ["a", "b"]
    assert drive.job.phase is Phase.EVIDENCE_ROUND


def test_a_host_that_does_not_answer_blames_no_one() -> None:
    drive = running("a", "b", hang=AUTO)
    beat(drive, "b", stopped=(3,))
    drive.say("b", drive.evidence(2, steps=25), drive.evidence(3, state="T", steps=25))
    drive.collected("b")
    assert messages(drive.wait(5, heard="ab"), KillWorker) == []


def test_one_that_has_ended_by_itself_meanwhile_did_not_hang() -> None:
    drive = running("a", "b", hang=AUTO)
    hang(drive)
    drive.say("b", replace(drive.exited("b", 3, 7)))
    drive.stop_all()
    assert (drive.cause.kind, drive.outcome.exit_code) == (FailureKind.EXITED, 7)


@pytest.mark.parametrize("policy", [AUTO, REPORT])
def test_after_the_loss_of_a_host_the_right_one_kills_the_rank(policy: HangPolicy) -> None:
    drive = three(policy)
    without(drive, "b", others="ac")
    beats(drive, "ac", stopped=(5,))
    commands = look(drive, stopped=(5,))
    assert notices(commands)[0].startswith("rank 5 on c (pid 105) hangs")
    orders = [(tell.host, tell.message.rank) for tell in tells(commands) if isinstance(tell.message, KillWorker)]
    assert orders == ([("c", 5)] if policy.acts else [])


def test_ranks_of_the_same_pid_on_two_hosts_are_two() -> None:
    drive = three(REPORT)
    beats(drive, "abc", stopped=(5,))
    assert len(notices(look(drive, stopped=(5,), pids={5: 57, 3: 57}))) == 1
    drive.wait(60, heard="abc")
    beats(drive, "acb", stopped=(3,))
    (said,) = notices(look(drive, stopped=(3,), pids={5: 57, 3: 57}))
    assert said.startswith("rank 3 on b (pid 57) hangs")


@pytest.mark.parametrize("end", ["its host is lost", "it has finished"])
def test_others_are_watched_after_a_killed_rank_ended_otherwise(end: str) -> None:
    drive = three()
    beats(drive, "abc", stopped=(5,))
    assert len(messages(look(drive, stopped=(5,)), KillWorker)) == 1
    if end == "its host is lost":
        without(drive, "c", others="ab")
    else:
        drive.say("c", drive.exited("c", 5))
        beats(drive, "c")
    drive.wait(60, heard="ab" if end == "its host is lost" else "abc")
    commands = beats(drive, "ab", stopped=(3,))
    assert "b" in receivers(commands, Collect)
    assert receivers(look(drive, stopped=(3,)), KillWorker) == ["b"]


def test_a_host_that_is_lost_is_suspected_no_longer() -> None:
    drive = three()
    beats(drive, "abc", silent_s=130.0)
    look(drive)
    without(drive, "c", others="ab")
    before = len(messages(drive.commands, Collect))
    for _ in range(60):
        beats(drive, "ab")
        drive.wait(1.0)
    assert len(messages(drive.commands, Collect)) == before


@pytest.mark.parametrize("known", [{"stopped": [5]}, {"silent_s": 130.0}])
def test_looks_that_a_host_does_not_answer_become_rarer(known: dict[str, Any]) -> None:
    drive = three()
    asked: set[int] = set()
    for _ in range(600):
        for host in "abc":
            drive.say(host, Heartbeat(drive.time(host), steps=50, resilient=True, **(known if host == "c" else {})))
        drive.wait(1.0)
        asked = {each.number for each in messages(drive.commands, Collect)}
        drive.say("a", Collected(max(asked)))
    looks = len(asked)
    assert 3 <= looks <= 10


def test_no_one_looks_while_the_others_wait_for_hosts() -> None:
    drive = three()
    drive.lose("c")
    assert receivers(beats(drive, "ab", stopped=(3,)), Collect) == []


def silent(drive: Drive, after_s: float) -> None:
    """Let so much time pass in which the hosts are heard, and their workers show nothing."""
    until = drive.now + after_s
    while drive.now < until:
        for host in ("a", "b"):
            drive.say(host, Heartbeat(drive.time(host), steps=50, longest_s=[0.5, 0.0, 0.0]))
        drive.now += 1.0


def test_a_run_that_shows_life_is_stopped_at_once() -> None:
    drive = running("a", "b", hang=REPORT)
    silent(drive, 5.0)
    assert receivers(drive.event(Signalled(signal.SIGTERM)), Stop) == ["a", "b"]
    assert not messages(drive.commands, Collect)


def test_a_run_that_seems_hung_is_looked_at_before_it_stops() -> None:
    drive = running("a", "b", hang=REPORT)
    silent(drive, 12.0)
    commands = drive.event(Signalled(signal.SIGTERM))
    assert (receivers(commands, Collect), receivers(commands, Stop)) == (["a", "b"], [])
    commands = look(drive)
    assert receivers(commands, Stop) == ["a", "b"]
    assert [len(command.evidence) for command in commands if isinstance(command, SaveEvidence)] == [4]
    assert {stop.signum for stop in messages(drive.commands, Stop)} == {signal.SIGTERM}


def test_hosts_that_do_not_answer_do_not_keep_it_from_its_end() -> None:
    drive = running("a", "b", hang=REPORT)
    silent(drive, 12.0)
    drive.event(Signalled(signal.SIGTERM))
    assert drive.job.deadline() <= drive.now + COLLECT_S
    assert receivers(drive.event(Tick(), after_s=COLLECT_S), Stop) == ["a", "b"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(signal.SIGINT, signal.SIGINT, signal.SIGKILL), (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM)],
)
def test_a_second_signal_does_not_wait_for_the_look(first: int, second: int, expected: int) -> None:
    drive = running("a", "b", hang=REPORT)
    silent(drive, 12.0)
    assert receivers(drive.event(Signalled(first)), Stop) == []
    drive.event(Signalled(second))
    assert messages(drive.commands, Stop)[-1].signum == expected


def test_the_first_of_two_signals_during_a_look_ends_the_run() -> None:
    drive = running("a", "b", hang=REPORT)
    silent(drive, 12.0)
    for signum in (signal.SIGTERM, signal.SIGINT):  # as of dtrain stop --kill
        drive.event(Signalled(signum))
    drive.stop_all()
    assert (drive.outcome.signum, drive.outcome.exit_code) == (signal.SIGTERM, 143)


def test_a_worker_that_fails_during_a_look_is_not_the_cause() -> None:
    drive = running("a", "b", hang=REPORT)
    silent(drive, 12.0)
    drive.event(Signalled(signal.SIGTERM))
    drive.say("a", drive.exited("a", 0, 1))
    look(drive)
    assert drive.job.phase is Phase.STOPPING
    assert drive.job.attempt is not None
    assert not drive.job.attempt.failures


def test_ranks_that_others_wait_for_are_named_with_their_hosts() -> None:
    attempt: Any = SimpleNamespace(number=0, host_of=lambda rank: f"node{rank // 8}")
    waiting = WaitingRanks((0,), (), tuple(range(1, 512)), (512,), (513, 514), (), 30.0)
    notice, _ = Hangs(REPORT).report_waiting(attempt, waiting, 1)
    assert isinstance(notice, Notice)
    assert notice.is_error
    assert notice.text.splitlines() == [
        "rank 0 has waited in init_process_group for 30 s or more",
        "  511 ranks (1, 2, 3, 4, 5, 6, 7, 8, ...) on node0, node1, node2, node3, node4, node5, node6, node7, ... "
        "have not called it yet",
        "  rank 512 on node64 has no readable stack",
        "  2 ranks (513, 514) on node64 have ended",
        "  this is reported once; torch gives up after 30 minutes by default",
    ]
