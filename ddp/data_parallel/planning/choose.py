"""The sizes of buckets that leave the least communication exposed: the best of some, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ddp.data_parallel.buckets.bucket_plan import BucketLimits
from ddp.data_parallel.planning.link_cost import CompressionCost, LinkCost
from ddp.data_parallel.planning.simulate import Bucket, SimulatedStep, simulate
from ddp.data_parallel.planning.step_record import StepRecord

__all__ = ["Choice", "candidates", "choose"]

_MB = 1 << 20
_CAPS_MB = (0.5, 1, 2, 4, 8, 16, 25, 50, 100)
_FIRST_CAP_MB = 1

# Plans whose simulated steps differ by less are the same to a measurement: the one that is there stays.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Choice:
    """Sizes of buckets, the buckets that they give, and the simulated step."""

    limits: BucketLimits
    buckets: tuple[Bucket, ...]
    step: SimulatedStep


def candidates(current: BucketLimits) -> Iterator[BucketLimits]:
    """Sizes to compare: `current` first; of the others, gradients that travel alone are as small as the cap at most."""
    yield current
    for cap in _CAPS_MB:
        cap_bytes = int(cap * _MB)
        own_bytes = None if current.own_bytes is None else min(current.own_bytes, cap_bytes)
        yield replace(current, cap_bytes=cap_bytes, first_caps_bytes=(), own_bytes=own_bytes)
        if cap > _FIRST_CAP_MB:
            first = (_FIRST_CAP_MB * _MB,)
            yield replace(current, cap_bytes=cap_bytes, first_caps_bytes=first, own_bytes=own_bytes)


def choose(
    record: StepRecord,
    cost: LinkCost,
    current: BucketLimits,
    plan: Callable[[BucketLimits], Sequence[Bucket]],
    *,
    compression: CompressionCost | None = None,
) -> list[Choice]:
    """Simulate the step of `record` for each of `candidates`; return them, quickest first.

    `plan` gives the buckets for sizes. The current sizes come first if no others are quicker by 2 %. A function of its
    arguments alone: the same on every rank that has the same ones.
    """
    choices = []
    for limits in candidates(current):
        buckets = tuple(plan(limits))
        choices.append(Choice(limits, buckets, simulate(record, buckets, cost, compression=compression)))
    now, *others = choices
    others.sort(key=lambda choice: (choice.step.total_s, len(choice.buckets)))
    if others[0].step.total_s < now.step.total_s * (1 - _LEAST_GAIN):
        return sorted(choices, key=lambda choice: (choice.step.total_s, len(choice.buckets)))
    return [now, *others]
