"""A slow rank, host or network is named soon, with the cause, once, and never where there is only noise."""

import json
import math
import random
from collections.abc import Callable, Mapping

import pytest
from testbed.seeds import Seeds

from launcher.timeline.records import Span, StepTimes
from launcher.timeline.stragglers import Straggler, Stragglers
from launcher.timeline.windows import Windows

USUAL_S = {"data": 0.002, "forward": 0.005, "backward": 0.010, "optimizer": 0.002, "other": 0.001}  # 20 ms
TRANSFER_S = 0.003
Slower = Callable[[int, int], Mapping[str, float]]  # by step and rank, what takes how much longer


def _nothing(_step: int, _rank: int) -> Mapping[str, float]:
    return {}


def simulated(
    *, ranks: int = 4, steps: int = 500, noise: float = 0.1, seed: int = 0, slower: Slower = _nothing,
    transfer: Callable[[int], float] = lambda _: TRANSFER_S, outliers: float = 0.0, evaluation: int = 0,
    summed: int = 1, per_host: int = 2,
) -> tuple[list[tuple[int, Straggler]], Stragglers]:  # fmt: skip
    """Train in lockstep; return what was told, with the step at which it was, and the detector.

    Each phase is log-normal with this `noise`; a part `outliers` of all steps of a rank is 1.5 to 6 times as long;
    rank 0 evaluates for 25 steps' time after so many. `summed` steps are one record.
    """
    rng, now, windows = random.Random(seed), 0.0, Windows()
    told: list[tuple[int, Straggler]] = []
    step = 0
    detector = Stragglers(
        0.0, host_of=lambda rank: f"node{rank // per_host}", tell=lambda straggler: told.append((step, straggler))
    )
    sums = [dict.fromkeys([*USUAL_S, "wait"], 0.0) for _ in range(ranks)]
    for step in range(1, steps + 1):  # `tell` sees it
        works = [{phase: usual * math.exp(rng.gauss(0, noise)) for phase, usual in USUAL_S.items()} for _ in sums]
        for rank, work in enumerate(works):
            if rng.random() < outliers:
                work[rng.choice([*USUAL_S])] += rng.choice((0.01, 0.03, 0.1))
            for phase, seconds in slower(step, rank).items():
                work[phase] += seconds
        began = now
        evaluated_s = 0.5 if evaluation and step % evaluation == 0 else 0.0
        if evaluated_s:
            windows.add(Span(0, 0, "evaluation", began, began + evaluated_s))
            works[0]["other"] += evaluated_s
        length = max(sum(work.values()) for work in works) + transfer(step) * math.exp(rng.gauss(0, noise))
        now += length
        for rank, work in enumerate(works):
            work["wait"] = length - sum(work.values())
            for phase, seconds in work.items():
                sums[rank][phase] += seconds
            if step % summed == 0:
                order = ("data", "forward", "backward", "wait", "optimizer", "other")
                windows.add(StepTimes(0, rank, step, summed, now, tuple(sums[rank][phase] for phase in order)))
                sums[rank] = dict.fromkeys(sums[rank], 0.0)
        for window in windows.take():
            detector.add(window)
    return told, detector


@pytest.mark.parametrize(("ranks", "noise"), [(2, 0.3), (3, 0.02), (4, 0.1), (5, 0.6)])
def test_noise_is_no_straggler_in_thousands_of_steps(ranks: int, noise: float, seeds: Seeds) -> None:
    (seed,) = seeds(1)
    told, _ = simulated(ranks=ranks, steps=3_000, noise=noise, seed=seed, outliers=0.01, evaluation=200)
    assert told == [], f"seed {seed}"


@pytest.mark.parametrize("summed", [1, 5])
@pytest.mark.parametrize("noise", [0.02, 0.2])
@pytest.mark.parametrize(
    ("phase", "what"),
    [("data", "data"), ("forward", "compute"), ("backward", "compute"), ("optimizer", "compute"), ("other", "other")],
)
def test_a_throttled_rank_of_four_is_found_within_30_steps(
    phase: str, what: str, noise: float, summed: int, seeds: Seeds
) -> None:
    for seed in seeds(1):

        def slower(step: int, rank: int) -> Mapping[str, float]:
            return {phase: 0.02} if rank == 3 and 200 < step <= 300 else {}

        told, detector = simulated(
            steps=300 + 60 * summed, noise=noise, seed=seed, slower=slower, outliers=0.01, summed=summed
        )
        (found_at, found), (over_at, over) = told
        assert (found.ranks, found.host, found.what, found.to_step) == ((3,), "node1", what, None)
        assert 200 < found_at <= 230
        # Single long steps of this rank may come just before step 200, and delay the end.
        assert 200 - 20 * summed < found.from_step <= 210
        assert 1.2 < found.times < 3.0
        assert over.ranks == (3,)
        assert over_at > 300
        assert over.to_step == pytest.approx(over_at, abs=summed)
        assert detector.found == [over]
        assert detector.now == []


@pytest.mark.parametrize("summed", [1, 5])
def test_without_single_long_steps_begin_and_end_are_exact(summed: int) -> None:
    told, _ = simulated(
        noise=0.02, slower=lambda step, rank: {"data": 0.02} if rank == 3 and 200 < step <= 300 else {}, summed=summed
    )
    (_, found), (over_at, _) = told
    assert 200 - summed <= found.from_step <= 201
    assert found.times == pytest.approx(2.0, rel=0.05)
    assert 300 < over_at <= 300 + 12 * summed


def test_a_single_long_step_does_not_say_what_is_slow() -> None:
    def slower(step: int, rank: int) -> Mapping[str, float]:
        return {"data": 0.02, "other": 0.2 if step == 202 else 0.0} if rank == 3 and step > 200 else {}

    told, _ = simulated(slower=slower)
    assert [straggler.what for _, straggler in told] == ["data"]


def test_a_rank_that_is_slow_from_the_start_is_found_and_stays_so() -> None:
    told, detector = simulated(steps=300, slower=lambda _, rank: {"forward": 0.01} if rank == 2 else {})
    ((found_at, found),) = told
    assert found_at <= 30
    assert detector.now == [found]
    assert detector.slowest is not None
    assert detector.slowest[0] == 2
    assert detector.slowest[2] == "compute"
    assert detector.slowest[1] == pytest.approx(1.5, rel=0.2)


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_slow_host_is_named_once(ranks: int) -> None:
    told, _ = simulated(
        ranks=ranks, slower=lambda step, rank: {"backward": 0.015} if rank // 2 == 1 and 200 < step <= 300 else {}
    )
    assert [(each.host, each.ranks, each.what) for _, each in told] == [("node1", (2, 3), "compute")] * 2
    assert told[0][0] <= 230


def test_a_host_of_which_one_rank_was_slow_before_is_named_as_a_whole() -> None:
    def slower(step: int, rank: int) -> Mapping[str, float]:
        return {"data": 0.02} if step > (100 if rank == 2 else 200) and rank // 2 == 1 else {}

    told, detector = simulated(ranks=8, slower=slower)
    assert [each.ranks for _, each in told] == [(2,), (2, 3)]
    assert [each.ranks for each in detector.now] == [(2, 3)]


def test_longer_waits_of_everybody_are_the_network() -> None:
    told, _ = simulated(transfer=lambda step: 0.015 if 200 < step <= 300 else TRANSFER_S)
    assert [(each.what, each.ranks, each.host) for _, each in told] == [("network", (), "")] * 2
    assert 200 < told[0][0] <= 230


def test_where_all_work_longer_nobody_is_slow() -> None:
    told, _ = simulated(slower=lambda step, _: {"data": 0.05} if 200 < step <= 300 else {})
    assert told == []


def test_a_slow_attempt_is_over_with_its_processes() -> None:
    told: list[Straggler] = []
    windows, detector = Windows(), Stragglers(0.0, host_of=lambda _: "here", tell=told.append)
    now = 0.0
    for attempt in (0, 1):
        for step in range(1, 60):
            now += 2.0
            for rank in range(3):
                work = 1.9 if rank == 1 and attempt == 0 else 0.9
                windows.add(StepTimes(attempt, rank, step, 1, now, (0.0, work, 0.0, 2.0 - work, 0.0, 0.0)))
        for window in windows.take(is_over=True):
            detector.add(window)
    assert [each.ranks for each in told] == [(1,)]
    assert detector.now == []
    (known,) = detector.found
    assert (known.to_step, known.from_step) == (59, 12)
    assert json.loads(json.dumps(known.as_json()))["ranks"] == [1]


def test_a_slow_rank_that_goes_is_not_said_to_be_fast_again() -> None:
    told: list[Straggler] = []
    windows, detector = Windows(), Stragglers(0.0, host_of=lambda _: "here", tell=told.append)
    for step in range(1, 120):
        for rank in range(3):
            work = 1.9 if rank == 1 else 0.9
            if rank != 1 or step < 60:
                windows.add(StepTimes(0, rank, step, 1, 2.0 * step, (0.0, work, 0.0, 2.0 - work, 0.0, 0.0)))
        for window in windows.take(is_over=step == 65):  # as at the end of a run, too
            detector.add(window)
        if step == 65:
            assert detector.now == told
    assert [each.to_step for each in told] == [None]
    assert detector.now == []


def test_one_rank_alone_is_compared_with_nobody() -> None:
    told, detector = simulated(ranks=1, slower=lambda step, _: {"data": 0.1} if step > 100 else {})
    assert told == []
    assert detector.slowest is None


def test_a_rank_that_is_joined_late_has_nobody_to_be_compared_with_until_then() -> None:
    told: list[Straggler] = []
    windows, detector = Windows(), Stragglers(0.0, host_of=lambda _: "here", tell=told.append)
    for step in range(1, 60):
        for rank in range(1 if step < 30 else 2):
            windows.add(StepTimes(0, rank, step, 1, 2.0 * step, (0.0, 0.9, 0.0, 1.1, 0.0, 0.0)))
        for window in windows.take():
            detector.add(window)
    assert told == []
    assert detector.slowest is not None


def test_ranks_whose_first_steps_are_seen_one_after_the_other_are_compared_once_both_are_there() -> None:
    told: list[Straggler] = []
    windows, detector = Windows(), Stragglers(0.0, host_of=lambda _: "here", tell=told.append)
    for step in range(1, 60):
        for rank in range(2):
            work = 1.8 if rank == 1 else 0.9
            if rank == 0 or step > 30:
                windows.add(StepTimes(0, rank, step, 1, 2.0 * step, (0.0, work, 0.0, 2.0 - work, 0.0, 0.0)))
        for window in windows.take(is_over=step <= 30):  # those of one rank, too
            detector.add(window)
    assert [each.ranks for each in told] == [(1,)]
