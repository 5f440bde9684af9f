"""The parts of a run's wall time add up to it, and each stretch of it is where it belongs."""

import random
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.timeline.goodput import PARTS, Goodput, Parts
from launcher.timeline.records import SPANS, Span, StepTimes
from launcher.timeline.windows import Windows


class _Run:
    """Two ranks that train by a script; `now` is the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.windows = Windows()
        self.goodput = Goodput(self.now)
        self.attempt = 0
        self._step = 0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def train_without_ddp(self, steps: int) -> None:
        """Make steps of a second, of which nothing else is known."""
        for _ in range(steps):
            self.now += 1.0
            self._step += 1
            for rank in (0, 1):
                self.windows.add(StepTimes(self.attempt, rank, self._step, 1, self.now, (0.0,) * 5 + (1.0,)))
        self._take()

    def train(self, steps: int, *, slow: float = 0.0) -> None:
        """Make steps of a second, of which 0.1 s are communication; rank 1 works `slow` longer."""
        for _ in range(steps):
            self.now += 1.0 + slow
            self._step += 1
            for rank in (0, 1):
                wait = 0.1 + (0.0 if rank else slow)
                phases = (0.1, 0.3, 0.4 + (slow if rank else 0.0), wait, 0.1, 0.0)
                self.windows.add(StepTimes(self.attempt, rank, self._step, 1, self.now, phases))
        self._take()

    def span(self, kind: str, seconds: float) -> None:
        """Rank 0 does something that is no step, and the other waits for it in the next one."""
        self.now += seconds
        span = Span(self.attempt, 0, kind, self.now - seconds, self.now)
        self.windows.add(span)
        self.goodput.add_span(span)
        self.now += 1.0
        self._step += 1
        for rank in (0, 1):
            phases = (0.1, 0.3, 0.4, 0.1 + rank * seconds, 0.1, (1 - rank) * seconds)
            self.windows.add(StepTimes(self.attempt, rank, self._step, 1, self.now, phases))
        self._take()

    def fail(self, detection_s: float, recovery_s: float) -> None:
        self.wait(detection_s)
        self.goodput.note(self.now, all_run=False, fails=True)
        self.wait(recovery_s)
        self.goodput.note(self.now, all_run=True, fails=False)

    def begin_attempt(self, lost: int | None) -> None:
        for window in self.windows.take(is_over=True):
            self.goodput.add(window)
        self.attempt += 1
        self.goodput.begin_attempt(lost)

    def parts(self) -> Parts:
        return self.goodput.parts(self.now)

    def _take(self) -> None:
        for window in self.windows.take():
            self.goodput.add(window)


def _shown(parts: Parts) -> dict[str, object]:
    return {name: pytest.approx(value) for name in PARTS if (value := getattr(parts, name)) > 1e-9}


def test_an_undisturbed_run() -> None:
    run = _Run()
    run.wait(5.0)
    run.train(20)
    run.wait(2.0)
    parts = run.parts()
    assert _shown(parts) == {"start": 5.0, "training": 20.0, "rest": 2.0}
    assert parts.goodput == pytest.approx(20 / 27)


def test_waiting_for_a_straggler_is_the_mean_over_the_ranks() -> None:
    run = _Run()
    run.train(10)
    run.train(10, slow=0.5)  # one of two waits for it
    assert _shown(run.parts()) == {"training": 10 + 12.5, "waiting": 2.5}


def test_a_save_of_one_rank_counts_once_though_the_other_waits() -> None:
    run = _Run()
    run.train(5)
    run.span("save", 3.0)
    run.span("evaluation", 2.0)
    run.train(5)
    assert _shown(run.parts()) == {"training": 12.0, "checkpoints": 5.0}


def test_a_span_between_steps_is_no_rest() -> None:
    run = _Run()
    run.train(5)
    run.wait(4.0)
    run.goodput.add_span(Span(0, 0, "evaluation", run.now - 3.0, run.now))
    run.goodput.add_span(Span(0, 1, "save", run.now - 3.5, run.now - 2.0))
    assert _shown(run.parts()) == {"training": 5.0, "checkpoints": 3.5, "rest": 0.5}


def test_a_failure_costs_its_recovery_and_the_steps_made_twice() -> None:
    run = _Run()
    run.wait(2.0)
    run.train(10)
    run.fail(3.0, 1.0)
    run.begin_attempt(4)
    run.wait(1.5)  # until the first step
    run.train(10)
    parts = run.parts()
    assert _shown(parts) == {"start": 2.0, "training": 16.0, "failures": 5.5 + 4.0}
    assert parts.repeated == pytest.approx(4.0)


@pytest.mark.parametrize("lost", [None, 10_000])
def test_without_a_checkpoint_all_steps_are_made_twice(lost: int | None) -> None:
    run = _Run()
    run.train(5)
    run.begin_attempt(0)
    run.train(10)
    run.begin_attempt(lost)
    run.train(10)
    assert _shown(run.parts()) == {"training": 15.0, "failures": 10.0}


@pytest.mark.parametrize("lost", [None, 10_000])
def test_without_ddp_nothing_is_known_to_be_made_twice(lost: int | None) -> None:
    run = _Run()
    run.train_without_ddp(10)
    run.fail(3.0, 1.0)
    run.begin_attempt(lost)
    run.train_without_ddp(10)
    assert _shown(run.parts()) == {"training": 20.0, "failures": 4.0}
    assert run.parts().repeated == 0.0


def test_where_others_live_on_a_longer_step_is_the_failure() -> None:
    run = _Run()
    run.train(20)
    run.fail(1.0, 4.0)
    run.now -= 5.0  # the step under way takes as long
    run.train(1, slow=5.0)
    run.train(5)
    parts = run.parts()
    assert parts.failures == pytest.approx(5.0)
    assert parts.training == pytest.approx(26.0)


def test_steps_that_a_recovery_undoes_are_no_training() -> None:
    run = _Run()
    run.train(10)
    run.goodput.add_span(Span(0, 0, "recovery", run.now - 2.5, run.now + 1.0))
    run.wait(1.0)
    run.train(5)
    parts = run.parts()
    assert _shown(parts) == {"training": 12.5, "failures": 3.5}
    assert parts.repeated == pytest.approx(2.5)


def test_a_failure_before_the_first_step_is_no_start() -> None:
    run = _Run()
    run.wait(2.0)
    run.fail(0.0, 3.0)
    run.begin_attempt(None)
    run.wait(1.0)
    run.train(1)
    assert _shown(run.parts()) == {"start": 2.0, "training": 1.0, "failures": 4.0}


def test_without_steps_start_and_failures_are_known() -> None:
    run = _Run()
    run.wait(2.0)
    run.goodput.note(run.now, all_run=True, fails=False)
    run.wait(10.0)
    run.fail(0.0, 3.0)
    run.wait(5.0)
    parts = run.parts()
    assert _shown(parts) == {"start": 2.0, "failures": 3.0, "rest": 15.0}
    assert parts.goodput is None
    assert parts.as_json()["training_s"] is None


_SECONDS = st.floats(0.0, 50.0)
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), _SECONDS),
        st.tuples(st.just("train"), st.integers(1, 5), st.floats(0.0, 3.0)),
        st.tuples(st.just("span"), st.sampled_from(SPANS), _SECONDS),
        st.tuples(st.just("fail"), _SECONDS, _SECONDS),
        st.tuples(st.just("attempt"), st.one_of(st.none(), st.integers(0, 20))),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(_EVENTS, st.integers(0, 1000))
def test_the_parts_add_up_whatever_happens(events: list[tuple[object, ...]], seed: int) -> None:
    run, rng = _Run(), random.Random(seed)
    began = run.now
    for event in events:
        match event:
            case ("wait", float(seconds)):
                run.wait(seconds)
            case ("train", int(steps), float(slow)):
                run.train(steps, slow=slow)
            case ("span", str(kind), float(seconds)):
                run.span(kind, seconds)
            case ("fail", float(detection_s), float(recovery_s)):
                run.fail(detection_s, recovery_s)
            case ("attempt", lost):
                run.begin_attempt(lost if lost is None or isinstance(lost, int) else None)
        if rng.random() < 0.3:  # a record of a time that is over, or on a clock that is a little off
            run.windows.add(StepTimes(run.attempt, 0, 1, 3, run.now - rng.random(), (0.5, 0.5, 0.0, 0.5, 0.0, 0.0)))
        parts = run.parts()
        assert parts.wall_s == pytest.approx(run.now - began, abs=1e-6)
        assert min(astuple(parts)[: len(PARTS)]) >= -1e-6
        assert -1e-6 <= parts.repeated <= parts.failures + 1e-6
