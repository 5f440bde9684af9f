"""When a host that hears nothing must have ended its workers: clocks and delays only, no process."""

import math

import pytest

from launcher.lease import Lease, Limits

THEIRS = 5000.0  # how far the controller's clock is ahead of ours


def _lease(duration_s: float = 20.0) -> tuple[Lease, Limits]:
    limits = Limits()
    assert math.isnan(limits.lease_end)  # the guard does not know yet
    lease = Lease(limits)
    lease.begin(duration_s, 100.0)
    return lease, limits


def _beat(lease: Lease, sent: float, *, delay: float = 0.01, clock: float = THEIRS) -> None:
    lease.beat(sent + clock, sent + delay)


def test_it_runs_from_its_beginning_and_then_from_each_heartbeat() -> None:
    lease, limits = _lease()
    assert lease.end == limits.lease_end == 120.0
    _beat(lease, 110.0)
    assert lease.end == limits.lease_end == pytest.approx(130.01)


def test_without_a_duration_there_is_none() -> None:
    lease, limits = _lease(0.0)
    _beat(lease, 110.0)
    assert (lease.end, limits.lease_end) == (math.inf, 0.0)
    lease.rest()
    lease.renew(200.0)
    assert (lease.end, limits.lease_end) == (math.inf, 0.0)


def test_what_arrives_late_counts_from_when_it_was_sent() -> None:
    lease, _ = _lease()
    _beat(lease, 110.0)
    _beat(lease, 113.0, delay=15.0)
    assert lease.end == pytest.approx(133.01)


def test_it_rests_and_begins_anew() -> None:
    lease, limits = _lease()
    lease.rest()
    assert lease.end == limits.lease_end == math.inf
    _beat(lease, 110.0)
    assert lease.end == math.inf
    lease.renew(500.0)
    assert lease.end == limits.lease_end == 520.0


def test_once_it_is_over_nothing_brings_it_back() -> None:
    lease, limits = _lease()
    lease.used_up(120.0)
    _beat(lease, 121.0)
    lease.renew(122.0)
    assert lease.over
    assert lease.end == math.inf
    assert 120.0 < limits.lease_end < 200.0  # until then the guard lets the agent act


@pytest.mark.parametrize("parts_in_a_million", [-200, 200])
def test_clocks_that_drift_apart_for_weeks_do_no_harm(parts_in_a_million: float) -> None:
    lease, _ = _lease()
    sent = 100.0
    while sent < 100.0 + 14 * 86400:
        sent += 100.0  # heartbeats come much more often; only the newest matters
        lease.beat(THEIRS + sent * (1 + parts_in_a_million / 1e6), sent + 0.01)
        assert sent + 19.8 < lease.end < sent + 20.2


def test_a_controller_s_clock_that_stood_still_is_followed_in_time() -> None:
    lease, _ = _lease()
    for second in range(100, 200):
        _beat(lease, second)
    for second in range(210, 900):  # its machine slept for 10 s, and its clock with it
        _beat(lease, second, clock=THEIRS - 10.0)
        assert lease.end > second + 9
    assert lease.end == pytest.approx(899 + 20.01)


def test_a_heartbeat_that_is_no_time_is_ignored() -> None:
    lease, _ = _lease()
    for time in (math.nan, math.inf, -math.inf):
        lease.beat(time, 110.0)
    assert lease.end == 120.0
