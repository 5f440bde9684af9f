"""Copies of plain values that later changes in place do not reach. `copy.deepcopy` takes ten times as long."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ddp.torch_internals import version_of

__all__ = ["ATOMS", "Copies", "copied"]

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


class Copies:
    """Of one state, time after time: a tensor that has not changed is not copied again."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}  # by id: itself, its version, its copy

    def of(self, value: Any) -> Any:
        before, self._of = self._of, {}
        return _copied(value, before, self._of)


def copied(value: Any) -> Any:
    """One copy."""
    return value if type(value) in ATOMS else _copied(value, {}, {})


_Known = dict[int, tuple[torch.Tensor, int, torch.Tensor]]


def _copied(value: Any, before: _Known, now: _Known) -> Any:
    kind = type(value)
    if kind is dict:
        if ATOMS.issuperset(map(type, value.values())):
            return value.copy()
        return {key: item if type(item) in ATOMS else _copied(item, before, now) for key, item in value.items()}
    if kind is list:
        if ATOMS.issuperset(map(type, value)):
            return value.copy()
        return [item if type(item) in ATOMS else _copied(item, before, now) for item in value]
    if kind is tuple:
        return value if ATOMS.issuperset(map(type, value)) else tuple(_copied(item, before, now) for item in value)
    if kind in ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        own, version, made = before.get(id(value), (None, 0, value))
        # One made under inference_mode has no version.
        if value.is_inference() or own is not value or version != version_of(value):
            made = value.detach().clone()
        if not value.is_inference():
            now[id(value)] = value, version_of(value), made
        return made
    return copy.deepcopy(value)
