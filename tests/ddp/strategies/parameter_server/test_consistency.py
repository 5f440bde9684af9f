"""Who waits for whom at a parameter server, for any order of events. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ddp.strategies.parameter_server.consistency import Consistency, Mode

CHUNK = 0


class Bounded(RuleBasedStateMachine):
    """Workers as they are: one that was answered pushes its next step; any may die, come again, or be through."""

    replicas, staleness = 4, 2

    def __init__(self) -> None:
        super().__init__()
        self.consistency = Consistency("bounded", self.replicas, staleness=self.staleness)
        self.next_step: dict[int, int] = {}  # of those that live
        self.waiting: set[int] = set()

    def _go_on(self) -> None:
        for replica in sorted(self.waiting):
            if self.consistency.may_go_on(replica):
                self.waiting.discard(replica)

    @rule(replica=st.integers(0, 3))
    def join(self, replica: int) -> None:
        if replica not in self.next_step and not self.consistency.workers[replica].has_finished:
            others = [
                self.consistency.workers[r].clock for r in self.next_step if not self.consistency.workers[r].is_lost
            ]
            self.next_step[replica] = self.consistency.join(replica, done=0, sync_step=0)
            assert self.next_step[replica] >= min(others, default=0), "no one waits for one that comes late"
            self._go_on()

    @precondition(lambda self: set(self.next_step) - self.waiting)
    @rule(pick=st.integers(0, 99))
    def push(self, pick: int) -> None:
        ready = sorted(set(self.next_step) - self.waiting)
        replica = ready[pick % len(ready)]
        self.consistency.hear(replica)
        step = self.next_step[replica]
        assert self.consistency.push(replica, step, CHUNK)
        assert not self.consistency.push(replica, step, CHUNK), "a gradient that comes twice counts once"
        self.consistency.complete(replica, step)
        self.next_step[replica] = max(step + 1, self.consistency.workers[replica].clock)
        self.waiting.add(replica)
        self._go_on()

    @precondition(lambda self: self.next_step)
    @rule(pick=st.integers(0, 99), how=st.sampled_from(["die", "finish", "fall silent"]))
    def end(self, pick: int, how: str) -> None:
        replica = sorted(self.next_step)[pick % len(self.next_step)]
        if how == "finish":
            self.consistency.workers[replica].has_finished = True
        else:
            self.consistency.workers[replica].is_lost = True
        if how != "fall silent":
            del self.next_step[replica]
            self.waiting.discard(replica)
        self._go_on()

    def _training(self) -> list[int]:
        return [r for r in self.next_step if self.consistency.workers[r].is_active]

    @invariant()
    def who_may_go_on_is_never_further_ahead_than_the_bound(self) -> None:
        workers = self.consistency.workers
        going = [workers[r].clock for r in self._training() if r not in self.waiting]
        everyone = [worker.clock for worker in workers if worker.is_active and worker.has_joined]
        if going and everyone:
            assert max(going) - min(everyone) <= self.staleness

    @invariant()
    def someone_can_always_go_on(self) -> None:
        active = [replica for replica, worker in enumerate(self.consistency.workers) if worker.is_active]
        training = self._training()
        if training and len(training) == len(active):  # else one that has never come, or is not missed yet, is awaited
            assert set(training) - self.waiting


TestBounded = Bounded.TestCase
TestBounded.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)), st.integers(0, n - 1))))
def test_sync_makes_a_step_of_the_first_that_are_needed(case: tuple[int, list[int], int]) -> None:
    replicas, order, backups = case
    consistency = Consistency("sync", replicas, backup_workers=backups)
    came: dict[int, set[int]] = {0: set()}
    for count, replica in enumerate(order, start=1):
        consistency.push(replica, 0, CHUNK)
        came[0].add(replica)
        if count < replicas - backups:
            assert consistency.due(came) is None
            assert consistency.missing(0, came[0]) == sorted(order[count:])
        else:
            assert consistency.due(came) == 0
            break


@given(st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4)), st.integers(0, 2))
def test_sync_waits_for_who_is_silent_and_not_for_who_is_through(
    pushed: set[int], finished: set[int], lost: set[int], backups: int
) -> None:
    consistency = Consistency("sync", 5, backup_workers=backups)
    for replica in finished:
        consistency.workers[replica].has_finished = True
    for replica in lost:
        consistency.workers[replica].is_lost = True
    for replica in pushed:
        consistency.push(replica, 3, CHUNK)
    missing = {0, 1, 2, 3, 4} - pushed - finished - (lost if backups else set())
    assert consistency.missing(3, pushed) == sorted(missing)
    enough = backups > 0 and len(pushed) >= max(1, 5 - len(finished) - backups)
    assert (consistency.due({3: pushed}) == 3) == (not missing or enough)
    assert consistency.due({}) is None


@given(st.integers(0, 9), st.integers(0, 9))
def test_a_new_life_begins_where_training_is(slow: int, ahead: int) -> None:
    for mode in ("async", "bounded"):
        consistency = Consistency(mode, 3, staleness=20)
        for replica, clock in ((0, slow), (1, slow + ahead)):
            consistency.join(replica, done=0, sync_step=0)
            for step in range(clock):
                consistency.complete(replica, step)
        assert consistency.step == slow + ahead
        assert consistency.join(2, done=0, sync_step=0) == slow, "with the slowest, so that no one has to wait for it"
        consistency.workers[1].is_lost = True
        assert consistency.join(1, done=0, sync_step=0) == slow + ahead, "what it has made before counts"
    consistency = Consistency("sync", 2)
    assert consistency.join(1, done=0, sync_step=7) == 7
    assert consistency.missing(6, {0}) == []


def test_a_new_life_is_never_further_ahead_than_the_bound() -> None:
    consistency = Consistency("bounded", 2, staleness=2)
    consistency.join(1, done=0, sync_step=0)
    for step in range(3):
        consistency.push(1, step, CHUNK)
        consistency.complete(1, step)
    consistency.workers[1].is_lost = True
    assert consistency.join(0, done=0, sync_step=0) == 0
    assert consistency.join(1, done=0, sync_step=0) == 2, "its first step is not asked whether it may be made"
    assert consistency.push(1, 2, CHUNK), "a step that is made again counts"


def test_the_end_is_when_every_replica_has_said_so() -> None:
    consistency = Consistency("async", 2)
    consistency.begin_at(4)
    assert consistency.step == 4
    consistency.workers[0].has_finished = True
    consistency.workers[1].is_lost = True
    assert not consistency.is_over
    consistency.workers[1].has_finished = True
    assert consistency.is_over


def test_a_new_server_takes_the_clock_of_a_worker_that_lives() -> None:
    consistency = Consistency("bounded", 2, staleness=1)
    consistency.begin_at(4)
    assert consistency.join(0, done=9, sync_step=5) == 9
    assert consistency.join(1, done=0, sync_step=5) == 9, "one that comes new goes along with it"
    consistency.complete(0, 9)
    consistency.complete(0, 10)
    assert not consistency.may_go_on(0)
    consistency.complete(1, 9)
    assert consistency.may_go_on(0)


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_a_new_server_takes_no_worker_for_further_than_it_is(mode: Mode) -> None:
    consistency = Consistency(mode, 2, staleness=9)
    consistency.begin_at(80)  # where the other one was
    assert consistency.join(0, done=74, sync_step=80) == 74
    assert consistency.join(1, done=83, sync_step=80) == 83
    assert consistency.join(0, done=73, sync_step=80) == 74, "once it has joined, only what it has made since counts"


def test_a_silent_worker_keeps_its_count_if_none_waits_for_it() -> None:
    cases: list[tuple[Mode, int]] = [("async", 0), ("bounded", 3)]
    for mode, clock in cases:
        consistency = Consistency(mode, 2, staleness=9)
        for replica in (0, 1):
            consistency.join(replica, done=0, sync_step=0)
        consistency.workers[1].is_lost = True
        consistency.complete(0, 2)
        consistency.hear(1)
        assert consistency.workers[1].clock == clock
