"""The user's optimizer over pieces of parameters: what a server holds of a model, and what it does in a step.

A server makes `Shards` of its chunks and steps them with the gradients that come. Copies of the user's optimizer do
the steps, one a chunk; the object of the user is never changed. So hooks on it (`register_step_pre_hook` and its kin)
and schedulers do not run here: the hyperparameters that they set come with each step. Knows no wire and no file.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ddp.errors import ArgumentError, UnsupportedError
from ddp.ps.partition import Chunk, Partition, Piece

__all__ = [
    "ChunkGradient",
    "Rows",
    "Shards",
    "collect",
    "hyperparameters",
    "in_flat",
    "in_parameters",
    "split_state",
    "splits_by_element",
    "states_of_pieces",
    "whole_state",
]

# Every element is stepped by itself in these classes of torch; a class derived from one may do anything.
_BY_ELEMENT = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    }
)
# What these classes keep once a parameter; all other tensors of their states have its shape.
_SCALARS = frozenset({"eta", "mu", "mu_product", "step"})
_NOT_HYPER = frozenset({"params", "param_names"})
_OF_THE_USERS_OBJECT = frozenset({"step", "zero_grad", "grad_scale", "found_inf", "_opt_called"})

State = dict[str, Any]  # what an optimizer keeps of one parameter or piece


class Rows(NamedTuple):
    """Some rows of a piece: their numbers (n,) int64, counted from the piece's first row, and values (n, *row)."""

    numbers: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class ChunkGradient:
    """The gradients of a chunk's pieces, where they are not simply one flat tensor.

    `flat` (numel,) holds those that are neither in `absent` (no gradient: not stepped, as with a grad of None) nor in
    `sparse`; both go by the position of the piece in the chunk. None if there is no other.
    """

    flat: torch.Tensor | None
    absent: frozenset[int] = frozenset()
    sparse: Mapping[int, Rows] = field(default_factory=dict)


Gradient = torch.Tensor | ChunkGradient
Changed = tuple[torch.Tensor | None, ...] | None
Memory = torch.Tensor | Callable[[Chunk], torch.Tensor]


def splits_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether stepping pieces of a parameter is the same as stepping the parameter. Else it must stay in one piece.

    Raises UnsupportedError for an optimizer that no server can step: LBFGS and others that call a closure, and those
    that are differentiable.
    """
    name = type(optimizer).__name__
    arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    needs_more = any(a.default is a.empty and a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD) for a in arguments)
    if isinstance(optimizer, torch.optim.LBFGS) or needs_more:
        raise UnsupportedError(
            f"{name} evaluates the model in its step, which only a process with the model and the data can do: use "
            'strategy "all_reduce", or an optimizer whose step() needs no closure'
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(f"{name}(differentiable=True): a graph does not reach from process to process")
    return type(optimizer) in _BY_ELEMENT


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The param groups without their parameters: what `Shards.step(groups=...)` takes."""
    return [{k: v for k, v in group.items() if k not in _NOT_HYPER} for group in optimizer.param_groups]


class Shards:
    """The chunks of one server: values, and the optimizer's state for them.

    `parameters` are all that `optimizer` steps, in the order of its groups, and give the first values; state that the
    optimizer has already is split over the pieces. `memory` is where the values lie: a uint8 tensor of
    `Partition.bytes(server)`, or a function that gives the flat tensor of a chunk; None: in memory of their own. All of
    it is in host memory, wherever the parameters are; `capturable` is off here for that reason.

    `values` has the flat tensor (numel,) of each chunk by its index; `step` changes it in place.

    Not for several threads at once. Raises UnsupportedError as `splits_by_element` does, or if the optimizer cannot be
    copied; ArgumentError if `parameters` are not those of the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        chunks: Sequence[Chunk],
        memory: Memory | None = None,
    ) -> None:
        by_element = splits_by_element(optimizer)
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if [id(parameter) for parameter in stepped] != [id(parameter) for parameter in parameters]:
            raise ArgumentError(
                f"{len(parameters)} parameters are given that are not the {len(stepped)} of the optimizer's groups, "
                "in their order"
            )
        self.values = {chunk.index: _flat_of(chunk, memory) for chunk in chunks}
        self._chunks = {}
        for chunk in chunks:
            flat = self.values[chunk.index]
            torch._foreach_copy_(in_flat(chunk, flat), in_parameters(chunk, parameters))
            states = [_part_of_state(optimizer.state, parameters[piece.parameter], piece) for piece in chunk.pieces]
            self._chunks[chunk.index] = _ChunkOptimizer(optimizer, chunk, flat, states, by_element=by_element)
        self._groups = hyperparameters(optimizer)

    def step(
        self, gradients: Mapping[int, Gradient], *, groups: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[int, Changed]:
        """Make one step of the optimizer on these chunks only; return which rows it changed, by chunk.

        `gradients` go by chunk index. `groups`: new hyperparameters of every param group, for this and later steps.
        Of a chunk, None stands for all rows, else there is an entry for each piece: None for all of its rows, or their
        numbers (n,), ascending.

        Raises what the optimizer's own step raises; ArgumentError for a chunk that is not here.
        """
        if groups is not None:
            if len(groups) != len(self._groups):
                raise ArgumentError(
                    f"the optimizer has {len(groups)} param groups now and had {len(self._groups)} when its parameters "
                    "were handed over: add groups before prepare()"
                )
            self._groups = [dict(group) for group in groups]
        changed = {}
        for index, gradient in gradients.items():
            if index not in self._chunks:
                raise ArgumentError(f"chunk {index} is not here: these are {sorted(self._chunks)}")
            self._chunks[index].use(self._groups)
            changed[index] = self._chunks[index].step(gradient)
        return changed

    def state(self) -> dict[str, Any]:
        """What the optimizer keeps, for a snapshot: {"chunks": {index: [state of each piece]}, "groups": [...]}.

        Made of dicts, lists, numbers and tensors, as `torch.load(weights_only=True)` reads. The tensors are the live
        ones, which the next step changes. Values are not in it.
        """
        return {
            "chunks": {index: chunk.states() for index, chunk in self._chunks.items()},
            "groups": [{k: v for k, v in group.items() if _is_plain(v)} for group in self._groups],
        }

    def state_of(self, index: int) -> list[State]:
        """What the optimizer keeps of the pieces of one chunk; live, as in `state`."""
        return self._chunks[index].states()

    def load_state_of(self, index: int, states: Sequence[State]) -> None:
        """Go on from such states with one chunk. Raises ArgumentError if they are of other pieces."""
        if not self._chunks[index].fits(states):
            raise ArgumentError(f"the state is of another chunk than {index}: cut it anew from a whole state")
        self._chunks[index].load(states)

    def live(self) -> Iterator[tuple[Chunk, int, int, State]]:
        """The dicts in which the optimizer keeps its state, of the pieces at positions `first` to `stop` of a chunk."""
        for part in self._chunks.values():
            for first, stop, state in part.live():
                yield part.chunk, first, stop, state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` or `split_state` gave, for the same chunks. The tensors in it are copied.

        Raises ArgumentError if it is of other chunks, and changes nothing then.
        """
        chunks = state["chunks"]
        if chunks.keys() != self._chunks.keys() or not all(
            self._chunks[index].fits(states) for index, states in chunks.items()
        ):
            raise ArgumentError("the state is of other chunks than these: cut it anew from a whole state (split_state)")
        for index, states in chunks.items():
            self._chunks[index].load(states)
        if state.get("groups"):
            pairs = zip(self._groups, state["groups"], strict=True)
            self._groups = [{**group, **loaded} for group, loaded in pairs]


_DENSE, _ABSENT, _SPARSE = range(3)


class _Unit:
    """Pieces of one param group, neighbours in a chunk, that the optimizer steps as one parameter.

    `first` and `stop` are positions in the chunk. Stepped by element, neighbours are as good as one, and a step takes
    as long as for one.
    """

    def __init__(self, first: int, stop: int, tensor: torch.Tensor) -> None:
        self.first = first
        self.stop = stop
        self.tensor = tensor


class _ChunkOptimizer:
    """A copy of the user's optimizer, with the pieces of one chunk for parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chunk: Chunk,
        flat: torch.Tensor,
        states: Sequence[State],
        *,
        by_element: bool,
    ) -> None:
        self.chunk = chunk
        self._flat = flat
        self._by_element = by_element
        group_of = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        self._group_of = [group_of[piece.parameter] for piece in chunk.pieces]
        self._whole = () if by_element else tuple(_window(flat, piece.offset, piece.shape) for piece in chunk.pieces)
        self._optimizer = _copy_of_torchs(optimizer) if by_element else _copy_of_another(optimizer, chunk, self._whole)
        self._groups: Sequence[Mapping[str, Any]] | None = None
        self._units: list[_Unit] = []
        self.load(states)

    # Units

    def fits(self, states: Sequence[State]) -> bool:
        """Whether these can be the states of the pieces."""
        if len(states) != len(self.chunk.pieces):
            return False
        return not self._by_element or all(
            value.numel() == piece.numel
            for state, piece in zip(states, self.chunk.pieces, strict=True)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name not in _SCALARS
        )

    def load(self, states: Sequence[State]) -> None:
        """Take over copies of these states, one for each piece; those that may be are stepped together from now on."""
        runs: list[tuple[int, int]] = []
        for position, state in enumerate(states):
            first = runs[-1][0] if runs else 0
            is_one_group = self._by_element and self._group_of[first] == self._group_of[position]
            if runs and is_one_group and _may_join(states[first], state):
                runs[-1] = (first, position + 1)
            else:
                runs.append((position, position + 1))
        self._optimizer.state.clear()  # in place: an optimizer inside this one may share it
        self._units = [self._unit(first, stop) for first, stop in runs]
        for unit in self._units:
            self._give(unit, states[unit.first : unit.stop])
        self._list_units()

    def _give(self, unit: _Unit, states: Sequence[State]) -> None:
        if states[0]:
            self._optimizer.state[unit.tensor] = _joined(states, unit.tensor.shape if self._by_element else None)

    def states(self) -> list[State]:
        """The state of each piece, as views."""
        return [state for unit in self._units for state in self._states_of(unit)]

    def live(self) -> Iterator[tuple[int, int, State]]:
        """What the optimizer keeps, with the positions of the pieces `first` to `stop` that it is of."""
        for unit in self._units:
            state = self._optimizer.state.get(unit.tensor)
            if state:
                yield unit.first, unit.stop, state

    def _states_of(self, unit: _Unit) -> Iterator[State]:
        pieces = self.chunk.pieces[unit.first : unit.stop]
        return states_of_pieces(pieces, self._optimizer.state.get(unit.tensor) or {}, by_element=self._by_element)

    def _unit(self, first: int, stop: int, *, is_flat: bool = True) -> _Unit:
        if not self._by_element:
            return _Unit(first, stop, self._whole[first])
        pieces = self.chunk.pieces
        begin, end = pieces[first].offset, pieces[stop - 1].stop
        return _Unit(first, stop, _window(self._flat, begin, (end - begin,) if is_flat else pieces[first].shape))

    def _split(self, kinds: Sequence[int]) -> None:
        """Let no unit hold pieces of several kinds; a sparse one is alone, and has its piece's shape."""
        units: list[_Unit] = []
        for unit in self._units:
            runs: list[int] = [unit.first]  # where a new unit begins
            runs += [
                at for at in range(unit.first + 1, unit.stop) if kinds[at] == _SPARSE or kinds[at] != kinds[at - 1]
            ]
            has_form = kinds[unit.first] != _SPARSE or unit.tensor.shape == self.chunk.pieces[unit.first].shape
            if len(runs) == 1 and has_form:
                units.append(unit)
                continue
            states = list(self._states_of(unit))
            self._optimizer.state.pop(unit.tensor, None)
            for first, stop in zip(runs, [*runs[1:], unit.stop], strict=True):
                part = self._unit(first, stop, is_flat=kinds[first] != _SPARSE)
                self._give(part, states[first - unit.first : stop - unit.first])
                units.append(part)
        if len(units) != len(self._units) or any(map(operator.is_not, units, self._units)):
            self._units = units
            self._list_units()

    def _list_units(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups):
            group["params"][:] = [unit.tensor for unit in self._units if self._group_of[unit.first] == number]

    # Steps

    def use(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over hyperparameters."""
        if groups is self._groups:
            return
        self._groups = groups
        for mine, given in zip(self._optimizer.param_groups, groups, strict=True):
            for name, value in given.items():
                if name not in _NOT_HYPER and name != "capturable":
                    mine[name] = _converted(value, mine.get(name))

    def step(self, gradient: Gradient) -> Changed:
        if isinstance(gradient, torch.Tensor):
            gradient = ChunkGradient(gradient)
        is_mixed = bool(gradient.absent or gradient.sparse)
        if is_mixed:
            self._split([_kind(gradient, position) for position in range(len(self.chunk.pieces))])
        flat = None if gradient.flat is None else gradient.flat.to(self.chunk.dtype)
        try:
            for unit in self._units:
                unit.tensor.grad = self._grad_of(unit, gradient, flat)
            self._optimizer.step()
        finally:
            for unit in self._units:
                unit.tensor.grad = None
        return self._changed(gradient) if is_mixed else None

    def _grad_of(self, unit: _Unit, gradient: ChunkGradient, flat: torch.Tensor | None) -> torch.Tensor | None:
        if unit.first in gradient.absent:
            return None
        rows = gradient.sparse.get(unit.first)
        if rows is not None:
            return torch.sparse_coo_tensor(
                rows.numbers[None], rows.values.to(self.chunk.dtype), unit.tensor.shape, check_invariants=True
            ).coalesce()
        if flat is None:
            raise ArgumentError(f"chunk {self.chunk.index}: no gradient for piece {unit.first}, which is not absent")
        pieces = self.chunk.pieces
        return flat[pieces[unit.first].offset : pieces[unit.stop - 1].stop].view(unit.tensor.shape)

    def _changed(self, gradient: ChunkGradient) -> tuple[torch.Tensor | None, ...]:
        changed: list[torch.Tensor | None] = []
        for unit in self._units:
            rows = gradient.sparse.get(unit.first)
            if unit.first in gradient.absent:
                changed += [torch.empty(0, dtype=torch.int64)] * (unit.stop - unit.first)
            elif rows is None:
                changed += [None] * (unit.stop - unit.first)
            else:
                changed.append(self._rows_changed(unit, rows))
        return tuple(changed)

    def _rows_changed(self, unit: _Unit, rows: Rows) -> torch.Tensor | None:
        """The rows that a step with a sparse gradient changed; with momentum, those of earlier gradients too."""
        momentum = (self._optimizer.state.get(unit.tensor) or {}).get("momentum_buffer")
        if momentum is not None:
            return momentum.coalesce().indices()[0].clone() if momentum.is_sparse else None
        # Other classes that take sparse gradients step whole parameters: who knows what they change.
        return torch.unique(rows.numbers) if self._by_element else None


def _window(flat: torch.Tensor, begin: int, shape: Sequence[int]) -> torch.Tensor:
    """A part of `flat` as a tensor whose storage begins with it.

    Adding a coalesced sparse tensor to one that does not, of one dimension, writes elsewhere (torch 2.13).
    """
    size = torch.Size(shape)
    if not size.numel():
        return flat.new_empty(size)
    first = (flat.storage_offset() + begin) * flat.itemsize
    storage = flat.untyped_storage()[first : first + size.numel() * flat.itemsize]
    window = torch.empty(0, dtype=flat.dtype)
    window.set_(storage, 0, size)  # type: ignore[call-overload]  # torch's stubs know no storage
    return window


def _kind(gradient: ChunkGradient, position: int) -> int:
    return _SPARSE if position in gradient.sparse else _ABSENT if position in gradient.absent else _DENSE


# Copies of an optimizer


def _copy_of_torchs(optimizer: torch.optim.Optimizer) -> Any:
    """One of the same class and settings, without parameters, state and hooks."""
    twin: Any = type(optimizer).__new__(type(optimizer))
    groups = [{**_copied_hyper(group), "params": []} for group in optimizer.param_groups]
    twin.__setstate__(
        {"defaults": _copied_hyper(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups}
    )
    return twin


def _copied_hyper(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: _on_host(copy.deepcopy(value)) for name, value in values.items() if name not in _NOT_HYPER}
    return {**kept, "capturable": False} if "capturable" in kept else kept


def _copy_of_another(optimizer: torch.optim.Optimizer, chunk: Chunk, pieces: Sequence[torch.Tensor]) -> Any:
    """A deep copy of an optimizer of any class, in which the parameters of this chunk are replaced by their pieces."""
    own = {piece.parameter: tensor for piece, tensor in zip(chunk.pieces, pieces, strict=True)}
    nothing = torch.empty(0)  # for other chunks' parameters, and for states, which are loaded afterwards
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    memo: dict[int, Any] = {id(parameter): own.get(number, nothing) for number, parameter in enumerate(parameters)}
    for state in optimizer.state.values():
        values = state.values() if isinstance(state, dict) else ()
        memo.update({id(value): nothing for value in values if isinstance(value, torch.Tensor)})
    kept = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OF_THE_USERS_OBJECT and not name.endswith("_hooks")
    }
    twin: Any = type(optimizer).__new__(type(optimizer))
    try:
        twin.__setstate__(copy.deepcopy(kept, memo))
    except Exception as error:
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot be copied, which a server needs to step it: {error}"
        ) from error
    for group in twin.param_groups:
        group.update(_copied_hyper(group))
    return twin


def _converted(value: Any, current: Any) -> Any:
    """A hyperparameter in the form that the optimizer was made with, whatever way it came."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, float(value))
    if isinstance(value, torch.Tensor):
        return _on_host(value.detach().clone())
    return tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


# States of pieces


def states_of_pieces(pieces: Sequence[Piece], state: State, *, by_element: bool) -> Iterator[State]:
    """Take the state of neighbours that are stepped as one apart, as views."""
    for piece in pieces:
        begin, stop = piece.offset - pieces[0].offset, piece.stop - pieces[0].offset
        yield {
            name: value.reshape(-1)[begin:stop].view(piece.shape)
            if by_element and _has_elements(name, value)
            else value
            for name, value in state.items()
        }


def _has_elements(name: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and name not in _SCALARS and not value.is_sparse


def _part_of_state(states: Mapping[Any, State], parameter: torch.Tensor, piece: Piece) -> State:
    """The state of a piece, of that of its parameter; views where they may be."""
    state = states.get(parameter, {})
    return {name: _part(name, value, piece, tuple(parameter.shape)) for name, value in state.items()}


def _part(name: str, value: Any, piece: Piece, shape: tuple[int, ...]) -> Any:
    if not isinstance(value, torch.Tensor) or name in _SCALARS or piece.shape == shape:
        return value
    if value.shape != shape:
        raise ArgumentError(
            f"the state of parameter {piece.parameter} has {name!r} of shape {tuple(value.shape)}, but the parameter "
            f"has shape {shape}: the model is not the one that was saved, or its parameters have another order"
        )
    return (value.narrow_copy if value.is_sparse else value.narrow)(0, piece.begin, piece.end - piece.begin)


def _may_join(left: State, right: State) -> bool:
    """Whether neighbours in these states can be stepped as one parameter: all that is not by element is equal."""
    if left.keys() != right.keys():
        return False
    for name, value in left.items():
        other = right[name]
        if isinstance(value, torch.Tensor) and name not in _SCALARS:
            if value.is_sparse or other.is_sparse or value.dtype != other.dtype:
                return False
        elif not _equal(value, other):
            return False
    return True


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def _joined(states: Sequence[State], shape: Sequence[int] | None) -> State:
    """A copy of the states of neighbours, as that of one parameter of `shape`; None: of one piece, as it is."""
    joined = {}
    for name, value in states[0].items():
        if not isinstance(value, torch.Tensor):
            joined[name] = copy.deepcopy(value)
        elif shape is None or name in _SCALARS or value.is_sparse:
            joined[name] = value.detach().to("cpu", copy=True)
        else:
            joined[name] = torch.cat([state[name].detach().cpu().reshape(-1) for state in states]).view(shape)
    return joined


# Whole states


def whole_state(
    partition: Partition,
    optimizer: torch.optim.Optimizer,
    states_by_server: Sequence[Mapping[str, Any]],
    *,
    like: Sequence[torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Put the states of all servers together to what `state_dict()` of the user's optimizer would be.

    Hyperparameters are those of `optimizer` now; tensors are copies in host memory, with the strides of the parameters
    (or of `like`), which torch's fused kernels need. Where the pieces of a parameter were stepped differently often,
    numbers are those of the one with most steps, and pieces that were never stepped have zeros.
    """
    parts: dict[int, list[tuple[Piece, State]]] = {}
    for chunk in partition.chunks:
        states = states_by_server[chunk.server]["chunks"][chunk.index]
        for piece, state in zip(chunk.pieces, states, strict=True):
            parts.setdefault(piece.parameter, []).append((piece, state))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole = {}
    for number, parameter in enumerate(parameters if like is None else like):
        state = _whole(sorted(parts[number], key=lambda part: part[0].begin))
        if state:
            whole[number] = {name: _strided(value, parameter) for name, value in state.items()}
    groups, count = [], 0
    for group in optimizer.param_groups:
        size = len(group["params"])
        groups.append({**group, "params": list(range(count, count + size))})
        count += size
    return {"state": whole, "param_groups": groups}


def _strided(value: Any, parameter: torch.Tensor) -> Any:
    is_like = isinstance(value, torch.Tensor) and not value.is_sparse and value.shape == parameter.shape
    if not is_like or parameter.is_contiguous():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _whole(parts: Sequence[tuple[Piece, State]]) -> State:
    """The state of a parameter, of those of its pieces in order."""
    newest = parts[0][1]
    if len(parts) > 1:
        newest = max((state for _, state in parts), key=lambda state: float(state.get("step", bool(state))))
    whole = {}
    for name, value in newest.items():
        if not isinstance(value, torch.Tensor):
            whole[name] = copy.deepcopy(value)
        elif len(parts) == 1 or name in _SCALARS:
            whole[name] = value.detach().clone()
        else:
            pieces = [state[name] if name in state else torch.zeros(piece.shape) for piece, state in parts]
            if any(each.is_sparse for each in pieces):
                pieces = [each if each.is_sparse else each.to_sparse(1) for each in pieces]
            whole[name] = torch.cat([each.to(value.dtype) for each in pieces])
    return whole


def split_state(partition: Partition, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cut `state_dict()` of an optimizer of the same parameters into what `load_state` takes, by server.

    Tensors get the dtype of their parameter, as torch's `load_state_dict` does. Raises ArgumentError if it is of
    other parameters.
    """
    groups = state_dict["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    shapes = _shapes(partition)
    if len(numbers) != len(shapes):
        raise ArgumentError(f"the state is of {len(numbers)} parameters, and the optimizer has {len(shapes)}")
    states = {place: state_dict["state"].get(number, {}) for place, number in enumerate(numbers)}
    hyper = [{k: v for k, v in group.items() if k not in _NOT_HYPER} for group in groups]
    split: list[dict[str, Any]] = [{"chunks": {}, "groups": hyper} for _ in range(partition.servers)]
    for chunk in partition.chunks:
        pieces: list[State] = []
        for piece in chunk.pieces:
            shape = shapes[piece.parameter]
            state = states[piece.parameter].items()
            pieces.append({name: _cast(name, _part(name, value, piece, shape), chunk.dtype) for name, value in state})
        split[chunk.server]["chunks"][chunk.index] = pieces
    return split


def _shapes(partition: Partition) -> dict[int, tuple[int, ...]]:
    shapes: dict[int, tuple[int, ...]] = {}
    for piece in (piece for chunk in partition.chunks for piece in chunk.pieces):
        rows = max(piece.end, shapes.get(piece.parameter, (0,))[0] if piece.shape else 0)
        shapes[piece.parameter] = (rows, *piece.shape[1:]) if piece.shape else ()
    return shapes


def _cast(name: str, value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and name != "step" and (dtype.is_floating_point or dtype.is_complex):
        return value.detach().to("cpu", dtype if value.is_floating_point() or value.is_complex() else value.dtype)
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


# Between parameters and chunks


def in_parameters(chunk: Chunk, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of each piece of `chunk` in its parameter, as views without a graph. `tensors` go by parameter."""
    return [
        tensors[piece.parameter].detach()[piece.begin : piece.end] if piece.shape else tensors[piece.parameter].detach()
        for piece in chunk.pieces
    ]


def in_flat(chunk: Chunk, flat: torch.Tensor) -> list[torch.Tensor]:
    """Each piece of `chunk` in its flat tensor (numel,), as views."""
    return [flat[piece.offset : piece.stop].view(piece.shape) for piece in chunk.pieces]


def collect(chunk: Chunk, gradients: Sequence[torch.Tensor | None], out: torch.Tensor | None = None) -> Gradient:
    """Gather what `Shards.step` takes for one chunk from the gradients of the parameters, None where there is none.

    A sparse gradient gives the rows of the piece; it should be coalesced, or it is here once a chunk. `out` (numel,)
    is filled and used if any gradient is dense, else a new tensor.
    """
    absent, sparse, dense = set(), {}, []
    for position, piece in enumerate(chunk.pieces):
        gradient = gradients[piece.parameter]
        if gradient is None:
            absent.add(position)
        elif gradient.is_sparse and gradient.sparse_dim() == 1:
            sparse[position] = _rows_of(gradient, piece)
        else:
            dense.append(piece)
    if not dense and chunk.pieces:
        return ChunkGradient(None, frozenset(absent), sparse)
    flat = torch.empty(chunk.numel, dtype=chunk.dtype) if out is None else out
    rows = [_dense_rows(gradients[piece.parameter], piece) for piece in dense]
    if absent or sparse:
        torch._foreach_copy_([flat[piece.offset : piece.stop].view(piece.shape) for piece in dense], rows)
        return ChunkGradient(flat, frozenset(absent), sparse)
    if len(rows) == 1:
        return flat.copy_(rows[0].reshape(-1))
    # Measured for 1000 small pieces: half the time of copying each to its place.
    return _concatenated(rows, flat)


def _concatenated(rows: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    parts = [each.reshape(-1) for each in rows]
    if all(part.device == out.device for part in parts):
        return torch.cat(parts, out=out)
    return out.copy_(torch.cat(parts))  # one transfer


def _dense_rows(gradient: torch.Tensor | None, piece: Piece) -> torch.Tensor:
    assert gradient is not None
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    is_whole = not piece.shape or len(dense) == piece.end - piece.begin
    return dense if is_whole else dense[piece.begin : piece.end]


def _rows_of(gradient: torch.Tensor, piece: Piece) -> Rows:
    gradient = gradient.detach().coalesce()
    numbers, values = gradient.indices()[0], gradient.values()
    edges = torch.searchsorted(numbers, torch.tensor([piece.begin, piece.end], device=numbers.device)).tolist()
    return Rows(numbers[edges[0] : edges[1]] - piece.begin, values[edges[0] : edges[1]])


def _flat_of(chunk: Chunk, memory: Memory | None) -> torch.Tensor:
    if memory is None:
        return torch.empty(chunk.numel, dtype=chunk.dtype)
    if isinstance(memory, torch.Tensor):
        return memory[chunk.offset_bytes : chunk.offset_bytes + chunk.nbytes].view(chunk.dtype)
    return memory(chunk)
