"""Collectives on a device never read a value there: shown with fake CUDA tensors, of which reading one is an error."""

from __future__ import annotations

import textwrap
from pathlib import Path

from ddp_worlds.nursery import Nursery

PROGRAM = """
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import ddp.horovod as hvd
    from ddp.horovod import calls
    from ddp.monitoring.stall_report import report_of

    class Agreed:  # the comparison travels in host memory, between real ranks
        def __init__(self, call, group, *, is_async=False):
            self.what, self.report = str(call), report_of(group)

        def settle(self):
            return [3, 3]

        def is_completed(self):
            return True

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    calls.CallCheck = Agreed
    real_wait, waits = type(report_of(None)).wait, []
    type(report_of(None)).wait = lambda self, work, what, **given: (
        waits.append(given["device"].type), real_wait(self, work, what, **given)
    )
    with FakeTensorMode():
        mine = torch.ones(3, device="cuda")
        try:
            mine.tolist()
        except DataDependentOutputException:
            pass
        else:
            raise AssertionError("a fake tensor was read")
        results = [
            hvd.allreduce(mine), *hvd.grouped_allreduce([mine, mine.half()], compression="bf16"),
            hvd.broadcast(mine, 1), hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Max)),
        ]
        handle = hvd.allgather_async(mine)
        assert hvd.poll(handle) in (True, False)
        results.append(hvd.synchronize(handle))
    assert [tuple(result.shape) for result in results] == [(3,)] * 5 + [(6,)], results
    assert {result.device.type for result in results} == {"cuda"}
    assert waits == ["cuda"] * 6, waits
    print("read nothing")
"""


def test_calls_on_a_device_let_the_stream_wait_and_read_nothing(nursery: Nursery, tmp_path: Path) -> None:
    result = nursery.program(textwrap.dedent(PROGRAM), tmp_path, deadline_s=200)
    assert (result.returncode, result.stdout) == (0, "read nothing\n"), result.stderr
