"""The arguments of local SGD, and its outer optimizer: an SGD step from the ranks' start towards their average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddp.errors import ArgumentError

_Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Settings:
    """The numeric arguments. Raises ArgumentError for values out of range."""

    every: int
    after: int
    outer_lr: float
    outer_momentum: float
    nesterov: bool

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("after", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ArgumentError(f"{name}={value!r}; it must be an int, {least} or more")
        if not self.outer_lr > 0:
            raise ArgumentError(f"outer_lr={self.outer_lr!r}; it must be more than 0 (1: plain averaging)")
        if not 0 <= self.outer_momentum < 1:
            raise ArgumentError(f"outer_momentum={self.outer_momentum!r}; it must be from 0 to less than 1")

    @property
    def has_outer(self) -> bool:
        """Whether there is an outer optimizer, not plain averaging."""
        return self.outer_lr != 1 or self.outer_momentum != 0

    @property
    def is_ordinary(self) -> bool:
        """Whether averaging gradients is equivalent."""
        return self.every == 1 and not self.has_outer


class OuterOptimizer:
    """Keeps the starting points of the local steps and the momenta, by the parameters' names.

    `starts` is empty until `begin`, and always with plain averaging. Both are the same on every rank.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.starts: dict[str, torch.Tensor] = {}
        self.momenta: dict[str, torch.Tensor] = {}

    @property
    def needs_starts(self) -> bool:
        """Whether `begin` must be called before the rank steps by itself."""
        return self._settings.has_outer and not self.starts

    def begin(self, parameters: _Parameters) -> None:
        """Copy the parameters as the starting point of local steps."""
        self.starts = {name: each.detach().clone() for name, each in parameters.items() if each.requires_grad}

    def step(self, parameters: _Parameters) -> None:
        """Step from the starts as torch's SGD does: momentum * velocity + gradient, with Nesterov's look-ahead.

        `parameters` are the averages over the ranks, and are overwritten.
        """
        settings = self._settings
        for name, parameter in parameters.items():
            if (start := self.starts.get(name)) is None:
                continue
            gradient = start - parameter
            if settings.outer_momentum:
                velocity = self.momenta.setdefault(name, torch.zeros_like(gradient))
                velocity.mul_(settings.outer_momentum).add_(gradient)
                ahead = gradient.add(velocity, alpha=settings.outer_momentum)
                gradient = ahead if settings.nesterov else velocity
            parameter.copy_(start.sub_(gradient, alpha=settings.outer_lr))

    def load(self, momenta: Mapping[str, Any], parameters: _Parameters) -> None:
        """Load the momenta of a checkpoint. Raises ArgumentError for those that do not fit."""
        for name, tensor in momenta.items():
            if name not in parameters or parameters[name].shape != tensor.shape:
                has = f"has shape {tuple(parameters[name].shape)}" if name in parameters else "is missing"
                raise ArgumentError(f"momentum of {name!r} with shape {tuple(tensor.shape)}, which {has} in the model")
        self.starts = {}
        self.momenta = {
            name: torch.empty_like(parameters[name], requires_grad=False).copy_(tensor)
            for name, tensor in momenta.items()
        }
