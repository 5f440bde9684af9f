"""Clocks of hosts are put on one axis, however wrong they are, and by the quickest of many round trips."""

import math
import random

import pytest

from launcher.timeline.clock_offset import MEASUREMENTS, ClockOffset


class Wire:
    """A host with a clock of its own behind a connection that takes as long as it likes."""

    def __init__(self, ahead_s: float, drift: float = 0.0) -> None:
        self.clock = ClockOffset()
        self.now = 1000.0
        self._ahead_s, self._drift = ahead_s, drift

    def theirs(self) -> float:
        return self.now * (1 + self._drift) + self._ahead_s

    @property
    def true_offset_s(self) -> float:
        return self.now - self.theirs()

    def round_trip(self, there_s: float, rest_s: float, back_s: float) -> None:
        asked = self.now
        self.now += there_s
        asked_at = self.theirs()
        self.now += rest_s
        time = self.theirs()
        self.now += back_s
        self.clock.hear(time, self.now, asked=asked, asked_at=asked_at)


@pytest.mark.parametrize("ahead_s", [0.0, 5e6, -900.0, 0.004])
def test_the_offset_is_wrong_by_half_of_the_shortest_way_at_most(ahead_s: float) -> None:
    random_ = random.Random(ahead_s)
    wire = Wire(ahead_s)
    for _ in range(20):
        wire.round_trip(random_.expovariate(20), random_.uniform(0, 1), random_.expovariate(20))
        assert abs(wire.clock.offset_s - wire.true_offset_s) <= wire.clock.error_s + 1e-9
    wire.round_trip(0.001, 0.9, 0.001)
    assert wire.clock.error_s == pytest.approx(0.001)
    wire.round_trip(0.5, 0.1, 0.0)  # all of it one way: not believed
    assert wire.clock.offset_s == pytest.approx(wire.true_offset_s, abs=1e-6)


def test_two_hosts_with_wrong_clocks_agree_on_a_time() -> None:
    wires = [Wire(5000.0), Wire(-3.0)]
    for wire in wires:
        wire.round_trip(0.002, 0.5, 0.004)
        wire.now = 1234.5
    moments = [wire.theirs() + wire.clock.offset_s for wire in wires]
    assert moments == pytest.approx([1234.5, 1234.5], abs=0.003)


def test_old_round_trips_are_forgotten_since_clocks_drift() -> None:
    wire = Wire(50.0, drift=1e-4)
    wire.round_trip(0.0005, 0.0, 0.0005)
    for _ in range(MEASUREMENTS):
        wire.now += 60.0
        wire.round_trip(0.01, 0.0, 0.01)
    assert abs(wire.clock.offset_s - wire.true_offset_s) < 0.01 + MEASUREMENTS * 60 * 1e-4
    assert wire.clock.error_s == pytest.approx(0.01, rel=0.01)


def test_without_a_round_trip_the_quickest_message_counts() -> None:
    clock = ClockOffset()
    assert (clock.offset_s, clock.error_s) == (0.0, math.inf)
    for delay_s in (0.5, 0.01, 2.0):
        clock.hear(100.0, 300.0 + delay_s)
    assert clock.offset_s == pytest.approx(200.01)
    assert clock.error_s == math.inf


def test_a_heartbeat_that_is_named_again_is_no_new_round_trip() -> None:
    wire = Wire(7.0)
    wire.round_trip(0.01, 0.0, 0.01)
    before = wire.clock.offset_s
    for _ in range(100):
        wire.now += 1.0
        wire.clock.hear(wire.theirs(), wire.now + 0.001, asked=1000.0, asked_at=1007.01)
    assert wire.clock.offset_s == before


@pytest.mark.parametrize(
    ("time", "asked", "asked_at"),
    [(100.0, 400.0, 90.0), (100.0, 200.0, 150.0), (100.0, 299.99, 50.0)],
    ids=["asked in the future", "answered before it came", "less than no time on the way"],
)
def test_what_cannot_be_is_no_round_trip(time: float, asked: float, asked_at: float) -> None:
    clock = ClockOffset()
    clock.hear(time, 300.0, asked=asked, asked_at=asked_at)
    assert clock.error_s == math.inf
