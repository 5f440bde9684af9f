"""Resilient processes: one that fails is replaced alone, and all others have to meet its successor."""

from typing import Any

import pytest
from testbed.job_drive import Drive, messages, notices, receivers, running, tells

from launcher.job.events import Command, Send
from launcher.job.run import Phase
from launcher.placement.roles import Role, Roles
from launcher.protocol.commands import Collect, NextGeneration, OpenStore, RestartWorker
from launcher.protocol.reports import Started

PEER_LOST = {"type": "RuntimeError", "message": "Connection closed by peer", "where": "t.py:3", "inside": ""}


def fails(drive: Drive, rank: int, status: int = -9, *, after_s: float = 0.0, **changes: Any) -> list[Command]:
    drive.now += after_s
    changes = {"restart_policy": 3} | changes
    host = drive.host_of(rank)
    return drive.say(host, drive.exited(host, rank, status, **changes))


def starts(drive: Drive, rank: int) -> list[Command]:
    host = drive.host_of(rank)
    return drive.say(host, Started(drive.number, rank, 200 + rank, drive.time(host)), after_s=0.1)


def exits(drive: Drive, rank: int, **changes: Any) -> list[Command]:
    return drive.say(drive.host_of(rank), drive.exited(drive.host_of(rank), rank, **changes))


@pytest.mark.parametrize("policy", [3, 4])
def test_every_host_is_notified_before_the_worker_starts_again(policy: int) -> None:
    drive = running("a", "b", "c", max_restarts=3)
    commands = fails(drive, 3, restart_policy=policy)
    assert tells(commands) == [
        *(Send(host, NextGeneration(attempt=0, number=1)) for host in "abc"),
        Send("b", RestartWorker(3, 0, restart=1)),
    ]
    assert notices(commands) == [
        "rank 3 on b was killed by SIGKILL after 1.0 s; only this worker restarts (restart 1 of 3)"
    ]
    starts(drive, 3)
    drive.end_well()
    assert (drive.outcome.exit_code, drive.outcome.attempts, drive.outcome.worker_restarts) == (0, 1, 1)


def test_the_number_goes_out_at_once_though_the_restart_waits() -> None:
    drive = running("a", "b", max_restarts=9)
    fails(drive, 3)
    starts(drive, 3)
    commands = fails(drive, 3)  # 0.1 s later
    assert [(send.host, send.message) for send in tells(commands)] == [
        (host, NextGeneration(attempt=0, number=2)) for host in "ab"
    ]
    assert messages(drive.wait(0.6, heard="ab"), RestartWorker) == [RestartWorker(3, 0, restart=2)]


def test_of_failures_close_together_the_newest_number_is_sent() -> None:
    drive = running("a", "b", max_restarts=9)
    assert len(tells(fails(drive, 1))) == 3
    assert tells(fails(drive, 2, after_s=0.001) + fails(drive, 3, after_s=0.001)) == []
    commands = drive.wait(0.02)
    assert [send.message for send in tells(commands)] == [
        NextGeneration(attempt=0, number=3),
        NextGeneration(attempt=0, number=3),
        RestartWorker(2, 0, restart=1),
        RestartWorker(3, 0, restart=1),
    ]


def test_an_attempt_begins_with_generation_0() -> None:
    drive = running("a", "b", max_restarts=9)
    fails(drive, 3)
    drive.fail(0, 7, at=drive.now + 10)
    drive.swept()
    drive.begin()
    assert messages(fails(drive, 1), NextGeneration)[0] == NextGeneration(attempt=1, number=1)


def test_without_restarts_left_no_other_generation_begins() -> None:
    drive = running("a", "b", max_restarts=1)
    fails(drive, 3)
    starts(drive, 3)
    commands = fails(drive, 3, after_s=40.0)
    assert messages(commands, NextGeneration) == []
    assert receivers(commands, Collect) == ["a", "b"]


def test_once_a_rank_has_finished_a_failure_ends_the_attempt() -> None:
    drive = running("a", "b", max_restarts=1)
    exits(drive, 0)
    assert messages(fails(drive, 3), NextGeneration) == []
    drive.collected()
    assert drive.job.phase is Phase.ENDING
    drive.swept()
    assert receivers(drive.commands, OpenStore) == ["a", "a"], "the restart is there for the attempt"


def test_a_rank_that_finishes_before_a_restart_ends_the_attempt() -> None:
    for after_order in (False, True):
        drive = running("a", "b", max_restarts=2)
        fails(drive, 3)
        if not after_order:  # it waits for its time
            starts(drive, 3)
            fails(drive, 3)
        assert receivers(exits(drive, 0), Collect) == ["a", "b"]
        drive.collected()
        assert messages(drive.wait(5.0, heard="ab"), RestartWorker) == []
        drive.swept()
        assert notices(drive.commands)[-2].startswith("attempt 0 failed: rank 3 on b was killed by SIGKILL")
        drive.begin()
        drive.end_well()
        outcome = drive.outcome
        assert (outcome.exit_code, outcome.attempts, outcome.worker_restarts) == (0, 2, 0 if after_order else 1)


def test_a_rank_that_was_left_out_is_gone_for_good() -> None:
    drive = running("a", "b", max_restarts=0)
    host = drive.host_of(1)
    drive.say(host, drive.exited(host, 1, -9, restart_policy=1))
    assert receivers(fails(drive, 3), Collect) == ["a", "b"]


def test_with_no_survivor_the_attempt_ends() -> None:
    drive = running("a", max_restarts=9)
    assert messages(fails(drive, 0), NextGeneration) == [NextGeneration(attempt=0, number=1)]
    assert receivers(fails(drive, 1, after_s=0.1), Collect) == ["a"], "the other one is not back yet"


def test_a_role_with_its_own_command_is_in_no_generation() -> None:
    class WithEvaluator(Drive):
        def host_of(self, rank: int) -> str:
            return "a" if rank == 4 else super().host_of(rank)

    roles = Roles(others=(Role("evaluator", 1, ("eval.py",)),))
    drive = WithEvaluator("a", "b", max_restarts=9, roles=roles)
    drive.run()
    drive.say("a", drive.exited("a", 4))
    assert messages(fails(drive, 3), NextGeneration) != []


def test_a_consequence_uses_no_restart_whichever_comes_first() -> None:
    for root_first in (True, False):
        drive = running("a", "b", max_restarts=1)
        root, consequence = {"rank": 3}, {"rank": 0, "status": 1, "error": PEER_LOST}
        for failure in (root, consequence) if root_first else (consequence, root):
            commands = fails(drive, after_s=0.1, **failure)
            assert messages(commands, NextGeneration) != []
        commands = drive.wait(1.1, heard="ab")
        assert len(messages(drive.commands, RestartWorker)) == 2
        drive.say("a", Started(0, 0, 300, drive.time("a")))
        starts(drive, 3)
        assert messages(fails(drive, 1, after_s=30.0), NextGeneration) == [], "the one restart was used"
        drive.collected()
        drive.stop_all()
        assert drive.outcome.no_restart_reason == "the one restart (--max-restarts) was used"


def test_a_consequence_of_a_known_failure_starts_again_at_once() -> None:
    drive = running("a", "b", max_restarts=1)
    fails(drive, 3)
    commands = fails(drive, 0, 1, error=PEER_LOST, after_s=0.1)
    assert messages(commands, RestartWorker) == [RestartWorker(0, 0, restart=1)]
    assert notices(commands)[0].endswith("; only this worker restarts (it follows from another failure)")


def test_consequences_alone_each_use_a_restart() -> None:
    drive = running("a", "b", max_restarts=1)
    fails(drive, 3, 1, error=PEER_LOST)
    assert messages(fails(drive, 0, 1, error=PEER_LOST, after_s=0.1), NextGeneration) == []


def test_a_rank_left_out_before_its_restart_is_not_waited_for() -> None:
    drive = running("a", "b", max_restarts=1)
    fails(drive, 3)
    fails(drive, 3, 127, after_s=0.1, pid=0, restart_policy=1, error={"type": "", "message": "could not be started"})
    assert notices(drive.commands)[-1].startswith("rank 3 on b could not be started; the other workers continue")
    assert not drive.job.fails


def test_failures_that_end_a_run_are_named_once() -> None:
    drive = running("a", max_restarts=0)
    fails(drive, 0, 1, restart_policy=1, error=PEER_LOST)
    fails(drive, 1, 3, restart_policy=1, after_s=0.1)
    drive.collected()
    drive.stop_all()
    assert [failure.rank for failure in (drive.cause, *drive.outcome.secondary_failures)] == [1, 0]
