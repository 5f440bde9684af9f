"""Stands in for collectives on a device: they are queued, the host waits for them late, and hears of no error.

`add_up` returns at once, and a thread adds, by gloo. Where a rank is gone, that waits until the collectives are
aborted, as a kernel does; then it leaves nan, and who waits for the device goes on. Import it before the State is made:
it lets ddp take host memory for that of such a device.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ddp import world
from ddp.generation import device_collectives
from ddp.resilience import commits, parts, rank_page

_queue: queue.Queue[Callable[[], None]] = queue.Queue()
_aborted = threading.Event()  # of the present group
_CPU = torch.device("cpu")


def add_up(tensor: torch.Tensor) -> None:
    """Queue the sum of a tensor over all ranks, in place."""
    aborted = _aborted

    def add() -> None:
        try:
            if not aborted.is_set():
                dist.all_reduce(tensor)
        except RuntimeError:
            assert aborted.wait(60)
        if aborted.is_set():
            tensor.fill_(torch.nan)

    _queue.put(add)


def _work() -> None:
    while True:
        _queue.get()()
        _queue.task_done()


def _begin(self: device_collectives.DeviceCollectives) -> None:
    global _aborted
    _real_begin(self)
    _aborted = threading.Event()


_DONE = SimpleNamespace(query=lambda: not _queue.unfinished_tasks)  # of all that is queued
threading.Thread(target=_work, name="late collectives", daemon=True).start()
_real_begin = device_collectives.DeviceCollectives.begin
_replaced: list[tuple[Any, str, Any]] = [
    (device_collectives.DeviceCollectives, "begin", _begin),
    (device_collectives, "abort_on_devices", lambda: _aborted.set()),
    (torch.accelerator, "synchronize", lambda *_: _queue.join()),
    (torch.accelerator, "current_stream", lambda *_: SimpleNamespace(record_event=lambda: _DONE)),
    (world, "device_types_of", lambda group: [_CPU, torch.device("cuda")]),
    (world, "is_by_gloo", lambda group, device: device == _CPU),
    (commits.Commits, "devices", property(lambda self: [_CPU], lambda self, found: None)),
    (parts.ModelPart, "_on_devices", lambda self: [buffer.data for buffer in self.module.buffers()]),
    (rank_page, "_MOST_BUFFER_BYTES", -1),  # buffers on a device are in no page
]
for _owner, _name, _value in _replaced:
    setattr(_owner, _name, _value)
