"""Compare nested states of models and optimizers."""

from __future__ import annotations

from typing import Any

import torch

SINGLE = 2e-6  # the least tolerance of numbers that are not float64


def assert_same(ours: Any, theirs: Any, where: str = "", *, rtol: float = 1e-12) -> None:
    """Compare types, keys and lengths, and numbers to a relative and absolute tolerance."""
    assert type(ours) is type(theirs), (where, ours, theirs)
    if isinstance(ours, torch.Tensor | float):
        mine, its = (torch.as_tensor(each).detach().cpu().to_dense() for each in (ours, theirs))
        bound = rtol if mine.dtype == torch.float64 or isinstance(ours, float) else max(rtol, SINGLE)
        torch.testing.assert_close(mine, its, rtol=bound, atol=bound, msg=lambda text: f"{where}: {text}")
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), (where, ours.keys(), theirs.keys())
        for key, value in ours.items():
            assert_same(value, theirs[key], f"{where}/{key}", rtol=rtol)
    elif isinstance(ours, list | tuple):
        for place, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, its, f"{where}/{place}", rtol=rtol)
    else:
        assert ours == theirs, (where, ours, theirs)
