"""The process group of `shm`: turns the calls of torch.distributed into operations of the engine.

Names and arguments are those of torch's ProcessGroup, old and new; ranks are those of the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ddp.comm.combine import Shares, reduction_of
from ddp.comm.shm.collectives import Algorithms, Steps
from ddp.comm.shm.engine import Engine, Operation
from ddp.comm.shm.memory import open_all
from ddp.comm.shm.messages import Receive, Send
from ddp.comm.shm.other_devices import OtherDevices
from ddp.comm.shm.rounds import Rounds
from ddp.comm.shm.work import DoneWork, Flats, ShmWork
from ddp.errors import ArgumentError
from ddp.torch_internals import backend_of

NAME = "shm"
_DONE = DoneWork()
_REDUCTIONS = {value: name for name, value in dist.ReduceOp.RedOpType.__members__.items()}


def or_elsewhere(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Forward calls with tensors on other devices, or sparse ones, to a group that supports them."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: ShmGroup, *args: Any, **kwargs: Any) -> dist.Work:
        first = args[0] if isinstance(args[0], torch.Tensor) else (args[0] or args[1])[0]
        while not isinstance(first, torch.Tensor):
            first = first[0]
        if first.is_cpu and first.layout is torch.strided:
            return method(self, *args, **kwargs)
        work: dist.Work = getattr(self.elsewhere(first), name)(*args, **kwargs)
        return work

    return call


# torch's stubs have overloads for each method; one Python method has to accept all of them.
_ProcessGroup: Any = dist.ProcessGroup


class ShmGroup(_ProcessGroup):  # type: ignore[misc]  # a class of type Any
    """Ranks that share a host's memory. All of them must make it; `timeout` also applies to each operation."""

    adds_in_fixed_order = True  # for all sizes
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, others: OtherDevices | None = None
    ) -> None:
        super().__init__(rank, size)  # the way with a store is not for subclasses
        self._store, self._others = store, others
        self._rank = rank
        self.set_timeout(timeout)
        self._group_name, self._group_desc = "", "undefined"
        self._connect(store, rank, size, timeout)

    def _connect(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        peers, pidfds = open_all(store, rank, size, timeout.total_seconds())
        rounds = Rounds(peers, rank, pidfds)
        self._algorithms: Any = Algorithms(rounds)
        self._engine: Any = Engine(rounds)

    # Properties that torch reads.

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    # torch's own groups keep these in their C++ backends; this one has none.

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._group_desc = description

    def getGroupName(self) -> str:
        return self._group_name

    def getGroupDesc(self) -> str:
        return self._group_desc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] if self._others is None else self._others.device_types(self)

    def elsewhere(self, tensor: torch.Tensor) -> Any:
        """Return torch's group for a tensor that this one does not support."""
        if self._others is None:
            raise ArgumentError(f"the group moves dense tensors in host memory, not {tensor.layout} on {tensor.device}")
        return self._others.for_sparse(self) if tensor.is_cpu else self._others.group_for(self, tensor.device.type)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""
        self._timeout_s = timeout.total_seconds()
        self.options = SimpleNamespace(_timeout=timeout, backend=NAME)

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return self
        if self._others is None:
            raise RuntimeError(f"the group has no backend for {device.type}: it was made with {NAME} alone")
        return backend_of(self._others.group_for(self, device.type), device)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescer(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._coalescer(device)._end_coalescing(device)

    def _coalescer(self, device: torch.device) -> Any:
        if device.type == "cpu" or self._others is None:
            raise RuntimeError("the backend shm coalesces lists of tensors, not calls: leave out `device`")
        return self._others.group_for(self, device.type)

    def shutdown(self) -> None:
        """Wait for the started collectives, within their timeouts; then leave the other ranks."""
        try:
            self._engine.drain()
        finally:
            self._engine.close()
        if self._others is not None:
            self._others.close()

    def fail(self, text: str) -> None:
        """Make the other ranks fail with this message; the group is unusable afterwards."""
        self._engine.close(text)

    def abort(self) -> None:
        self._engine.close()

    def __del__(self) -> None:
        if "_engine" in vars(self):
            self._engine.close(limit_s=0)  # this may be any thread, in the middle of anything

    def adds_by_tree(self, dtype: torch.dtype) -> bool:
        """Return whether sums of numbers of `dtype` are those of `combine` over the ranks, for any hosts."""
        return True

    def sum_rows(self, out: torch.Tensor, rows: Sequence[torch.Tensor], shares: Shares) -> dist.Work:
        """Start writing the sum of all leaves to `out`, see `ddp.comm.sums.tree_sum`."""
        flats = Flats()
        each = [self._algorithms.sum_rows(flats.write(out), [flats.read(row) for row in rows], shares)]
        return self._run("all_reduce", each, flats, [out], None, None)

    # Collectives with one tensor per rank.

    @or_elsewhere
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        return self._all_reduce(_listed(tensors), opts, timeout)

    @or_elsewhere
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._all_reduce(tensors, opts, None)

    def _all_reduce(self, tensors: Sequence[torch.Tensor], opts: Any, timeout: timedelta | None) -> dist.Work:
        reduction, flats = _reduction(opts, tensors), Flats()
        each = [self._algorithms.all_reduce(flats.write(tensor), reduction) for tensor in tensors]
        return self._run("all_reduce", each, flats, tensors, opts, timeout)

    @or_elsewhere
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        tensors, root, flats = _listed(tensors), self._root(opts), Flats()
        flatten = flats.read if root == self._rank else flats.write
        each = [self._algorithms.broadcast(flatten(tensor), root) for tensor in tensors]
        return self._run("broadcast", each, flats, tensors, opts, timeout)

    @or_elsewhere
    def reduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        tensors, root, flats = _listed(tensors), self._root(opts), Flats()
        reduction = _reduction(opts, tensors)
        flatten = flats.write if root == self._rank else flats.read
        each = [self._algorithms.reduce(flatten(tensor), reduction, root) for tensor in tensors]
        return self._run("reduce", each, flats, tensors, opts, timeout)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        return self._run("barrier", [self._algorithms.barrier()], Flats(), (), opts, timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Run a barrier. Its error names all ranks that did not arrive, for any `wait_all_ranks`."""
        self._run("monitored_barrier", [self._algorithms.barrier()], Flats(), (), None, timeout).wait()

    # Collectives with many tensors per rank.

    @or_elsewhere
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        flats = Flats()
        each = [
            self._gathered(flats, [flats.write(out) for out in outs], tensor)
            for outs, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._run("all_gather", each, flats, [out for outs in outputs for out in outs], opts, timeout)

    @or_elsewhere
    def allgather_coalesced(self, outputs: Any, inputs: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        return self.allgather([*zip(*outputs, strict=True)], inputs, opts)

    @or_elsewhere
    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        return self._all_gather_single([output], [input], opts, timeout)

    @or_elsewhere
    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        return self._all_gather_single(outputs, inputs, opts, None)

    def _all_gather_single(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any, timeout: timedelta | None
    ) -> dist.Work:
        flats = Flats()
        each = [
            self._gathered(flats, flats.write_parts(out, [tensor.numel()] * self.size()), tensor)
            for out, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._run("all_gather", each, flats, outputs, opts, timeout)

    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced

    def _gathered(self, flats: Flats, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Steps:
        _check_alike(tensor, outs, self.size())
        steps: Steps = self._algorithms.all_gather(outs, flats.read(tensor))
        return steps

    @or_elsewhere
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        root, flats = self._root(opts), Flats()
        (tensor,) = inputs
        outs = [flats.write(out) for outs in outputs for out in outs] if root == self._rank else []
        if root == self._rank:
            _check_alike(tensor, outs, self.size())
        each = [self._algorithms.gather(outs, flats.read(tensor), root)]
        return self._run("gather", each, flats, outputs[0] if outputs else (), opts, timeout)

    @or_elsewhere
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        root, flats = self._root(opts), Flats()
        (out,) = outputs
        pieces = [flats.read(piece) for pieces in inputs for piece in pieces] if root == self._rank else []
        if root == self._rank:
            _check_alike(out, pieces, self.size())
        each = [self._algorithms.scatter(flats.write(out), pieces, root)]
        return self._run("scatter", each, flats, outputs, opts, timeout)

    @or_elsewhere
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        reduction, flats = _reduction(opts, outputs), Flats()
        each = [
            self._scattered(flats, out, [flats.read(piece) for piece in pieces], reduction)
            for out, pieces in zip(outputs, inputs, strict=True)
        ]
        return self._run("reduce_scatter", each, flats, outputs, opts, timeout)

    @or_elsewhere
    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        return self._reduce_scatter_single([output], [input], opts, timeout)

    @or_elsewhere
    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        return self._reduce_scatter_single(outputs, inputs, opts, None)

    def _reduce_scatter_single(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any, timeout: timedelta | None
    ) -> dist.Work:
        reduction, flats = _reduction(opts, outputs), Flats()
        each = [
            self._scattered(flats, out, flats.read_parts(tensor, [out.numel()] * self.size()), reduction)
            for out, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._run("reduce_scatter", each, flats, outputs, opts, timeout)

    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced

    def _scattered(self, flats: Flats, out: torch.Tensor, pieces: Sequence[torch.Tensor], reduction: str) -> Steps:
        _check_alike(out, pieces, self.size())
        steps: Steps = self._algorithms.reduce_scatter(flats.write(out), pieces, reduction)
        return steps

    @or_elsewhere
    def alltoall(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        flats = Flats()
        outs, pieces = [flats.write(out) for out in outputs], [flats.read(piece) for piece in inputs]
        return self._run("all_to_all", [self._exchanged(outs, pieces)], flats, outputs, opts, timeout)

    @or_elsewhere
    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        flats = Flats()
        outs = flats.write_parts(output, _split(output, output_split_sizes, self.size()))
        pieces = flats.read_parts(input, _split(input, input_split_sizes, self.size()))
        return self._run("all_to_all", [self._exchanged(outs, pieces)], flats, [output], opts, timeout)

    all_to_all_single = alltoall_base

    def _exchanged(self, outs: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> Steps:
        if not len(outs) == len(pieces) == self.size() or len({tensor.dtype for tensor in (*outs, *pieces)}) != 1:
            raise ArgumentError(
                f"all_to_all among {self.size()} ranks wants as many inputs and outputs, of one dtype; here are "
                f"{len(pieces)} and {len(outs)}, of {', '.join(sorted({str(t.dtype) for t in (*outs, *pieces)}))}"
            )
        steps: Steps = self._algorithms.all_to_all(outs, pieces)
        return steps

    # Messages.

    @or_elsewhere
    def send(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        (tensor,) = _listed(tensors)
        flats = Flats()
        return self._start("send", Send(flats.read(tensor), self._other_rank(rank), tag), flats, tensors)

    @or_elsewhere
    def recv(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        return self._receive(_listed(tensors), self._other_rank(rank), tag)

    @or_elsewhere
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._receive(_listed(tensors), -1, tag)

    def _receive(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        flats = Flats()
        return self._start("recv", Receive(flats.write(tensor), rank, tag), flats, tensors)

    def _other_rank(self, rank: int) -> int:
        if not 0 <= rank < self.size() or rank == self._rank:
            raise ArgumentError(f"rank {self._rank} of {self.size()} cannot exchange messages with rank {rank}")
        return rank

    # Starting them.

    def run_now(self, what: str, *args: Any) -> None:
        """Run one of `collectives` on flat tensors; block until it is done, or raise its error."""
        self._engine.run_now(what, getattr(self._algorithms, what)(*args), (), self._timeout_s)

    def _root(self, opts: Any) -> int:
        root = opts if isinstance(opts, int) else 0 if opts is None else int(opts.rootRank)
        if not 0 <= root < self.size():
            raise ArgumentError(f"the root is rank {root}, but the group has {self.size()} ranks, from 0")
        return root

    def _run(
        self,
        what: str,
        each: Sequence[Steps],
        flats: Flats,
        results: Sequence[torch.Tensor],
        opts: Any,
        timeout: timedelta | None,
    ) -> dist.Work:
        steps = flats.then_back(each[0] if len(each) == 1 else _in_turn(each))
        limit = timeout if timeout is not None else getattr(opts, "timeout", None)
        limit_s = 0.0 if limit is None else limit.total_seconds()
        if limit_s <= 0:  # not set
            limit_s = self._timeout_s
        is_async = getattr(opts, "asyncOp", True)
        if not is_async and not flats.in_inference:
            self._engine.run_now(what, steps, results, limit_s)
            return _DONE
        operation = Operation(what, steps, results, limit_s)
        operation.in_inference = flats.in_inference
        self._engine.run(operation, wait=not is_async)
        return ShmWork(self, self._engine, operation)

    def _start(self, what: str, message: Send | Receive, flats: Flats, results: Sequence[torch.Tensor]) -> dist.Work:
        operation = Operation(what, message, results, self._timeout_s)
        operation.then = flats.bring_back
        self._engine.run(operation, wait=False)
        return ShmWork(self, self._engine, operation)


def _listed(tensors: Any) -> Sequence[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _in_turn(each: Sequence[Steps]) -> Iterator[None]:
    for steps in each:
        yield from steps


def _reduction(opts: Any, tensors: Sequence[torch.Tensor]) -> str:
    """Return the name of the reduction in options, or of an operation itself; raises ArgumentError."""
    asked = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    name = "SUM" if asked == dist.ReduceOp.SUM else _REDUCTIONS[getattr(asked, "op", asked)]  # a look-up is slow
    for tensor in tensors:
        reduction_of(name, tensor.dtype)
    return name


def _split(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the elements for each rank, from sizes along the first dimension; without sizes, equal parts."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes and rows % ranks:
        raise ArgumentError(f"a tensor of {rows} rows cannot be divided equally among {ranks} ranks: give split sizes")
    sizes = [*sizes] or [rows // ranks] * ranks
    if sum(sizes) != rows or len(sizes) != ranks:
        raise ArgumentError(f"split sizes {sizes} are not for {ranks} ranks and a tensor of {rows} rows")
    return [size * (tensor.numel() // rows if rows else 0) for size in sizes]


def _check_alike(tensor: torch.Tensor, others: Sequence[torch.Tensor], ranks: int) -> None:
    wrong = {(other.dtype, other.numel()) for other in others} - {(tensor.dtype, tensor.numel())}
    if wrong or len(others) != ranks:
        raise ArgumentError(
            f"expected {ranks} tensors of {tensor.numel()} elements of {tensor.dtype}, one a rank; got {len(others)}"
            + "".join(f", some of {numel} elements of {dtype}" for dtype, numel in wrong)
        )
