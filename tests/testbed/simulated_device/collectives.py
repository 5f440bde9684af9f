"""Collectives of the simulated device, with the meaning that NCCL gives them; gloo moves the bytes between processes.

A communicator has a stream, in which its collectives run in order, each after what the caller's stream had when it was
started. `Work.wait` has the current stream wait. A peer that is gone, or does not come, leaves a collective running
until the communicator is aborted; then its output is undefined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.utils._pytree import tree_flatten, tree_map_only

from testbed.simulated_device.memory import Memory
from testbed.simulated_device.queues import Event, Op, Scheduler, Stream
from testbed.simulated_device.tensors import NAME, DeviceTensor

_c10d = torch.ops.c10d
_LONG = timedelta(minutes=30)
_UNWRITTEN = (_c10d.send.default, _c10d.barrier.default)


class Communicator:
    """The part of a process group that is on the device. `abort` may be called from any thread."""

    def __init__(self, scheduler: Scheduler, store: Any, rank: int, size: int, options: Any) -> None:
        self.options = options
        self.stream = Stream(scheduler, f"communicator {len(scheduler.streams)}", moves_data=True)
        self.is_aborted = False
        self.broken: set[int] = set()  # operations that no longer end by themselves
        self.size = size
        self.host = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=_LONG)
        self.host._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)

    def abort(self) -> None:
        """End all collectives; those that have not begun end when they would begin."""
        scheduler = self.stream.scheduler
        with scheduler.changed:
            self.is_aborted = True
            for op in [each for each in scheduler.flying if each.stream is self.stream]:
                scheduler.end(op)


class Collectives:
    """Runs collectives of tensors on the device."""

    def __init__(self, scheduler: Scheduler, memory: Memory) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self.of: dict[Any, Communicator] = {}  # by what torch holds for it

    def connect(self, store: Any, rank: int, size: int, options: Any) -> Any:
        """Make a communicator, in place of ProcessGroupNCCL(...). All ranks must; blocks."""
        made = FakeProcessGroup._create_internal(rank, size)
        self.of[made] = Communicator(self._scheduler, store, rank, size, options)
        return made

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Queue a collective, given as torch dispatches it; return what torch expects."""
        place = next(at for at, each in enumerate(func._schema.arguments) if "ProcessGroup" in str(each.type))
        communicator = self.of[dist.ProcessGroup.unbox(args[place])._get_backend(torch.device(NAME))]
        tensors = [each for each in tree_flatten(args)[0] if isinstance(each, DeviceTensor)]
        below = {id(each): self._memory.below(each) for each in tensors}
        into = [] if func in _UNWRITTEN else [below[id(each)] for each in tree_flatten(args[0])[0]]
        given = tree_map_only(DeviceTensor, lambda each: below[id(each)], args)
        before = self._scheduler.queue(self._scheduler.current, lambda _: True)
        op = self._scheduler.queue(
            communicator.stream, lambda op: self._start(communicator, op, func, given, place, into), [before]
        )
        for each in tree_flatten(args[0])[0] if into else ():
            self._memory.note_write(each, op)
        work = _Work(op, tensors)
        returns = len(func._schema.returns)
        return work.boxed() if returns == 1 else (args[0], work.boxed())

    def _start(
        self, communicator: Communicator, op: Op, func: Any, given: Sequence[Any], place: int, into: list[torch.Tensor]
    ) -> bool:
        """Read the input, and have gloo move it. Returns whether it is over."""
        if communicator.is_aborted:
            for each in into:
                each.fill_(torch.nan if each.is_floating_point() else -1)
            return True
        args = list(tree_map_only(torch.Tensor, lambda each: each.clone(), list(given)))
        moved = tree_flatten(args[0])[0]
        divisor = 1
        if func is _c10d.allreduce_.default and dist.ReduceOp.RedOpType(args[2].op()) is dist.ReduceOp.AVG:
            divisor = communicator.size
            work = communicator.host.allreduce(moved)
        else:
            args[place] = communicator.host.boxed()
            returned = func(*args)
            work = dist.Work.unbox(returned if isinstance(returned, torch.ScriptObject) else returned[-1])

        def is_over() -> bool:
            if not work.is_completed() or id(op) in communicator.broken:
                return False
            try:
                work.wait()
            except RuntimeError:  # a peer is gone: the kernel would wait for ever
                communicator.broken.add(id(op))
                return False
            for to, source in zip(into, moved, strict=bool(into)):
                to.copy_(source if divisor == 1 else source / divisor)
            return True

        self._scheduler.flying[op] = is_over
        return False


class _Work(dist.Work):
    """A collective of the device. It keeps the tensors until the caller's stream waits for it, as NCCL's does."""

    def __init__(self, op: Op, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._op = op
        self._tensors = list(tensors)
        _recent.append(self)
        _kept[op] = self._tensors
        for done in [each for each in list(_kept) if each.is_done]:
            _kept.pop(done, None)  # another thread may have done it

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        scheduler = self._op.stream.scheduler
        scheduler.current.wait_for(self._op)
        self._tensors.clear()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._op.stream.scheduler.has_run(self._op)

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def get_future(self) -> Future:
        return Future(self._op, self._tensors[:1])


_kept: dict[Op, list[torch.Tensor]] = {}  # as NCCL keeps the tensors of a work that its caller dropped
_recent: deque[_Work] = deque(maxlen=256)  # torch hands them out, for which their Python objects must be there


class Future(torch.futures.Future):  # type: ignore[type-arg]
    """A future that is complete at once, with a value that a stream still computes."""

    def __init__(self, op: Op, value: Any) -> None:
        super().__init__()
        self._op, self._value = op, value
        super().set_result(None)

    def done(self) -> bool:
        return True

    def value(self) -> Any:
        return self._value

    def wait(self) -> Any:
        self._op.stream.scheduler.current.wait_for(self._op)
        return self._value

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """Call `callback` now, with a stream of its own as the current one, which waits for this future."""
        scheduler = self._op.stream.scheduler
        before, scheduler.current = scheduler.current, Stream(scheduler, "callback")
        scheduler.current.wait_for(self._op)
        try:
            value = callback(self)
            last = Event()
            last.record(scheduler.current)
        finally:
            scheduler.current = before
        assert last.op is not None
        return Future(last.op, value)


def as_nccl(collectives: Collectives) -> list[tuple[Any, str, Any]]:
    """Return what to replace in torch, as owner, name and value, so that "nccl" is this."""

    class IsCommunicator(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, FakeProcessGroup)

    class ProcessGroupNCCL(metaclass=IsCommunicator):
        Options = SimpleNamespace

        def __new__(cls, *args: Any) -> Any:
            return collectives.connect(*args)

    return [
        (dist.distributed_c10d, "ProcessGroupNCCL", ProcessGroupNCCL),
        (dist.distributed_c10d, "_NCCL_AVAILABLE", True),
        (FakeProcessGroup, "name", lambda made: "nccl"),
        (FakeProcessGroup, "abort", lambda made: collectives.of[made].abort()),
        (FakeProcessGroup, "shutdown", lambda made: None),
        (FakeProcessGroup, "options", property(lambda made: collectives.of[made].options)),
        (FakeProcessGroup, "_set_sequence_number_for_group", lambda made: None),
    ]
