"""Copy plain values, so that later in-place changes do not affect them. `copy.deepcopy` takes ten times as long."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


_Key = tuple[int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]
_Known = dict[_Key, torch.Tensor]


class Copies:
    """Repeated copies of one state: a tensor in the same place is copied into the memory of its last copy.

    Each is copied every time: a change cannot be detected, since NumPy and `.data` do not increase the version.
    """

    def __init__(self) -> None:
        self._of: _Known = {}  # copies of tensors, by the original's place

    def of(self, value: Any) -> Any:
        """Return a copy, which the next call overwrites."""
        before, self._of = self._of, {}
        return _copied(value, before, self._of)


def copied(value: Any) -> Any:
    """Return a single copy."""
    return value if type(value) in ATOMS else _copied(value, {}, {})


def _copied(value: Any, before: _Known, now: _Known) -> Any:
    kind = type(value)
    if kind is dict:
        if ATOMS.issuperset(map(type, value.values())):
            return value.copy()
        return {key: item if type(item) in ATOMS else _copied(item, before, now) for key, item in value.items()}
    if kind is OrderedDict:
        made = OrderedDict((key, _copied(item, before, now)) for key, item in value.items())
        vars(made).update(copy.deepcopy(vars(value)))  # a module's state_dict has versions there
        return made
    if kind is list:
        if ATOMS.issuperset(map(type, value)):
            return value.copy()
        return [item if type(item) in ATOMS else _copied(item, before, now) for item in value]
    if kind is tuple:
        return value if ATOMS.issuperset(map(type, value)) else tuple(_copied(item, before, now) for item in value)
    if kind in ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return _copied_tensor(value, before, now)
    return copy.deepcopy(value)


def _copied_tensor(tensor: torch.Tensor, before: _Known, now: _Known) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.is_cpu or tensor.layout is not torch.strided:
        return tensor.detach().clone()
    key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    made = before.get(key)
    if made is None or made.is_inference():
        made = tensor.detach().clone()
    else:
        made.copy_(tensor.detach())
    now[key] = made
    return made
