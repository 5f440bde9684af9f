"""Gathers what `model.explain` says. It never communicates: what it needs was agreed on in the first steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from ddp.compression.compressors import Half, Int8, PowerSGD, named
from ddp.compression.powersgd import PowerSGDCompressor
from ddp.compression.rehearsal import RehearsalGroup, bucket_like
from ddp.compression.row_compressor import RowCompressor
from ddp.data_parallel.buckets.bucket_plan import BucketLimits, Member
from ddp.data_parallel.buckets.bucket_schedule import BucketSchedule
from ddp.data_parallel.explaining.all_reduce_models import Link
from ddp.data_parallel.explaining.extrapolate import PUBLISHED, Extrapolator, link_of
from ddp.data_parallel.explaining.scaling_report import ScalingReport
from ddp.data_parallel.explaining.step_report import StepReport, explain_step
from ddp.data_parallel.planning.bucket_planner import BucketPlanner, Measurement
from ddp.data_parallel.planning.link_cost import CompressionCost, LinkCost, exchange_ratio
from ddp.data_parallel.planning.simulate import Bucket, buckets_of
from ddp.errors import ArgumentError, DdpError, UnsupportedError
from ddp.torch_internals import backend_of

__all__ = ["Explained"]

_METHODS = ("bf16", "int8", "powersgd")
_REHEARSALS = 3
_REHEARSED_BYTES = 4 << 20
_MIB = 1 << 20
_OTHER_LIMITS = {
    "one bucket": BucketLimits(1 << 62, (), None),
    "torch's, 25 MiB": BucketLimits(25 * _MIB, (1 * _MIB,), None),
}
_FEWEST_STEPS = 3  # after those that are measured


@dataclass(frozen=True)
class Explained:
    """What is known of a model: its buckets, what was measured, what it sends by, with its settings.

    Raises DdpError from `of` where too little is known.
    """

    schedule: BucketSchedule
    planner: BucketPlanner
    measurement: Measurement
    group: dist.ProcessGroup
    members: Sequence[Member]
    compression: Half | Int8 | PowerSGD | None

    @classmethod
    def of(
        cls,
        schedule: BucketSchedule,
        planner: BucketPlanner | None,
        group: dist.ProcessGroup,
        members: Sequence[Member],
        compression: Half | Int8 | PowerSGD | None,
    ) -> Explained:
        """Check that enough is known. Raises UnsupportedError if it never will be, DdpError if it is not yet."""
        if planner is None:
            raise UnsupportedError(
                "explain() needs what is measured in the first steps, and nothing was of this model: wrap it with "
                'measure=True and init_sync=True, and without bucket_cap_mb or, on the CPU, with bucket_cap_mb="auto"'
            )
        if schedule.has_hook and compression is None:
            raise UnsupportedError("explain() does not know what a communication hook of your own costs")
        if schedule.has_hook and planner.clock.is_device:
            raise UnsupportedError(
                "explain() does not know what compressing costs on a device: wrap it without, to see"
            )
        steps = len(planner.recent.times_s()[0])
        if planner.timer is not None or steps < _FEWEST_STEPS:
            raise DdpError(
                "explain() needs the first 10 steps of training: some are measured, the next show how long a step "
                "takes. Call it after more steps"
            )
        if planner.measurement is None:
            raise DdpError(
                "explain() has nothing to go by: the steps that were to be measured were not whole on every rank "
                "(uneven inputs, create_graph, a forward pass inside of backward)"
            )
        return cls(schedule, planner, planner.measurement, group, members, compression)

    @property
    def _backend(self) -> str:
        return str(backend_of(self.group, self.members[0].parameter.device).name())

    @property
    def _buckets(self) -> list[Bucket]:
        return buckets_of(self.schedule.plans_for(self.schedule.limits))

    def report(self) -> StepReport:
        """Where the time of a step goes, and what other ways would cost."""
        found, schedule = self.measurement, self.schedule
        steps_s, computed_s = self.planner.recent.times_s()
        ratio = exchange_ratio(self._backend, self.group.size(), self.planner.hosts)

        def cost_of(method: Half | Int8 | PowerSGD) -> CompressionCost:
            cost = self._rehearsed(method)(found.link)
            return replace(cost, wire_ratio=cost.wire_ratio * ratio)

        buckets, compressed_limits = self._buckets, self.planner.compressed_limits or schedule.limits
        limits = {**_OTHER_LIMITS, "quickest": found.choices[0].limits}
        plans = {title: buckets_of(schedule.plans_for(each)) for title, each in limits.items()}
        return explain_step(
            found.record,
            found.link,
            buckets,
            backend=self._backend,
            step_times_s=steps_s,
            compute_times_s=computed_s,
            plans={title: plan for title, plan in plans.items() if plan != buckets},
            compression=None if self.compression is None else cost_of(self.compression),
            compressed_buckets=buckets_of(schedule.plans_for(compressed_limits, compressed=True)),
            compressions=[] if self.planner.clock.is_device else [cost_of(named(name)) for name in _METHODS],
        )

    def scaling(
        self, hosts: int | None, gpus: int, gbit: float | None, latency_us: float | None, local_gbyte_s: float | None
    ) -> ScalingReport:
        """The step with `gpus` ranks on each of `hosts`; for the arguments see `DistributedDataParallel.explain`."""
        for name, value in (("hosts", hosts), ("gpus", gpus), ("gbit", gbit), ("local_gbyte_s", local_gbyte_s)):
            if value is not None and not value > 0:
                raise ArgumentError(f"explain({name}={value}): it must be more than 0")
        if latency_us is not None and not latency_us >= 0:
            raise ArgumentError(f"explain(latency_us={latency_us}): it must be at least 0")
        if hosts is None:
            raise ArgumentError("explain(gpus=, gbit=, ...) extrapolates: say to how many hosts= as well")
        found, hosts_here = self.measurement, len(self.planner.hosts or [0])
        here = link_of(found.link, self._backend, hosts_here)
        local, network, notes = _links(here, hosts_here, hosts, gbit, latency_us, local_gbyte_s)
        if self.planner.hosts is None:
            notes.append("The launcher does not say which ranks share a host: taken for ranks of one host.")
        _, computed_s = self.planner.recent.times_s()
        made = Extrapolator(
            found.record,
            self._buckets,
            self._backend,
            found.link.contention,
            computed_s,
            local,
            network,
            compression=None if self.compression is None else self._rehearsed(self.compression),
        )
        return ScalingReport(
            steps=made.steps(hosts, gpus),
            needed=[made.needed(published) for published in PUBLISHED],
            ranks_per_host=gpus,
            local=local,
            network=network,
            algorithm=made.algorithm,
            backend=self._backend,
            notes=notes,
        )

    def _rehearsed(self, method: Half | Int8 | PowerSGD) -> Callable[[LinkCost], CompressionCost]:
        """What a method costs on a link, by compressing gradients of this model's shapes here; nothing is sent."""
        compressor = method.compressor(RehearsalGroup(self.group.size()), None)
        assert isinstance(compressor, RowCompressor | PowerSGDCompressor)
        bucket = bucket_like([member.parameter for member in self.members], _REHEARSED_BYTES)
        tries = [compressor.rehearse(bucket) for _ in range(_REHEARSALS)]  # the first one takes fresh memory
        compressor.close()
        name = compressor.name
        nbytes, sent_bytes = bucket.buffer().nbytes, tries[0].wire_bytes
        before, after = min(each.before_s for each in tries) / nbytes, min(each.after_s for each in tries) / nbytes

        def cost_of(link: LinkCost) -> CompressionCost:
            if not isinstance(method, PowerSGD):
                return CompressionCost(name, sent_bytes / nbytes, before, after)
            # Over gloo, backward waits until a bucket is through.
            waiting_s = 2 * link.latency_s + sent_bytes * link.seconds_per_byte
            return CompressionCost(name, 0.0, before + waiting_s / nbytes, 0.0, collectives=0)

        return cost_of


def _links(
    here: Link,
    hosts_here: int,
    hosts: int,
    gbit: float | None,
    latency_us: float | None,
    local_gbyte_s: float | None,
) -> tuple[Link, Link, list[str]]:
    """The links within a host and between hosts, and where each comes from. Raises ArgumentError."""
    if gbit is None and hosts_here == 1 and hosts > 1:
        raise ArgumentError(
            "explain(hosts=...) of a world on one host, which has measured no network: say what it carries, gbit="
        )
    latency_s = here.latency_s if latency_us is None else latency_us * 1e-6
    rate = here.bytes_per_s if gbit is None else gbit * 1e9 / 8
    notes = ["Every rank computes what it does here, and nobody else uses the network."]
    said = "as here" if latency_us is None else "as given"
    notes.append(f"A message takes {latency_s * 1e6:.0f} us to another host, {said}.")
    if local_gbyte_s is not None:
        local = Link(here.latency_s if hosts_here == 1 else 0.0, local_gbyte_s * 1e9)
        notes.append(f"Ranks of a host exchange {local_gbyte_s:g} GB/s each, as given.")
    elif hosts_here == 1:
        local = here
        notes.append(f"Ranks of a host exchange {here.bytes_per_s / 1e9:.3g} GB/s each, as measured.")
    else:
        local = Link(0.0, float("inf"))
        notes.append("Links within a host were not measured, cost nothing here: give local_gbyte_s=.")
    return local, Link(latency_s, rate), notes
