"""One wording of failures: what is said while a run goes on, and in full at its end."""

from typing import Any

import pytest

from launcher.job.failure import LINE_CHARACTERS, Failure, FailureKind, how_they_ended, what_happened


def failure(kind: FailureKind, **more: Any) -> Failure:
    return Failure(**{"kind": kind, "host": "a", "at": 5.0, "ran_s": 1.25, "rank": 3, "pid": 7, **more})


OTHER = "by another process or by itself: dtrain did not send it"
PASSED_ON = "dtrain passes it on when it is sent one; the script has no handler for it"


@pytest.mark.parametrize(
    ("kind", "changes", "brief", "in_full"),
    [
        (
            FailureKind.RAISED,
            {"error_type": "ValueError", "message": "\nbad batch\nmore"},
            "rank 3 on a raised ValueError after 1.2 s: bad batch",
            "rank 3 on a (pid 7) raised an exception after 1.2 s",
        ),
        (
            FailureKind.RAISED,
            {"status": -15},
            "rank 3 on a raised an exception after 1.2 s",
            "rank 3 on a (pid 7) raised an exception after 1.2 s",
        ),
        (
            FailureKind.EXITED,
            {"status": 7},
            "rank 3 on a exited with code 7 after 1.2 s",
            "rank 3 on a (pid 7) exited with code 7 after 1.2 s",
        ),
        (
            FailureKind.KILLED,
            {"status": -10},
            "rank 3 on a was killed by SIGUSR1 after 1.2 s",
            f"rank 3 on a (pid 7) was killed by SIGUSR1 ({PASSED_ON}) after 1.2 s",
        ),
        (
            FailureKind.KILLED,
            {"status": -9},
            "rank 3 on a was killed by SIGKILL after 1.2 s",
            f"rank 3 on a (pid 7) was killed by SIGKILL ({OTHER}, and no out-of-memory kill was seen) after 1.2 s",
        ),
        (
            FailureKind.KILLED,
            {"status": -15},
            "rank 3 on a was killed by SIGTERM after 1.2 s",
            f"rank 3 on a (pid 7) was killed by SIGTERM ({OTHER}) after 1.2 s",
        ),
        (FailureKind.NEVER_STARTED, {"message": "x"}, "rank 3 on a x", "rank 3 on a x"),
        (FailureKind.HOST_LOST, {"message": "x"}, "host a was lost after 1.2 s: x", "host a was lost after 1.2 s: x"),
        (
            FailureKind.STORE_LOST,
            {"message": "x"},
            "the rendezvous store on a was lost after 1.2 s: x",
            "the rendezvous store on a was lost after 1.2 s: x",
        ),
        (FailureKind.STALLED, {"message": "no progress"}, "no progress", "no progress"),
    ],
)
def test_every_kind_of_failure_is_said_in_one_line(
    kind: FailureKind, changes: dict[str, Any], brief: str, in_full: str
) -> None:
    assert what_happened(failure(kind, **changes)) == brief
    assert what_happened(failure(kind, **changes), in_full=True) == in_full


def test_a_long_message_is_cut_while_the_run_goes_on() -> None:
    said = what_happened(failure(FailureKind.RAISED, error_type="E", message="x" * 500))
    assert said.endswith(": " + "x" * LINE_CHARACTERS)
    lost = failure(FailureKind.HOST_LOST, message="x" * 500)
    assert len(what_happened(lost, in_full=True)) > 500 > len(what_happened(lost))


@pytest.mark.parametrize(
    ("kind", "changes", "one", "two"),
    [
        (FailureKind.EXITED, {"status": 3}, "exited with code 3", "exited with code 3"),
        (FailureKind.KILLED, {"status": -6}, "was killed by SIGABRT", "were killed by SIGABRT"),
        (FailureKind.RAISED, {"inside": "f", "message": "No"}, "failed in f: no", "failed in f: no"),
        (FailureKind.RAISED, {}, "failed with an error", "failed with an error"),
        (FailureKind.NEVER_STARTED, {}, "never started", "never started"),
        (FailureKind.HOST_LOST, {"message": "gone"}, "was lost: gone", "were lost: gone"),
    ],
)
def test_failures_that_are_alike_are_said_in_one_phrase(
    kind: FailureKind, changes: dict[str, Any], one: str, two: str
) -> None:
    assert how_they_ended(failure(kind, **changes), 1) == one
    assert how_they_ended(failure(kind, **changes), 2) == two
