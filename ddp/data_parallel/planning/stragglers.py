"""How long many ranks wait for the slowest of them, from a sample of what one rank takes: a pure function."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["expected_maximum"]

_TAIL = 0.1  # of the sample: what lies above it gives the slope of the tail


def expected_maximum(sample: Sequence[float], draws: int) -> float:
    """The expected largest of `draws` independent draws from the distribution that `sample` is of.

    Up to as many draws as the sample has, it is that of draws from the sample itself (David and Nagaraja 2003, "Order
    Statistics", chapter 2). More draws would give no more than its largest. For them the tail is taken for exponential
    with the mean excess over the upper tenth (Pickands 1975, "Statistical Inference Using Extreme Order Statistics",
    Annals of Statistics 3(1), with shape 0), whose largest grows with the logarithm of their number. A tail that is
    heavier makes larger ones. Ranks that are slow in every step are not independent draws: the largest is then smaller.
    """
    ordered = sorted(sample)
    count = len(ordered)
    within = min(draws, count)
    expected = sum(
        value * ((at / count) ** within - ((at - 1) / count) ** within) for at, value in enumerate(ordered, 1)
    )
    if draws <= count:
        return expected
    first = max(0, math.ceil(count * (1 - _TAIL)) - 1)
    excesses = [value - ordered[first] for value in ordered[first + 1 :]]
    slope = sum(excesses) / len(excesses) if excesses else 0.0
    return expected + slope * math.log(draws / count)
