"""Which of several failures was the first by itself."""

from typing import Any

import pytest

from launcher.job.cause import SLACK_S, first_cause, looks_like_consequence
from launcher.job.failure import Failure, FailureKind


def failure(at: float, kind: FailureKind = FailureKind.EXITED, **more: Any) -> Failure:
    return Failure(**{"kind": kind, "host": "a", "at": at, "ran_s": 1.0, "rank": 0, **more})


def raised(at: float, error_type: str, message: str = "") -> Failure:
    return failure(at, FailureKind.RAISED, error_type=error_type, message=message)


def test_nothing_failed() -> None:
    assert first_cause([]) is None


def test_the_first_in_time_is_the_cause_whatever_came_first_in_the_news() -> None:
    later, first = failure(11.0), failure(10.0)
    assert first_cause([later, first]) is first


def test_a_lost_connection_is_the_consequence_of_what_is_seen_a_little_later() -> None:
    victim, root = raised(10.0, "RuntimeError", "[gloo] Connection closed by peer"), failure(10.01)
    assert first_cause([victim, root]) is root


def test_what_fails_long_after_a_lost_connection_is_not_its_cause() -> None:
    victim, other = raised(10.0, "ConnectionResetError"), failure(10.0 + SLACK_S + 0.1)
    assert first_cause([other, victim]) is victim


def test_of_consequences_alone_the_first_is_taken() -> None:
    first, second = raised(10.0, "DistBackendError"), raised(10.5, "ConnectionResetError")
    assert first_cause([second, first]) is first


@pytest.mark.parametrize(
    ("failed", "consequence"),
    [
        (raised(0, "RuntimeError", "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"), True),
        (raised(0, "DistNetworkError", "failed to recv, got 0 bytes"), True),
        (raised(0, "DistBackendError", "NCCL error: remote process exited"), True),
        (raised(0, "ValueError", "bad batch"), False),
        (raised(0, "RuntimeError", "CUDA out of memory"), False),
        (failure(0, FailureKind.KILLED, status=-6), True),
        (failure(0, FailureKind.KILLED, status=-9), False),
        (failure(0, FailureKind.EXITED, status=1), False),
        (failure(0, FailureKind.HOST_LOST, message="the connection broke"), False),
        (failure(0, FailureKind.STALLED), False),
    ],
)
def test_what_looks_like_a_consequence(failed: Failure, consequence: bool) -> None:
    assert looks_like_consequence(failed) is consequence
