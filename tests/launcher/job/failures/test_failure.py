"""Failures: which of several was the first by itself; and their one wording, while a run goes on and at its end."""

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
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


FAILURES = {
    "USR1": failure(FailureKind.KILLED, status=-10),
    "KILL": failure(FailureKind.KILLED, status=-9),
    "out of memory": failure(FailureKind.KILLED, status=-9, killer="the out-of-memory killer: 61 of 64 GiB in use"),
    "SEGV": failure(FailureKind.KILLED, status=-11),
    "TERM": failure(FailureKind.KILLED, status=-15),
    "ABRT": failure(FailureKind.KILLED, status=-6),
    "signal 40": failure(FailureKind.KILLED, status=-40),
    "exception": failure(FailureKind.RAISED, error_type="ValueError", message="\nbad batch\nmore"),
    "exception in a call": failure(FailureKind.RAISED, inside="f", message="No"),
    "exception in a killed process": failure(FailureKind.RAISED, status=-15),
    "exit code": failure(FailureKind.EXITED, status=7),
    "hung": failure(FailureKind.HUNG, status=-9, message="x"),
    "never started": failure(FailureKind.NEVER_STARTED, message="x"),
    "host lost": failure(FailureKind.HOST_LOST, message="x"),
    "store lost": failure(FailureKind.STORE_LOST, message="x"),
    "stalled": failure(FailureKind.STALLED, message="no progress"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_how_a_failure_is_described(name: str, snapshot: SnapshotAssertion) -> None:
    """On a line while the run goes on, in full at its end, and in a phrase for one rank and for two."""
    failure = FAILURES[name]
    brief, in_full = what_happened(failure), what_happened(failure, in_full=True)
    assert "\n".join([brief, in_full, how_they_ended(failure, 1), how_they_ended(failure, 2)]) == snapshot


def test_a_long_message_is_cut_while_the_run_goes_on() -> None:
    said = what_happened(failure(FailureKind.RAISED, error_type="E", message="x" * 500))
    assert said.endswith(": " + "x" * LINE_CHARACTERS)
    lost = failure(FailureKind.HOST_LOST, message="x" * 500)
    assert len(what_happened(lost, in_full=True)) > 500 > len(what_happened(lost))


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
