"""Commands that ask where ranks are, or that debug one: who is answered, with what, and whose clocks rest meanwhile."""

import signal
from typing import Any

import pytest
from testbed.job_drive import Drive, messages, receivers, running

from launcher.hangs.watch import HangPolicy
from launcher.job.events import (
    Answer,
    Asked,
    AskerLeft,
    AskerSent,
    Command,
    DebuggerQuestion,
    PassOn,
    SaveEvidence,
    Signalled,
    StacksQuestion,
)
from launcher.job.inspection import COLLECT_S, NATIVE_S
from launcher.job.run import Phase
from launcher.protocol.commands import CloseDebugger, Collect, KillWorker, OpenDebugger, RestClocks, Stop
from launcher.protocol.reports import Collected, DebuggerClosed, DebuggerOpened
from launcher.protocol.two_way import ChannelData, ChannelTaken, Heartbeat


def answers(commands: list[Command]) -> dict[int, Any]:
    """Return the last answer to each command; its connection ends then."""
    return {c.asker: c.value for c in commands if isinstance(c, Answer) and c.is_last}


def stacks(drive: Drive, asker: int, *ranks: int, native: bool = False) -> list[Command]:
    return drive.event(Asked(asker, StacksQuestion(ranks, native)))


def collected(drive: Drive, host: str, *ranks: int) -> list[Command]:
    return [c for rank in ranks for c in drive.say(host, drive.evidence(rank))] + drive.collected(host)


def all_collected(drive: Drive) -> list[Command]:
    return collected(drive, "a", 0, 1) + collected(drive, "b", 2, 3)


def test_two_who_ask_for_the_same_meanwhile_share_the_next_round() -> None:
    drive = running("a", "b")
    assert receivers(stacks(drive, 1), Collect) == ["a", "b"]
    assert stacks(drive, 2) == []
    assert stacks(drive, 3) == []
    commands = all_collected(drive)
    assert receivers(commands, Collect) == ["a", "b"], "those who came later see what is later"
    assert [each.rank for each in answers(commands)[1]["evidence"]] == [0, 1, 2, 3]
    assert answers(commands)[1]["missing"] == {}
    assert answers(all_collected(drive)).keys() == {2, 3}
    assert drive.job.phase is Phase.RUNNING


def test_a_host_that_does_not_answer_in_time_is_named() -> None:
    drive = running("a", "b")
    stacks(drive, 1)
    collected(drive, "a", 0, 1)
    assert answers(drive.wait(COLLECT_S - 0.1, heard="ab")) == {}
    answer = answers(drive.wait(0.2, heard="ab"))[1]
    assert (answer["missing"], [each.rank for each in answer["evidence"]]) == ({"b": [2, 3]}, [0, 1])


def test_only_hosts_of_the_ranks_are_asked_and_longer_for_native() -> None:
    drive = running("a", "b")
    commands = stacks(drive, 1, 3, native=True)
    (order,) = messages(commands, Collect)
    assert (receivers(commands, Collect), order.ranks, order.native) == (["b"], [3], True)
    assert order.limit_s < NATIVE_S
    assert answers(collected(drive, "b", 3))[1]["missing"] == {}
    assert answers(stacks(drive, 2, 9))[2] == {"error": "there is no rank 9; the run has ranks 0 to 3"}


def test_a_failure_ends_the_round_and_who_asks_then_gets_it() -> None:
    drive = running("a", "b")
    stacks(drive, 1, native=True)
    drive.say("a", drive.evidence(0))
    commands = drive.say("b", drive.exited("b", 2, 1))
    answer = answers(commands)[1]
    assert [each.rank for each in answer["evidence"]] == [0]
    assert answer["missing"] == {"a": [1], "b": [3]}, "rank 2 has ended"
    assert receivers(commands, Collect) == ["a", "b"], "for the report"
    (error,) = answers(stacks(drive, 2)).values()
    assert error["error"].startswith("no worker can be looked at now: looking where the ranks stand")


def test_sigquit_during_a_round_is_answered_after_it() -> None:
    drive = running("a", "b")
    stacks(drive, 1)
    assert drive.event(Signalled(signal.SIGQUIT)) == []
    commands = all_collected(drive)
    assert answers(commands).keys() == {1}
    assert receivers(commands, Collect) == ["a", "b"]
    (shown,) = all_collected(drive)
    assert isinstance(shown, SaveEvidence)
    assert (shown.asked, [each.rank for each in shown.evidence]) == (True, [0, 1, 2, 3])
    assert receivers(drive.wait(1.0, heard="ab"), Collect) == []


def test_one_who_has_left_gets_no_answer() -> None:
    drive = running("a", "b")
    stacks(drive, 1)
    stacks(drive, 2)
    drive.event(AskerLeft(1))
    drive.event(AskerLeft(2))
    commands = all_collected(drive)
    assert answers(commands) == {}
    assert receivers(commands, Collect) == [], "no round begins for the second one"


def test_no_one_can_be_looked_at_before_there_are_workers() -> None:
    drive = Drive("a")
    for question in (StacksQuestion(), DebuggerQuestion(0, "pdb")):
        (answer,) = answers(drive.event(Asked(1, question))).values()
        assert "0 of 1" in answer["error"] or "waiting for a" in answer["error"]


def debug(drive: Drive, asker: int = 1, rank: int = 3) -> list[Command]:
    return drive.event(Asked(asker, DebuggerQuestion(rank, "pdb")))


def opened(**options: Any) -> Drive:
    drive = running("a", "b", **options)
    debug(drive)
    drive.say("b", DebuggerOpened(1))
    return drive


def test_what_both_ends_of_a_debugger_say_is_passed_on() -> None:
    drive = running("a", "b")
    commands = debug(drive)
    (order,) = messages(commands, OpenDebugger)
    assert (receivers(commands, OpenDebugger), order.channel, order.rank, order.debugger) == (["b"], 1, 3, "pdb")
    assert [c for c in commands if isinstance(c, Answer)] == [Answer(1, {"host": "b"}, is_last=False)]
    drive.say("b", DebuggerOpened(1))
    assert drive.say("b", ChannelData(1, b"prompt")) == [PassOn(ChannelData(1, b"prompt"))]
    assert messages(drive.event(AskerSent(ChannelTaken(1, 6))), ChannelTaken) == [ChannelTaken(1, 6)]
    assert messages(drive.event(AskerSent(ChannelData(1, b"next"))), ChannelData) == [ChannelData(1, b"next")]
    assert drive.say("b", ChannelTaken(1, 4)) == [PassOn(ChannelTaken(1, 4))]
    assert drive.say("a", ChannelData(1, b"of another host")) == []
    commands = drive.event(AskerLeft(1))
    assert receivers(commands, CloseDebugger) == ["b"]
    assert drive.event(AskerSent(ChannelData(1, b"late"))) == []


def test_a_rank_has_one_debugger_and_another_rank_another() -> None:
    drive = opened()
    assert "debugged already" in answers(debug(drive, 2))[2]["error"]
    assert receivers(debug(drive, 3, rank=0), OpenDebugger) == ["a"]
    assert answers(drive.say("b", DebuggerClosed(1, "")))[1] == {"ended": ""}
    assert receivers(debug(drive, 4), OpenDebugger) == ["b"]


def test_the_end_of_the_rank_or_of_its_host_ends_the_debugger() -> None:
    drive = opened()
    (answer,) = answers(drive.say("b", drive.exited("b", 3, -9))).values()
    assert answer == {"ended": "rank 3 on b was killed by SIGKILL after 1.0 s"}
    drive = opened()
    (answer,) = answers(drive.lose("b")).values()
    assert answer == {"ended": "host b is lost: the connection broke"}


def test_all_clocks_of_stalls_rest_while_a_debugger_is_open() -> None:
    drive = running("a", "b", stall_timeout_s=60.0, hang=HangPolicy(acts=True))
    commands = debug(drive)
    assert receivers(commands, RestClocks) == [], "it may hang in truth"
    commands = drive.say("b", DebuggerOpened(1))
    assert sorted(receivers(commands, RestClocks)) == ["a", "b"]
    commands = drive.wait(1000.0, heard="ab")
    for host in "ab":
        commands += drive.say(host, Heartbeat(drive.time(host), steps=50, silent_s=900.0, stopped=[2, 3]))
    assert receivers(commands, Stop) + receivers(commands, Collect) + receivers(commands, KillWorker) == []
    drive.wait(1.0, heard="ab")
    commands = drive.event(AskerLeft(1))
    assert [each.resting for each in messages(commands, RestClocks)] == [False, False]
    assert receivers(drive.wait(59.0, heard="ab"), Collect) == [], "the time begins again"
    assert receivers(drive.wait(2.0, heard="ab"), Collect) == ["a", "b"]
    assert drive.job.phase is Phase.EVIDENCE_ROUND


def test_a_look_blames_no_one_once_a_debugger_is_open() -> None:
    drive = running("a", "b", hang=HangPolicy(acts=True))
    debug(drive)
    beat: dict[str, Any] = {"steps": 50, "longest_s": [0.5, 0.0, 0.0]}
    drive.say("a", Heartbeat(drive.time("a"), **beat))
    assert receivers(drive.say("b", Heartbeat(drive.time("b"), stopped=[3], **beat)), Collect) == ["a", "b"]
    drive.say("b", DebuggerOpened(1))
    for rank in range(4):
        drive.say(drive.host_of(rank), drive.evidence(rank, state="T" if rank == 3 else "S", steps=25))
    assert receivers(drive.collected(), KillWorker) == []


@pytest.mark.parametrize("resting", [True, False])
def test_a_new_attempt_has_no_debugger_of_the_last(resting: bool) -> None:
    drive = opened(max_restarts=1) if resting else running("a", "b", max_restarts=1)
    if not resting:
        debug(drive)
    commands = drive.fail(0)
    drive.swept()
    drive.begin()
    ended = [c.value for c in drive.commands if isinstance(c, Answer) and "ended" in c.value]
    assert ended == [{"ended": "attempt 0 has ended"}], commands
    assert [each.resting for each in messages(drive.commands, RestClocks)] == ([True, True, False, False] * resting)


@pytest.mark.parametrize("restarts", [0, 1])
def test_errors_of_gpus_are_those_of_the_last_attempt(restarts: int) -> None:
    drive = running("a", "b", nnodes=(1, 2), max_restarts=restarts)
    drive.say("a", drive.exited("a", 0, 1))
    drive.say("a", Collected(messages(drive.commands, Collect)[-1].number, devices=["Xid 79 of 0000:3b:00"]))
    drive.collected("b")
    if restarts:
        drive.lose("a")
        drive.swept("b")
        drive.wait(35.0, heard="b")
        drive.begin()
        assert drive.members == ("b",)
        drive.fail(0)
    drive.stop_all()
    drive.wait(60.0)
    assert drive.cause.attempt == restarts
    assert drive.outcome.devices == (() if restarts else ("a: Xid 79 of 0000:3b:00",))
