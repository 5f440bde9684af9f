"""A slow rank, host or network is named once it matters, with the cause, once, and never where there is only noise."""

import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from testbed.seeds import Seeds

from launcher.runs.overview import ProcessorWaits
from launcher.timeline.records import Span, StepTimes
from launcher.timeline.stragglers import LEAST_STEPS, Crowded, Stragglers
from launcher.timeline.windows import Windows

USUAL_S = {"data": 0.02, "forward": 0.05, "backward": 0.10, "optimizer": 0.02, "other": 0.01}  # 200 ms
TRANSFER_S = 0.03
SAID_AFTER = 60  # steps, from the first that is slow: 10 s, and some for the sum
Slower = Callable[[int, int], Mapping[str, float]]  # by step and rank, what takes how much longer


def _nothing(_step: int, _rank: int) -> Mapping[str, float]:
    return {}


def _never(_rank: int, _since: float) -> float:
    return 0.0


class Lockstep:
    """Ranks that make steps of `step_s` together, each with its own work in it, and a detector of stragglers."""

    def __init__(self, ranks: int, *, step_s: float = 2.0) -> None:
        self.reported: list[Any] = []
        self.detector = Stragglers(0.0, host_of=lambda _: "here", queued_part=_never, report=self.reported.append)
        self.windows = Windows()
        self._ranks, self._step_s, self._now = ranks, step_s, 0.0

    def step(self, number: int, works: Callable[[int], float | None], *, attempt: int = 0) -> None:
        """Let each rank work so long; without a number it makes no step."""
        self._now += self._step_s
        for rank in range(self._ranks):
            if (work := works(rank)) is not None:
                phases_s = (0.0, work, 0.0, self._step_s - work, 0.0, 0.0)
                self.windows.add(StepTimes(attempt, rank, number, 1, self._now, phases_s))

    def take(self, *, is_over: bool = False) -> None:
        for window in self.windows.take(is_over=is_over):
            self.detector.add(window)


def simulated(
    *, ranks: int = 4, steps: int = 500, noise: float = 0.1, seed: int = 0, slower: Slower = _nothing,
    transfer: Callable[[int], float] = lambda _: TRANSFER_S, outliers: float = 0.0, evaluation: int = 0,
    summed: int = 1, per_host: int = 2, usual: float = 1.0,
    queued_part: Callable[[int, float], float] = _never,
) -> tuple[list[tuple[int, Any]], Stragglers]:  # fmt: skip
    """Train in lockstep; return what was reported, with the step at which it was, and the detector.

    Each phase is log-normal with this `noise`; a part `outliers` of all steps of a rank is 1.5 to 6 times as long;
    rank 0 evaluates for 25 steps' time after so many. `summed` steps are one record. `usual` is a factor of all times.
    """
    rng, now, windows = random.Random(seed), 0.0, Windows()
    reported: list[tuple[int, Any]] = []
    step = 0
    detector = Stragglers(
        0.0, host_of=lambda rank: f"node{rank // per_host}", queued_part=queued_part,
        report=lambda straggler: reported.append((step, straggler)),
    )  # fmt: skip
    sums = [dict.fromkeys([*USUAL_S, "wait"], 0.0) for _ in range(ranks)]
    for step in range(1, steps + 1):  # `tell` sees it
        works = [
            {phase: usual * usual_s * math.exp(rng.gauss(0, noise)) for phase, usual_s in USUAL_S.items()} for _ in sums
        ]
        for rank, work in enumerate(works):
            if rng.random() < outliers:
                work[rng.choice([*USUAL_S])] += usual * rng.choice((0.1, 0.3, 1.0))
            for phase, seconds in slower(step, rank).items():
                work[phase] += usual * seconds
        began = now
        evaluated_s = 5.0 * usual if evaluation and step % evaluation == 0 else 0.0
        if evaluated_s:
            windows.add(Span(0, 0, "evaluation", began, began + evaluated_s))
            works[0]["other"] += evaluated_s
        length = max(sum(work.values()) for work in works) + usual * transfer(step) * math.exp(rng.gauss(0, noise))
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
    return reported, detector


@pytest.mark.parametrize(("ranks", "noise"), [(2, 0.3), (3, 0.02), (4, 0.1), (5, 0.6)])
def test_noise_is_no_straggler_in_thousands_of_steps(ranks: int, noise: float, seeds: Seeds) -> None:
    (seed,) = seeds(1)
    reported, _ = simulated(ranks=ranks, steps=3_000, noise=noise, seed=seed, outliers=0.01, evaluation=200)
    assert reported == [], f"seed {seed}"


@pytest.mark.parametrize("summed", [1, 5])
@pytest.mark.parametrize("noise", [0.02, 0.2])
@pytest.mark.parametrize(
    ("phase", "what"),
    [("data", "data"), ("forward", "compute"), ("backward", "compute"), ("optimizer", "compute"), ("other", "other")],
)
def test_a_throttled_rank_of_four_is_named_within_15_s(
    phase: str, what: str, noise: float, summed: int, seeds: Seeds
) -> None:
    for seed in seeds(1, kept=[1393342614]):

        def slower(step: int, rank: int) -> Mapping[str, float]:
            return {phase: 0.2} if rank == 3 and 200 < step <= 300 else {}

        reported, detector = simulated(
            steps=300 + 60 * summed, noise=noise, seed=seed, slower=slower, outliers=0.01, summed=summed
        )
        (found_at, found), (over_at, over) = reported
        assert (found.ranks, found.host, found.what, found.to_step) == ((3,), "node1", what, None)
        # Single long steps of this rank may come just before step 200: it is found earlier then, and its end later.
        assert 200 - 20 * summed < found.from_step <= 210
        assert found.from_step + LEAST_STEPS - summed <= found_at <= 200 + SAID_AFTER + 5 * summed
        assert 1.2 < found.times < 3.0
        assert over.ranks == (3,)
        assert over_at > 300
        assert over.to_step == pytest.approx(over_at, abs=summed)
        assert detector.found == [over]
        assert detector.now == []


@pytest.mark.parametrize("summed", [1, 5])
def test_without_single_long_steps_begin_and_end_are_exact(summed: int) -> None:
    reported, _ = simulated(
        noise=0.02, slower=lambda step, rank: {"data": 0.2} if rank == 3 and 200 < step <= 300 else {}, summed=summed
    )
    (_, found), (over_at, _) = reported
    assert 200 - summed <= found.from_step <= 201
    assert found.times == pytest.approx(2.0, rel=0.05)
    assert 300 < over_at <= 300 + 12 * summed


def test_a_single_long_step_does_not_say_what_is_slow() -> None:
    def slower(step: int, rank: int) -> Mapping[str, float]:
        return {"data": 0.2, "other": 2.0 if step == 202 else 0.0} if rank == 3 and step > 200 else {}

    reported, _ = simulated(slower=slower)
    assert [straggler.what for _, straggler in reported] == ["data"]


def test_a_rank_that_is_slow_from_the_start_is_found() -> None:
    reported, detector = simulated(steps=300, slower=lambda _, rank: {"forward": 0.1} if rank == 2 else {})
    ((found_at, found),) = reported
    assert found_at <= 18 + SAID_AFTER  # 2 s and 11 windows are learned from
    assert detector.now == [found]
    assert detector.slowest is not None
    assert detector.slowest[0] == 2
    assert detector.slowest[2] == "compute"
    assert detector.slowest[1] == pytest.approx(1.5, rel=0.2)


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_slow_host_is_named_once(ranks: int) -> None:
    reported, _ = simulated(
        ranks=ranks, slower=lambda step, rank: {"backward": 0.15} if rank // 2 == 1 and 200 < step <= 300 else {}
    )
    assert [(each.host, each.ranks, each.what) for _, each in reported] == [("node1", (2, 3), "compute")] * 2
    assert reported[0][0] <= 200 + SAID_AFTER


def test_a_host_is_named_though_one_rank_was_slow_before() -> None:
    def slower(step: int, rank: int) -> Mapping[str, float]:
        return {"data": 0.2} if step > (100 if rank == 2 else 200) and rank // 2 == 1 else {}

    reported, detector = simulated(ranks=8, slower=slower)
    assert [each.ranks for _, each in reported] == [(2,), (2, 3)]
    assert [each.ranks for each in detector.now] == [(2, 3)]


def test_longer_waits_of_everybody_are_the_network() -> None:
    reported, _ = simulated(transfer=lambda step: 0.15 if 200 < step <= 300 else TRANSFER_S)
    assert [(each.what, each.ranks, each.host) for _, each in reported] == [("network", (), "")] * 2
    assert 200 < reported[0][0] <= 200 + SAID_AFTER


def test_where_all_work_longer_no_one_is_slow() -> None:
    reported, _ = simulated(slower=lambda step, _: {"data": 0.5} if 200 < step <= 300 else {})
    assert reported == []


def test_a_slow_attempt_is_over_with_its_processes() -> None:
    run = Lockstep(3)
    for attempt in (0, 1):
        for step in range(1, 100):
            run.step(step, lambda rank: 1.9 if rank == 1 and attempt == 0 else 0.9, attempt=attempt)  # noqa: B023
        run.take(is_over=True)
    assert [each.ranks for each in run.reported] == [(1,)]
    assert run.detector.now == []
    (known,) = run.detector.found
    assert (known.to_step, known.from_step) == (99, 13)
    assert json.loads(json.dumps(known.as_json()))["ranks"] == [1]


def test_a_slow_rank_that_goes_is_not_said_to_be_fast_again() -> None:
    run = Lockstep(3)
    for step in range(1, 150):
        run.step(step, lambda rank: 0.9 if rank != 1 else 1.9 if step < 90 else None)  # noqa: B023
        run.take(is_over=step == 95)  # as at the end of a run, too
        if step == 95:
            assert run.detector.now == run.reported
    assert [each.to_step for each in run.reported] == [None]
    assert run.detector.now == []


def test_ranks_whose_steps_are_not_divided_are_not_compared() -> None:
    """Rank 1 makes steps of twice the length: without ddp no one knows who waits for whom."""
    run = Lockstep(3)
    for step in range(1, 1001):
        for rank in (0, 1, 2) if step % 2 == 0 else (0, 2):
            run.windows.add(StepTimes(0, rank, step, 1, 0.1 * step, (0.0,) * 5 + (0.2 if rank == 1 else 0.1,)))
        run.take()
    assert (run.reported, run.detector.now, run.detector.slowest) == ([], [], None)


def test_one_rank_alone_is_compared_with_no_one() -> None:
    reported, detector = simulated(ranks=1, slower=lambda step, _: {"data": 1.0} if step > 100 else {})
    assert reported == []
    assert detector.slowest is None


def test_ranks_are_compared_once_both_are_there() -> None:
    for slow_s, found in ((0.9, []), (1.8, [(1,)])):
        run = Lockstep(2)
        for step in range(1, 120):
            run.step(step, lambda rank: 0.9 if rank == 0 else slow_s if step > 30 else None)  # noqa: B023
            run.take(is_over=step <= 30)  # those of one rank, too
        assert [each.ranks for each in run.reported] == found


@pytest.mark.parametrize(
    ("slower", "usual"),
    [
        (lambda step, rank: {"data": 0.2} if rank == 3 and 200 < step <= 220 else {}, 1.0),  # 8 s
        (lambda step, rank: {"data": 0.014} if rank == 3 and step > 100 else {}, 1.0),  # 7 % of 0.2 s
        (lambda step, rank: {"data": 0.2} if rank == 3 and step > 100 else {}, 0.01),  # steps of 4 ms
        (lambda step, rank: {"data": 0.2} if rank == 3 and step > 100 and step % 50 < 25 else {}, 1.0),
    ],
    ids=["not-long", "not-much", "short-steps", "now-and-then"],
)
def test_who_is_slow_where_it_does_not_matter_is_not_named(slower: Slower, usual: float) -> None:
    steps = 1000 if usual == 1.0 else 10_000  # 40 s, four times as long as it takes with longer steps
    reported, detector = simulated(steps=steps, slower=slower, noise=0.02, usual=usual)
    assert reported == []
    assert detector.slowest is None


@pytest.mark.parametrize("kind", ["start", "recovery", "join"])
def test_the_first_seconds_say_nothing(kind: str) -> None:
    """A rank that is slow only in the 2 s after it has begun, or begun again, adds nothing to its sum."""
    run = Lockstep(3)
    for step in range(1, 400):
        now, begins = 0.2 * step, {"start": 0, "recovery": 200, "join": 200}[kind]
        for rank in range(3):
            is_slow = rank == 1 and 0 < step - begins <= 10
            work = 0.18 if is_slow else 0.09
            spent_s = 0.05 if kind == "recovery" and step == 200 else 0.0
            if spent_s:
                run.windows.add(Span(0, rank, "recovery", now - spent_s, now))
            if not (kind == "join" and rank == 1 and step <= 200):
                phases_s = (0.0, work, 0.0, 0.2 - work - spent_s, 0.0, spent_s)
                run.windows.add(StepTimes(0, rank, step, 1, now, phases_s))
        run.take()
        if step == begins + 12:
            assert [each.slow for each in run.detector._sums.values()] == [0.0] * 3
    assert run.reported == []


def test_where_processors_are_shared_only_the_host_is_named() -> None:
    asked: list[tuple[int, float]] = []

    def queued_part(rank: int, since: float) -> float:
        asked.append((rank, since))
        return 0.3

    reported, detector = simulated(
        slower=lambda step, rank: {"forward": 0.1} if rank == 3 and step > 100 else {}, noise=0.02,
        queued_part=queued_part,
    )  # fmt: skip
    assert [found for _, found in reported] == [Crowded("node1", 0.3)]
    assert detector.found == []
    (rank, since), *_ = asked
    assert rank == 3
    assert since == pytest.approx(100 * 0.23, rel=0.1)


def test_a_rank_slower_than_its_waits_for_a_processor_is_named() -> None:
    slower = {"forward": 0.1}  # a third of the time
    reported, _ = simulated(slower=lambda _, rank: slower if rank == 3 else {}, queued_part=lambda _rank, _since: 0.1)
    assert [found.ranks for _, found in reported] == [(3,)]


def test_waits_for_a_processor_are_a_part_of_the_time_since_then() -> None:
    waits = ProcessorWaits()
    assert waits.part(0, 0.0) == 0.0
    waits.add(10.0, {"0": 5.0, "1": 0.0})
    assert waits.part(0, 0.0) == 0.0
    for now, waited_s in ((13.0, 5.0), (16.0, 6.5), (19.0, 8.0)):
        waits.add(now, {"0": waited_s})
    assert waits.part(0, 14.0) == pytest.approx(0.5)
    assert waits.part(0, 0.0) == pytest.approx(3.0 / 9.0)
    assert waits.part(0, 99.0) == 0.0
    waits.add(22.0, {"0": 0.1})  # another process
    assert waits.part(0, 14.0) == 0.0
    waits.add(25.0, {"0": 0.4})
    assert waits.part(0, 14.0) == pytest.approx(0.1)
