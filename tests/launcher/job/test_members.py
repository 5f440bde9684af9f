"""Hosts that are lost or come while resilient workers run: the attempt goes on with others."""

from pathlib import Path
from typing import Any

import pytest
from testbed.job_drive import Drive, messages, notices, receivers, running, tells

from launcher.errors import PlacementError
from launcher.job.recovery.members import numbered
from launcher.job.run import Phase
from launcher.placement.placement import HostOffer, Placement, place
from launcher.protocol.commands import EndAttempt, NextGeneration, OpenStore, StartWorker
from launcher.protocol.reports import Started, StoreOpened, Swept
from launcher.protocol.two_way import Heartbeat
from launcher.runs.housekeeping import Limits
from launcher.runs.overview import Overview
from launcher.runs.record import RunRecord
from launcher.timeline.records import Timeline

FENCED_S = 30.0 + 3.0  # after a host was heard last


def resilient_run(*names: str, resilient: bool = True, **changes: Any) -> Drive:
    drive = running(*names, **changes)
    for name in drive.members:
        say_resilient(drive, name, resilient=resilient)
    return drive


def say_resilient(drive: Drive, name: str, *, resilient: bool = True) -> list[Any]:
    return drive.say(name, Heartbeat(drive.time(name), steps=5, resilient=resilient))


def fence(drive: Drive, heard: str) -> list[Any]:
    commands = []
    for _ in range(int(FENCED_S)):
        for name in heard:
            commands += say_resilient(drive, name)
        commands += drive.wait(1.0)
    return commands


def started(drive: Drive, commands: list[Any]) -> list[Any]:
    return [
        command
        for send in tells(commands)
        if isinstance(send.message, StartWorker)
        for command in drive.say(send.host, Started(0, send.message.rank, 500 + send.message.rank, drive.now))
    ]


def test_the_others_are_notified_of_a_loss_and_of_its_fence() -> None:
    drive = resilient_run("a", "b", "c", nnodes=(1, 3))
    commands = drive.lose("c")
    assert [(send.host, send.message) for send in tells(commands)] == [
        (host, NextGeneration(0, 1, "later")) for host in "ab"
    ]
    assert messages(commands, EndAttempt) == []
    early = drive.wait(25.0, heard="ab")
    assert messages(early, NextGeneration) == [], "workers may live there"
    commands = drive.wait(8.0, heard="ab")
    news = messages(commands, NextGeneration)
    assert [(one.number, one.when) for one in news] == [(2, "now"), (2, "now")]
    assert [{rank: env["RANK"] for rank, env in one.variables.items()} for one in news] == [
        {"0": "0", "1": "1"}, {"2": "2", "3": "3"},
    ]  # fmt: skip
    assert {env["WORLD_SIZE"] for one in news for env in one.variables.values()} == {"4"}
    assert notices(commands) == ["generation 2 goes on with 4 workers on 2 hosts, without c"]
    assert messages(commands, StartWorker) == []
    drive.end_well()
    drive.wait(60.0)
    assert (drive.outcome.exit_code, drive.outcome.attempts) == (0, 1)


def test_a_spare_host_takes_the_ranks_and_only_those_are_started() -> None:
    drive = resilient_run("a", "b", "c", nnodes=(2, 2), max_restarts=1)
    drive.lose("b")
    commands = fence(drive, "ac")
    starts = messages(commands, StartWorker)
    assert receivers(commands, StartWorker) == ["c", "c"]
    assert [(start.rank, start.generation) for start in starts] == [(2, 2), (3, 2)]
    assert {start.restart_policy for start in starts} == {3}
    assert [start.env["TORCHELASTIC_RESTART_COUNT"] for start in starts] == ["1", "1"]
    assert receivers(commands, NextGeneration) == ["a"]
    started(drive, commands)
    assert drive.members == ("a", "c")
    drive.end_well()
    drive.wait(60.0)
    assert (drive.outcome.exit_code, drive.outcome.attempts) == (0, 1)


@pytest.mark.parametrize("spare", [True, False])
def test_the_record_names_the_hosts_with_which_an_attempt_goes_on(tmp_path: Path, spare: bool) -> None:
    drive = resilient_run("a", "b", "c", nnodes=(2, 2)) if spare else resilient_run("a", "b", nnodes=(1, 2))
    kept: list[Any] = []
    record = RunRecord(
        drive.job.spec, {}, folder=tmp_path, limits=Limits(None, None), keep=kept.append, on_start=lambda: None,
        overview=Overview(Timeline(), lambda _: None),
    )  # fmt: skip
    record.watch(drive.job)
    drive.lose("b")
    record.watch(drive.job)
    (attempt,) = kept[-1]["attempts"]
    assert [place[:2] for place in attempt["workers"]] == [[0, "a"], [1, "a"], [2, "b"], [3, "b"]]
    fence(drive, "ac" if spare else "a")
    record.watch(drive.job)
    (attempt,) = kept[-1]["attempts"]
    last = "c" if spare else "b"  # where these ranks were, then
    assert [place[:2] for place in attempt["workers"]] == [[0, "a"], [1, "a"], [2, last], [3, last]]
    assert (attempt["hosts"], attempt["world_size"]) == ((["a", "c"], 4) if spare else (["a"], 2))
    record.finish()


def test_a_run_of_fixed_size_uses_a_restart_for_a_lost_host() -> None:
    drive = resilient_run("a", "b", max_restarts=1)
    drive.lose("b")
    drive.wait(0.1, heard="a")
    say_resilient(drive, "a")
    commands = drive.back("b")
    assert [start.rank for start in messages(commands, StartWorker)] == [2, 3], "its new agent has ended what was there"
    started(drive, commands)
    drive.lose("b")
    assert drive.job.phase is Phase.EVIDENCE_ROUND, "the one restart was used"


def test_ranks_move_together_and_keep_their_numbers() -> None:
    drive = resilient_run("a", "b", "c", nnodes=(1, 3), max_restarts=1)
    drive.lose("b")
    news = messages(fence(drive, "ac"), NextGeneration)
    moved = {rank: env["RANK"] for one in news for rank, env in one.variables.items()}
    assert moved == {"0": "0", "1": "1", "4": "2", "5": "3"}
    commands = drive.say("c", drive.exited("c", 5, -9, restart_policy=3))
    assert "rank 5 on c was killed by SIGKILL" in notices(commands)[0]
    assert receivers(commands, NextGeneration) == ["a", "c"]


def test_the_store_is_opened_on_another_host_first() -> None:
    drive = resilient_run("a", "b", "c", nnodes=(1, 3))
    drive.lose("a")
    commands = fence(drive, "bc")
    assert receivers(commands, OpenStore) == ["b"]
    assert [one.when for one in messages(commands, NextGeneration)] == []
    news = messages(drive.say("b", StoreOpened(0, "10.0.0.7", 4711)), NextGeneration)
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for one in news for env in one.variables.values()} == {
        ("10.0.0.7", "4711")
    }


def test_two_losses_before_a_fence_are_one_generation() -> None:
    drive = resilient_run("a", "b", "c", nnodes=(1, 3))
    drive.lose("c")
    drive.wait(5.0, heard="ab")
    say_resilient(drive, "a")
    assert messages(drive.lose("b"), NextGeneration) == [], "the others wait already"
    commands = drive.wait(29.0, heard="a")
    assert messages(commands, NextGeneration) == [], "c is fenced, b is not"
    news = messages(drive.wait(6.0, heard="a"), NextGeneration)
    assert [(one.number, [*one.variables]) for one in news] == [(2, ["0", "1"])]


def test_too_few_hosts_end_the_run_in_time() -> None:
    drive = resilient_run("a", "b", max_restarts=3)
    drive.lose("b")
    drive.wait(FENCED_S + 58.0, heard="a")
    assert drive.job.phase is Phase.RUNNING, "others have --start-timeout-s once it is fenced"
    drive.wait(2.0, heard="a")
    assert drive.phase() in (Phase.STOPPING, Phase.ENDED)
    drive.stop_all()
    drive.wait(60.0)
    assert "1 of at least 2 hosts were ready" in drive.outcome.no_restart_reason
    assert drive.cause.host == "b"


@pytest.mark.parametrize("why", ["not resilient", "one has finished", "other roles"])
def test_all_start_again_where_the_others_cannot_go_on(why: str) -> None:
    env_for = ("tf",) if why == "other roles" else ()
    if env_for:
        drive = running("a", "b", "c", nnodes=(1, 3))
        object.__setattr__(drive.job.spec, "env_for", env_for)
    else:
        drive = resilient_run("a", "b", "c", nnodes=(1, 3), resilient=why != "not resilient")
    if why == "one has finished":
        drive.say("a", drive.exited("a", 0))
    assert messages(drive.lose("c"), NextGeneration) == []
    assert drive.job.phase is Phase.EVIDENCE_ROUND


def test_a_rank_that_finishes_meanwhile_lets_all_start_again() -> None:
    drive = resilient_run("a", "b", "c", nnodes=(1, 3))
    drive.lose("c")
    drive.say("a", drive.exited("a", 0))
    assert drive.job.phase is Phase.EVIDENCE_ROUND


def test_a_failed_rank_starts_again_with_the_next_generation() -> None:
    drive = resilient_run("a", "b", "c", nnodes=(1, 3), max_restarts=3)
    drive.lose("c")
    commands = drive.say("b", drive.exited("b", 2, -9, restart_policy=3))
    assert tells(commands) == []
    commands = fence(drive, "ab")
    kinds = [type(send.message).__name__ for send in tells(commands) if not isinstance(send.message, Heartbeat)]
    assert [kind for kind in kinds if kind != "Prepare"] == ["NextGeneration", "NextGeneration", "RestartWorker"]


def test_a_host_that_comes_back_joins_at_a_commit() -> None:
    drive = resilient_run("a", "b", "c", nnodes=(1, 3))
    drive.lose("c")
    fence(drive, "ab")
    commands = drive.back("c")
    starts = messages(commands, StartWorker)
    assert [(start.rank, start.generation, start.restart_policy) for start in starts] == [(4, 3, 0), (5, 3, 0)]
    assert messages(commands, NextGeneration) == [], "the others go on"
    started(drive, commands)
    say_resilient(drive, "c", resilient=False)
    assert messages(drive.wait(2.0, heard="ab"), NextGeneration) == []
    for name in "ab":
        say_resilient(drive, name)
    commands = say_resilient(drive, "c")
    assert receivers(commands, NextGeneration) == [tell.host for tell in tells(commands)] == ["a", "b", "c"]
    assert [(news.number, news.when) for news in messages(commands, NextGeneration)] == [(4, "at_commit")] * 3
    assert {env["WORLD_SIZE"] for one in messages(commands, NextGeneration) for env in one.variables.values()} == {"6"}
    assert drive.members == ("a", "b", "c")
    drive.end_well()
    drive.wait(60.0)
    assert (drive.outcome.exit_code, drive.outcome.attempts) == (0, 1)


def test_what_fails_before_it_has_joined_ends_alone() -> None:
    drive = resilient_run("a", "b", "c", nnodes=(1, 3))
    drive.lose("c")
    fence(drive, "ab")
    started(drive, drive.back("c"))
    commands = drive.say("c", drive.exited("c", 4, 1))
    assert receivers(commands, EndAttempt) == ["c"]
    assert notices(commands) == ["c does not join: rank 4 on c exited with code 1 after 1.0 s"]
    assert drive.job.phase is Phase.RUNNING
    for name in "ab":
        say_resilient(drive, name)
    assert messages(drive.say("c", Swept(0, 0, 0, [])), StartWorker) != [], "another try"
    commands = drive.say("c", drive.exited("c", 4, 1))
    assert "c is excluded from further attempts: it was lost 2 times in a row" in notices(commands)
    assert messages(drive.say("c", Swept(0, 0, 0, [])), StartWorker) == []


def test_a_host_that_was_to_join_takes_the_place_of_a_lost_one() -> None:
    drive = Drive("a", "b", "c", nnodes=(2, 3), max_restarts=3, last_call_s=0.0)
    drive.join("a", "b")
    drive.check("a", "b")
    drive.wait(1.0, heard="ab")
    drive.begin()
    for name in "ab":
        say_resilient(drive, name)
    drive.join("c")
    assert receivers(drive.check("c"), StartWorker) == ["c", "c"]
    commands = drive.lose("b")
    assert receivers(commands, EndAttempt) == ["c"]
    assert "c does not join: b is lost" in notices(commands)
    drive.say("c", Swept(0, 0, 0, []))
    commands = fence(drive, "ac")
    assert receivers(commands, StartWorker) == ["c", "c"]
    assert drive.members == ("a", "c")
    assert drive.job.fleet.states["c"].failed_attempts == 0


@pytest.mark.parametrize("timeout_s", [30.0, 60.0])
def test_the_time_for_another_store_begins_at_the_fence(timeout_s: float) -> None:
    drive = resilient_run("a", "b", "c", nnodes=(1, 3), heartbeat_timeout_s=timeout_s)
    drive.lose("a")
    commands = []
    for _ in range(int(1.1 * timeout_s) + 1):
        commands += say_resilient(drive, "b") + say_resilient(drive, "c") + drive.wait(1.0)
    assert receivers(commands, OpenStore) == ["b"]
    drive.wait(50.0, heard="bc")
    assert receivers(drive.say("b", StoreOpened(0, "10.0.0.7", 4711)), NextGeneration) == ["b", "c"]


def test_only_the_answer_to_the_last_order_for_a_store_counts() -> None:
    drive = resilient_run("a", "b", "c", nnodes=(1, 3))
    drive.lose("a")
    assert receivers(fence(drive, "bc"), OpenStore) == ["b"]
    drive.lose("c")
    assert receivers(fence(drive, "b"), OpenStore) == ["b"], "for others than before"
    assert messages(drive.say("b", StoreOpened(0, "10.0.0.7", 4711)), NextGeneration) == [], (
        "closed by the second order"
    )
    (news,) = messages(drive.say("b", StoreOpened(0, "10.0.0.7", 4712)), NextGeneration)
    assert {env["MASTER_PORT"] for env in news.variables.values()} == {"4712"}


def test_a_missing_module_on_a_new_host_does_not_end_the_run() -> None:
    drive = resilient_run("a", "b", "c", nnodes=(2, 2), max_restarts=5)
    drive.lose("b")
    started(drive, fence(drive, "ac"))
    error = {"type": "ModuleNotFoundError", "message": "No module named 'x'", "where": "", "inside": ""}
    commands = drive.say("c", drive.exited("c", 2, 1, restart_policy=3, error=error))
    assert notices(commands)[0].endswith("only this worker restarts (restart 1 of 5)")
    assert drive.job.phase is Phase.RUNNING


def placed(*names: str, slots: int = 2) -> Placement:
    offers = [
        HostOffer(name, slots, (), gpus_verified=False, gpu_variable="", cores=(0,), cpu_limit=1) for name in names
    ]
    return place(offers, nproc=None)


def test_workers_that_run_keep_their_ranks() -> None:
    before = placed("a", "b", "c")
    after = numbered(placed("a", "d", "c", "e"), {"a": (0, 1), "c": (4, 5)}, before)
    assert [(worker.host, worker.rank, worker.world_rank) for worker in after.workers] == [
        ("a", 0, 0), ("a", 1, 1), ("d", 2, 2), ("d", 3, 3), ("c", 4, 4), ("c", 5, 5), ("e", 6, 6), ("e", 7, 7),
    ]  # fmt: skip
    for slots in (1, 3):
        with pytest.raises(PlacementError, match="workers now than those that run there"):
            numbered(placed("a", slots=slots), {"a": (0, 1)}, before)
