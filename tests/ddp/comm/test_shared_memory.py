"""Memory that processes of one host share without a file."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from testbed.present import present
from testbed.processes import started, wait_until

from ddp.comm.shared_memory import SharedSegment
from ddp.errors import ArgumentError, ParameterServerError

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(not SharedSegment.available, reason="this system has no memfd_create")

# Says where its segment is, opens ours, answers in both, and waits to be killed.
_OTHER = """
import json, sys
from ddp.comm.shared_memory import SharedSegment
own = SharedSegment(1 << 20)
own.tensor[:3] = 5
print(json.dumps(own.ticket), flush=True)
theirs = SharedSegment.open(json.loads(sys.stdin.readline()))
theirs.tensor[1] = theirs.tensor[0] + 1
print("done", flush=True)
sys.stdin.read()
"""


def test_two_processes_share_a_segment_until_both_are_gone() -> None:
    with SharedSegment(12345) as segment:
        assert segment.tensor.shape == (12345,)
        assert segment.tensor.dtype == torch.uint8
        assert segment.tensor.data_ptr() % os.sysconf("SC_PAGE_SIZE") == 0
        assert segment.tensor.max() == 0
        segment.tensor[0] = 41
        env = {"PYTHONPATH": str(ROOT)}
        with started(sys.executable, "-c", _OTHER, env=env, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            ticket = json.loads(process.stdout.readline())
            theirs = present(SharedSegment.open(ticket))
            assert theirs.tensor[:4].tolist() == [5, 5, 5, 0]
            if os.geteuid() == 0:
                os.seteuid(65534)
                try:
                    assert SharedSegment.open(ticket) is None  # another user's
                finally:
                    os.seteuid(0)
            process.stdin.write(json.dumps(segment.ticket).encode() + b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"done\n"
            assert segment.tensor[:2].tolist() == [41, 42]
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert SharedSegment.open(ticket) is None
            assert theirs.tensor[:4].tolist() == [5, 5, 5, 0]  # who has it keeps it
            theirs.close()


def test_only_what_the_ticket_says_is_opened(tmp_path: Path) -> None:
    with SharedSegment(4096) as segment:
        again = present(SharedSegment.open(json.loads(json.dumps(segment.ticket))))
        again.tensor.view(torch.bfloat16)[7] = 3
        assert segment.tensor.view(torch.bfloat16)[7] == 3
        plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
        unsealed = os.memfd_create("dtrain", os.MFD_CLOEXEC)
        reader, writer = os.pipe()
        try:
            for descriptor in (plain, unsealed):
                os.ftruncate(descriptor, 4096)
            for change in (
                {"boot": "another host"},
                {"namespace": "pid:[1]"},
                {"started": "1"},
                {"pid": 1 << 30},
                {"pid": os.getppid()},
                {"descriptor": 1 << 20},
                {"descriptor": -1},
                {"descriptor": "../../../etc/passwd"},
                {"descriptor": reader},
                {"descriptor": plain, "inode": os.fstat(plain).st_ino},
                {"descriptor": unsealed, "inode": os.fstat(unsealed).st_ino},
                {"inode": 1},
                {"bytes": 8192},
                {"bytes": 0},
                {"bytes": None},
            ):
                assert SharedSegment.open({**segment.ticket, **change}) is None, change
        finally:
            for descriptor in (plain, unsealed, reader, writer):
                os.close(descriptor)
        for missing in segment.ticket:
            assert SharedSegment.open({k: v for k, v in segment.ticket.items() if k != missing}) is None, missing
        with pytest.raises(PermissionError):  # no one can cut it off under the others
            os.ftruncate(segment.ticket["descriptor"], 0)
        kept = segment.tensor
        segment.close()
        assert SharedSegment.open(segment.ticket) is None
        assert kept.view(torch.bfloat16)[7] == 3


def test_nothing_is_left_open_and_what_cannot_be_had_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):
        with SharedSegment(100) as segment:
            again = present(SharedSegment.open(segment.ticket))
            again.close()
            assert SharedSegment.open({**segment.ticket, "bytes": 99}) is None
    wait_until(lambda: descriptors() == before, "all descriptors are closed")
    with pytest.raises(ArgumentError, match="of 0 bytes"):
        SharedSegment(0)
    with pytest.raises(ParameterServerError, match="no shared memory of 4611686018427387904 bytes"):
        SharedSegment(1 << 62)
    assert descriptors() == before
    monkeypatch.setattr(SharedSegment, "available", False)
    with pytest.raises(ParameterServerError, match="memfd_create"):
        SharedSegment(100)
    assert SharedSegment.open(segment.ticket) is None
