"""One step by simulation: when each bucket leaves and arrives, and what of it backward does not cover. Pure arithmetic.

The model: gradients become ready at their measured times. A bucket leaves when its last gradient is ready and all
buckets before it have left; the last one leaves at the end of backward, since it carries the step status. The
collectives of a group go one after another. While one is on its way, computing is slower by the link's `contention`.
Compressing takes its time from backward, before a bucket leaves and after it has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddp.data_parallel.buckets.bucket_plan import BucketPlan
from ddp.data_parallel.planning.link_cost import CompressionCost, LinkCost
from ddp.data_parallel.planning.step_record import StepRecord

__all__ = ["Bucket", "BucketTime", "SimulatedStep", "buckets_of", "simulate"]


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
    wire_s = after_s = 0.0
    for position, bucket in enumerate(buckets):
        is_last = position == len(buckets) - 1
        needs_s = max((ready_of.get(index, record.backward_s) for index in bucket.indices), default=record.backward_s)
        clock.compute_until(record.backward_s if is_last else needs_s)
        ready_s = clock.now_s
        lasts_s = cost.collective_s(bucket.nbytes)
        clock.delay(after_s)  # of the bucket before
        after_s = 0.0
        if compression is not None and bucket.indices:
            clock.delay(bucket.nbytes * compression.before_s_per_byte)
            after_s = bucket.nbytes * compression.after_s_per_byte
            lasts_s = compression.collectives * cost.latency_s
            lasts_s += bucket.nbytes * compression.wire_ratio * cost.seconds_per_byte
        start_s = clock.send(lasts_s)
        times.append(BucketTime(bucket, ready_s, start_s, start_s + lasts_s + after_s))
        wire_s += lasts_s
    clock.compute_until(record.backward_s)
    end_s = max((time.end_s for time in times), default=0.0)
    exposed_s = max(0.0, end_s - clock.now_s)
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
