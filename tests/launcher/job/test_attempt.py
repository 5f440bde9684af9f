"""Who takes part in an attempt, and how far it has come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.present import present

from launcher.job.attempt import AttemptState
from launcher.job.ranks import RankState
from launcher.job.recovery.members import choose_members
from launcher.job.timers import Timer, Timers
from launcher.placement.placement import HostOffer, place
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


def attempt() -> AttemptState:
    offers = [HostOffer(name, 2, (), False, "CUDA_VISIBLE_DEVICES", (0,), 1) for name in "ab"]
    return AttemptState(0, ("a", "b"), place(offers, nproc=None), Timers(), began=10.0, stall_s=5.0)


def exited(rank: int, status: int = 0, *, provoked: bool = False, pid: int = 1) -> Exited:
    return Exited(0, rank, pid, status, 1.0, provoked, "", None, None, 0.0)


def ends(state: AttemptState, end: Exited) -> None:
    state.take_exit(present(state.ranks.get(end.rank)), end, 11.0, 11.0)


def test_an_attempt_has_ended_well_when_every_worker_has_by_itself() -> None:
    for provoked in (False, True):
        state = attempt()
        for rank in range(4):
            assert not state.finished
            ends(state, exited(rank, provoked=provoked and rank == 3))
        assert state.all_started
        assert state.finished is not provoked
        assert [row.number for row in state.ranks.of(RankState.STOPPED)] == ([3] if provoked else [])


def test_a_host_is_needed_until_its_workers_have_ended_well_and_for_the_store() -> None:
    state = attempt()
    for rank in (0, 1, 2):
        ends(state, exited(rank))
    assert (state.needs("a"), state.needs("b"), state.needs("c")) == (True, True, False)
    ends(state, exited(3))
    assert not state.needs("b")


def test_progress_is_a_number_that_changes() -> None:
    state = attempt()
    state.take_start(present(state.ranks.get(0)), Started(0, 0, 1, 0.0), 11.0)
    state.take_heartbeat("a", Heartbeat(0.0, 5), 12.0)
    state.take_heartbeat("a", Heartbeat(0.0, 5), 13.0)
    assert state._timers.at(Timer.STALL) == 17.0
    state.take_heartbeat("a", Heartbeat(0.0, 6), 14.0)
    assert state._timers.at(Timer.STALL) == 19.0
