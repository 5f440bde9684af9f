"""Tensors of the simulated device: what torch dispatches for them is queued, and its output has a shape at once.

A tensor is a plain one of host memory that says it is on the device. Its operations are torch's own for the CPU, which
run later on the same bytes. Shapes come from the same operations on meta tensors; what has none waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._meta_registrations  # each rank would import it with its first shape
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from testbed.simulated_device.memory import Memory, caller
from testbed.simulated_device.queues import Op, Scheduler

NAME = "sim"  # the type of the device
DEVICE = f"{NAME}:0"
_aten = torch.ops.aten
_CPU = torch.device("cpu")
_WITH_FREE_INDICES = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default)
_EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default}
_EMPTY |= {_aten.new_empty_strided.default}
_READS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default, _aten.nonzero.default}
_known: dict[Any, Any] = {}  # outputs as meta tensors
Collective = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


class HostWaits(Exception):
    """The host has read or written the device's memory, which makes it wait, where it may not."""


class DeviceTensor(torch.Tensor):
    """See the module."""

    device_of: Device | None = None

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_subclass(
            cls, plain, False, dispatch_device=True, device_for_backend_keys=torch.device(DEVICE)
        )
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch's own refuses subclasses

    def __format__(self, form: str) -> str:
        return format(self.cpu(), form)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch says it

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub is a function
        assert cls.device_of is not None
        return cls.device_of.dispatch(func, args, kwargs or {})


class DeviceMode(TorchDispatchMode):
    """Sees what makes tensors on the device, and what uses pinned memory. Each thread has its own."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation there
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wanted = kwargs.get("device")
        is_on_device = wanted is not None and torch.device(wanted).type == NAME
        if is_on_device or any(issubclass(each, DeviceTensor) for each in types):
            return self._device.dispatch(func, args, kwargs)
        return self._device.on_host(func, args, kwargs)


class Device:
    """Queues operations. `calls` are their names in order; HostWaits is raised for a wait unless `may_wait`."""

    def __init__(self, scheduler: Scheduler, memory: Memory, collective: Collective) -> None:
        self.scheduler = scheduler
        self.memory = memory
        self.calls: list[str] = []
        self.may_wait = True
        self._collective = collective

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is torch.ops.prim.device.default:
            return torch.device(DEVICE)
        with torch._C._DisableTorchDispatch():
            return self._dispatch(func, args, dict(kwargs))

    def _dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "c10d":
            self.calls.append(str(func))
            return self._collective(func, args, kwargs)
        if func in (_aten.is_pinned.default, _aten.record_stream.default):
            return False if func is _aten.is_pinned.default else None
        if torch.Tag.inplace_view in func.tags or func.overloadpacket is _aten.set_:
            return self._change_view(func, args, kwargs)
        returns = func._schema.returns
        alias = returns[0].alias_info if returns else None
        if alias is not None and not alias.is_write:
            views = func(*tree_map_only(DeviceTensor, _plain, args), **tree_map_only(DeviceTensor, _plain, kwargs))
            return tree_map_only(torch.Tensor, DeviceTensor, views)
        self.calls.append(str(func))
        if func is _aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is _aten._foreach_copy_.default:
            for to, source in zip(args[0], args[1], strict=True):
                self._copy(to, source, *args[2:], **kwargs)
            return None
        if func is _aten._to_copy.default and (_is_to_host(kwargs) or not isinstance(args[0], DeviceTensor)):
            return self._copy_across(*args, **kwargs)
        return self._compute(func, args, kwargs)

    def _compute(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Queue an operation and return its output, which has no values yet."""
        flat, spec = tree_flatten((args, kwargs))
        self._check_places(func, flat)
        written = _written(func, args, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        fresh = [each.alias_info is None for each in func._schema.returns]
        shapes = None if is_random or func in _READS else _shapes(func, flat, spec) if any(fresh) else ()
        if shapes is None:
            return self._compute_now(func, flat, spec, written)
        outputs, outputs_spec = tree_flatten(shapes)
        made = [self._like(each) if isinstance(each, torch.Tensor) else each for each in outputs]
        if func not in _EMPTY:
            below = [self._below(each) for each in flat]
            into = [self.memory.below(each) if isinstance(each, torch.Tensor) else None for each in made]

            def run(_: Op) -> bool:
                given, options = tree_unflatten(below, spec)
                results = tree_flatten(func(*given, **options))[0]
                for place, result in zip(into, results if into else (), strict=True):
                    if place is not None and place.numel():
                        place.copy_(result)
                return True

            op = self.scheduler.queue(self.scheduler.current, run)
            for each in (*written, *made):
                if isinstance(each, torch.Tensor):
                    self.memory.note_write(each, op)
        if not any(fresh):
            return written[0] if len(fresh) == 1 else tuple(written[: len(fresh)]) or None
        return tree_unflatten(
            [DeviceTensor(each) if isinstance(each, torch.Tensor) else each for each in made], outputs_spec
        )

    def _compute_now(self, func: Any, flat: list[Any], spec: Any, written: Sequence[torch.Tensor]) -> Any:
        """Wait for the device, as its kernels do whose output has a shape or value that only the data gives."""
        self.wait(str(func), [each for each in flat if isinstance(each, DeviceTensor)])
        args, kwargs = tree_unflatten([self._below(each) for each in flat], spec)
        results = func(*args, **kwargs)
        if len(func._schema.returns) == 1 and func._schema.returns[0].alias_info is not None:
            return written[0]
        return tree_map_only(torch.Tensor, self._upload, results)

    def wait(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Have the host wait for the current stream, before it reads these tensors."""
        if not self.may_wait:
            raise HostWaits(f"{what} at {caller()}")
        self.scheduler.current.synchronize()
        self.memory.check_written(tensors, what)

    def on_host(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an operation on host memory, unless it is pinned and a transfer uses it."""
        if kwargs.get("pin_memory"):
            with torch._C._DisableTorchDispatch():
                made = func(*args, **{**kwargs, "pin_memory": False})
                pinned = self.memory.allocate(made.size(), made.stride(), made.dtype, is_pinned=True)
                return pinned if func in _EMPTY else pinned.copy_(made)
        if func is _aten.is_pinned.default:
            return self.memory.is_pinned(args[0])
        if self.memory.has_transfers:
            alias = func._schema.returns[0].alias_info if func._schema.returns else None
            if (alias is None or alias.is_write) and torch.Tag.inplace_view not in func.tags:
                given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
                self.memory.check_host(given, _written(func, args, kwargs), str(func))
        return func(*args, **kwargs)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if isinstance(to, DeviceTensor):
            if isinstance(source, DeviceTensor):
                self._compute(_aten.copy_.default, (to, source), {})
                return to
            late = non_blocking and self.memory.is_pinned(source)
            if not self.may_wait and not late and source.dim():
                raise HostWaits(f"a copy to the device at {caller()}")
            values = _alias(source) if late else source.clone()
            into = self.memory.below(to)
            op = self.scheduler.queue(self.scheduler.current, lambda _: into.copy_(values) is into)
            self.memory.note_write(to, op)
            if late:
                self.memory.note_transfer(source, op, is_to_host=False)
        elif non_blocking and self.memory.is_pinned(to):
            values, into = self.memory.below(source), _alias(to)
            op = self.scheduler.queue(self.scheduler.current, lambda _: into.copy_(values) is into)
            self.memory.note_transfer(to, op, is_to_host=True)
        else:
            self.wait("a copy to the host", [source])
            self.memory.check_host([to], [to], "a copy to the host")
            to.copy_(self.memory.below(source))
        return to

    def _copy_across(self, source: torch.Tensor, **options: Any) -> torch.Tensor:
        """Copy to memory of the other side; to the host without blocking means to pinned memory, as in torch."""
        non_blocking = options.pop("non_blocking", False)
        options.pop("pin_memory", None)
        like = _aten._to_copy.default(_meta(source), **{**options, "device": torch.device("meta")})
        if isinstance(source, DeviceTensor):
            to = self.memory.allocate(like.size(), like.stride(), like.dtype, is_pinned=True)
            if not non_blocking:
                to = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
        else:
            to = DeviceTensor(self._like(like))
        return self._copy(to, source, non_blocking)

    def _change_view(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """Change shape or memory of a tensor in place."""
        tensor, *rest = args
        plain = _plain(tensor)
        before = plain.untyped_storage().nbytes()
        func(plain, *tree_map_only(DeviceTensor, _plain, rest), **kwargs)
        if func.overloadpacket is not _aten.set_ and plain.untyped_storage().nbytes() != before:
            raise NotImplementedError(f"{func} would need more memory for a tensor of the device")
        tensor.data = DeviceTensor(plain)
        return tensor  # type: ignore[no-any-return]

    def _like(self, meta: torch.Tensor) -> torch.Tensor:
        if meta.layout is not torch.strided:
            raise NotImplementedError(f"the simulated device has no tensors of layout {meta.layout}")
        return self.memory.allocate(meta.size(), meta.stride(), meta.dtype)

    def _upload(self, values: torch.Tensor) -> torch.Tensor:
        made = self._like(values)
        return DeviceTensor(made.copy_(values))

    def _below(self, value: Any) -> Any:
        """Return an argument as the queued operation gets it: nothing that keeps the device's memory alive."""
        if isinstance(value, DeviceTensor):
            return self.memory.below(value)
        if isinstance(value, torch.device):
            return _CPU
        return value.clone() if isinstance(value, torch.Tensor) else value

    def _check_places(self, func: Any, flat: Sequence[Any]) -> None:
        strangers = [each for each in flat if isinstance(each, torch.Tensor) and not isinstance(each, DeviceTensor)]
        if any(each.dim() for each in strangers):
            if func not in _WITH_FREE_INDICES:
                raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {NAME}:0 and cpu")
            if not self.may_wait:
                raise HostWaits(f"{func} with indices in host memory at {caller()}")


def _is_to_host(options: Mapping[str, Any]) -> bool:
    wanted = options.get("device")
    return wanted is not None and torch.device(wanted).type == "cpu"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the device as a plain one over the same storage."""
    shape, strides = tensor.size(), tensor.stride()
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, strides)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _shapes(func: Any, flat: Sequence[Any], spec: Any) -> Any:
    """Return the output as meta tensors, of an earlier call if it was alike; None if only the values tell its shape."""
    key = (func, spec, *(_kind(each) for each in flat))
    if key in _known:
        return _known[key]
    given = [_as_meta(each) for each in flat]
    args, kwargs = tree_unflatten(given, spec)
    try:
        found = func(*args, **kwargs)
    except NotImplementedError:
        found = None
    _known[key] = found
    return found


def _kind(value: Any) -> Any:
    """Return what of an argument decides the shape of the output."""
    if not isinstance(value, torch.Tensor):
        return type(value), value
    return value.size(), value.stride(), value.dtype, isinstance(value, DeviceTensor)


def _as_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, torch.Tensor):
        return value
    return _meta(value) if isinstance(value, DeviceTensor) or value.dim() else value


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation changes in place, in the order of its arguments."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor)]
    return found
