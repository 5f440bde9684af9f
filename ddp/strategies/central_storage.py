"""Variables in the memory of one host, shared by its processes: one copy of parameters and of optimizer state.

`CentralStorage.prepare` moves a model's parameters into shared memory and deals them out: each rank steps its part of
them with the averaged gradient, for all. Nothing travels; the process group only says when everybody is ready.

    step:  own gradients to own shared memory | meet | average and step the own part | meet

Between the meetings every rank reads all gradients and writes its part of the parameters; outside of them nobody does.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddp.arguments import check_initialized, control_group
from ddp.broadcast import BufferSync, broadcast_tensors, buffer_collector
from ddp.errors import ArgumentError, CollectiveError, DdpError, PeerFailedError, UnsupportedError
from ddp.exchange import gather_values
from ddp.layout import check_same_layout, describe
from ddp.progress import count_step
from ddp.ps.memory import SharedSegment
from ddp.ps.partition import Chunk, Partition, Piece, partition
from ddp.ps.shards import (
    ChunkGradient,
    Gradient,
    Rows,
    Shards,
    hyperparameters,
    split_state,
    splits_by_element,
    states_of_pieces,
    whole_state,
)
from ddp.roster import Roster, sparse_names
from ddp.strategy import Strategy, join
from ddp.whereabouts import Whereabouts
from ddp.world import before_leaving

__all__ = ["CentralOptimizer", "CentralStorage", "CentralStorageStrategy"]

_CHUNK_BYTES = 1 << 20  # averaged, then stepped while it is in the cache
_ALIGN_BYTES = 64
_TEXT_BYTES = 1000  # of what a rank says of its failure
_NONE, _DENSE = -2, -1  # what gradient a parameter has; else the number of rows of a sparse one
_WRITE, _AVERAGE, _STEP = range(3)  # the phases of a step, each ended by a meeting
_PHASES = 3
_NOT_HYPER = frozenset({"params", "param_names"})
_HALF = (torch.float16, torch.bfloat16)


class CentralStorage:
    """Train with one copy of the parameters and of the optimizer's state in the memory of this host.

    `prepare` returns the model itself, on the CPU with parameters that lie in memory shared by all ranks, and an
    optimizer that stands for the user's. A rank averages the gradients of its part of the parameters over the ranks and
    steps that part; after `step()` every rank sees all new values. On a device, the model keeps its copy of them there.
    The result is that of all-reduce, for every optimizer that a `Shards` can step.

    - `max_grad_norm`: clip the averaged gradient to this norm before the step, as a single process would clip that of
      the whole batch. `torch.nn.utils.clip_grad_norm_` before `step()` clips each rank's own gradient instead.
    - `stall_timeout_s`: how long to wait for the other ranks; default: nine tenths of the group's own timeout.

    `.grad` is this rank's own gradient, also after the step, and on the CPU it lies in shared memory that the next
    backward pass writes to: clone what should stay. Parameters that some rank used are averaged with zeros for the
    others; those without a gradient on any rank are not stepped. Buffers are rank 0's on every rank after each step.
    """

    def __init__(self, *, max_grad_norm: float | None = None, stall_timeout_s: float | None = None) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ArgumentError(f"max_grad_norm={max_grad_norm!r} must be more than 0, or None for no clipping")
        self._max_grad_norm = max_grad_norm
        self._stall_timeout_s = stall_timeout_s

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, group: dist.ProcessGroup | None = None
    ) -> tuple[nn.Module, CentralOptimizer]:
        """Move the parameters that `optimizer` steps into shared memory; all start with the values of rank 0.

        Every rank of `group` (default: all) must call it with a model and an optimizer made alike; it blocks until all
        have. State that the optimizer has already is taken over, and `optimizer` itself steps no more.

        Raises ArgumentError if the ranks run on several hosts, LayoutMismatchError if their models or optimizers
        differ, UnsupportedError for an optimizer that cannot step parts of a model, CollectiveError if a rank is gone.
        """
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        storage = _Storage(model, optimizer, group, self._max_grad_norm, self._stall_timeout_s)
        return model, CentralOptimizer(storage, optimizer)


class CentralStorageStrategy(Strategy):
    """`CentralStorage` behind `ddp.strategy("central_storage")`; its options are the same."""

    name = "central_storage"
    averages_in_step = True

    def __init__(
        self, *, max_grad_norm: float | None = None, stall_timeout_s: float | None = None, communication: str = "auto"
    ) -> None:
        engine = CentralStorage(max_grad_norm=max_grad_norm, stall_timeout_s=stall_timeout_s)
        super().__init__(join(communication))
        self._engine = engine

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self._engine.prepare(model, optimizer)


class CentralOptimizer(torch.optim.Optimizer):
    """Stands for the user's optimizer, whose `param_groups` it shares: schedulers of either set the same rates.

    Every rank must call `step()` equally often, with the same hyperparameters. `state_dict()` is that of the user's
    optimizer, whole, on any rank and without the others; `load_state_dict()` takes it on every rank. Its own `state`
    is empty. Hooks registered on this object run; those of the user's object do not.
    """

    def __init__(self, storage: _Storage, optimizer: torch.optim.Optimizer) -> None:
        self._storage: _Storage | None = None
        # Not the user's groups and defaults: they would be filled up with each other.
        super().__init__(
            [{"params": [parameter for group in optimizer.param_groups for parameter in group["params"]]}], {}
        )
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self._storage = storage
        self._users = optimizer
        self._refusal = optimizer.register_step_pre_hook(_refuse_step)
        before_leaving(self, CentralOptimizer._let_go)

    @property
    def grad_norm(self) -> float | None:
        """The norm of the averaged gradient of the last step before it was clipped; None without `max_grad_norm`."""
        return self._open().grad_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # overloads
        """Average the gradients of all ranks and make one step. Every rank must call it; blocks.

        Raises ArgumentError if the model was changed after `prepare()` or the ranks' hyperparameters differ,
        PeerFailedError if another rank failed, CollectiveError if one is gone or too slow. After these two, parameters
        may be half stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._open().step(self.param_groups)
        self._users._opt_called = True  # type: ignore[attr-defined]  # a scheduler made before prepare() looks for it
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as torch has it, copied; on any rank, between two steps, and without the others."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._open().state_dict(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a whole state, perhaps saved by torch or in a world of another size.

        Every rank must call it, with the same; blocks. Raises ArgumentError if it is of other parameters.
        """
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state = before(self, state) or state
        self._open().load_state_dict(state, self.param_groups)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: parameters are dealt out once. Raises ArgumentError."""
        if self._storage is not None:
            raise ArgumentError("add_param_group() after prepare(): give the optimizer all of its groups before")
        super().add_param_group(param_group)

    def close(self) -> None:
        """Move the parameters back into memory of this process alone. Every rank must call it after the same step."""
        storage, self._storage = self._open(), None
        storage.close()
        self._refusal.remove()

    def _open(self) -> _Storage:
        if self._storage is None:
            raise DdpError("this optimizer was closed: use the one that was given to prepare(), or prepare again")
        return self._storage

    def _let_go(self) -> None:
        if self._storage is not None:
            self._storage.let_go()


def _refuse_step(*_: object) -> None:
    raise DdpError(
        "this optimizer was given to prepare(): step the one that prepare() returned, which steps for all ranks"
    )


# Where things lie


@dataclass(frozen=True)
class _Form:
    """What a parameter was when it was prepared."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Plan:
    """Offsets in bytes. Chunks and parameters lie alike among the values and in every rank's gradients.

    A rank's desk has its gradients first, then the row numbers of sparse ones, then words and texts for the others.
    """

    chunks: Mapping[int, int]
    parameters: tuple[int, ...]
    values_bytes: int
    rows: Mapping[int, int]
    words: int
    texts: int
    desk_bytes: int


def _plan(parts: Partition, forms: Sequence[_Form], sparse: Sequence[int]) -> _Plan:
    chunks: dict[int, int] = {}
    parameters = [0] * len(forms)
    end = 0
    for chunk in parts.chunks:
        # The rows of a parameter go on where the last chunk ended, so that it is one tensor.
        chunks[chunk.index] = end = end if chunk.pieces[0].begin else _aligned(end)
        for piece in chunk.pieces:
            if not piece.begin:
                parameters[piece.parameter] = end + piece.offset * chunk.dtype.itemsize
        end += chunk.nbytes
    values_bytes = end = max(_aligned(end), _ALIGN_BYTES)
    rows: dict[int, int] = {}
    for number in sparse:
        rows[number] = end
        end = _aligned(end + 8 * forms[number].shape[0])
    texts = end + 8 * (_Desk.HEADER + len(forms))
    return _Plan(chunks, tuple(parameters), values_bytes, rows, end, texts, texts + _PHASES * _TEXT_BYTES)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _view(memory: torch.Tensor, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor at an offset of `memory` (bytes,), with a storage of its own: who saves it saves no more."""
    size = torch.Size(shape)
    if not size.numel():
        return torch.empty(size, dtype=dtype)
    tensor = torch.empty(0, dtype=dtype)
    storage = memory.untyped_storage()[at : at + size.numel() * dtype.itemsize]
    tensor.set_(storage, 0, size)  # type: ignore[call-overload]  # torch's stubs know no storage
    return tensor


class _Desk:
    """One rank's part of shared memory: it writes there what the others need in a step."""

    HEADER = 8
    FAILED, DIGEST, STEP, MOVED, SQUARES = 0, 3, 4, 5, 6  # FAILED takes a word for each phase

    def __init__(self, memory: torch.Tensor, plan: _Plan, forms: Sequence[_Form]) -> None:
        self.memory = memory
        self._plan = plan
        self._forms = forms
        self.words = _view(memory, plan.words, (self.HEADER,), torch.int64)
        self.kinds = _view(memory, plan.words + 8 * self.HEADER, (len(forms),), torch.int64)
        self.squares = self.words[self.SQUARES : self.SQUARES + 1].view(torch.float64)

    def flat(self, chunk: Chunk) -> torch.Tensor:
        """The gradients of a chunk."""
        return _view(self.memory, self._plan.chunks[chunk.index], (chunk.numel,), chunk.dtype)

    def slot(self, number: int) -> torch.Tensor:
        """The place of a parameter's gradient."""
        form = self._forms[number]
        return _view(self.memory, self._plan.parameters[number], form.shape, form.dtype)

    def write_rows(self, number: int, gradient: torch.Tensor) -> int:
        """Write a coalesced sparse gradient; return its number of rows."""
        numbers, values = gradient.indices()[0], gradient.values()
        self._numbers(number, len(numbers)).copy_(numbers)
        self.slot(number).view(-1)[: values.numel()].copy_(values.reshape(-1))
        return len(numbers)

    def rows(self, piece: Piece, count: int) -> Rows:
        """Those of the `count` rows that lie in a piece, counted from its first."""
        numbers = self._numbers(piece.parameter, count)
        first, last = torch.searchsorted(numbers, torch.tensor([piece.begin, piece.end])).tolist()
        row = piece.shape[1:]
        slot = self.slot(piece.parameter)
        values = slot.view(-1)[: count * torch.Size(row).numel()].view(count, *row)
        return Rows(numbers[first:last] - piece.begin, values[first:last])

    def _numbers(self, number: int, count: int) -> torch.Tensor:
        return _view(self.memory, self._plan.rows[number], (count,), torch.int64)

    def fail(self, phase: int, step: int, text: str) -> None:
        data = text.encode(errors="replace")[: _TEXT_BYTES - 1]
        place = self._text(phase)
        place.zero_()
        place[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        self.words[self.FAILED + phase] = step

    def failure(self, phase: int, step: int) -> str | None:
        if int(self.words[self.FAILED + phase]) != step:
            return None
        return bytes(self._text(phase).tolist()).rstrip(b"\0").decode(errors="replace")

    def _text(self, phase: int) -> torch.Tensor:
        return _view(self.memory, self._plan.texts + phase * _TEXT_BYTES, (_TEXT_BYTES,), torch.uint8)


# The engine


class _Storage:
    """The shared memory of one model, and this rank's part in stepping it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None,
        max_grad_norm: float | None,
        stall_timeout_s: float | None,
    ) -> None:
        self.grad_norm: float | None = None
        self._max_grad_norm = max_grad_norm
        self._step = 0
        self._parameters = [parameter for each in optimizer.param_groups for parameter in each["params"]]
        self._forms = _forms(model, self._parameters)
        self._by_element = splits_by_element(optimizer)
        self._size = 1 if group is None else group.size()
        self._rank = 0 if group is None else group.rank()
        self._model = model
        self._room = _Room(group, model, self._forms, stall_timeout_s)
        self._room.compare(model, optimizer, {"max_grad_norm": max_grad_norm})
        self._partition = partition(
            [form.shape for form in self._forms],
            [form.dtype for form in self._forms],
            servers=self._size,
            chunk_bytes=_CHUNK_BYTES,
            splits=self._by_element,
        )
        self._with_rows = self._sparse(model, optimizer)
        plan = _plan(self._partition, self._forms, self._with_rows)
        self._values, self._desks = self._room.open(plan)
        self._mine = self._desks[self._rank]
        # How the user's parameters lay in memory: saved states lie so too.
        self._like = [torch.empty_like(parameter, device="meta") for parameter in self._parameters]
        self._take_places(plan)
        self._shards = Shards(
            optimizer,
            self._parameters,
            self._partition.of(self._rank),
            lambda chunk: _view(self._values, plan.chunks[chunk.index], (chunk.numel,), chunk.dtype),
        )
        optimizer.state.clear()
        self._groups = hyperparameters(optimizer)
        self._chunks = {chunk.index: chunk for chunk in self._partition.of(self._rank)}
        self._flats = {i: [desk.flat(chunk) for desk in self._desks] for i, chunk in self._chunks.items()}
        self._scratches: dict[torch.dtype, torch.Tensor] = {}
        self._kinds: list[list[int]] = []  # of every rank's gradients in this step
        self._is_plain = False  # whether all of them are dense
        self._averages: dict[int, Gradient] = {}
        self._roster = Roster(model, ())
        self._published = _Published(self._shards)
        self._others: dict[int, tuple[torch.Tensor, list[_Entry]]] = {}
        if self._size > 1:
            self._published.update()
            self._exchange()

    def _sparse(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
        """Numbers of the parameters whose gradients may be sparse."""
        names = sparse_names(model)
        takes_only_sparse = isinstance(optimizer, torch.optim.SparseAdam)
        return [
            number
            for number, form in enumerate(self._forms)
            if form.shape and (takes_only_sparse or form.name in names)
        ]

    @torch.no_grad()
    def _take_places(self, plan: _Plan) -> None:
        """Let the parameters lie in shared memory, with rank 0's values, and their gradients too."""
        self._places = [
            _view(self._values, at, form.shape, form.dtype)
            for at, form in zip(plan.parameters, self._forms, strict=True)
        ]
        if self._rank == 0:
            torch._foreach_copy_(self._places, [parameter.detach() for parameter in self._parameters])
        own = {id(parameter) for parameter in self._parameters}
        others = [tensor for tensor in self._model.parameters() if id(tensor) not in own]
        self._room.equalise([*others, *self._model.buffers()])
        self._room.meet("first values")
        self._on_device = []
        self._slots = [self._mine.slot(number) for number in range(len(self._forms))]
        self._hooks: list[RemovableHandle] = []
        for parameter, place, slot in zip(self._parameters, self._places, self._slots, strict=True):
            if parameter.device.type != "cpu":
                self._on_device.append((parameter, place))
                parameter.copy_(place)
                continue
            parameter.data = place
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_move_gradient, slot)))
        self._pointers = [parameter.data_ptr() for parameter in self._parameters]

    # A step

    def step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._step += 1
        with self._phase(_WRITE, "gradients of the others"):
            self._check_model()
            self._write(groups)
        self._check_words(groups)
        self._kinds = [desk.kinds.tolist() for desk in self._desks]
        self._is_plain = all(kind == _DENSE for kinds in self._kinds for kind in kinds)
        scale = None
        if self._max_grad_norm is not None:
            with self._phase(_AVERAGE, "norms of the others"):
                self._mine.squares.fill_(self._average_all())
            self.grad_norm = sum(float(desk.squares) for desk in self._desks) ** 0.5
            scale = min(1.0, self._max_grad_norm / (self.grad_norm + 1e-6))  # as torch's clip_grad_norm_
        with self._phase(_STEP, "parameters of the others"):
            self._step_own(scale)
            if self._size > 1 and self._published.update():
                self._mine.words[_Desk.MOVED] = self._step
        if any(int(desk.words[_Desk.MOVED]) == self._step for desk in self._desks):
            self._exchange()
        self._room.equalise_buffers()
        if self._on_device:
            torch._foreach_copy_(
                [parameter for parameter, _ in self._on_device], [place for _, place in self._on_device]
            )
        count_step()

    @contextlib.contextmanager
    def _phase(self, phase: int, what: str) -> Iterator[None]:
        """Meet the other ranks at the end of a block, and let them know if it raised: all ranks raise then."""
        if self._size == 1:
            yield
            return
        try:
            yield
        except Exception as error:
            self._mine.fail(phase, self._step, f"{type(error).__name__}: {error}")
            with contextlib.suppress(DdpError):  # the cause is this rank's own error
                self._room.meet(what, step=self._step)
            raise
        self._room.meet(what, step=self._step)
        told = {rank: desk.failure(phase, self._step) for rank, desk in enumerate(self._desks)}
        failures = {rank: text for rank, text in told.items() if text is not None}
        if failures:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
            raise PeerFailedError(f"another rank failed in step {self._step}: {said}", failures=failures)

    def _check_model(self) -> None:
        problem = self._roster.problem()
        changed = problem.parameter if problem is not None else None
        for form, parameter, pointer in zip(self._forms, self._parameters, self._pointers, strict=True):
            is_same = parameter.dtype == form.dtype and parameter.device == form.device
            if not is_same or (form.device.type == "cpu" and parameter.data_ptr() != pointer):
                changed = form.name
                break
        if changed is not None:
            raise ArgumentError(
                f"parameter {changed!r} was added, replaced, moved or converted after prepare(), so it is not the one "
                "in shared memory: change the model first, then prepare it (load_state_dict() without assign=True is "
                "allowed, as is everything that writes into the parameters)"
            )

    def _write(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Put this rank's gradients and words on its desk."""
        kinds = [self._written(number, parameter) for number, parameter in enumerate(self._parameters)]
        self._mine.kinds.copy_(torch.tensor(kinds, dtype=torch.int64))
        self._mine.words[_Desk.DIGEST] = _digest(groups)
        self._mine.words[_Desk.STEP] = self._step

    def _written(self, number: int, parameter: torch.Tensor) -> int:
        gradient, slot = parameter.grad, self._slots[number]
        if gradient is None:
            return _NONE
        if gradient is slot:
            return _DENSE
        gradient = gradient.detach()
        if gradient.layout is torch.sparse_coo:
            gradient = gradient.coalesce()
            if gradient.sparse_dim() == 1 and number in self._with_rows:
                return self._mine.write_rows(number, gradient)
            gradient = gradient.to_dense()
        slot.copy_(gradient)
        return _DENSE

    def _check_words(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for rank, desk in enumerate(self._desks):
            step = int(desk.words[_Desk.STEP])
            if step != self._step:
                raise ArgumentError(
                    f"rank {rank} makes its step {step}, and rank {self._rank} its step {self._step}: every rank must "
                    "call step() equally often"
                )
            if int(desk.words[_Desk.DIGEST]) != int(self._desks[0].words[_Desk.DIGEST]):
                rates = [group.get("lr") for group in groups]
                raise ArgumentError(
                    f"rank {rank} steps with other hyperparameters than rank 0 in step {self._step} (rank {self._rank} "
                    f"has lr {rates}): set them from what is equal on all ranks, such as strategy.reduce() of a loss"
                )
        self._groups = [{k: v for k, v in group.items() if k not in _NOT_HYPER} for group in groups]

    def _step_own(self, scale: float | None) -> None:
        self._shards.step({}, groups=self._groups)
        for index, chunk in self._chunks.items():
            # One by one: a chunk is stepped while its average is in the cache.
            gradient = self._average(chunk) if scale is None else _scaled(self._averages.pop(index), scale)
            self._shards.step({index: gradient})

    def _average_all(self) -> float:
        """Average the own part and keep it; return the sum of its squares."""
        self._averages = {index: self._average(chunk, keep=True) for index, chunk in self._chunks.items()}
        return sum(_squares(self._averages[index], chunk) for index, chunk in self._chunks.items())

    def _average(self, chunk: Chunk, *, keep: bool = False) -> Gradient:
        """The mean over the ranks of one chunk's gradients; unless `keep`, only until the next call."""
        kinds = self._kinds
        numbers = [piece.parameter for piece in chunk.pieces]
        flats = self._flats[chunk.index]
        is_plain = self._is_plain or all(each[number] == _DENSE for each in kinds for number in numbers)
        if is_plain and self._size == 1 and not keep:
            return flats[0]
        total = self._scratch(chunk, keep=keep)
        if is_plain:
            in_one = self._size > 1 and total.dtype == chunk.dtype  # else it would be rounded before it is written
            torch.add(flats[0], flats[1], out=total) if in_one else total.copy_(flats[0])
            for flat in flats[1 + in_one :]:
                total.add_(flat)
            return total.div_(self._size)
        absent, sparse = set(), {}
        for position, piece in enumerate(chunk.pieces):
            ranks = [rank for rank in range(self._size) if kinds[rank][piece.parameter] != _NONE]
            if not ranks:
                absent.add(position)
            elif all(kinds[rank][piece.parameter] >= 0 for rank in ranks):
                sparse[position] = self._mean_rows(piece, ranks)
            else:
                self._add_up(piece, ranks, flats, total[piece.offset : piece.stop])
        return ChunkGradient(total.div_(self._size), frozenset(absent), sparse)

    def _add_up(self, piece: Piece, ranks: Sequence[int], flats: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Write the sum over `ranks` of the gradients of a piece to `total` (numel,)."""
        total.zero_()
        for rank in ranks:
            count = self._kinds[rank][piece.parameter]
            if count == _DENSE:
                total.add_(flats[rank][piece.offset : piece.stop])
            else:
                rows = self._desks[rank].rows(piece, count)
                total.view(piece.shape).index_add_(0, rows.numbers, rows.values.to(total.dtype))

    def _mean_rows(self, piece: Piece, ranks: Sequence[int]) -> Rows:
        every = [self._desks[rank].rows(piece, self._kinds[rank][piece.parameter]) for rank in ranks]
        numbers, places = torch.unique(torch.cat([rows.numbers for rows in every]), return_inverse=True)
        values = torch.cat([rows.values for rows in every])
        total = torch.zeros(len(numbers), *values.shape[1:], dtype=_wide(values.dtype))
        return Rows(numbers, total.index_add_(0, places, values.to(total.dtype)).div_(self._size))

    def _scratch(self, chunk: Chunk, *, keep: bool) -> torch.Tensor:
        """Room for an average, wide enough that it is rounded once."""
        dtype = _wide(chunk.dtype)
        if keep:
            return torch.empty(chunk.numel, dtype=dtype)
        held = self._scratches.get(dtype)
        if held is None or len(held) < chunk.numel:
            held = self._scratches[dtype] = torch.empty(chunk.numel, dtype=dtype)
        return held[: chunk.numel]

    # State

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        states = [self._shards.state() if rank == self._rank else self._read(rank) for rank in range(self._size)]
        return whole_state(self._partition, optimizer, states, like=self._like)

    def load_state_dict(self, state: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
        if len(state["param_groups"]) != len(groups) or any(
            len(mine["params"]) != len(theirs["params"])
            for mine, theirs in zip(groups, state["param_groups"], strict=True)
        ):
            raise ArgumentError("the state has other param groups than the optimizer")
        self._shards.load_state(split_state(self._partition, state)[self._rank])
        for mine, theirs in zip(groups, state["param_groups"], strict=True):
            mine.update({name: copy.deepcopy(value) for name, value in theirs.items() if name not in _NOT_HYPER})
        if self._size > 1:
            self._published.update()
            self._exchange()

    def _read(self, rank: int) -> dict[str, Any]:
        """The state of another rank, of what it has published; nobody writes there between two steps."""
        memory, entries = self._others.get(rank, (self._values, []))
        states: dict[tuple[int, int, int], dict[str, Any]] = {}
        for entry in entries:
            states.setdefault((entry.chunk, entry.first, entry.stop), {})[entry.name] = entry.read(memory)
        chunks: dict[int, list[dict[str, Any]]] = {
            chunk.index: [{} for _ in chunk.pieces] for chunk in self._partition.of(rank)
        }
        for (index, first, stop), state in states.items():
            pieces = self._partition.chunks[index].pieces[first:stop]
            chunks[index][first:stop] = states_of_pieces(pieces, state, by_element=self._by_element)
        return {"chunks": chunks}

    def _exchange(self) -> None:
        """Learn where the others' states are now. Every rank must call it; blocks."""
        if self._size == 1:
            return
        told = self._room.tell_all(self._published.announcement(), "places of optimizer states")
        for rank, announced in enumerate(told):
            if rank != self._rank and announced is not None:
                ticket, entries = announced
                self._others[rank] = self._room.open_segment(ticket, rank), [_Entry(*fields) for fields in entries]
        self._room.meet("optimizer states of the others", step=self._step)
        self._published.is_known()

    # The end

    @torch.no_grad()
    def close(self) -> None:
        for parameter, place in zip(self._parameters, self._places, strict=True):
            if parameter.device.type == "cpu" and parameter.data_ptr() == place.data_ptr():
                parameter.data = place.clone()
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()
        for hook in self._hooks:
            hook.remove()
        self.let_go()

    def let_go(self) -> None:
        self._room.close()


def _move_gradient(slot: torch.Tensor, parameter: torch.Tensor) -> None:
    """Move a gradient that autograd has made to its place in shared memory; it goes on adding there."""
    gradient = parameter.grad
    if gradient is None or gradient is slot or gradient.layout is not torch.strided or gradient.requires_grad:
        return
    if gradient.dtype == slot.dtype:
        parameter.grad = slot.copy_(gradient)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _squares(gradient: Gradient, chunk: Chunk) -> float:
    if isinstance(gradient, torch.Tensor):
        return float(torch.linalg.vector_norm(gradient, dtype=_norm_dtype(gradient))) ** 2
    total = 0.0
    for position, piece in enumerate(chunk.pieces):
        if position in gradient.sparse:
            total += _squares(gradient.sparse[position].values, chunk)
        elif position not in gradient.absent and gradient.flat is not None:
            total += _squares(gradient.flat[piece.offset : piece.stop], chunk)
    return total


def _norm_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _scaled(gradient: Gradient, scale: float) -> Gradient:
    """Scale an average that was kept, in place."""
    if isinstance(gradient, torch.Tensor):
        return gradient.mul_(scale)
    if gradient.flat is not None:
        gradient.flat.mul_(scale)
    for rows in gradient.sparse.values():
        rows.values.mul_(scale)
    return gradient


def _digest(groups: Sequence[Mapping[str, Any]]) -> int:
    """63 bits of the hyperparameters."""
    told = [
        [(k, v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in group.items() if k not in _NOT_HYPER]
        for group in groups
    ]
    return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=8).digest(), "big") >> 1


def _forms(model: nn.Module, parameters: Sequence[torch.Tensor]) -> list[_Form]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    named = [(names.get(id(p), f"number {number} of the optimizer"), p) for number, p in enumerate(parameters)]
    check_initialized(named)  # type: ignore[arg-type]  # an optimizer may step plain tensors
    return [_Form(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in named]


# Optimizer state where all ranks can read it


@dataclass(frozen=True)
class _Entry:
    """One value of an optimizer's state, at `at` bytes: of pieces `first` to `stop` of a chunk, under `name`.

    `kind`: "tensor", "sparse" (row numbers (count,) int64, then values (count, *row)), "number" or "none".
    """

    chunk: int
    first: int
    stop: int
    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    count: int = 0
    at: int = 0

    @property
    def nbytes(self) -> int:
        if self.kind == "sparse":
            return self._values_at + self.count * torch.Size(self.shape[1:]).numel() * self.dtype.itemsize
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def _values_at(self) -> int:
        return _aligned(8 * self.count)

    def place(self, memory: torch.Tensor) -> torch.Tensor:
        return _view(memory, self.at, self.shape, self.dtype)

    def sparse_places(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            _view(memory, self.at, (self.count,), torch.int64),
            _view(memory, self.at + self._values_at, (self.count, *self.shape[1:]), self.dtype),
        )

    def read(self, memory: torch.Tensor) -> Any:
        if self.kind == "none":
            return None
        if self.kind == "sparse":
            numbers, values = self.sparse_places(memory)
            return torch.sparse_coo_tensor(
                numbers[None].clone(), values.clone(), self.shape, is_coalesced=True, check_invariants=False
            )
        place = self.place(memory)
        return place.item() if self.kind == "number" else place


class _Published:
    """This rank's optimizer state, moved to shared memory, where the others may read it while nobody steps."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._entries: list[_Entry] = []
        self._places: list[torch.Tensor | None] = []
        self._segment: SharedSegment | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def announcement(self) -> tuple[Any, list[tuple[Any, ...]]] | None:
        """What the others need to read it, or None if they know."""
        return None if self._segment is None else (self._segment.ticket, [astuple(entry) for entry in self._entries])

    def is_known(self) -> None:
        """All others have it open: let nobody else in."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def update(self) -> bool:
        """Bring shared memory up to date after a step; return whether the others must look elsewhere now."""
        found = [
            (_entry(chunk, first, stop, name, value), state, value)
            for chunk, first, stop, state in self._shards.live()
            for name, value in state.items()
        ]
        moves = [entry for entry, _, _ in found] != [replace(entry, at=0) for entry in self._entries]
        if moves:
            self._move([entry for entry, _, _ in found])
        for (_, state, value), entry, place in zip(found, self._entries, self._places, strict=True):
            if place is not value:
                self._store(entry, state, value, place)
        return moves

    def _move(self, found: Sequence[_Entry]) -> None:
        self._entries, end = [], 0
        for entry in found:
            self._entries.append(replace(entry, at=end))
            end = _aligned(end + entry.nbytes)
        self._segment = SharedSegment(max(end, _ALIGN_BYTES))
        self._memory = memory = self._segment.tensor
        self._places = [entry.place(memory) if entry.kind in ("tensor", "number") else None for entry in self._entries]

    def _store(self, entry: _Entry, state: dict[str, Any], value: Any, place: torch.Tensor | None) -> None:
        if entry.kind == "sparse":  # a step gives such a tensor other memory
            numbers, values = entry.sparse_places(self._memory)
            coalesced = value.coalesce()
            numbers.copy_(coalesced.indices()[0])
            values.copy_(coalesced.values())
        elif place is not None:
            place.copy_(value) if entry.kind == "tensor" else place.fill_(value)
            if entry.kind == "tensor":
                state[entry.name] = place  # from now on the optimizer's steps change it here


def _entry(chunk: Chunk, first: int, stop: int, name: str, value: Any) -> _Entry:
    where = (chunk.index, first, stop, name)
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo and value.sparse_dim() == 1:
        coalesced = value.coalesce()
        return _Entry(*where, "sparse", tuple(value.shape), value.dtype, coalesced._nnz())
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return _Entry(*where, "tensor", tuple(value.shape), value.dtype)
    if isinstance(value, bool | int | float):
        dtype = torch.float64 if isinstance(value, float) else torch.bool if isinstance(value, bool) else torch.int64
        return _Entry(*where, "number", (), dtype)
    if value is None:
        return _Entry(*where, "none", (), torch.uint8)
    raise UnsupportedError(
        f"the optimizer keeps {name!r}, a {type(value).__name__}, of each parameter: central storage takes those that "
        "keep tensors and numbers"
    )


# Between the ranks


class _Room:
    """The ranks that share memory: where they meet, and how they find each other's segments."""

    def __init__(
        self, group: dist.ProcessGroup | None, model: nn.Module, forms: Sequence[_Form], stall_timeout_s: float | None
    ) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._forms = forms
        self._buffers: BufferSync | None = None
        if self._group is None:
            return
        self._control = control_group(self._group, forms[0].device)
        self._whereabouts = Whereabouts(self._control, timeout_s=stall_timeout_s)
        self._whereabouts.at("its forward and backward passes")
        self._token = torch.zeros(1, dtype=torch.int64)
        self._collect = buffer_collector(model, frozenset())
        self._buffers = BufferSync(self._group, self._collect, self._whereabouts.wait)

    def meet(self, what: str, *, step: int = 0) -> None:
        """Wait until all ranks are here; what they wrote before can be read after. Raises CollectiveError."""
        if self._group is not None:
            self._whereabouts.step = step
            self._whereabouts.wait(self._control.allreduce([self._token]), what)

    def tell_all(self, mine: object, what: str) -> list[Any]:
        """The values of all ranks. Every rank must call it; blocks."""
        if self._group is None:
            return [mine]
        with self._whereabouts.waiting(what):
            return gather_values(mine, device=torch.device("cpu"), group=self._control)

    def compare(self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, object]) -> None:
        """Raise LayoutMismatchError on every rank if the ranks' models, optimizers or settings differ."""
        if self._group is None:
            return
        described = {
            **settings,
            "optimizer": type(optimizer).__qualname__,
            "parameters of the optimizer": [form.name for form in self._forms],
            "hyperparameters": _digest(optimizer.param_groups),
        }
        with self._whereabouts.waiting("comparison of the models"):
            check_same_layout(
                self._control,
                describe(described, model.named_parameters(), model.named_buffers()),
                torch.device("cpu"),
            )

    def open(self, plan: _Plan) -> tuple[torch.Tensor, list[_Desk]]:
        """Make the segments and find those of the others: the values, and every rank's desk."""
        if self._group is None:
            values = torch.zeros(plan.values_bytes, dtype=torch.uint8)
            return values, [_Desk(torch.zeros(plan.desk_bytes, dtype=torch.uint8), plan, self._forms)]
        rank = self._group.rank()
        own = [SharedSegment(plan.desk_bytes), *([SharedSegment(plan.values_bytes)] if rank == 0 else [])]
        told = self.tell_all(([segment.ticket for segment in own], platform.node()), "places of shared memory")
        memories = [own if other == rank else self._open_all(tickets) for other, (tickets, _) in enumerate(told)]
        self._check_same_host([host for _, host in told], [other for other, found in enumerate(memories) if not found])
        desks = [_Desk(found[0].tensor, plan, self._forms) for found in memories]
        values = memories[0][1].tensor
        for segment in own:
            segment.close()  # to newcomers; the memory stays
        return values, desks

    def _open_all(self, tickets: Sequence[Mapping[str, Any]]) -> list[SharedSegment]:
        """The segments of another rank, or none if one of them cannot be had here."""
        opened = [SharedSegment.open(ticket) for ticket in tickets]
        found = [segment for segment in opened if segment is not None]
        return found if len(found) == len(tickets) else []

    def _check_same_host(self, hosts: Sequence[str], hidden: Sequence[int]) -> None:
        for rank, unseen in enumerate(self.tell_all(list(hidden), "who can open it")):
            if unseen:
                raise ArgumentError(
                    f"central_storage keeps parameters in memory that all processes share, but rank {rank} (on "
                    f"{hosts[rank]}) cannot open that of rank {unseen[0]} (on {hosts[unseen[0]]}): run all processes "
                    'on one host, as one user, or use strategy "all_reduce" or "parameter_server"'
                )

    def open_segment(self, ticket: Any, rank: int) -> torch.Tensor:
        segment = SharedSegment.open(ticket)
        if segment is None:
            raise CollectiveError(
                f"the shared memory of rank {rank} is gone: that process has ended",
                rank=self._whereabouts.rank,
                what="places of optimizer states",
            )
        return segment.tensor

    def equalise(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make these rank 0's on every rank."""
        if self._group is not None:
            with self._whereabouts.waiting("broadcast of what is not stepped"):
                broadcast_tensors(self._group, tensors)

    def equalise_buffers(self) -> None:
        if self._buffers is not None and self._collect():
            self._buffers.run()

    def close(self) -> None:
        if self._group is not None:
            self._whereabouts.close()
            self._buffers = self._group = None
            del self._control
