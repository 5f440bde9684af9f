"""Who takes part in an attempt, and how far it has come."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.present import present

from launcher.job.attempt import HUNG_S, AttemptState
from launcher.job.failures.failure import FailureKind
from launcher.job.ranks import RankState
from launcher.job.recovery.members import choose_members
from launcher.job.timers import Timers
from launcher.placement.placement import HostOffer, Placement, place
from launcher.protocol.reports import Exited, Started
from launcher.protocol.two_way import Heartbeat

NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True)


@pytest.mark.parametrize(
    ("previous", "ready", "most", "members"),
    [
        ("", "abc", 2, "ab"),  # the first attempt: as they were named
        ("ab", "ab", 2, "ab"),
        ("abc", "bc", 3, "bc"),
        ("abc", "bcd", 3, "dbc"),  # d takes the place of a
        ("abc", "abd", 3, "abd"),
        ("ab", "abcd", 4, "abcd"),
        ("dbc", "abcd", 3, "dbc"),  # who is in stays in
        ("abcd", "bde", 4, "ebd"),
    ],
)
def test_members_by_example(previous: str, ready: str, most: int, members: str) -> None:
    assert choose_members(tuple(previous), tuple(ready), most) == tuple(members)


@given(NAMES, NAMES, st.integers(1, 8))
def test_members_are_ready_and_keep_their_places(previous: list[str], ready: list[str], most: int) -> None:
    previous = previous[:most]
    members = choose_members(previous, ready, most)
    stay = [name for name in previous if name in ready]
    assert set(members) <= set(ready)
    assert len(set(members)) == len(members) == min(most, len(ready))
    assert [name for name in members if name in previous] == stay, "in the same order"
    if len(members) >= len(previous):
        assert all(members[place] == name for place, name in enumerate(previous) if name in stay)


def placed(hosts: str) -> Placement:
    return place([HostOffer(name, 2, (), False, "CUDA_VISIBLE_DEVICES", (0,), 1) for name in hosts], nproc=None)


def attempt(*, start_s: float = 0.0) -> AttemptState:
    return AttemptState(0, ("a", "b"), placed("ab"), Timers(), began=10.0, stall_s=5.0, start_s=start_s)


def starts(state: AttemptState, rank: int, now: float, **changes: Any) -> None:
    state.take_start(present(state.ranks.get(rank)), Started(0, rank, 1, 0.0, **changes), now)


def exited(rank: int, status: int = 0, *, provoked: bool = False, pid: int = 1) -> Exited:
    return Exited(0, rank, pid, status, 1.0, provoked, "", None, None, 0.0)


def ends(state: AttemptState, end: Exited) -> None:
    state.take_exit(present(state.ranks.get(end.rank)), end, 11.0, 11.0)


def test_an_attempt_has_finished_when_every_worker_has_by_itself() -> None:
    for provoked in (False, True):
        state = attempt()
        for rank in range(4):
            assert not state.finished
            ends(state, exited(rank, provoked=provoked and rank == 3))
        assert state.all_started
        assert state.finished is not provoked
        assert [row.number for row in state.ranks.of(RankState.STOPPED)] == ([3] if provoked else [])


def test_a_host_is_needed_for_its_workers_and_for_the_store() -> None:
    state = attempt()
    for rank in (0, 1, 2):
        ends(state, exited(rank))
    assert (state.needs("a"), state.needs("b"), state.needs("c")) == (True, True, False)
    ends(state, exited(3))
    assert not state.needs("b")


def test_a_host_says_when_its_workers_have_saved_checkpoints() -> None:
    state = attempt()
    said = [state.take_heartbeat("a", Heartbeat(0.0, saved=saved), 11.0) for saved in (0, 1, 1, 2)]
    assert said == [False, True, False, True]
    assert state.take_heartbeat("b", Heartbeat(0.0, saved=1, steps=3), 12.0)
    assert (state.steps_on("a"), state.steps_on("b"), state.steps_on("c")) == (0, 3, 0)


def test_it_seems_hung_after_a_long_silence() -> None:
    state = attempt()
    for rank in range(4):
        starts(state, rank, 11.0)
    assert [state.seems_hung(10.9 + HUNG_S), state.seems_hung(11.0 + HUNG_S)] == [False, True]
    state.made_progress(20.0)
    assert not state.seems_hung(19.9 + HUNG_S)
    state.take_heartbeat("a", Heartbeat(0.0, 1, silent_s=14.0, longest_s=[3.0]), 20.0)
    assert not state.seems_hung(20.0)
    state.take_heartbeat("a", Heartbeat(0.0, 1, silent_s=15.0, longest_s=[3.0]), 20.0)
    assert state.seems_hung(20.0)


def test_workers_that_were_not_forked_are_counted() -> None:
    state = attempt()
    starts(state, 0, 11.0)
    for rank, costs_s in ((1, 0.25), (2, 0.5), (3, 0.125)):
        starts(state, rank, 11.0, by_exec="tensorflow", costs_s=costs_s)
    assert (state.forked, state.by_exec) == (1, {"tensorflow": 0.5})


def test_a_host_that_comes_later_is_resilient_until_it_is_lost() -> None:
    state = attempt()
    failure = state.failure(FailureKind.HOST_LOST, "b", "gone", 11.0)
    for rank in range(4):
        starts(state, rank, 10.5)
    assert state.is_whole
    state.lose("b", failure)
    assert (state.lacks_workers, state.is_whole) == (True, False)
    rows = state.compose(("a", "c"), placed("ac"), failure)
    assert [row.host for row in rows] == ["c", "c"]
    assert [state.is_resilient(name) for name in "abc"] == [False, False, True]
    state.lose("c", failure)
    assert not state.is_resilient("c")


def test_one_lost_rank_is_enough_to_be_waited_for() -> None:
    state = attempt()
    for rank in range(4):
        starts(state, rank, 10.5)
    state.ranks.move(present(state.ranks.get(3)), RankState.GONE)
    state.lose("b", state.failure(FailureKind.HOST_LOST, "b", "gone", 11.0))
    assert (state.ranks.count(RankState.LOST), state.lacks_workers) == (1, True)
