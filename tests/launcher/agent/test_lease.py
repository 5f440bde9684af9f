"""When a host that hears nothing must have ended its workers: clocks and delays only, no process."""

import math

from launcher.agent.cleanup.lease import Lease, Limits


def _lease(duration_s: float = 20.0) -> tuple[Lease, Limits]:
    limits = Limits.shared()
    assert math.isnan(limits.lease_end)  # the guard does not know yet
    lease = Lease(limits)
    lease.begin(duration_s, 100.0)
    return lease, limits


def test_it_runs_from_its_beginning_and_then_from_each_heartbeat() -> None:
    lease, limits = _lease()
    assert lease.end == limits.lease_end == 120.0
    lease.beat(110.0, 110.01)
    assert lease.end == limits.lease_end == 130.0


def test_without_a_duration_there_is_none() -> None:
    lease, limits = _lease(0.0)
    lease.beat(110.0, 110.0)
    assert (lease.end, limits.lease_end) == (math.inf, 0.0)
    lease.rest()
    lease.renew(200.0)
    assert (lease.end, limits.lease_end) == (math.inf, 0.0)


def test_what_arrives_late_counts_from_when_it_was_sent() -> None:
    lease, _ = _lease()
    lease.beat(103.0, 118.0)
    assert lease.end == 123.0


def test_a_link_that_is_slow_from_the_start_prolongs_nothing() -> None:
    lease, _ = _lease()
    for sent in range(103, 200, 3):
        lease.beat(sent - 4.0, sent + 6.0)  # as the controller knows our clock: by words that took 4 s
        assert lease.end == max(120.0, sent + 16.0)


def test_a_heartbeat_from_the_future_counts_from_its_arrival() -> None:
    lease, _ = _lease()
    lease.beat(500.0, 110.0)  # our clock stood still, and the controller has not heard it since
    assert lease.end == 130.0


def test_an_earlier_heartbeat_holds_where_a_later_one_says_less() -> None:
    lease, _ = _lease()
    lease.beat(110.0, 110.1)
    lease.beat(103.0, 113.1)  # the controller's clock stood still, and it has not heard us since
    assert lease.end == 130.0


def test_it_rests_and_begins_again() -> None:
    lease, limits = _lease()
    lease.rest()
    assert lease.end == limits.lease_end == math.inf
    lease.beat(110.0, 110.0)
    assert lease.end == math.inf
    lease.renew(500.0)
    assert lease.end == limits.lease_end == 520.0


def test_once_it_is_over_nothing_brings_it_back() -> None:
    lease, limits = _lease()
    lease.used_up(120.0)
    lease.beat(121.0, 121.0)
    lease.renew(122.0)
    assert lease.over
    assert lease.end == math.inf
    assert 120.0 < limits.lease_end < 200.0  # until then the guard lets the agent act


def test_a_heartbeat_that_is_no_time_is_ignored() -> None:
    lease, _ = _lease()
    for time in (math.nan, math.inf, -math.inf):
        lease.beat(time, 110.0)
    assert lease.end == 120.0


def test_the_guard_acts_a_little_after_the_agent_should_have() -> None:
    for duration_s, late_s in ((5.0, 0.15), (60.0, 1.0), (0.0, 0.0)):
        assert _lease(duration_s)[1].late_s == late_s
