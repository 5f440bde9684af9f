"""Simulation of one step: when each bucket is sent and arrives, and how much backward does not overlap. Pure.

The model: gradients become ready at their measured times. A bucket is sent when its last gradient is ready and all
buckets before it are sent; the last one is sent at the end of backward, since it carries the step status. The
collectives of a group run one after another. While one runs, computing is slower by the link's `contention`.
Compression and decompression interrupt backward, before a bucket is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ddp.data_parallel.buckets.bucket_plan import BucketLimits, BucketPlan
from ddp.data_parallel.planning.link_cost import LinkCost

_MB = 1 << 20
_CAPS_MB = (0.5, 1, 2, 4, 8, 16, 25, 50, 100)
_FIRST_CAP_MB = 1

# A smaller difference between simulated steps cannot be measured: the current plan stays.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class GradReady:
    """One gradient: the index of its parameter, its size on the wire, and when it was ready.

    `ready_s` counts from the start of backward, without delays by concurrent collectives.
    """

    index: int
    nbytes: int
    ready_s: float


@dataclass(frozen=True)
class StepRecord:
    """One measured step without its communication, on the slowest rank, in seconds.

    `gradients` are in the order in which they were ready. `backward_s` is the duration of backward with nothing on the
    wire; `forward_s` that of the forward pass and the time until backward; `other_s` the rest of a step: copying
    averages into gradients, the optimizer, reading data.
    """

    gradients: tuple[GradReady, ...]
    forward_s: float
    backward_s: float
    other_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.other_s

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)


@dataclass(frozen=True)
class CompressionCost:
    """Cost of sending a bucket compressed.

    `wire_ratio`: time on the wire, relative to an all-reduce of the uncompressed bucket. `s_per_byte`: time to compress
    and decompress, per byte of the bucket. `collectives`: their number per bucket, one after another.
    """

    name: str
    wire_ratio: float
    s_per_byte: float
    collectives: int = 2


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together, by the indices of their parameters, and their total bytes."""

    indices: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class BucketTime:
    """Times at which a bucket was ready and its collective began and ended, in seconds since the start of backward."""

    bucket: Bucket
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step, in seconds: `total_s` = `compute_s` + `delayed_s` + `exposed_s`.

    `compute_s` is the step without communication, `delayed_s` the time that concurrent collectives and compression took
    from the cores. `wire_s` is the time of collectives: `overlapped_s` during backward, `exposed_s` after it.
    """

    total_s: float
    compute_s: float
    delayed_s: float
    wire_s: float
    overlapped_s: float
    exposed_s: float
    buckets: tuple[BucketTime, ...]


def buckets_of(plans: Iterable[BucketPlan]) -> list[Bucket]:
    """Return the buckets of a plan for the simulation, in launch order.

    The step status costs nothing beside a device's gradients: the device does not wait for this host memory.
    """
    plans = list(plans)
    return [
        Bucket(
            tuple(slot.spec.index for slot in plan.slots),
            plan.nbytes + plan.status_numel * plan.dtype.itemsize,
        )
        for plan in plans
        if plan.device == plans[0].device
    ]


def simulate(
    record: StepRecord, buckets: Sequence[Bucket], cost: LinkCost, *, compression: CompressionCost | None = None
) -> SimulatedStep:
    """Simulate the step of `record` with these buckets, in launch order, on a link of this cost."""
    ready_of = {gradient.index: gradient.ready_s for gradient in record.gradients}
    clock = _Clock(cost.contention)
    times: list[BucketTime] = []
    for position, bucket in enumerate(buckets):
        is_last = position == len(buckets) - 1
        needs_s = max((ready_of.get(index, record.backward_s) for index in bucket.indices), default=record.backward_s)
        clock.compute_until(record.backward_s if is_last else needs_s)
        ready_s = clock.now_s
        lasts_s = cost.collective_s(bucket.nbytes)
        if compression is not None and bucket.indices:
            clock.delay(bucket.nbytes * compression.s_per_byte)
            lasts_s = compression.collectives * cost.latency_s
            lasts_s += bucket.nbytes * compression.wire_ratio * cost.seconds_per_byte
        start_s = clock.send(lasts_s)
        times.append(BucketTime(bucket, ready_s, start_s, start_s + lasts_s))
    clock.compute_until(record.backward_s)
    wire_s = sum((time.end_s - time.start_s for time in times), 0.0)
    exposed_s = max(0.0, max((time.end_s for time in times), default=0.0) - clock.now_s)
    return SimulatedStep(
        total_s=record.forward_s + clock.now_s + exposed_s + record.other_s,
        compute_s=record.compute_s,
        delayed_s=clock.now_s - record.backward_s,
        wire_s=wire_s,
        overlapped_s=max(0.0, wire_s - exposed_s),
        exposed_s=exposed_s,
        buckets=tuple(times),
    )


class _Clock:
    """Time in backward, which is slower while the link is busy."""

    def __init__(self, contention: float) -> None:
        self.now_s = 0.0
        self._computed_s = 0.0
        self._busy_until_s = 0.0
        self._slowdown = 1 + contention

    def compute_until(self, computed_s: float) -> None:
        """Advance until `computed_s` of backward is computed."""
        left_s = computed_s - self._computed_s
        if left_s <= 0:
            return
        slow_s = min(left_s * self._slowdown, max(0.0, self._busy_until_s - self.now_s))
        self.now_s += slow_s + max(0.0, left_s - slow_s / self._slowdown)
        self._computed_s = computed_s

    def delay(self, seconds: float) -> None:
        """Spend `seconds` on work that is not backward's own."""
        self.now_s += seconds

    def send(self, wire_s: float) -> float:
        """Start a collective as soon as the link is free; return when it starts."""
        start_s = max(self.now_s, self._busy_until_s)
        self._busy_until_s = start_s + wire_s
        return start_s


@dataclass(frozen=True)
class Choice:
    """Sizes of buckets, and the simulated step with these buckets."""

    limits: BucketLimits
    step: SimulatedStep


def candidates(current: BucketLimits) -> Iterator[BucketLimits]:
    """Yield sizes to compare: `current` first; others with `own_bytes` no larger than the cap."""
    yield current
    for cap in _CAPS_MB:
        cap_bytes = int(cap * _MB)
        own_bytes = None if current.own_bytes is None else min(current.own_bytes, cap_bytes)
        yield replace(current, cap_bytes=cap_bytes, first_caps_bytes=(), own_bytes=own_bytes)
        if cap > _FIRST_CAP_MB:
            first = (_FIRST_CAP_MB * _MB,)
            yield replace(current, cap_bytes=cap_bytes, first_caps_bytes=first, own_bytes=own_bytes)


def choose(
    record: StepRecord, cost: LinkCost, current: BucketLimits, plan: Callable[[BucketLimits], Sequence[Bucket]]
) -> list[Choice]:
    """Simulate the step of `record` for each of `candidates`; return them, quickest first.

    `plan` returns the buckets for sizes. The current sizes come first if no others are quicker by 2 %. Pure: equal
    arguments have the same result on every rank.
    """
    now, *others = (Choice(limits, simulate(record, plan(limits), cost)) for limits in candidates(current))
    others.sort(key=_rank_of)
    if others[0].step.total_s < now.step.total_s * (1 - _LEAST_GAIN):
        return sorted([now, *others], key=_rank_of)
    return [now, *others]


def _rank_of(choice: Choice) -> tuple[float, int]:
    return choice.step.total_s, len(choice.step.buckets)
