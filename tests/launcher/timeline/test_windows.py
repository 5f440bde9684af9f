"""Ranks are compared by time: whatever their records are summed up to, each window has the share of every rank."""

import random

import pytest
from testbed.seeds import Seeds

from launcher.timeline.records import Span, StepTimes
from launcher.timeline.windows import LATE_S, SHARES_PER_S, Windows


def _step(rank: int, step: int, ended: float, *phases: float, steps: int = 1, attempt: int = 0) -> StepTimes:
    return StepTimes(attempt, rank, step, steps, ended, (*phases, *[0.0] * (6 - len(phases))))


def test_a_window_waits_for_the_records_of_all_ranks() -> None:
    windows = Windows()
    windows.add(_step(0, 1, 10.0, 0.25, 0.5, 0.0, 0.25))
    windows.add(_step(1, 1, 9.9, 0.1, 0.8))
    assert windows.take() == []
    windows.add(_step(1, 3, 11.9, 1.0, 1.0, steps=2))
    (window,) = windows.take()
    assert (window.step, window.steps, window.began, window.ended) == (1, 1, 9.0, 10.0)
    assert (window.shares[0].data, window.shares[0].compute, window.shares[0].wait) == (0.25, 0.5, 0.25)
    # Of its two records nine tenths of a second, and one tenth of the two.
    assert window.shares[1].data == pytest.approx(0.15)
    assert window.shares[1].compute == pytest.approx(0.85)


def test_a_rank_that_says_no_more_holds_no_one_up() -> None:
    windows = Windows()
    windows.add(_step(1, 1, 1.0, 1.0))
    for step in range(1, int(LATE_S) + 3):
        windows.add(_step(0, step, float(step), 1.0))
    found = windows.take()
    assert [window.step for window in found] == [*range(1, int(LATE_S) + 3)]
    assert [sorted(window.shares) for window in found[:2]] == [[0, 1], [0]]


def test_when_the_lowest_rank_is_away_another_one_leads() -> None:
    windows = Windows()
    for step in range(1, 6):
        windows.add(_step(1, step, float(step), 1.0))
    windows.add(_step(0, 1, 1.0, 1.0))
    windows.add(_step(0, 1, 5.0, 1.0))  # started again: it counts again
    found = windows.take()
    assert [(window.began, window.ended) for window in found] == [(float(at), float(at + 1)) for at in range(5)]
    assert [sorted(window.shares) for window in found] == [[0, 1], [1], [1], [1], [0, 1]]


def test_spans_are_no_work_of_the_steps() -> None:
    windows = Windows()
    windows.add(Span(0, 0, "evaluation", 1.5, 2.5))
    windows.add(_step(0, 1, 3.0, 0.0, 1.0, 0.5, 0.0, 0.25, 1.25))
    windows.add(_step(1, 1, 3.0, 0.5, 1.0, 0.5, 1.0))
    (window,) = windows.take()
    assert window.shares[0].spans == {"evaluation": 1.0}
    assert window.shares[0].own == pytest.approx(2.0)
    assert window.shares[0].other == pytest.approx(0.25)
    assert (window.shares[1].own, window.shares[1].spans) == (2.0, {})


def test_the_last_steps_of_an_attempt_are_not_lost() -> None:
    windows = Windows()
    windows.add(_step(0, 5, 5.0, 1.0))
    windows.add(_step(1, 4, 4.0, 1.0))
    windows.add(_step(0, 1, 9.0, 1.0, attempt=1))
    windows.add(_step(1, 5, 5.0, 1.0))  # late, of the attempt before
    assert [(window.attempt, window.step) for window in windows.take()] == [(0, 4), (0, 5), (1, 1)]


def test_of_many_ranks_there_are_fewer_windows() -> None:
    ranks, steps, windows = 200, 100, Windows()
    for step in range(1, steps + 1):
        for rank in range(ranks):
            windows.add(_step(rank, step, step * 0.01, 0.01))
    found = windows.take(is_over=True)
    assert sum(window.steps for window in found) == steps
    assert len(found) <= 1 + steps * 0.01 * SHARES_PER_S / ranks


def test_records_in_any_order_give_the_same_windows(seeds: Seeds) -> None:
    first, second, times = seeds(3)
    rng = random.Random(times)
    streams: list[list[StepTimes]] = []
    for rank in range(3):
        now, stream = 0.0, []
        for step in range(1, 200):
            phases = [rng.random() for _ in range(6)]
            now += sum(phases)
            stream.append(_step(rank, step, now, *phases))
        streams.append(stream)

    def found(chance: random.Random) -> list[float]:
        windows, left, seen = Windows(), [[*stream] for stream in streams], []
        for stream in left:
            windows.add(stream.pop(0))
        while any(left):
            first = min(stream[0].ended for stream in left if stream)
            stream = chance.choice([each for each in left if each and each[0].ended < first + LATE_S / 4])
            windows.add(stream.pop(0))
            seen += windows.take()
        return [
            number
            for window in seen
            for number in (window.ended, *window.shares, *(share.own for share in window.shares.values()))
        ]

    assert found(random.Random(first)) == pytest.approx(found(random.Random(second)))
    assert len(found(random.Random(first))) > 3 * 100


def test_zero_lengths_are_no_error() -> None:
    windows = Windows()
    for rank in range(2):
        windows.add(_step(rank, 1, 1.0))
        windows.add(_step(rank, 2, 2.0, 1.0))
    (window,) = windows.take()
    assert (window.length_s, window.steps, len(window.shares)) == (1.0, 2, 2)
