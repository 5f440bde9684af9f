"""Where workers may live: leases, fences, and hosts that are tried again."""

import pytest

from launcher.events import Open, Tell
from launcher.fleet import ANSWERS, FENCE, LEASE, LOCAL_FENCE_S, NEVER, RETRIES_S, Fleet
from launcher.hosts import Host, HostKind
from launcher.hoststate import HostClock, HostPhase
from launcher.protocol import Bye, Facts, Heartbeat, Suspend

T = 30.0


def fleet_of(*names: str, kind: HostKind = HostKind.SSH, join_s: float = 60.0) -> Fleet:
    return Fleet([Host(name, kind) for name in names], timeout_s=T, join_s=join_s, now=0.0)


def ready(fleet: Fleet, now: float) -> None:
    for state in fleet:
        fleet.open(state)
        fleet.connected(state, None, now)
        fleet.greeted(state, f"{state.name}{state.link}", now)
        fleet.checked(state, Facts([], "", False, [], 1, [], now))


def test_the_lease_is_over_before_a_silent_host_is_given_up() -> None:
    assert ANSWERS + LEASE + FENCE <= 1.0 + 1e-9


def test_a_host_that_speaks_may_have_heard_us_until_now() -> None:
    fleet = fleet_of("a")
    ready(fleet, 0.0)
    state = fleet.states["a"]
    fleet.occupy(state, 0)
    state.heard = 99.0
    fleet.lost(state, "the connection broke", 100.0)
    assert fleet.next_fence() == pytest.approx(100.0 + (LEASE + FENCE) * T)
    fleet.fence(100.0)
    assert fleet.busy == {"a"}
    fleet.fence(100.0 + (LEASE + FENCE) * T)
    assert (fleet.busy, state.attempt, state.dirty) == (set(), None, True), "its traces are still to be looked for"


def test_a_host_that_was_silent_is_fenced_the_sooner() -> None:
    fleet = fleet_of("a", "b")
    ready(fleet, 0.0)
    for state, heard in zip(fleet, (100.0 - T, 85.0), strict=True):
        fleet.occupy(state, 0)
        state.heard = heard
        fleet.lost(state, "silent", 100.0)
    assert [state.fenced_at for state in fleet] == [100.0, 85.0 + T]


def test_on_this_machine_only_time_helps() -> None:
    fleet = fleet_of("a", kind=HostKind.SIMULATED)
    ready(fleet, 0.0)
    state = fleet.states["a"]
    fleet.occupy(state, 0)
    fleet.lost(state, "its agent was killed", 100.0)
    assert fleet.next_fence() == 100.0 + LOCAL_FENCE_S


def test_a_lease_that_rests_never_ends() -> None:
    fleet = fleet_of("a", "b")
    ready(fleet, 0.0)
    assert [c.message for c in fleet.suspend(True, 10.0) if isinstance(c, Tell)] == 2 * [Suspend(suspended=True)]
    fleet.suspend(False, 100.0)
    for state in fleet:
        fleet.occupy(state, 0)
    fleet.states["b"].hear(Heartbeat(103.1), 103.1)  # sent after it was told to go on
    for state in fleet:
        fleet.lost(state, "the connection broke", 104.0)
    assert [state.fenced_at == NEVER for state in fleet] == [True, False]
    assert fleet.never_fenced() == ["a"]


def test_heartbeats_go_to_hosts_that_answer() -> None:
    fleet = fleet_of("a", "b", "c")
    ready(fleet, 0.0)
    fleet.states["a"].heard = 100.0 - ANSWERS * T
    fleet.states["b"].heard = 99.9 - ANSWERS * T
    fleet.states["c"].heard = 100.0
    fleet.move(fleet.states["c"], HostPhase.LEAVING)
    assert [tell.host for tell in fleet.heartbeats(100.0) if isinstance(tell, Tell)] == ["a", "c"]
    assert fleet_of("a", kind=HostKind.SIMULATED).heartbeats(0.0) == []


def test_a_silent_host_is_found_and_one_that_looks_at_its_devices_has_more_time() -> None:
    fleet = fleet_of("a", "b")
    ready(fleet, 0.0)
    fleet.move(fleet.states["b"], HostPhase.CHECKING)
    assert [state.name for state in fleet.silent(T)] == ["a"]
    assert [state.name for state in fleet.silent(60.0)] == ["a", "b"]


def test_a_lost_host_is_tried_again_with_growing_pauses() -> None:
    fleet = fleet_of("a")
    ready(fleet, 0.0)
    state, now, pauses = fleet.states["a"], 100.0, []
    for _ in range(8):
        fleet.lost(state, "gone", now)
        fleet.try_again(state, now)
        at = fleet.next_retry()
        assert at is not None
        assert fleet.retries(at - 0.01) == []
        assert fleet.retries(at) == [Open("a", state.link)]
        assert fleet.next_retry() is None
        pauses.append(at - now)
        now = at
    assert pauses == [*RETRIES_S, RETRIES_S[-1], RETRIES_S[-1]]


def test_what_lost_agents_left_is_known_until_somebody_has_looked() -> None:
    fleet = fleet_of("a")
    ready(fleet, 0.0)
    state = fleet.states["a"]
    fleet.occupy(state, 0)
    fleet.lost(state, "gone", 1.0)
    fleet.open(state)
    fleet.connected(state, None, 2.0)
    fleet.greeted(state, "a2", 2.0)
    fleet.said_bye(state, Bye(0, [], ""))
    assert (state.traces, fleet.busy) == (["a1"], {"a"}), "it ended before it looked"
    ready(fleet, 3.0)
    assert (state.traces, fleet.busy, fleet.used) == ([], set(), {"a"})


def test_a_clock_is_known_by_its_quickest_message_of_late() -> None:
    clock = HostClock()
    assert clock.corrected(5.0) == 5.0
    clock.hear(1000.0, 10.5)
    clock.hear(1001.0, 11.1)
    clock.hear(1002.0, 14.0)
    assert clock.corrected(1003.0) == pytest.approx(13.1)
    for now in range(20, 200):
        clock.hear(now + 900.0, now)  # it has lost 90 seconds
    assert clock.corrected(1100.0) == pytest.approx(200.0)
