"""The user's optimizer over pieces of parameters: a server's part of a model, and its steps.

A server makes `Shards` of its chunks and steps them with the gradients that arrive. Copies of the user's optimizer
step them, one per chunk; the user's object is never changed. Hooks on it (such as `register_step_pre_hook`) and
schedulers therefore do not run here: the hyperparameters that they set come with each step. Does no network or file
I/O.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddp.errors import ArgumentError, UnsupportedError
from ddp.strategies.sharding.chunk_gradient import ChunkGradient, Gradient, Rows
from ddp.strategies.sharding.optimizer_state import (
    NOT_HYPER,
    SCALARS,
    State,
    hyperparameters,
    joined_state,
    may_join,
    state_of_piece,
    states_of_pieces,
)
from ddp.strategies.sharding.partition import Chunk, view_of
from ddp.torch_internals import foreach_copy

# These classes of torch step each element independently; subclasses may not.
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
_OF_THE_USERS_OBJECT = frozenset({"step", "zero_grad", "grad_scale", "found_inf", "_opt_called"})
_DENSE, _ABSENT, _SPARSE = range(3)
Changed = tuple[torch.Tensor | None, ...] | None


class Shards:
    """The chunks of one server: values, and the optimizer's state for them.

    The first values are those of the parameters of `optimizer`, in the order of its groups; existing optimizer state
    is split over the pieces. `values` has the flat tensor (numel,) of each chunk by its index, which holds the values;
    `step` changes it in place. All of it is in host memory, wherever the parameters are; `capturable` is off here for
    that reason.

    Not thread-safe. Raises UnsupportedError as `splits_by_element` does, or if the optimizer cannot be copied.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, chunks: Sequence[Chunk], values: Mapping[int, torch.Tensor]
    ) -> None:
        by_element = splits_by_element(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.values = values
        self._chunks = {}
        for chunk in chunks:
            foreach_copy(chunk.in_flat(values[chunk.index]), chunk.in_parameters(parameters))
            states = []
            for piece in chunk.pieces:
                parameter = parameters[piece.parameter]
                states.append(state_of_piece(optimizer.state.get(parameter, {}), piece, tuple(parameter.shape)))
            self._chunks[chunk.index] = _ChunkOptimizer(
                optimizer, chunk, values[chunk.index], states, by_element=by_element
            )
        self._groups = hyperparameters(optimizer.param_groups)

    def step(
        self, gradients: Mapping[int, Gradient], *, groups: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[int, Changed]:
        """Make one step of the optimizer on these chunks only; return the changed rows, by chunk.

        `gradients` are keyed by chunk index. `groups`: new hyperparameters of every param group, for this and later
        steps. The result for a chunk is None for all rows, or an entry for each piece: None for all of its rows, or
        their numbers (n,), ascending.

        Raises what the optimizer's own step raises; ArgumentError for another number of param groups.
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
            self._chunks[index].use(self._groups)
            changed[index] = self._chunks[index].step(gradient)
        return changed

    def state(self) -> dict[int, list[State]]:
        """Return the optimizer's state of the pieces of each chunk, by chunk index.

        Consists of dicts, lists, numbers and tensors, which `torch.load(weights_only=True)` reads. The tensors are the
        live ones, which the next step changes. Values and hyperparameters are not included.
        """
        return {index: self.state_of(index) for index in self._chunks}

    def state_of(self, index: int) -> list[State]:
        """Return the optimizer's state of the pieces of one chunk; live, as in `state`."""
        return self._chunks[index].states()

    def live(self) -> Iterator[tuple[Chunk, int, int, State]]:
        """Yield the optimizer's own state dicts, each with the positions `first` to `stop` of its pieces in a chunk."""
        for chunk in self._chunks.values():
            for first, stop, state in chunk.live():
                yield chunk.chunk, first, stop, state

    def load_state(self, state: Mapping[int, Sequence[State]]) -> None:
        """Load what `state` or `split_state` returned for these chunks, or for some. The tensors are copied.

        Raises ArgumentError if it is for other chunks, and changes nothing then.
        """
        if not all(index in self._chunks and self._chunks[index].fits(states) for index, states in state.items()):
            raise ArgumentError("the state is for other chunks: split a whole state again (split_state)")
        for index, states in state.items():
            self._chunks[index].load(states)


def splits_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether stepping pieces of a parameter equals stepping the parameter. Else it must stay in one piece.

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
        raise UnsupportedError(f"{name}(differentiable=True): an autograd graph cannot span processes")
    return type(optimizer) in _BY_ELEMENT


@dataclass(frozen=True, eq=False)
class _Unit:
    """Neighbouring pieces of one param group in a chunk, which the optimizer steps as one parameter.

    `first` and `stop` are positions in the chunk. For an optimizer that steps by element the result is the same, and
    a step takes as long as for one.
    """

    first: int
    stop: int
    tensor: torch.Tensor


class _ChunkOptimizer:
    """A copy of the user's optimizer, with the pieces of one chunk as parameters.

    Neighbouring pieces are stepped as one parameter if that gives the same result. Measured with 53 tensors of 37,000
    elements and 106 of 256, a step of SGD or AdamW takes half the time that it takes piece by piece.
    """

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

    def fits(self, states: Sequence[State]) -> bool:
        """Return whether these can be the states of the pieces."""
        if len(states) != len(self.chunk.pieces):
            return False
        return not self._by_element or all(
            value.numel() == piece.numel
            for state, piece in zip(states, self.chunk.pieces, strict=True)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and name not in SCALARS
        )

    def load(self, states: Sequence[State]) -> None:
        """Load copies of these states, one for each piece; pieces are stepped together from now on where possible."""
        runs: list[tuple[int, int]] = []
        for position, state in enumerate(states):
            first = runs[-1][0] if runs else 0
            is_one_group = self._by_element and self._group_of[first] == self._group_of[position]
            if runs and is_one_group and may_join(states[first], state):
                runs[-1] = (first, position + 1)
            else:
                runs.append((position, position + 1))
        self._optimizer.state.clear()  # in place: an optimizer inside this one may share it
        self._units = [self._unit(first, stop) for first, stop in runs]
        for unit in self._units:
            self._set_state(unit, states[unit.first : unit.stop])
        self._list_units()

    def _set_state(self, unit: _Unit, states: Sequence[State]) -> None:
        if states[0]:
            self._optimizer.state[unit.tensor] = joined_state(states, unit.tensor.shape if self._by_element else None)

    def states(self) -> list[State]:
        """Return the state of each piece, as views."""
        return [state for unit in self._units for state in self._states_of(unit)]

    def live(self) -> Iterator[tuple[int, int, State]]:
        """Yield the optimizer's states, each with the positions `first` to `stop` of its pieces."""
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
        """Split units that hold pieces of several kinds; a sparse piece is alone, and its unit has its shape."""
        units: list[_Unit] = []
        for unit in self._units:
            runs: list[int] = [unit.first]  # the first positions of the new units
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
                units.append(self._unit(first, stop, is_flat=kinds[first] != _SPARSE))
                self._set_state(units[-1], states[first - unit.first : stop - unit.first])
        if units != self._units:
            self._units = units
            self._list_units()

    def _list_units(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups):
            group["params"][:] = [unit.tensor for unit in self._units if self._group_of[unit.first] == number]

    def use(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set hyperparameters."""
        if groups is self._groups:
            return
        self._groups = groups
        for mine, given in zip(self._optimizer.param_groups, groups, strict=True):
            for name, value in given.items():
                if name not in NOT_HYPER and name != "capturable":
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
            values = rows.values.to(self.chunk.dtype)
            return torch.sparse_coo_tensor(
                rows.numbers[None], values, unit.tensor.shape, device=values.device, check_invariants=True
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
                changed += [torch.empty(0, dtype=torch.int64, device="cpu")] * (unit.stop - unit.first)
            elif rows is None:
                changed += [None] * (unit.stop - unit.first)
            else:
                changed.append(self._rows_changed(unit, rows))
        return tuple(changed)

    def _rows_changed(self, unit: _Unit, rows: Rows) -> torch.Tensor | None:
        """Return the rows that a step with a sparse gradient changed; with momentum, those of earlier gradients too."""
        momentum = (self._optimizer.state.get(unit.tensor) or {}).get("momentum_buffer")
        if momentum is not None:
            return momentum.coalesce().indices()[0].clone() if momentum.is_sparse else None
        # Other classes that take sparse gradients may change any row.
        return torch.unique(rows.numbers) if self._by_element else None


def _window(flat: torch.Tensor, begin: int, shape: Sequence[int]) -> torch.Tensor:
    return view_of(flat, (int(flat.storage_offset()) + begin) * flat.itemsize, shape, flat.dtype)


def _kind(gradient: ChunkGradient, position: int) -> int:
    return _SPARSE if position in gradient.sparse else _ABSENT if position in gradient.absent else _DENSE


def _copy_of_torchs(optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer of the same class and settings, without parameters, state and hooks."""
    twin: Any = type(optimizer).__new__(type(optimizer))
    groups = [{**_copied_hyper(group), "params": []} for group in optimizer.param_groups]
    twin.__setstate__(
        {"defaults": _copied_hyper(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups}
    )
    return twin


def _copied_hyper(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: _on_host(copy.deepcopy(value)) for name, value in values.items() if name not in NOT_HYPER}
    return {**kept, "capturable": False} if "capturable" in kept else kept


def _copy_of_another(optimizer: torch.optim.Optimizer, chunk: Chunk, pieces: Sequence[torch.Tensor]) -> Any:
    """Return a deep copy of any optimizer, with the parameters of this chunk replaced by their pieces."""
    own = {piece.parameter: tensor for piece, tensor in zip(chunk.pieces, pieces, strict=True)}
    nothing = torch.empty(0, device="cpu")  # for other chunks' parameters, and for states, which are loaded later
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
    """Convert a hyperparameter to the type that the optimizer was made with."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, float(value))
    if isinstance(value, torch.Tensor):
        return _on_host(value.detach().clone())
    return tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
