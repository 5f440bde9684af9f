"""The report of `model.explain()`: where the time of a step goes, and the cost of other ways to communicate.

It never communicates: the ranks agreed on its data in the first steps. Other plans, compressions and LocalSGD are
simulated, not tried; only compression is timed, with made-up gradients.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from time import perf_counter
from typing import Any

import torch.distributed as dist

from ddp.compression import Half, Int8, PowerSGD
from ddp.compression.compressors import named
from ddp.compression.rehearsal import RehearsalGroup, bucket_like
from ddp.data_parallel.buckets.bucket_plan import BucketLimits, Member
from ddp.data_parallel.buckets.gradient_sums import GradientSums
from ddp.data_parallel.planning.bucket_planner import BucketPlanner
from ddp.data_parallel.planning.link_cost import LinkCost
from ddp.data_parallel.planning.simulate import (
    Bucket,
    CompressionCost,
    SimulatedStep,
    StepRecord,
    buckets_of,
    simulate,
)
from ddp.environment import read_placement
from ddp.errors import DdpError, LaunchEnvironmentError, UnsupportedError
from ddp.torch_internals import backend_of

__all__ = ["Exposed", "OtherWay", "StepReport"]  # those that scripts/docs shows

_Method = Half | Int8 | PowerSGD

_LEAST_SAVING = 0.1  # that pays, since simulations are inexact
_LOCAL_STEPS = 8  # of LocalSGD between two averages
_LOCAL_CHUNK_BYTES = 64 << 20  # of LocalSGD's averages
_METHODS = ("bf16", "int8", "powersgd")
_REHEARSALS = 3
_REHEARSED_BYTES = 4 << 20
_MIB = 1 << 20
_OTHER_LIMITS = {
    "one bucket": BucketLimits(1 << 62, (), None),
    "torch's, 25 MiB": BucketLimits(25 * _MIB, (1 * _MIB,), None),
}
_FEWEST_STEPS = 3  # after those that are measured
_LEAST_SHOWN_S = 5e-5


@dataclass(frozen=True)
class Exposed:
    """Causes of exposed communication, in seconds that add up to all of it.

    `latency_s`: the part that would not be exposed if latency were 0. The rest consists of `last_s`, the bucket that is
    sent at the end of backward, and `queued_s`, buckets before it that were still in transit then.
    """

    latency_s: float
    last_s: float
    queued_s: float


@dataclass(frozen=True)
class OtherWay:
    """Another plan, compression or LocalSGD: its simulated step, and by what fraction it is shorter than this one."""

    title: str
    step_s: float
    gain: float
    bucket_bytes: Sequence[int] = ()

    @property
    def pays(self) -> bool:
        """Whether it saves a tenth of the step; less is within the simulation's error."""
        return self.gain >= _LEAST_SAVING


@dataclass(frozen=True)
class StepReport:
    """Breakdown of a step's time. `str()` is one screen of 80 columns.

    `computed_s` is the computing time of this rank in each of its last steps, and `measured_step_s` the median of these
    steps. `step` is simulated with the `record` of the slowest rank.
    """

    ranks: int
    backend: str
    compression: str
    measured_step_s: float
    computed_s: Sequence[float]
    record: StepRecord
    step: SimulatedStep
    exposed: Exposed
    cost: LinkCost
    plans: Sequence[OtherWay]
    ways: Sequence[OtherWay]

    @property
    def measured_steps(self) -> int:
        """Number of measured steps of this rank."""
        return len(self.computed_s)

    @property
    def behind_slowest_s(self) -> float:
        """Additional computing time of the slowest rank, compared with the median of this one's steps."""
        return max(0.0, self.record.compute_s - statistics.median(self.computed_s))

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report as JSON types: numbers, strings, lists and dicts."""
        step, record, rate = self.step, self.record, self.cost.ring_bytes_per_s
        parts = {name: value for name, value in asdict(step).items() if name not in ("total_s", "buckets")}
        return {
            "ranks": self.ranks,
            "backend": self.backend,
            "compression": self.compression,
            "measured_steps": self.measured_steps,
            "measured_step_s": self.measured_step_s,
            "step_s": step.total_s,
            **parts,
            "forward_s": record.forward_s,
            "backward_s": record.backward_s,
            "other_s": record.other_s,
            "exposed_by": asdict(self.exposed),
            "behind_slowest_s": self.behind_slowest_s,
            "link": {**asdict(self.cost), "ring_bytes_per_s": rate if rate < float("inf") else None},
            "buckets": [
                {"nbytes": t.bucket.nbytes, "ready_s": t.ready_s, "start_s": t.start_s, "end_s": t.end_s}
                for t in step.buckets
            ],
            "other_plans": [asdict(way) for way in self.plans],
            "other_ways": [asdict(way) for way in self.ways],
        }

    def __str__(self) -> str:
        return "\n".join([*self._times(), *self._others()])

    def _times(self) -> Iterator[str]:
        step, record, cost, exposed = self.step, self.record, self.cost, self.exposed
        count = _count(len(step.buckets), "bucket")
        sent = sum(time.bucket.nbytes for time in step.buckets)
        is_plain = self.compression == "none"
        yield f"A step on {_count(self.ranks, 'rank')} ({self.backend}{'' if is_plain else f', {self.compression}'})"
        yield _line("measured", self.measured_step_s, f"median of {_count(self.measured_steps, 'step')} of this rank")
        yield _line("by the model", step.total_s, "compute, delayed and exposed")
        parts = f"forward {_ms(record.forward_s)}, backward {_ms(record.backward_s)}, rest {_ms(record.other_s)}"
        yield _line("compute", step.compute_s, parts)
        if step.delayed_s >= _LEAST_SHOWN_S:
            yield _line("delayed", step.delayed_s, f"{'' if is_plain else 'compressing; '}cores taken by communication")
        yield _line("wire", step.wire_s, f"{sent / _MIB:.3g} MiB in {count}, {_rate(cost)}")
        yield _line("  overlapped", step.overlapped_s, "beside backward")
        yield _line("  exposed", step.exposed_s, "after backward" if step.exposed_s >= _LEAST_SHOWN_S else "nothing")
        reasons = (
            (exposed.queued_s, "link slower than backward: buckets queued"),
            (exposed.last_s, "last bucket leaves only at the end of backward"),
            (
                exposed.latency_s,
                f"latency: {_count(len(step.buckets), 'collective')} of {cost.latency_s * 1e6:.0f} us",
            ),
        )
        for seconds, text in sorted(reasons, reverse=True):
            if seconds >= _LEAST_SHOWN_S:
                yield _line("    of it", seconds, text)
        if self.behind_slowest_s >= _LEAST_SHOWN_S:
            yield _line("stragglers", self.behind_slowest_s, "the slowest rank computes longer than this one")
        if self.measured_step_s > step.total_s:
            unexplained_s = self.measured_step_s - step.total_s
            yield _line("unexplained", unexplained_s, "not in the model: load, waiting elsewhere")

    def _others(self) -> Iterator[str]:
        yield "Plan of buckets"
        sizes = [time.bucket.nbytes for time in self.step.buckets if time.bucket.indices]
        yield _line("  now", self.step.total_s, _sizes(sizes))
        for plan in self.plans:
            yield _line(f"  {plan.title}", plan.step_s, f"{_gain(plan.gain):>6}  {_sizes(plan.bucket_bytes)}")
        yield "Would it pay?"
        for way in self.ways:
            yield _line(f"  {way.title}", way.step_s, f"{_gain(way.gain):>6}  {'yes' if way.pays else 'no'}")


def explain(
    sums: GradientSums,
    planner: BucketPlanner | None,
    group: dist.ProcessGroup,
    members: Sequence[Member],
    compression: _Method | None,
    compressed_limits: BucketLimits,
) -> StepReport:
    """Explain the step of a model with `compression`; other methods would have `compressed_limits`.

    Raises UnsupportedError if the data will never be known, DdpError if there were too few steps.
    """
    if planner is None:
        raise UnsupportedError(
            "explain() needs measurements of the first steps, and this model has none: wrap it with measure=True and "
            'init_sync=True, and without bucket_cap_mb or, on the CPU, with bucket_cap_mb="auto"'
        )
    is_on_device = planner.timer.clock.is_device
    if sums.has_hook and compression is None:
        raise UnsupportedError("explain() does not know the cost of a communication hook of your own")
    if sums.has_hook and is_on_device:
        raise UnsupportedError("explain() does not know the cost of compression on a device: wrap the model without it")
    steps_s, computed_s = planner.timer.recent_s()
    if planner.is_deciding or len(steps_s) < _FEWEST_STEPS:
        raise DdpError(
            "explain() needs the first 10 steps of training: some are measured, the next ones show how long a step "
            "takes. Call it after more steps"
        )
    found = planner.measurement
    if found is None:
        raise DdpError(
            "explain() has no measurements: the steps to measure were incomplete on some rank (uneven inputs, "
            "create_graph, a forward pass inside of backward)"
        )
    backend = str(backend_of(group, members[0].parameter.device).name())

    def cost_of(method: _Method) -> CompressionCost:
        return _rehearsed(method, members, group.size(), backend, found.link)

    limits = {**_OTHER_LIMITS, "quickest": found.choices[0].limits}
    return explain_step(
        found.record,
        found.link,
        buckets_of(sums.plans_for(sums.limits)),
        backend=backend,
        step_times_s=steps_s,
        compute_times_s=computed_s,
        plans={title: buckets_of(sums.plans_for(each)) for title, each in limits.items()},
        compression=None if compression is None else cost_of(compression),
        compressed_buckets=buckets_of(sums.plans_for(compressed_limits, compressed=True)),
        compressions=[] if is_on_device else [cost_of(named(name)) for name in _METHODS],
    )


def _rehearsed(method: _Method, members: Sequence[Member], ranks: int, backend: str, link: LinkCost) -> CompressionCost:
    """Measure the cost of a method by compressing gradients of this model's shapes here; nothing is sent."""
    group = RehearsalGroup(ranks)
    compressor = method.compressor(group, None)
    bucket = bucket_like([member.parameter for member in members], _REHEARSED_BYTES)
    nbytes, took_s = bucket.buffer().nbytes, []
    for _ in range(_REHEARSALS):  # the first one allocates memory
        began = perf_counter()
        compressor.rehearse(bucket)
        took_s.append(perf_counter() - began)
    compressor.close()
    s_per_byte, sent = min(took_s) / nbytes, group.sent_bytes / _REHEARSALS / nbytes
    sent *= exchange_ratio(backend, ranks, _ranks_of_a_host(ranks))
    if not isinstance(method, PowerSGD):
        return CompressionCost(compressor.name, sent, s_per_byte)
    # Over gloo, backward waits until a bucket has arrived.
    waiting_s = 2 * link.latency_s / nbytes + sent * link.seconds_per_byte
    return CompressionCost(compressor.name, 0.0, s_per_byte + waiting_s, collectives=0)


def _ranks_of_a_host(ranks: int) -> int:
    """Return how many of a group's ranks share this host, from the environment; 1 if it does not say."""
    try:
        return min(ranks, read_placement(os.environ).local_world_size)
    except LaunchEnvironmentError:
        return 1


def exchange_ratio(backend: str, ranks: int, local_ranks: int) -> float:
    """Return the ratio of an exchange between all ranks, as compressors make, to an all-reduce of the same bytes.

    A host's network is the limit: its g of n ranks send 2 g (n-g)/n of a bucket to other hosts, compared with 2 (n-1)/n
    in a ring, and 2 (h-1)/h by shm's algorithm for h hosts.
    """
    if local_ranks >= ranks:
        return 1.0
    sent, hosts = local_ranks * (ranks - local_ranks) / ranks, -(-ranks // local_ranks)
    return max(1.0, sent / ((hosts - 1) / hosts if backend == "shm" else (ranks - 1) / ranks))


def explain_step(
    record: StepRecord,
    cost: LinkCost,
    buckets: Sequence[Bucket],
    *,
    backend: str,
    step_times_s: Sequence[float],
    compute_times_s: Sequence[float],
    plans: Mapping[str, Sequence[Bucket]],
    compression: CompressionCost | None,
    compressed_buckets: Sequence[Bucket],
    compressions: Sequence[CompressionCost],
) -> StepReport:
    """Explain the current step, with `buckets` and `compression`, and simulate alternatives.

    `step_times_s` and `compute_times_s` are this rank's measured steps and its computing time in each; `plans` are
    other buckets by title, `compressions` the methods to compare, which would have `compressed_buckets`.
    """
    now = simulate(record, buckets, cost, compression=compression)

    def other(title: str, step_s: float, sizes: Sequence[int] = ()) -> OtherWay:
        return OtherWay(title, step_s, 1 - step_s / now.total_s, sizes)

    ways = [] if compression is None else [other("no compression", simulate(record, buckets, cost).total_s)]
    ways += [
        other(each.name, simulate(record, compressed_buckets, cost, compression=each).total_s)
        for each in compressions
        if compression is None or each.name != compression.name
    ]
    # A step of LocalSGD: its own computing, and its share of the average of all parameters after the last step.
    average_s = -(-record.nbytes // _LOCAL_CHUNK_BYTES) * cost.latency_s + record.nbytes * cost.seconds_per_byte
    ways.append(other(f"LocalSGD, every={_LOCAL_STEPS}", record.compute_s + average_s / _LOCAL_STEPS))
    return StepReport(
        ranks=cost.ranks,
        backend=backend,
        compression="none" if compression is None else compression.name,
        measured_step_s=statistics.median(step_times_s),
        computed_s=compute_times_s,
        record=record,
        step=now,
        exposed=_exposed(now, simulate(record, buckets, replace(cost, latency_s=0.0), compression=compression)),
        cost=cost,
        plans=[
            other(
                title,
                simulate(record, plan, cost, compression=compression).total_s,
                [bucket.nbytes for bucket in plan if bucket.indices],
            )
            for title, plan in plans.items()
            if plan != buckets
        ],
        ways=ways,
    )


def _exposed(now: SimulatedStep, without_latency: SimulatedStep) -> Exposed:
    rest_s = min(without_latency.exposed_s, now.exposed_s)
    last = without_latency.buckets[-1]
    last_s = min(rest_s, last.end_s - last.start_s)
    return Exposed(latency_s=now.exposed_s - rest_s, last_s=last_s, queued_s=rest_s - last_s)


def _line(name: str, seconds: float, text: str) -> str:
    return f"  {name:20}{_ms(seconds):>9}  {text}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _rate(cost: LinkCost) -> str:
    if not cost.seconds_per_byte:
        return "bytes cost nothing"
    rate = cost.ring_bytes_per_s
    return f"{rate / 1e9:.3g} GB/s a rank" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s a rank"


def _sizes(nbytes: Sequence[int]) -> str:
    """Format sizes of buckets in MiB, with runs of equal sizes counted."""
    runs = [(size, len(list(alike))) for size, alike in groupby(f"{each / _MIB:.2g}" for each in nbytes)]
    texts = [size if times == 1 else f"{times} x {size}" for size, times in runs]
    if len(texts) > 4:
        texts = [*texts[:2], "...", texts[-1]]
    return f"{', '.join(texts)} MiB"


def _gain(gain: float) -> str:
    return f"{-100 * gain:+.0f} %"
