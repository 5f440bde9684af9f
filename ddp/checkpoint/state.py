"""The states of a run's objects in a checkpoint: check, collect and restore them. Knows neither files nor ranks.

Called by `ddp.checkpoint`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ddp.data_parallel.wrapper import DistributedDataParallel
from ddp.errors import ArgumentError, CheckpointError
from ddp.monitoring.interrupts import is_interrupt
from ddp.torch_internals import compiled_module, unwrapped

PARTS = ("model", "optimizer", "scheduler", "scaler", "sampler")
_NAMED_DIFFERENCES = 3
# The types that `torch.load(weights_only=True)` reads; it reads no subclasses.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_TENSORS = frozenset({torch.Tensor, nn.Parameter})
_SEQUENCES = frozenset({list, tuple, set})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})


class Stateful(Protocol):
    """An object that returns and loads its state: an optimizer, a scheduler, a GradScaler, a DistributedSampler."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def given_parts(**given: Any) -> dict[str, Stateful]:
    """Return the given ones of PARTS, the model without wrappers. Raises ArgumentError for one without a state."""
    parts: dict[str, Stateful] = {name: part for name, part in given.items() if part is not None}
    if "model" in parts:
        parts["model"] = unwrapped(given["model"])
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            hint = ": ddp.DistributedSampler has them" if name == "sampler" else ""
            raise ArgumentError(f"{name}={type(part).__name__} has no state_dict() and load_state_dict(){hint}")
    return parts


def wrapper_of(model: nn.Module | None) -> DistributedDataParallel | None:
    """Return this package's wrapper of a model, if there is one, around or inside: it has a state, too."""
    while model is not None and not isinstance(model, DistributedDataParallel):
        model = compiled_module(model)
    return model


def check_plain(value: Any, name: str = "") -> None:
    """Raise ArgumentError for tensors that cannot be copied, and what `torch.load(weights_only=True)` would refuse."""
    kind = type(value)
    if kind in _MAPPINGS:
        for key, item in value.items():
            inner = f"{name}[{key!r}]" if name else str(key)
            if type(key) not in _ATOMS:
                raise ArgumentError(f"the key {inner} is a {type(key).__qualname__}: use a string or a number")
            check_plain(item, inner)
    elif kind in _SEQUENCES:
        for index, item in enumerate(value):
            check_plain(item, f"{name}[{index}]")
    elif kind.__name__ == "DTensor":
        raise ArgumentError(
            f"{name} is a DTensor, whose parts the ranks hold: save it with torch.distributed.checkpoint, which "
            "`python -m ddp.checkpoint.convert` turns into one of these checkpoints"
        )
    elif kind in _TENSORS:
        for unreadable in ("meta", "nested", "mkldnn"):
            if getattr(value, f"is_{unreadable}"):
                raise ArgumentError(f"{name} is a {unreadable} tensor, which a checkpoint cannot hold")
    elif kind not in _ATOMS:
        raise ArgumentError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which loading with weights_only refuses: save its "
            "numbers, strings, tensors, or lists and dicts of them"
        )


def restore_parts(state: Mapping[str, Any], parts: Mapping[str, Stateful]) -> None:
    """Restore every part; the model only if all of its keys and shapes fit. Raises CheckpointError."""
    saved = [name for name in PARTS if name in state]
    for name in parts:
        if name not in saved:
            raise CheckpointError(f"{name} is given, but the file only holds {', '.join(saved) or 'values'}")
    for name in saved:
        if name not in parts:
            raise CheckpointError(
                f"the file holds {name}, which is not given: pass {name}=..., or read only what you need with "
                "torch.load(path, weights_only=True)"
            )
    if "model" in parts:
        _require_fit(parts["model"].state_dict(), state["model"])
    for name, part in parts.items():
        try:
            part.load_state_dict(state[name])
        except Exception as error:  # another package's; only the object's name can be added
            if is_interrupt(error):
                raise
            raise CheckpointError(f"{name}: {error}") from error


def _require_fit(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    differences = [f"{key} is missing in the file" for key in own if key not in saved]
    differences += [f"{key} is only in the file" for key in saved if key not in own]
    for key in own:
        mine, theirs = own[key], saved.get(key)
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and mine.shape != theirs.shape:
            differences.append(f"{key} has shape {tuple(mine.shape)} here and {tuple(theirs.shape)} in the file")
    if differences:
        shown = "; ".join(differences[:_NAMED_DIFFERENCES])
        more = len(differences) - _NAMED_DIFFERENCES
        raise CheckpointError(f"the model is not the saved one: {shown}{f'; and {more} more' if more > 0 else ''}")
