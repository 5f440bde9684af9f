"""What `model.explain()` returns: where the time of a step goes, and what other ways to communicate would cost.

Pure functions of what was measured. Other plans, compressions and LocalSGD are simulated (`simulate`), none is tried.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddp.data_parallel.planning.bucket_planner import LEAST_SAVING
from ddp.data_parallel.planning.link_cost import CompressionCost, LinkCost
from ddp.data_parallel.planning.simulate import Bucket, SimulatedStep, simulate
from ddp.data_parallel.planning.step_record import StepRecord

__all__ = ["Exposed", "OtherWay", "StepReport", "explain_step"]

_LOCAL_STEPS = 8  # of LocalSGD between two averages
_LOCAL_CHUNK_BYTES = 64 << 20  # in which LocalSGD averages
_MIB = 1 << 20


@dataclass(frozen=True)
class Exposed:
    """Why communication was exposed, in seconds that add up to all of it.

    `latency_s`: what would not be exposed if messages took no time before their first byte. Of the rest, `last_s` is
    the bucket that leaves at the end of backward, and `queued_s` those before it, which were still on their way then.
    """

    latency_s: float
    last_s: float
    queued_s: float


@dataclass(frozen=True)
class OtherWay:
    """Another plan, compression or LocalSGD: its step as simulated, and by how much of this one it is shorter."""

    title: str
    step_s: float
    gain: float
    bucket_bytes: Sequence[int] = ()

    @property
    def pays(self) -> bool:
        """Whether it saves as much as `compression="auto"` asks for; simulations err."""
        return self.gain >= LEAST_SAVING


@dataclass(frozen=True)
class StepReport:
    """Where a step's time goes. `str()` is one screen of 80 columns.

    `measured_step_s` is the median over `measured_steps` steps of this rank; `step` is the model's, with the record of
    the slowest rank; `behind_slowest_s` is what that one computes longer than this one.
    """

    ranks: int
    backend: str
    compression: str
    measured_steps: int
    measured_step_s: float
    behind_slowest_s: float
    record: StepRecord
    step: SimulatedStep
    exposed: Exposed
    cost: LinkCost
    plans: Sequence[OtherWay]
    ways: Sequence[OtherWay]

    def as_dict(self) -> dict[str, Any]:
        """All of it in numbers, strings, lists and dicts, as JSON has them."""
        step, record = self.step, self.record
        return {
            "ranks": self.ranks,
            "backend": self.backend,
            "compression": self.compression,
            "measured_steps": self.measured_steps,
            "measured_step_s": self.measured_step_s,
            "step_s": step.total_s,
            "compute_s": step.compute_s,
            "forward_s": record.forward_s,
            "backward_s": record.backward_s,
            "other_s": record.other_s,
            "delayed_s": step.delayed_s,
            "wire_s": step.wire_s,
            "overlapped_s": step.overlapped_s,
            "exposed_s": step.exposed_s,
            "exposed_by": asdict(self.exposed),
            "behind_slowest_s": self.behind_slowest_s,
            "link": {**asdict(self.cost), "ring_bytes_per_s": _finite(self.cost.ring_bytes_per_s)},
            "buckets": [
                {"nbytes": t.bucket.nbytes, "ready_s": t.ready_s, "start_s": t.start_s, "end_s": t.end_s}
                for t in step.buckets
            ],
            "other_plans": [_way_dict(way) for way in self.plans],
            "other_ways": [_way_dict(way) for way in self.ways],
        }

    def __str__(self) -> str:
        return "\n".join([*self._times(), *self._plans(), *self._ways()])

    def _times(self) -> Iterator[str]:
        step, record, count = self.step, self.record, len(self.step.buckets)
        sent = sum(time.bucket.nbytes for time in step.buckets)
        how = "" if self.compression == "none" else f", {self.compression}"
        yield f"A step on {self.ranks} ranks ({self.backend}{how})"
        yield _line("measured", self.measured_step_s, f"median of {_count(self.measured_steps, 'step')} of this rank")
        yield _line("by the model", step.total_s, "compute, delayed and exposed")
        parts = f"forward {_ms(record.forward_s)}, backward {_ms(record.backward_s)}, rest {_ms(record.other_s)}"
        yield _line("compute", step.compute_s, parts)
        if step.delayed_s >= 5e-5:
            compressing = "" if self.compression == "none" else "compressing; "
            yield _line("delayed", step.delayed_s, f"{compressing}cores taken by communication")
        yield _line("wire", step.wire_s, f"{sent / _MIB:.3g} MiB in {_count(count, 'bucket')}, {_link(self.cost)}")
        yield _line("  overlapped", step.overlapped_s, "beside backward")
        yield _line("  exposed", step.exposed_s, "after backward" if step.exposed_s >= 5e-5 else "nothing")
        exposed = self.exposed
        reasons = (
            (exposed.queued_s, "link slower than backward: buckets queued"),
            (exposed.last_s, "last bucket leaves only at the end of backward"),
            (exposed.latency_s, f"latency: {_count(count, 'collective')} of {self.cost.latency_s * 1e6:.0f} us"),
        )
        for seconds, text in sorted(reasons, reverse=True):
            if seconds >= 5e-5:
                yield _line("    of it", seconds, text)
        if self.behind_slowest_s >= 5e-5:
            yield _line("stragglers", self.behind_slowest_s, "the slowest rank computes longer than this one")

        if self.measured_step_s > step.total_s:
            unexplained_s = self.measured_step_s - step.total_s
            yield _line("unexplained", unexplained_s, "not in the model: load, waiting elsewhere")

    def _plans(self) -> Iterator[str]:
        sizes = [time.bucket.nbytes for time in self.step.buckets if time.bucket.indices]
        yield "Plan of buckets"
        yield _line("  now", self.step.total_s, _sizes(sizes))
        for plan in self.plans:
            yield _line(f"  {plan.title}", plan.step_s, f"{_gain(plan.gain):>6}  {_sizes(plan.bucket_bytes)}")

    def _ways(self) -> Iterator[str]:
        yield "Would it pay?"
        for way in self.ways:
            yield _line(f"  {way.title}", way.step_s, f"{_gain(way.gain):>6}  {'yes' if way.pays else 'no'}")


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
    """Explain the step that is made now, with `buckets` and `compression`, and simulate the others.

    `step_times_s` and `compute_times_s` are this rank's measured steps and what it computed in each; `plans` are
    other buckets by title, `compressions` the ones to compare, which would have `compressed_buckets`.
    """
    now = simulate(record, buckets, cost, compression=compression)

    def other(title: str, step_s: float, sizes: Sequence[int] = ()) -> OtherWay:
        return OtherWay(title, step_s, 1 - step_s / now.total_s, sizes)

    other_plans = [
        other(
            title, simulate(record, plan, cost, compression=compression).total_s, [b.nbytes for b in plan if b.indices]
        )
        for title, plan in plans.items()
    ]
    ways = [] if compression is None else [other("no compression", simulate(record, buckets, cost).total_s)]
    ways += [
        other(each.name, simulate(record, compressed_buckets, cost, compression=each).total_s)
        for each in compressions
        if compression is None or each.name != compression.name
    ]
    ways.append(other(f"LocalSGD, every={_LOCAL_STEPS}", _local_step_s(record, cost)))
    own_s = statistics.median(compute_times_s)
    return StepReport(
        ranks=cost.ranks,
        backend=backend,
        compression="none" if compression is None else compression.name,
        measured_steps=len(step_times_s),
        measured_step_s=statistics.median(step_times_s),
        behind_slowest_s=max(0.0, record.compute_s - own_s),
        record=record,
        step=now,
        exposed=_exposed(record, buckets, cost, now, compression),
        cost=cost,
        plans=other_plans,
        ways=ways,
    )


def _exposed(
    record: StepRecord,
    buckets: Sequence[Bucket],
    cost: LinkCost,
    now: SimulatedStep,
    compression: CompressionCost | None,
) -> Exposed:
    at_once = simulate(record, buckets, replace(cost, latency_s=0.0), compression=compression)
    rest_s = min(at_once.exposed_s, now.exposed_s)
    last = at_once.buckets[-1]
    last_s = min(rest_s, last.end_s - last.start_s)
    return Exposed(latency_s=now.exposed_s - rest_s, last_s=last_s, queued_s=rest_s - last_s)


def _local_step_s(record: StepRecord, cost: LinkCost) -> float:
    """A step of LocalSGD: its own computing, and its share of the average of all parameters after the last."""
    chunks = -(-record.nbytes // _LOCAL_CHUNK_BYTES)
    average_s = chunks * cost.latency_s + record.nbytes * cost.seconds_per_byte
    return record.compute_s + average_s / _LOCAL_STEPS


def _way_dict(way: OtherWay) -> dict[str, Any]:
    return {"title": way.title, "step_s": way.step_s, "gain": way.gain, "bucket_bytes": list(way.bucket_bytes)}


def _finite(number: float) -> float | None:
    return number if number < float("inf") else None


def _line(name: str, seconds: float, text: str) -> str:
    return f"  {name:20}{_ms(seconds):>9}  {text}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _link(cost: LinkCost) -> str:
    if not cost.seconds_per_byte:
        return "bytes cost nothing"
    rate = cost.ring_bytes_per_s
    return f"{rate / 1e9:.3g} GB/s a rank" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s a rank"


def _sizes(nbytes: Sequence[int]) -> str:
    """Sizes of buckets in MiB, those alike one after the other counted."""
    runs: list[tuple[str, int]] = []
    for size in (f"{each / _MIB:.2g}" for each in nbytes):
        runs = [*runs[:-1], (size, runs[-1][1] + 1)] if runs and runs[-1][0] == size else [*runs, (size, 1)]
    words = [size if times == 1 else f"{times} x {size}" for size, times in runs]
    if len(words) > 4:
        words = [*words[:2], "...", words[-1]]
    return f"{', '.join(words)} MiB"


def _gain(gain: float) -> str:
    return f"{-100 * gain:+.0f} %"
