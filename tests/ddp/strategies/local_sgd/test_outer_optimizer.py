"""The optimizer of the averages."""

from __future__ import annotations

import torch
from torch import nn

from ddp.strategies.local_sgd.outer_optimizer import OuterOptimizer, Settings


def test_renamed_parameters_keep_their_averages() -> None:
    outer = OuterOptimizer(Settings(every=2, after=0, outer_lr=0.5, outer_momentum=0.0, nesterov=True))
    outer.begin({name: nn.Parameter(torch.zeros(1)) for name in ("kept", "renamed")})
    averages = {name: nn.Parameter(torch.ones(1)) for name in ("kept", "as now")}
    with torch.no_grad():
        outer.step(averages)
    assert [each.item() for each in averages.values()] == [0.5, 1.0]
