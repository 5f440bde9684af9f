"""Splits an optimizer's state into the states of pieces and merges them, in the format of torch's `state_dict()`.

Pure functions. Called by `ddp.strategies.sharding.shards` and by code that saves and loads states of whole models.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ddp.errors import ArgumentError
from ddp.strategies.sharding.partition import Partition, Piece

# State that these classes keep once per parameter; all other tensors of their states have its shape.
SCALARS = frozenset({"eta", "mu", "mu_product", "step"})
NOT_HYPER = frozenset({"params", "param_names"})
State = dict[str, Any]  # the optimizer's state for one parameter or piece


def hyperparameters(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the param groups without their parameters, for `Shards.step(groups=...)`."""
    return [{name: value for name, value in group.items() if name not in NOT_HYPER} for group in groups]


def whole_state(
    partition: Partition,
    optimizer: torch.optim.Optimizer,
    states: Mapping[int, Sequence[State]],
    *,
    like: Sequence[torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Merge the states of all chunks, by index, into the `state_dict()` that the user's optimizer would have.

    Hyperparameters are those of `optimizer` now; tensors are copies in host memory, with the strides of the parameters
    (or of `like`), which torch's fused kernels need. If the pieces of a parameter have different numbers of steps,
    numbers are those of the one with most steps, and pieces that were never stepped have zeros.
    """
    of_parameter: dict[int, list[tuple[Piece, State]]] = {}
    for chunk in partition.chunks:
        for piece, state in zip(chunk.pieces, states[chunk.index], strict=True):
            of_parameter.setdefault(piece.parameter, []).append((piece, state))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole = {}
    for number, parameter in enumerate(parameters if like is None else like):
        state = _whole(sorted(of_parameter[number], key=lambda pair: pair[0].begin))
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


def _whole(pairs: Sequence[tuple[Piece, State]]) -> State:
    """Merge the states of a parameter's pieces, in order."""
    newest = pairs[0][1]
    if len(pairs) > 1:
        newest = max((state for _, state in pairs), key=lambda state: float(state.get("step", bool(state))))
    whole = {}
    for name, value in newest.items():
        if not isinstance(value, torch.Tensor):
            whole[name] = copy.deepcopy(value)
        elif len(pairs) == 1 or name in SCALARS:
            whole[name] = value.detach().clone()
        else:
            pieces = [
                state[name] if name in state else torch.zeros(piece.shape, device="cpu") for piece, state in pairs
            ]
            if any(each.is_sparse for each in pieces):
                pieces = [each if each.is_sparse else each.to_sparse(1) for each in pieces]
            whole[name] = torch.cat([each.to(value.dtype) for each in pieces])
    return whole


def split_state(partition: Partition, state_dict: Mapping[str, Any]) -> dict[int, list[State]]:
    """Split the `state_dict()` of an optimizer of the same parameters into states by chunk, for `load_state`.

    Tensors get the dtype of their parameter, as in torch's `load_state_dict`. Raises ArgumentError if the parameters
    differ.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    shapes = _shapes(partition)
    if len(numbers) != len(shapes):
        raise ArgumentError(f"the state is of {len(numbers)} parameters, and the optimizer has {len(shapes)}")
    states = {place: state_dict["state"].get(number, {}) for place, number in enumerate(numbers)}
    split = {}
    for chunk in partition.chunks:
        pieces: list[State] = []
        for piece in chunk.pieces:
            state = state_of_piece(states[piece.parameter], piece, shapes[piece.parameter])
            pieces.append({name: _cast(name, value, chunk.dtype) for name, value in state.items()})
        split[chunk.index] = pieces
    return split


def _shapes(partition: Partition) -> dict[int, tuple[int, ...]]:
    shapes: dict[int, tuple[int, ...]] = {}
    for piece in (piece for chunk in partition.chunks for piece in chunk.pieces):
        shapes[piece.parameter] = (piece.end, *piece.shape[1:]) if piece.shape else ()  # the last piece's remains
    return shapes


def _cast(name: str, value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and name != "step" and (dtype.is_floating_point or dtype.is_complex):
        return value.detach().to("cpu", dtype if value.is_floating_point() or value.is_complex() else value.dtype)
    return value


def states_of_pieces(pieces: Sequence[Piece], state: State, *, by_element: bool) -> Iterator[State]:
    """Split the state of neighbours that are stepped as one, as views."""
    for piece in pieces:
        begin, stop = piece.offset - pieces[0].offset, piece.stop - pieces[0].offset
        yield {
            name: value.reshape(-1)[begin:stop].view(piece.shape)
            if by_element and _has_elements(name, value)
            else value
            for name, value in state.items()
        }


def _has_elements(name: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and name not in SCALARS and not value.is_sparse


def state_of_piece(state: State, piece: Piece, shape: tuple[int, ...]) -> State:
    """Return the state of a piece, from that of its parameter of `shape`; as views where possible."""
    return {name: _rows_of(name, value, piece, shape) for name, value in state.items()}


def _rows_of(name: str, value: Any, piece: Piece, shape: tuple[int, ...]) -> Any:
    if not isinstance(value, torch.Tensor) or name in SCALARS or piece.shape == shape:
        return value
    if value.shape != shape:
        raise ArgumentError(
            f"the state of parameter {piece.parameter} has {name!r} of shape {tuple(value.shape)}, but the parameter "
            f"has shape {shape}: the model is not the one that was saved, or its parameters have another order"
        )
    return (value.narrow_copy if value.is_sparse else value.narrow)(0, piece.begin, piece.end - piece.begin)


def may_join(left: State, right: State) -> bool:
    """Return whether neighbours in these states can be stepped as one parameter: all scalar state is equal."""
    if left.keys() != right.keys():
        return False
    for name, value in left.items():
        other = right[name]
        if isinstance(value, torch.Tensor) and name not in SCALARS:
            if value.is_sparse or other.is_sparse or value.dtype != other.dtype:
                return False
        elif not _equal(value, other):
            return False
    return True


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def joined_state(states: Sequence[State], shape: Sequence[int] | None) -> State:
    """Copy the states of neighbours into the state of one parameter of `shape`; None: of one piece, unchanged."""
    joined = {}
    for name, value in states[0].items():
        if not isinstance(value, torch.Tensor):
            joined[name] = copy.deepcopy(value)
        elif shape is None or name in SCALARS or value.is_sparse:
            joined[name] = value.detach().to("cpu", copy=True)
        else:
            joined[name] = torch.cat([state[name].detach().cpu().reshape(-1) for state in states]).view(shape)
    return joined
