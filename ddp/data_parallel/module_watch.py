"""Detect parameters that were added to a module, or converted, after it was wrapped.

Called by the reducer at the start of every backward pass; never changes the module.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from ddp.errors import BackwardError
from ddp.torch_internals import parameters_of, submodules_of

_DTYPE = operator.attrgetter("dtype")
_DEVICE = operator.attrgetter("device")


class ModuleWatch:
    """The parameters and submodules of `module` at construction. `ignored` are full names of parameters."""

    def __init__(self, module: nn.Module, ignored: Iterable[str]) -> None:
        self._module = module
        self._ignored = frozenset(ignored)
        owners = list(module.modules())
        self._dicts: list[Any] = [*map(parameters_of, owners)]
        self._dicts += [modules for modules in map(submodules_of, owners) if modules]
        self._owned = self._dicts[: len(owners)]
        self._owned_values = list(chain.from_iterable(map(dict.values, self._owned)))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))
        self.parameters = [parameter for name, parameter in module.named_parameters() if name not in self._ignored]
        self._known = {id(parameter) for parameter in module.parameters()}
        self._dtypes = list(map(_DTYPE, self.parameters))
        self._devices = list(map(_DEVICE, self.parameters))

    def follow(self, module: nn.Module) -> ModuleWatch:
        """Return the watch of the module that is wrapped now; another one with the same parameters may replace it.

        Raises BackwardError if it has others.
        """
        if module is self._module:
            return self
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known and name not in self._ignored:
                raise BackwardError(
                    f".module was replaced after wrapping by one with another parameter {name!r}, whose gradient would "
                    "not be reduced: wrap the new module in DistributedDataParallel",
                    parameter=name,
                )
        return ModuleWatch(module, self._ignored)

    def problem(self) -> BackwardError | None:
        """Return why gradients could not be reduced now, or None. Takes about 0.1 us per parameter."""
        newcomer = self._newcomer()
        if newcomer is not None:
            return BackwardError(
                f"parameter {newcomer!r} was added or replaced after the module was wrapped, so its gradient would not "
                "be reduced: wrap the module in DistributedDataParallel again after changing it",
                parameter=newcomer,
            )
        return self._conversion()

    def _conversion(self) -> BackwardError | None:
        """Return an error if a parameter changed its dtype or device; the first one's device stands for all."""
        if list(map(_DTYPE, self.parameters)) == self._dtypes and self.parameters[0].device == self._devices[0]:
            return None
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        for parameter, dtype, device in zip(self.parameters, self._dtypes, self._devices, strict=True):
            if parameter.dtype != dtype or parameter.device != device:
                name = names.get(id(parameter), "?")
                return BackwardError(
                    f"parameter {name!r} was {dtype} on {device} when the module was wrapped and is "
                    f"{parameter.dtype} on {parameter.device} now: convert the module first, then wrap it",
                    parameter=name,
                )
        return None

    def has_foreign_leaf(self) -> bool:
        """Return whether a parameter was replaced by a tensor that a backward pass would leave a gradient in."""
        values = chain.from_iterable(map(dict.values, self._owned))
        if all(map(operator.is_, values, self._owned_values)):
            return False
        return any(
            isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad and id(value) not in self._known
            for value in chain.from_iterable(map(dict.values, self._owned))
        )

    def _newcomer(self) -> str | None:
        """Return the name of a new trainable parameter, or None."""
        values = chain.from_iterable(map(dict.values, self._dicts))
        if sum(map(len, self._dicts)) == len(self._values) and all(map(operator.is_, values, self._values)):
            return None
        for name, parameter in self._module.named_parameters():
            is_known = id(parameter) in self._known or name in self._ignored
            if not is_known and parameter.requires_grad and isinstance(parameter, nn.Parameter):
                return name
        return None


def sparse_names(module: nn.Module) -> frozenset[str]:
    """Return the full names of parameters that get sparse gradients."""
    sources = {
        id(owner.weight)
        for owner in module.modules()
        if getattr(owner, "sparse", False) is True and isinstance(owner, nn.Embedding | nn.EmbeddingBag)
    }
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in sources)
