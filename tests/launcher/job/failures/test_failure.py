"""Failures: which of several was the first by itself; and their one wording, while a run goes on and at its end."""

from typing import Any

import pytest
from testbed.present import present

from launcher.job.failures.failure import (
    LINE_CHARACTERS,
    SLACK_S,
    Failure,
    FailureKind,
    all_timed_out,
    failure_of,
    first_cause,
    how_they_ended,
    looks_like_consequence,
    what_happened,
)
from launcher.protocol.reports import Exited


def failure(kind: FailureKind, **more: Any) -> Failure:
    return Failure(**{"kind": kind, "host": "a", "at": 5.0, "ran_s": 1.25, "rank": 3, "pid": 7, **more})


OTHER = "by another process or by itself: dtrain did not send it"


@pytest.mark.parametrize(
    ("status", "killer", "name", "why"),
    [
        (-10, "", "SIGUSR1", "dtrain passes it on when it is sent one; the script has no handler for it"),
        (-9, "", "SIGKILL", f"{OTHER}, and no out-of-memory kill was seen"),
        (
            -9,
            "the out-of-memory killer: 61 of 64 GiB in use",
            "SIGKILL",
            "the out-of-memory killer: 61 of 64 GiB in use",
        ),
        (-11, "", "SIGSEGV", "it crashed: segmentation fault"),
        (-15, "", "SIGTERM", OTHER),
        (-40, "", "signal 40", OTHER),
    ],
)
def test_a_signal_is_named_with_who_may_have_sent_it(status: int, killer: str, name: str, why: str) -> None:
    killed = failure(FailureKind.KILLED, status=status, killer=killer)
    assert what_happened(killed) == f"rank 3 on a was killed by {name} after 1.2 s"
    assert what_happened(killed, in_full=True) == f"rank 3 on a (pid 7) was killed by {name} ({why}) after 1.2 s"


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
            FailureKind.HUNG,
            {"status": -9, "message": "x"},
            "rank 3 on a hung after 1.2 s: x",
            "rank 3 on a (pid 7) hung after 1.2 s: x",
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


@pytest.mark.parametrize(
    ("status", "pid", "error", "kind"),
    [
        (3, 1, None, FailureKind.EXITED),
        (3, 1, {"status": "3", "where": "t.py:1", "inside": "f"}, FailureKind.EXITED),
        (-11, 1, None, FailureKind.KILLED),
        (-11, 1, {"status": "3", "where": "t.py:1", "inside": "f"}, FailureKind.KILLED),
        (1, 1, {"type": "ValueError", "message": "x", "where": "t.py:1"}, FailureKind.RAISED),
        (127, 0, {"type": "", "message": "could not be started", "where": ""}, FailureKind.NEVER_STARTED),
    ],
)
def test_kinds_of_failures(status: int, pid: int, error: dict[str, str] | None, kind: FailureKind) -> None:
    said = Exited(4, 2, pid, status, 1.5, False, "the kernel", error, None, 0.0)
    failure = failure_of("a", said, 12.0, attempt=4)
    assert (failure.kind, failure.attempt, failure.rank, failure.killer) == (kind, 4, 2, "the kernel")
    assert failure.error_type == (error or {}).get("type", "")
    assert failure.where == ("" if kind is FailureKind.KILLED else (error or {}).get("where", ""))


# ---- which of several was the first by itself -------------------------------------------------------------------


def ended(at: float, kind: FailureKind = FailureKind.EXITED, **more: Any) -> Failure:
    return failure(kind, **{"at": at, **more})


def raised(at: float, error_type: str, message: str = "") -> Failure:
    return ended(at, FailureKind.RAISED, error_type=error_type, message=message)


CLOSED = raised(10.0, "RuntimeError", "[gloo] Connection closed by peer")


@pytest.mark.parametrize(
    "failures",
    [
        [ended(10.0), ended(11.0)],
        [ended(10.01), CLOSED],  # which is a consequence of what is seen a little later
        [CLOSED, ended(10.0 + SLACK_S + 0.1)],
        [raised(10.0, "DistBackendError"), raised(10.5, "ConnectionResetError")],  # consequences alone
    ],
)
def test_the_cause_is_the_first_failure_by_itself(failures: list[Failure]) -> None:
    assert first_cause([]) is None
    assert first_cause(failures) is first_cause(failures[::-1]) is failures[0]


@pytest.mark.parametrize(
    ("failed", "consequence"),
    [
        (raised(0, "RuntimeError", "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"), True),
        (raised(0, "DistNetworkError", "failed to recv, got 0 bytes"), True),
        (raised(0, "DistBackendError", "NCCL error: remote process exited"), True),
        (raised(0, "ValueError", "bad batch"), False),
        (raised(0, "RuntimeError", "CUDA out of memory"), False),
        (ended(0, FailureKind.KILLED, status=-6), True),
        (ended(0, FailureKind.KILLED, status=-9), False),
        (ended(0, FailureKind.EXITED, status=1), False),
        (ended(0, FailureKind.HOST_LOST, message="the connection broke"), False),
        (ended(0, FailureKind.STALLED), False),
    ],
)
def test_what_looks_like_a_consequence(failed: Failure, consequence: bool) -> None:
    assert looks_like_consequence(failed) is consequence


GLOO_LATE = "Timed out waiting 5000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("failures", "timed_out"),
    [
        ([raised(0, "RuntimeError", GLOO_LATE)], True),
        ([raised(0, "RuntimeError", GLOO_LATE), raised(0, "RuntimeError", "Connection closed by peer")], True),
        ([raised(0, "RuntimeError", "[Rank 0]: Ranks 3 failed to pass monitoredBarrier in 5000 ms")], True),
        ([raised(0, "RuntimeError", GLOO_LATE), raised(0, "ValueError", "bad batch")], False),
        ([raised(0, "RuntimeError", "Connection closed by peer")], False),
        ([raised(0, "ReadTimeout", "HTTPSConnectionPool: Read timed out")], False),
        ([], False),
    ],
)
def test_whether_all_that_failed_had_waited_in_vain(failures: list[Failure], timed_out: bool) -> None:
    assert all_timed_out(failures) is timed_out


def reported(at: float, rank: int, named: str, message: str = "") -> Failure:
    """An error of ddp on a rank that names others, as its worker writes it."""
    error = {"type": "AnyError", "message": message, "where": "", "inside": "", "failed_ranks": named}
    return failure_of("a", Exited(0, rank, 100 + rank, 1, 1.0, False, "", error, None, 0.0), at, attempt=0)


def test_the_rank_that_an_error_of_ddp_names_is_the_cause() -> None:
    root = ended(10.0 + 5 * SLACK_S, FailureKind.RAISED, rank=2, error_type="RuntimeError", message="read timed out")
    assert looks_like_consequence(root)
    assert first_cause([reported(10.0, 0, "2"), reported(10.1, 1, "2"), root]) is root
    assert first_cause([reported(10.0, 0, "1"), reported(10.1, 1, "2"), root]) is root


def test_an_error_that_names_no_failed_rank_stays_the_cause() -> None:
    first, second = reported(10.0, 0, "2"), reported(10.1, 1, "")
    assert first_cause([second, first]) is first
    assert present(first_cause([second, first, ended(10.2, rank=3)])).rank == 3


def test_two_that_name_each_other_are_no_endless_search() -> None:
    first, second = reported(10.0, 0, "1"), reported(10.1, 1, "0 1 x")
    assert first_cause([first, second]) in (first, second)
