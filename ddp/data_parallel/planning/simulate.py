"""One step by simulation: when each bucket leaves and arrives, and what of it backward does not cover. Pure arithmetic.

The model: gradients become ready at their measured times. A bucket leaves when its last gradient is ready and all
buckets before it have left; the last one leaves at the end of backward, since it carries the step status. The
collectives of a group go one after another. While one is on its way, computing is slower by the link's `contention`.
Compressing and decompressing take their time from backward, before a bucket leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ddp.data_parallel.buckets.bucket_plan import BucketLimits, BucketPlan
from ddp.data_parallel.planning.link_cost import LinkCost

_MB = 1 << 20
_CAPS_MB = (0.5, 1, 2, 4, 8, 16, 25, 50, 100)
_FIRST_CAP_MB = 1

# Plans whose simulated steps differ by less are the same to a measurement: the one that is there stays.
_LEAST_GAIN = 0.02


@dataclass(frozen=True)
class GradReady:
    """One gradient: the index of its parameter, its size on the wire, and when it was ready.

    `ready_s` counts from the start of backward, without what collectives beside it delay.
    """

    index: int
    nbytes: int
    ready_s: float


@dataclass(frozen=True)
class StepRecord:
    """One step as measured, without its communication, on the slowest of the ranks, in seconds.

    `gradients` are in the order in which they were ready. `backward_s` is the time from the start of backward to its
    end with nothing on the wire; `forward_s` that of the forward pass and what lies between it and backward; `other_s`
    the rest of a step: copying averages into gradients, the optimizer, reading data.
    """

    gradients: tuple[GradReady, ...]
    forward_s: float
    backward_s: float
    other_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of a step that communicates nothing."""
        return self.forward_s + self.backward_s + self.other_s

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)


@dataclass(frozen=True)
class CompressionCost:
    """What it costs to send a bucket compressed.

    `wire_ratio`: the time of its bytes on the wire by that of an all-reduce of the bucket as it is. `s_per_byte`: what
    compressing and decompressing take for each byte of the bucket. `collectives` follow each other for one bucket.
    """

    name: str
    wire_ratio: float
    s_per_byte: float
    collectives: int = 2


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together, by the index of their parameters, and the bytes of all of them."""

    indices: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class BucketTime:
    """When a bucket was ready, and its collective began and ended, in seconds since the start of backward."""

    bucket: Bucket
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedStep:
    """A step as simulated, in seconds: `total_s` = `compute_s` + `delayed_s` + `exposed_s`.

    `compute_s` is the step without communication, `delayed_s` what collectives and compression beside it took of the
    cores. `wire_s` is how long collectives were on their way: `overlapped_s` beside backward, `exposed_s` after it.
    """

    total_s: float
    compute_s: float
    delayed_s: float
    wire_s: float
    overlapped_s: float
    exposed_s: float
    buckets: tuple[BucketTime, ...]


def buckets_of(plans: Iterable[BucketPlan]) -> list[Bucket]:
    """What the simulation needs of a plan, in launch order. Beside a device's gradients, the step status costs nothing.

    It is in host memory, and the device does not wait for it.
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
    """Simulate the step of `record` with these buckets, given in launch order, on a link of this cost."""
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
    """The time of backward, which goes on more slowly while the link is busy."""

    def __init__(self, contention: float) -> None:
        self.now_s = 0.0
        self._computed_s = 0.0
        self._busy_until_s = 0.0
        self._slowdown = 1 + contention

    def compute_until(self, computed_s: float) -> None:
        """Go on until so much of backward is computed."""
        left_s = computed_s - self._computed_s
        if left_s <= 0:
            return
        slow_s = min(left_s * self._slowdown, max(0.0, self._busy_until_s - self.now_s))
        self.now_s += slow_s + max(0.0, left_s - slow_s / self._slowdown)
        self._computed_s = computed_s

    def delay(self, seconds: float) -> None:
        """Do so much that is not backward's own."""
        self.now_s += seconds

    def send(self, wire_s: float) -> float:
        """Start a collective as soon as the link is free; return when that is."""
        start_s = max(self.now_s, self._busy_until_s)
        self._busy_until_s = start_s + wire_s
        return start_s


@dataclass(frozen=True)
class Choice:
    """Sizes of buckets, and the simulated step with the buckets that they give."""

    limits: BucketLimits
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
    record: StepRecord, cost: LinkCost, current: BucketLimits, plan: Callable[[BucketLimits], Sequence[Bucket]]
) -> list[Choice]:
    """Simulate the step of `record` for each of `candidates`; return them, quickest first.

    `plan` gives the buckets for sizes. The current sizes come first if no others are quicker by 2 %. A function of its
    arguments alone: the same on every rank that has the same ones.
    """
    now, *others = (Choice(limits, simulate(record, plan(limits), cost)) for limits in candidates(current))
    others.sort(key=_rank_of)
    if others[0].step.total_s < now.step.total_s * (1 - _LEAST_GAIN):
        return sorted([now, *others], key=_rank_of)
    return [now, *others]


def _rank_of(choice: Choice) -> tuple[float, int]:
    return choice.step.total_s, len(choice.step.buckets)
