"""One rank's part of central storage: its step and its state. Made by `CentralStorage.prepare`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddp.comm.pinned_buffer import device_with_stream
from ddp.data_parallel.arguments import check_initialized
from ddp.data_parallel.module_watch import ModuleWatch, sparse_names
from ddp.errors import ArgumentError, DdpError, PeerFailedError
from ddp.monitoring.progress import count_step
from ddp.strategies.central_storage.regions import (
    DeviceCopies,
    Form,
    RankRegion,
    RegionPlan,
    SharedRegion,
    digest,
    make_plan,
)
from ddp.strategies.central_storage.state import Published, StateEntry
from ddp.strategies.sharding.chunk_gradient import ChunkGradient, Gradient, Rows, average
from ddp.strategies.sharding.optimizer_state import State, hyperparameters, split_state, states_of_pieces, whole_state
from ddp.strategies.sharding.partition import Chunk, partition, view_of
from ddp.strategies.sharding.shards import Shards, splits_by_element
from ddp.torch_internals import foreach_copy

_CHUNK_BYTES = 1 << 20  # averaged, then stepped while it is in the cache
_NONE, _DENSE = -2, -1  # kinds of gradients; other numbers are the rows of a sparse one
_WRITE, _AVERAGE, _STEP = range(3)  # the phases of a step, each ended by a barrier
_HALF = (torch.float16, torch.bfloat16)


class Storage:
    """The shared memory of one model, and the chunks that this rank steps."""

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
        self._shared = SharedRegion(group, model, self._forms, stall_timeout_s)
        self._shared.compare(model, optimizer, {"max_grad_norm": max_grad_norm})
        self._partition = partition(
            self._parameters,
            servers=self._size,
            chunk_bytes=_CHUNK_BYTES,
            splits=self._by_element,
        )
        self._with_rows = self._sparse(model, optimizer)
        plan = make_plan(self._partition, self._forms, self._with_rows)
        self._regions = self._shared.open(plan)
        self._mine = self._regions[self._rank]
        # The memory layout of the user's parameters, which saved states have too.
        self._like = [torch.empty_like(parameter, device="meta") for parameter in self._parameters]
        self._place_parameters(plan)
        chunks = self._partition.of(self._rank)
        values = {
            chunk.index: self._value(plan, plan.chunks[chunk.index], (chunk.numel,), chunk.dtype) for chunk in chunks
        }
        self._shards = Shards(optimizer, chunks, values)
        optimizer.state.clear()
        self._chunks = {chunk.index: chunk for chunk in chunks}
        self._flats = {i: [region.flat(chunk) for region in self._regions] for i, chunk in self._chunks.items()}
        self._scratches: dict[torch.dtype, torch.Tensor] = {}
        self._kinds: list[list[int]] = []  # of every rank's gradients in this step
        self._is_plain = False  # whether all of them are dense
        self._averages: dict[int, Gradient] = {}
        self._watch = ModuleWatch(model, ())
        self._published = Published(self._shards)
        self._others: dict[int, tuple[torch.Tensor, list[StateEntry]]] = {}
        if self._size > 1:
            self._published.update()
            self._exchange()

    def _sparse(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
        """Return the numbers of the parameters whose gradients may be sparse."""
        names = sparse_names(model)
        takes_only_sparse = isinstance(optimizer, torch.optim.SparseAdam)
        return [
            number
            for number, form in enumerate(self._forms)
            if form.shape and (takes_only_sparse or form.name in names)
        ]

    def _value(self, plan: RegionPlan, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a view of some of the values."""
        return view_of(self._regions[0].memory, plan.region_bytes + at, shape, dtype)

    @torch.no_grad()
    def _place_parameters(self, plan: RegionPlan) -> None:
        """Move the parameters, with rank 0's values, and their gradients into shared memory."""
        self._places = [
            self._value(plan, at, form.shape, form.dtype) for at, form in zip(plan.parameters, self._forms, strict=True)
        ]
        if self._rank == 0:
            foreach_copy(self._places, [parameter.detach() for parameter in self._parameters])
        own = {id(parameter) for parameter in self._parameters}
        others = [tensor for tensor in self._model.parameters() if id(tensor) not in own]
        self._shared.broadcast([*others, *self._model.buffers()])
        self._shared.barrier("first values")
        self._on_device: dict[int, torch.nn.Parameter] = {}
        self._slots = [self._mine.slot(number) for number in range(len(self._forms))]
        self._hooks: list[RemovableHandle] = []
        for number, (parameter, place, slot) in enumerate(
            zip(self._parameters, self._places, self._slots, strict=True)
        ):
            if _is_on_device(parameter):
                self._on_device[number] = parameter
                parameter.copy_(place)
                continue
            parameter.data = place
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_move_gradient, slot)))
        device = device_with_stream(self._on_device.values())
        self._copies = None if device is None else DeviceCopies(self._on_device, device)
        self._pointers = [parameter.data_ptr() for parameter in self._parameters]

    def step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._step += 1
        with self._phase(_WRITE, "gradients of the others"):
            self._check_model()
            self._write(groups)
        self._check_headers(groups)
        self._kinds = [region.kinds.tolist() for region in self._regions]
        self._is_plain = all(kind == _DENSE for kinds in self._kinds for kind in kinds)
        scale = None
        if self._max_grad_norm is not None:
            with self._phase(_AVERAGE, "norms of the others"):
                self._mine.squares.fill_(self._average_all())
            self.grad_norm = sum(float(region.squares) for region in self._regions) ** 0.5
            scale = min(1.0, self._max_grad_norm / (self.grad_norm + 1e-6))  # as torch's clip_grad_norm_
        with self._phase(_STEP, "parameters of the others"):
            self._step_own(groups, scale)
            if self._size > 1 and self._published.update():
                self._mine.header[RankRegion.MOVED] = self._step
        if any(int(region.header[RankRegion.MOVED]) == self._step for region in self._regions):
            self._exchange()
        self._shared.broadcast_buffers()
        if self._copies is not None:
            self._copies.send(self._places)
        elif self._on_device:
            foreach_copy([*self._on_device.values()], [self._places[number] for number in self._on_device])
        count_step()

    @contextlib.contextmanager
    def _phase(self, phase: int, what: str) -> Iterator[None]:
        """Wait for the other ranks at the end of a block; if it raises on one rank, all ranks raise."""
        if self._size == 1:
            yield
            return
        try:
            yield
        except Exception as error:
            self._mine.header[RankRegion.FAILED + phase] = self._step
            with contextlib.suppress(DdpError):  # the cause is this rank's own error
                self._shared.barrier(what, step=self._step)
                self._shared.gather(f"{type(error).__name__}: {error}", what)
            raise
        self._shared.barrier(what, step=self._step)
        if any(int(region.header[RankRegion.FAILED + phase]) == self._step for region in self._regions):
            gathered: list[str | None] = self._shared.gather(None, what)
            failures = {rank: text for rank, text in enumerate(gathered) if text is not None}
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
            raise PeerFailedError(
                f"another rank failed in step {self._step}: {texts}",
                failures=failures,
                failed_ranks=self._shared.in_world(failures),
            )

    def _check_model(self) -> None:
        problem = self._watch.problem()
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
        """Write this rank's gradients and header into its region."""
        copied = self._copied()
        kinds = [
            _DENSE if number in copied else self._written(number, parameter)
            for number, parameter in enumerate(self._parameters)
        ]
        self._mine.kinds.copy_(torch.tensor(kinds, dtype=torch.int64, device="cpu"))
        self._mine.header[RankRegion.DIGEST] = digest(groups)
        self._mine.header[RankRegion.STEP] = self._step

    def _copied(self) -> Mapping[int, torch.Tensor]:
        """Copy all dense gradients from a device at once; return them by number."""
        if self._copies is None:
            return {}
        gradients = {number: parameter.grad for number, parameter in self._on_device.items()}
        dense = {
            number: gradient.detach()
            for number, gradient in gradients.items()
            if gradient is not None and gradient.layout is torch.strided
        }
        self._copies.fetch(dense, self._slots)
        return dense

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

    def _check_headers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for rank, region in enumerate(self._regions):
            step = int(region.header[RankRegion.STEP])
            if step != self._step:
                raise ArgumentError(
                    f"rank {rank} makes its step {step}, and rank {self._rank} its step {self._step}: every rank must "
                    "call step() equally often"
                )
            if int(region.header[RankRegion.DIGEST]) != int(self._regions[0].header[RankRegion.DIGEST]):
                rates = [group.get("lr") for group in groups]
                raise ArgumentError(
                    f"rank {rank} steps with other hyperparameters than rank 0 in step {self._step} (rank {self._rank} "
                    f"has lr {rates}): set them from what is equal on all ranks, such as strategy.reduce() of a loss"
                )

    def _step_own(self, groups: Sequence[Mapping[str, Any]], scale: float | None) -> None:
        self._shards.step({}, groups=hyperparameters(groups))
        for index, chunk in self._chunks.items():
            # One by one, so that a chunk is stepped while its average is in the cache.
            if scale is None:
                gradient = self._average(chunk, self._scratch(chunk))
            else:
                gradient = _scaled(self._averages.pop(index), scale, self._scratch(chunk))
            self._shards.step({index: gradient})

    def _average_all(self) -> float:
        """Average this rank's chunks and keep the results; return the sum of their squares."""
        self._averages = {
            index: self._average(chunk, torch.empty(chunk.numel, dtype=_wide(chunk.dtype), device="cpu"))
            for index, chunk in self._chunks.items()
        }
        return sum(_squares(self._averages[index], chunk) for index, chunk in self._chunks.items())

    def _average(self, chunk: Chunk, out: torch.Tensor) -> Gradient:
        """Return the mean over the ranks of one chunk's gradients, in `out` if memory is needed."""
        return average(chunk, [self._gradient(rank, chunk) for rank in range(self._size)], out)

    def _gradient(self, rank: int, chunk: Chunk) -> Gradient:
        """Return the gradients that a rank has written for a chunk."""
        flat, kinds = self._flats[chunk.index][rank], self._kinds[rank]
        if self._is_plain:
            return flat
        of_pieces = [kinds[piece.parameter] for piece in chunk.pieces]
        absent = frozenset(position for position, kind in enumerate(of_pieces) if kind == _NONE)
        region = self._regions[rank]
        sparse = {p: region.rows(chunk.pieces[p], kind) for p, kind in enumerate(of_pieces) if kind >= 0}
        return ChunkGradient(flat, absent, sparse) if absent or sparse else flat

    def _scratch(self, chunk: Chunk) -> torch.Tensor:
        """Return memory for an average until the next call, wide enough that it is rounded only once."""
        dtype = _wide(chunk.dtype)
        held = self._scratches.get(dtype)
        if held is None or len(held) < chunk.numel:
            held = self._scratches[dtype] = torch.empty(chunk.numel, dtype=dtype, device="cpu")
        return held[: chunk.numel]

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        states = self._shards.state()
        for rank in range(self._size):
            if rank != self._rank:
                states.update(self._read(rank))
        return whole_state(self._partition, optimizer, states, like=self._like)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        states = split_state(self._partition, state)
        self._shards.load_state({index: states[index] for index in self._chunks})
        if self._size > 1:
            self._published.update()
            self._exchange()

    def _read(self, rank: int) -> dict[int, list[State]]:
        """Return the state that another rank has published; no rank writes there between two steps."""
        memory, entries = self._others.get(rank, (self._regions[rank].memory, []))
        states: dict[tuple[int, int, int], State] = {}
        for entry in entries:
            states.setdefault((entry.chunk, entry.first, entry.stop), {})[entry.name] = entry.read(memory)
        chunks: dict[int, list[State]] = {c.index: [{} for _ in c.pieces] for c in self._partition.of(rank)}
        for (index, first, stop), state in states.items():
            pieces = self._partition.chunks[index].pieces[first:stop]
            chunks[index][first:stop] = states_of_pieces(pieces, state, by_element=self._by_element)
        return chunks

    def _exchange(self) -> None:
        """Exchange where the ranks' states are now. Every rank must call it; blocks."""
        if self._size == 1:
            return
        gathered = self._shared.gather(self._published.announcement(), "places of optimizer states")
        for rank, announced in enumerate(gathered):
            if rank != self._rank and announced is not None:
                ticket, entries = announced
                self._others[rank] = (
                    self._shared.open_segment(ticket, rank),
                    [StateEntry(*fields) for fields in entries],
                )
        self._shared.barrier("optimizer states of the others", step=self._step)
        self._published.is_known()

    @torch.no_grad()
    def close(self) -> None:
        for parameter, place in zip(self._parameters, self._places, strict=True):
            if parameter.device.type == "cpu" and parameter.data_ptr() == place.data_ptr():
                parameter.data = place.clone()
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()
        for hook in self._hooks:
            hook.remove()
        self.release()

    def release(self) -> None:
        self._shared.close()


def _is_on_device(parameter: torch.Tensor) -> bool:
    return parameter.device.type != "cpu"


def _move_gradient(slot: torch.Tensor, parameter: torch.Tensor) -> None:
    """Move a gradient that autograd has made to its place in shared memory, where it then accumulates."""
    gradient = parameter.grad
    if gradient is None or gradient is slot or gradient.layout is not torch.strided or gradient.requires_grad:
        return
    if gradient.dtype == slot.dtype:
        parameter.grad = slot.copy_(gradient)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _squares(gradient: Gradient, chunk: Chunk) -> float:
    if isinstance(gradient, torch.Tensor):
        dtype = torch.complex128 if gradient.is_complex() else torch.float64
        return float(torch.linalg.vector_norm(gradient, dtype=dtype)) ** 2
    total = 0.0
    for position, piece in enumerate(chunk.pieces):
        if position in gradient.sparse:
            total += _squares(gradient.sparse[position].values, chunk)
        elif position not in gradient.absent and gradient.flat is not None:
            total += _squares(piece.in_flat(gradient.flat), chunk)
    return total


def _scaled(gradient: Gradient, scale: float, out: torch.Tensor) -> Gradient:
    """Return an average times `scale`, in `out` if dense: the average may be a rank's own gradient."""
    if isinstance(gradient, torch.Tensor):
        return torch.mul(gradient, scale, out=out)
    flat = None if gradient.flat is None else torch.mul(gradient.flat, scale, out=out)
    sparse = {position: Rows(rows.numbers, rows.values * scale) for position, rows in gradient.sparse.items()}
    return ChunkGradient(flat, gradient.absent, sparse)


def _forms(model: nn.Module, parameters: Sequence[torch.Tensor]) -> list[Form]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    named = [(names.get(id(p), f"number {number} of the optimizer"), p) for number, p in enumerate(parameters)]
    check_initialized(named)  # type: ignore[arg-type]  # an optimizer may step plain tensors
    return [Form(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in named]
