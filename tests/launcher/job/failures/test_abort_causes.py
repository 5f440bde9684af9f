"""What the last lines of a process that aborted say of the cause: messages as users report them, and the first line."""

from __future__ import annotations

import signal

import pytest

from launcher.job.failures.abort_causes import abort_cause
from launcher.job.failures.failure import (
    Failure,
    FailureKind,
    failure_of,
    first_cause,
    looks_like_consequence,
    what_happened,
)
from launcher.protocol.reports import Exited

FRAMES = "".join(
    f"frame #{number}: c10d::ProcessGroupNCCL::f() + 0x{number}a (0x7f00 in /x/libtorch_cuda.so)\n"
    for number in range(8)
)


def watchdog(rank: int, number: int, enqueued: int, operation: str = "ALLREDUCE") -> str:
    """What torch's watchdog writes when a collective has timed out."""
    work = f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000)"
    caught = f"[Rank {rank}] Watchdog caught collective operation timeout: {work} ran for 600021 milliseconds before "
    prefix = f"[rank{rank}]:[E1130 02:07:08.4 ProcessGroupNCCL.cpp:1664] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    return (
        f"{prefix} {caught}timing out.\n"
        f"{prefix} Exception (either an error or timeout) detected by watchdog at work: {number}, last enqueued NCCL "
        f"work: {enqueued}, last completed NCCL work: {number - 1}.\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        f"  what():  [PG ID 0 Rank {rank}] Process group watchdog thread terminated with exception: {caught}timing "
        "out.\n"
        f"Exception raised from checkTimeout at /x/ProcessGroupNCCL.cpp:632 (most recent call first):\n{FRAMES}"
    )


def in_watchdog(text: str) -> str:
    return (
        "[rank2]:[E1130 02:07:08.4 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0 Rank 2] Process group watchdog thread "
        f"terminated with exception: {text}\nterminate called after throwing an instance of 'c10::DistBackendError'\n"
        f"  what():  {text}\n{FRAMES}"
    )


NCCL = "NCCL error in: /x/ProcessGroupNCCL.cpp:3690, "
REMOTE = (
    "remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly "
    "due to a network error or a remote process exiting prematurely.\nLast error:\n"
)
SYSTEM = "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclSystemError: "
ENFORCE = "[enforce fail at /x.cc:4] a <= b. 17 vs 4"
CUDA, CLOSED = "CUDA error: ", "Connection closed by peer"
THROWN = "terminate called after throwing an instance of '{}'\n  what():  {}\n"
# The end of stderr; what the report says; whether it is the process's own fault.
WRITTEN = [
    (watchdog(0, 1580, 1582), "NCCL timed out in allreduce 1580 after 600 s", False),
    (watchdog(4, 77, 77, "_ALLGATHER_BASE"), "NCCL timed out in allgather_base 77 after 600 s", False),
    (
        "[E ProcessGroupNCCL.cpp:458] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=96, "
        "OpType=BROADCAST, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.\n",
        "NCCL timed out in broadcast 96 after 1800 s",
        False,
    ),
    *(
        (in_watchdog(error), error, True)
        for error in (
            "CUDA error: uncorrectable ECC error encountered",
            "CUDA error: an illegal memory access was encountered",
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        )
    ),
    *(
        (in_watchdog(NCCL + REMOTE + error), error, False)
        for error in (
            "socketProgressOpt: Call to recv from 10.0.0.2<33759> failed : Connection reset by peer",
            "NET/IB : Got completion from peer 10.0.0.2<39138> with error 12, opcode 0, len 0, vendor err 129",
        )
    ),
    (
        in_watchdog(
            NCCL + "internal error, NCCL version 2.14.3\nncclInternalError: Internal check failed.\nLast error:\n"
            "Net : Connection closed by remote peer host<50260>"
        ),
        "Net : Connection closed by remote peer host<50260>",
        False,
    ),
    (
        NCCL + SYSTEM + "System call or external library call failed.\nLast error:\nError while creating shared memory "
        "segment /dev/shm/nccl-Ab12 (size 9637888), error: No space left on device (28)\n",
        "NCCL cannot make /dev/shm/nccl-Ab12: No space left on device",
        True,
    ),
    (
        NCCL + SYSTEM + "System call failed.\nLast error:\nibv_create_qp failed with error Cannot allocate memory\n",
        "NCCL: unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5; "
        "ibv_create_qp failed with error Cannot allocate memory",
        True,
    ),
    (f"n1:9:7 [0] NCCL WARN Cuda failure 2 'out of memory'\n{NCCL}unhandled cuda error", f"{CUDA}out of memory", True),
    (f"n1:9:7 [0] NCCL WARN Cuda failure 'no peer access'\n{NCCL}unhandled cuda error", f"{CUDA}no peer access", True),
    (
        NCCL + "invalid usage, NCCL version 2.17.1\nncclInvalidUsage: This usually reflects invalid usage of NCCL.\n"
        "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000\n",
        "ranks 1 and 0 use the same GPU, 1000",
        True,
    ),
    ("node2:5:5 [0] NCCL WARN Bootstrap : no socket interface found\n", "NCCL: no socket interface found", True),
    (THROWN.format("gloo::IoException", f"[/x/pair.cc:534] {CLOSED} [10.0.0.2]:4711"), CLOSED, False),
    (THROWN.format("gloo::EnforceNotMet", ENFORCE), ENFORCE, True),
    (THROWN.format("std::bad_alloc", "std::bad_alloc"), "std::bad_alloc", True),
    ("double free or corruption (!prev)\nFatal Python error: Aborted\n", "double free or corruption", True),
    ("munmap_chunk(): invalid pointer\nFatal Python error: Aborted\n", "munmap_chunk(): invalid pointer", True),
    ("*** stack smashing detected ***: terminated\n", "stack smashing detected", True),
    (
        "terminate called without an active exception\nFatal Python error: Aborted\n",
        "terminate called without an active exception",
        False,
    ),
    (
        "[rank3]:[F1130 02:07:08.4 ProcessGroupNCCL.cpp:1554] [PG ID 0 PG GUID 0(default_pg) Rank 3] [PG ID 0 PG GUID "
        "0(default_pg) Rank 3] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in "
        "monitoring enqueued collectives. This typically indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang "
        f"blocking the watchdog.\n{FRAMES}",
        "NCCL's watchdog made no progress for 480 s: a call of CUDA or NCCL hangs",
        True,
    ),
    (
        "[rank1]:[E1130 02:17:08.4 ProcessGroupNCCL.cpp:1685] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump "
        "signal due to a collective timeout from  rank 3 and we will try our best to dump the debug info. Last "
        f"enqueued NCCL work: 5, last completed NCCL work: 4.\n{FRAMES}",
        "dump signal due to a collective timeout from rank 3",
        False,
    ),
    (
        THROWN.format(
            "c10::OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
            "capacity of 79.15 GiB of which 1.00 GiB is free.",
        ),
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.00 GiB is "
        "free.",
        True,
    ),
    (
        "n1:9:7 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : mlx5_0:1 Got async event : port error\n"
        + in_watchdog(NCCL + REMOTE + "NET/IB : Got completion from peer 10.0.0.2<3> with error 12"),
        "NET/IB : mlx5_0:1 Got async event : port error",
        True,
    ),
    (
        f"n1:9:7 [0] bootstrap.cc:98 NCCL WARN Bootstrap Root : mismatch in rank count from procs 8 : 16\n{NCCL}"
        "internal error, NCCL version 2.18.1\n",
        "NCCL: mismatch in rank count from procs 8 : 16",
        True,
    ),
    ("python: /x/a.cpp:12: f(): Assertion `n > 0' failed.\n", "/x/a.cpp:12: f(): Assertion `n > 0' failed", True),
]


def failed(rank: int, stderr: str, at: float = 0.0) -> Failure:
    exited = Exited(
        attempt=0, rank=rank, pid=100 + rank, status=-signal.SIGABRT, ran_s=9.0, provoked=False, killer="", error=None,
        error_file=None, time=at, stderr=stderr,
    )  # fmt: skip
    return failure_of("h", exited, at, attempt=0)


@pytest.mark.parametrize(("stderr", "said", "own"), WRITTEN)
def test_the_cause_is_read_from_what_a_process_wrote(stderr: str, said: str, own: bool) -> None:
    failure = failed(3, "step 8 loss 0.3\n" + stderr)
    assert what_happened(failure) == f"rank 3 on h was killed by SIGABRT after 9.0 s: {said}"
    assert what_happened(failure, in_full=True) == (
        f"rank 3 on h (pid 103) was killed by SIGABRT (it aborted itself: {said}) after 9.0 s"
    )
    assert looks_like_consequence(failure) != own


def test_an_abort_of_unknown_cause_may_be_a_consequence() -> None:
    assert abort_cause("step 8 loss 0.3\nFatal Python error: Aborted\n") is None
    assert what_happened(failed(1, "")) == "rank 1 on h was killed by SIGABRT after 9.0 s"
    assert looks_like_consequence(failed(1, ""))


@pytest.mark.parametrize(("own_at", "peer_at"), [(1.0, 1.4), (1.4, 1.0)])
def test_of_aborts_the_one_with_its_own_fault_is_the_cause(own_at: float, peer_at: float) -> None:
    own = failed(2, in_watchdog("CUDA error: uncorrectable ECC error encountered"), own_at)
    peers = [failed(rank, in_watchdog(NCCL + REMOTE + "Broken pipe"), peer_at + rank / 100) for rank in (0, 1, 3)]
    assert first_cause([*peers, own]) is own


def test_of_timeouts_the_rank_that_is_behind_is_the_cause() -> None:
    waiting = [failed(rank, watchdog(rank, 1580, 1582), 1.0 + rank / 10) for rank in (0, 1, 3)]
    behind = failed(2, watchdog(2, 1579, 1579), 2.0)
    assert first_cause([*waiting, behind]) is behind
    assert first_cause(waiting) is waiting[0]


def test_a_timeout_long_after_a_lost_connection_is_not_the_cause() -> None:
    lost = failed(1, in_watchdog(NCCL + REMOTE + "Broken pipe"), 1.0)
    assert first_cause([failed(0, watchdog(0, 1580, 1582), 601.0), lost]) is lost


def test_the_text_of_torch_s_error_decides_its_place() -> None:
    for text, own in ((NCCL + REMOTE + "Broken pipe", False), (NCCL + "Cuda failure 2 'out of memory'", True)):
        error = {"type": "DistBackendError", "message": text, "where": "t.py:3", "inside": "all_reduce"}
        exited = Exited(0, 1, 101, 1, 9.0, False, "", error, None, 0.0)
        failure = failure_of("h", exited, 0.0, attempt=0)
        assert failure.kind is FailureKind.RAISED
        assert looks_like_consequence(failure) != own
