"""A device without values, to show that the host never waits for one: tensors on it have shapes and nothing else.

They are torch's fake tensors, on a backend that has no kernels. Autograd runs them in a thread of its own, as it does
with every device, and a group can move them by torch's fake backend, which leaves them as they are. In host memory all
is real, so that ranks of a real world may still tell each other things over gloo.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # has fake tensors take part in collectives, when it is imported
import torch.testing._internal.distributed.fake_pg  # has the backend "fake", when it is imported
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class HostWaits(Exception):
    """The host has read or written the device's memory, which makes it wait for the device."""


class PretendDevice(TorchDispatchMode):
    """While it is entered, there is a device "pretend:0". `calls` are the operations on it, by name, in order.

    Operations that make the host wait raise HostWaits, unless `may_wait`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.may_wait = False
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if wanted != "pretend" and not any(isinstance(tensor, FakeTensor) for tensor in given):
            return func(*args, **kwargs)
        self.calls.append(str(func))
        reads = wanted == "cpu"
        mixes = any(not isinstance(tensor, FakeTensor) and tensor.dim() for tensor in given)
        if (reads or mixes) and not self.may_wait:
            raise HostWaits(f"{func} copies between host and device")
        try:
            with self._fake:
                return func(*args, **kwargs)
        except RuntimeError as error:
            if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
                raise HostWaits(f"{func} reads a value of the device") from error
            raise


@contextlib.contextmanager
def pretend_device() -> Iterator[PretendDevice]:
    """Have the device in this process, and until it exits a backend for it."""
    if torch._C._get_privateuse1_backend_name() != "pretend":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _setup_privateuseone_for_python_backend("pretend")
        dist.Backend.backend_capability["fake"].append("pretend")
    with PretendDevice() as mode:
        yield mode


def group_of_both() -> dist.ProcessGroup:
    """A group of all ranks as ddp.init() makes them where there is CUDA: gloo in host memory, another on the device."""
    made = dist.new_group(backend="cpu:gloo,pretend:fake")
    assert isinstance(made, dist.ProcessGroup)
    return made


def on_device(module: torch.nn.Module) -> torch.nn.Module:
    """`module` with parameters and buffers of the same shapes on the device."""
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="pretend:0")
                owner._parameters[name] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None:
                owner._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="pretend:0")
    return module
