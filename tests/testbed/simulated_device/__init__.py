"""A device whose work is late and in another order than the program's, with values, without any hardware.

    with simulated_device(seed) as device:
        group = dist.new_group(backend=BACKEND)
        ...                                          # tensors and modules on "sim:0"

An operation is queued and returns at once; its output is not a number until it has run, and freed memory is poisoned.
Of all that streams, events and waits of the host allow, a scheduler runs one at random, and by most seeds no more than
something waits for. A copy between pinned memory and the device is as late. Torch code that uses such memory too early
raises ReadTooEarly; other code finds the old bytes. Collectives are as NCCL's, between real processes.

It replaces, in the process: torch.Event, torch.accelerator, NCCL, and the names by which ddp knows a device.

It does not show: several devices in a process, autograd's own streams (backward runs on the current stream of
autograd's thread), kernels that run at the same time on the same memory, CUDA graphs, how torch's allocator reuses
memory (a freed tensor is overwritten in the order of its stream), and what NCCL does beside its order. Sparse tensors
raise NotImplementedError: for a device of this kind, torch has no kernel that makes one. A hook that raises in
autograd's thread becomes SystemError or ends the process: torch's guard of the stream, which is in Python for such a
device, is called while the exception is pending.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import backend_registration

from ddp import device_choice, world
from ddp.checkpoint import state as checkpoint_state
from ddp.comm import pinned_buffer
from ddp.generation import device_collectives
from testbed.simulated_device.collectives import Collectives, as_nccl
from testbed.simulated_device.memory import Memory, ReadTooEarly
from testbed.simulated_device.queues import DeviceStuck, Event, Scheduler, Stream
from testbed.simulated_device.tensors import DEVICE, NAME, Device, DeviceMode, DeviceTensor, HostWaits

__all__ = ["BACKEND", "DEVICE", "Device", "DeviceStuck", "HostWaits", "ReadTooEarly", "Stream", "simulated_device"]

BACKEND = f"cpu:gloo,{NAME}:nccl"


@contextlib.contextmanager
def simulated_device(seed: int) -> Iterator[Device]:
    """Have the device in this process, in all its threads, until it exits."""
    with pytest.MonkeyPatch.context() as patch:
        device = install(seed, patch)
        with DeviceMode(device):
            yield device
            device.scheduler.close()


def install(seed: int, patch: pytest.MonkeyPatch) -> Device:
    """Make the device known to torch and ddp; the mode of this thread is the caller's."""
    register()
    scheduler = Scheduler(seed)
    memory = Memory(scheduler)
    collectives = Collectives(scheduler, memory)
    device = Device(scheduler, memory, collectives.call)
    is_on = torch.UntypedStorage.device
    run = threading.Thread.run
    real_tensor: Any = torch.tensor

    def tensor(data: Any, *, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Replace torch.tensor, which copies to a device below what a mode sees."""
        made: torch.Tensor = real_tensor(data, dtype=dtype)
        return made if device is None else made.to(device)

    def run_with_device(thread: threading.Thread) -> None:
        with DeviceMode(device):
            run(thread)

    replaced: list[tuple[Any, str, Any]] = [
        *as_nccl(collectives),
        (DeviceTensor, "device_of", device),
        (Event, "scheduler", scheduler),
        (threading.Thread, "run", run_with_device),
        (torch, "Event", Event),
        (torch, "tensor", tensor),
        (torch.nn.Module, "_apply", _converting),
        (
            torch.UntypedStorage,
            "device",
            property(lambda each: torch.device(DEVICE) if memory.holds(each.data_ptr()) else is_on.__get__(each)),
        ),
        (torch.accelerator, "is_available", lambda: True),
        (torch.accelerator, "device_count", lambda: 1),
        (torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(NAME)),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "set_device_index", lambda index: None),
        (torch.accelerator, "current_stream", lambda device=None: scheduler.current),
        (torch.accelerator, "synchronize", lambda device=None: scheduler.finish_all()),
        (device_choice, "_DEVICE_BACKENDS", {NAME: "nccl"}),
        (device_choice, "_CHOOSERS", {NAME: ("SIM_VISIBLE_DEVICES",)}),
        (pinned_buffer, "_WITH_STREAMS", {NAME}),
        (checkpoint_state, "_TENSORS", {*checkpoint_state._TENSORS, DeviceTensor}),
        (world, "_world", None),
        *((each, "NCCL_BESIDE_GLOO", {"cpu", "gloo", NAME, "nccl"}) for each in (device_collectives, world)),
    ]
    for owner, name, value in replaced:
        patch.setattr(owner, name, value, raising=False)
    return device


_apply: Any = torch.nn.Module._apply


def _converting(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
    """Replace Module._apply: module.to() keeps the parameters that there are, as it does between CPU and CUDA."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return _apply(module, *args, **options)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


class _Module(backend_registration._DummyBackendModule):
    """Stands in for torch.cuda."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def register() -> None:
    """Have torch know the type of device; before the first backward pass of the process, which counts the devices."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())


def group_of_all() -> dist.ProcessGroup:
    """Return a new group of all ranks as ddp.init() makes it: gloo in host memory, NCCL on the device."""
    made = dist.new_group(backend=BACKEND)
    assert isinstance(made, dist.ProcessGroup)
    return made
