"""Whether another attempt is worth while, and when."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.hosts.host import Host, HostKind
from launcher.job.failures.failure import FailedAttempt, Failure, FailureKind
from launcher.job.recovery.restarts import LOOP, failed_attempt, judge, judge_early
from launcher.placement.job_spec import CommandKind, JobSpec, WorkerCommand

CRASH = Failure(kind=FailureKind.EXITED, host="a", at=5.0, ran_s=5.0, attempt=1, rank=0, status=7)
LOST = Failure(kind=FailureKind.HOST_LOST, host="b", at=5.0, ran_s=5.0, attempt=1)


def spec(**changes: Any) -> JobSpec:
    hosts = (Host("a", HostKind.SSH), Host("b", HostKind.SSH))
    base = JobSpec(WorkerCommand(CommandKind.SCRIPT, "t.py"), hosts, run_id="r", workdir=Path("/w"), max_restarts=3)
    return replace(base, **changes)


def crashed(cause: Failure = CRASH, *, ran_s: float = 5.0, saved: int = 0) -> FailedAttempt:
    return failed_attempt(spec(), cause, ran_s=ran_s, saved=saved)


def test_as_many_restarts_as_asked_for() -> None:
    assert judge(spec(), 3 * [crashed()]).again_after_s is not None
    restart = judge(spec(), 4 * [crashed()])
    assert (restart.again_after_s, restart.reason) == (None, "all 3 restarts (--max-restarts) were used")
    assert judge(spec(max_restarts=1), 2 * [crashed()]).reason == "the one restart (--max-restarts) was used"


def test_a_run_without_restarts_has_nothing_to_say_about_them() -> None:
    restart = judge(spec(max_restarts=0), [crashed()])
    assert (restart.again_after_s, restart.reason) == (None, "")


def test_a_lost_host_is_free_where_a_run_can_do_without_it_only() -> None:
    elastic = spec(nnodes=(1, 2), max_restarts=0)
    lost = failed_attempt(elastic, LOST, ran_s=5.0, saved=0)
    assert judge(elastic, 10 * [lost]).again_after_s is not None
    assert judge(elastic, [lost, crashed()]).again_after_s is None
    assert not failed_attempt(spec(), LOST, ran_s=5.0, saved=0).free


def test_pauses_grow_with_attempts_that_made_no_progress() -> None:
    patient = spec(max_restarts=100)
    others = [crashed(replace(CRASH, status=status)) for status in range(10, 20)]  # no loop: each fails in its own way
    pauses = [judge(patient, others[:count]).again_after_s for count in range(1, 11)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert judge(patient, [*others, crashed(saved=1)]).again_after_s == 0.0
    assert judge(patient, [*others, crashed(ran_s=60.0), crashed()]).again_after_s == 0.0


def test_the_same_failure_without_progress_ends_the_run() -> None:
    patient = spec(max_restarts=100)
    assert judge(patient, (LOOP - 1) * [crashed()]).again_after_s is not None
    restart = judge(patient, LOOP * [crashed()])
    assert (restart.again_after_s, "without any progress" in restart.reason) == (None, True)
    assert judge(patient, [*(LOOP * [crashed(saved=1)]), crashed()]).again_after_s is not None
    other = crashed(replace(CRASH, status=8))
    assert judge(patient, [*((LOOP - 1) * [crashed()]), other]).again_after_s is not None


def test_a_process_alone_is_judged_by_its_own_lives() -> None:
    def died(rank: int, saved: int = 0) -> FailedAttempt:
        return FailedAttempt(CRASH, ran_s=1.0, saved=saved, free=False, rank=rank)

    assert judge(spec(), [crashed(), died(1), died(2)]).again_after_s == 0.0
    assert judge(spec(), [crashed(), died(1), died(2), died(3)]).reason.startswith("all 3 restarts")
    patient = spec(max_restarts=100)
    lives = [died(1), died(2), died(1), crashed(), died(1)]
    assert judge(patient, lives).again_after_s == 1.0, "the third of rank 1 in a row"
    assert judge(patient, [*lives, crashed()]).again_after_s == 0.5, "the second attempt"
    assert judge(patient, [*lives, died(1), died(2), died(1)]).reason.startswith("not tried again: the same failure")
    assert judge(patient, [*lives, died(1), died(1, saved=1)]).again_after_s == 0.0


def test_before_an_attempt_is_over_it_may_have_made_progress() -> None:
    patient = spec(max_restarts=100)
    for of, before, again in ((patient, LOOP - 1, True), (spec(), 3, False)):
        assert (judge_early(of, before * [crashed()], CRASH).again_after_s is not None) is again


@pytest.mark.parametrize(
    ("changes", "futile"),
    [
        ({"kind": FailureKind.RAISED, "error_type": "SyntaxError"}, True),
        ({"kind": FailureKind.RAISED, "error_type": "ImportError"}, True),
        ({"kind": FailureKind.RAISED, "error_type": "FileNotFoundError"}, True),
        ({"kind": FailureKind.RAISED, "error_type": "KeyError"}, False),
        ({"kind": FailureKind.NEVER_STARTED, "status": 127}, True),
        ({"status": 2}, True),
        ({"status": 2, "ran_s": 31.0}, False),
        ({"status": 2, "attempt": 1}, False),
    ],
)
def test_what_is_wrong_with_the_program_itself(changes: dict[str, Any], futile: bool) -> None:
    cause = replace(CRASH, **{"attempt": 0, **changes})
    assert (judge(spec(), [crashed(cause)]).again_after_s is None) is futile
