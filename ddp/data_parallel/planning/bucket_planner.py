"""Choose the buckets of a model from measurements of its first steps; the same on every rank.

The reducer reports every pass. After the first, which shows the order of gradients, two passes hold their buckets back
until backward has ended, to show when gradients are ready with nothing on the wire; the next two run normally. Then
the ranks agree on the slowest value of each figure, and all use rank 0's decision; on a device two steps later, when
its events can be read.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from ddp.comm.channel import Channel
from ddp.comm.failures import changing_together, failing_together
from ddp.data_parallel.buckets.bucket_plan import BucketLimits
from ddp.data_parallel.buckets.gradient_sums import GradientSums
from ddp.data_parallel.planning.link_cost import LinkCost, agree, measure_link
from ddp.data_parallel.planning.simulate import Choice, GradReady, StepRecord, buckets_of, choose, simulate
from ddp.data_parallel.planning.step_timer import Clock, StepTimer, StepTimes, TimedStep, clock_of
from ddp.torch_internals import adds_in_fixed_order, backend_of

_HELD_STEPS = 2
_FREE_STEPS = 2

_PIECE_BYTES = 1 << 20
_SLOW_PIECE_S = 0.006  # about 1.4 Gbit/s; on faster links the CPU time of more all-reduces matters

# Whether measurement may change the sizes of buckets: "exact" only if the averages stay the same to the bit, "asked" at
# the user's request, with a warning if no decision is possible.
Replanning = Literal["no", "exact", "asked"]


@dataclass(frozen=True)
class Measurement:
    """Results of the first steps, the same on every rank: their record, the link, and the decision.

    `step_s` is the measured time of a step with the buckets of that time, whose sizes are `limits`. `choices` are sizes
    of buckets with their simulated steps, quickest first.
    """

    record: StepRecord
    link: LinkCost
    step_s: float
    limits: BucketLimits
    choices: tuple[Choice, ...]


class BucketPlanner:
    """Measures the first steps of a model by `clock`. Every rank must create it with equal arguments."""

    def __init__(self, channel: Channel, link: LinkCost, clock: Clock, replanning: Replanning) -> None:
        self.timer = StepTimer(clock)
        self.is_deciding = True
        self.measurement: Measurement | None = None
        self._channel = channel
        self._link = link
        self._replanning = replanning
        self.restart()

    @classmethod
    def of(
        cls,
        channel: Channel,
        parameters: Sequence[tuple[str, torch.Tensor]],
        replanning: Replanning,
        *,
        by_tree: bool = False,
    ) -> BucketPlanner | None:
        """Measure the link of a model with `parameters`; None if these are on several devices.

        `by_tree`: its sums do not depend on buckets. Every rank must call it; blocks.
        """
        devices = {parameter.device for _, parameter in parameters if parameter.requires_grad}
        if len(devices) > 1:
            return None
        (device,) = devices
        if replanning == "exact" and not (by_tree or _are_exact(channel.group, device)):
            replanning = "no"
        return cls(channel, measure_link(channel, device), clock_of(device), replanning)

    def restart(self) -> None:
        """Measure from the next step on: the gradients or their order have changed."""
        self._steps = 0
        self._held: list[TimedStep] = []
        self._free: list[TimedStep] = []
        self._is_missing = False
        self.timer.restart()

    def keep_buckets(self) -> None:
        """Measure, but change nothing: the buckets of a checkpoint must stay."""
        self._replanning = "no"

    @property
    def holds(self) -> bool:
        """Whether buckets of the next pass must wait for the end of backward."""
        return self.is_deciding and self._steps < _HELD_STEPS

    def count_step(self) -> None:
        """Count a pass in which all ranks have sent everything without failures: it is a step on every rank.

        If one rank alone raises after this, its count must not fall behind the others'.
        """
        self._steps += 1

    @property
    def decides(self) -> bool:
        """Whether the ranks decide at the end of the pass that is counted now."""
        return self.is_deciding and self._steps >= _HELD_STEPS + _FREE_STEPS + self.timer.clock.late_steps

    def step_ended(self, sums: GradientSums, *, has_joined: bool) -> None:
        """End a step, when averages are in place. After the last measured one, agree with the other ranks; blocks.

        Every rank must call it in the same passes, after `count_step`. `has_joined`: this rank had no inputs, so its
        times do not count.
        """
        step = self.timer.end_step(sums.arrived)
        if self.is_deciding and not has_joined and self._steps <= _HELD_STEPS + _FREE_STEPS:
            self._is_missing |= step is None
            if step is not None:
                (self._held if self._steps <= _HELD_STEPS else self._free).append(step)
        if not self.decides:
            return
        self.is_deciding = False
        self.timer.forget()
        figures = self._agreed(sums)
        if figures is None:
            self._warn(
                "the steps to measure were incomplete on some rank (uneven inputs, create_graph, a forward pass inside "
                "of backward)"
            )
            return
        with failing_together(self._channel, "the choice of buckets"):
            self.measurement, limits = self._chosen(sums, *figures)
        # The simulation has the same result on all ranks, unless their floating-point arithmetic differs.
        every = self._channel.gather(dataclasses.astuple(limits), "agreement on the sizes of buckets")
        if (limits := BucketLimits(*every[0])) != sums.limits:
            with changing_together(self._channel):
                sums.use_limits(limits)

    def _chosen(
        self, sums: GradientSums, record: StepRecord, link: LinkCost, step_s: float
    ) -> tuple[Measurement, BucketLimits]:
        """Choose sizes of buckets from these figures."""
        current = sums.limits
        if sums.has_hook:  # its state may depend on these buckets
            self._warn("the state of compression or a communication hook may depend on these buckets")
            self.keep_buckets()
        choices = choose(record, link, current, lambda limits: buckets_of(sums.plans_for(limits)))
        best = current if self._replanning == "no" else choices[0].limits
        pieces = None if sums.has_hook else self._piece_bytes(link)
        measurement = Measurement(record, link, step_s, current, tuple(choices))
        return measurement, dataclasses.replace(best, piece_bytes=pieces)

    def _piece_bytes(self, link: LinkCost) -> int | None:
        """Return the size of pieces for gloo on a slow link; None: whole. It changes no bit of two ranks' sums.

        In a large all-reduce of gloo, requests for data wait behind data in the same direction: measured at 100 Mbit/s,
        32 MB take 6 % longer in all-reduces of 4 MB than in those of 1 MB, which take the time of the bytes; at 1
        Gbit/s, 1 or 2 %.
        """
        if self.timer.clock.is_device:  # the group may have no backend for the CPU
            return None
        backend = backend_of(self._channel.group, torch.device("cpu")).name()
        is_slow = _PIECE_BYTES * link.seconds_per_byte > _SLOW_PIECE_S
        return _PIECE_BYTES if is_slow and link.ranks == 2 and backend == "gloo" else None

    def _warn(self, why: str) -> None:
        if self._replanning == "asked":
            warnings.warn(f'bucket_cap_mb="auto" has no effect, buckets stay as they are: {why}', stacklevel=2)

    def _agreed(self, sums: GradientSums) -> tuple[StepRecord, LinkCost, float] | None:
        """Return the slowest rank's figures, part by part, and the link as seen by the last rank to end backward."""
        held: list[StepTimes] = []
        free: list[StepTimes] = []
        try:
            if not self._is_missing:
                held, free = ([step.times() for step in steps] for steps in (self._held, self._free))
        except RuntimeError:  # the device lost an event; the others must not wait for this rank
            self._is_missing = True
        mine = [float(self._is_missing), *[-math.inf] * (6 + len(sums.order))]
        if held and free:
            # Disturbances make a step longer, so the shortest of each part is the best.
            mine = [
                0.0,
                min(t.forward_s for t in held + free),
                min(t.backward_s for t in held),
                min(t.other_s for t in held + free),
                -min(t.wire_s for t in held),
                min(t.backward_s for t in free),
                min(t.total_s for t in free),
                *(min((t.ready_s[index] for t in held if index in t.ready_s), default=0.0) for index in sums.order),
            ]
        with self._channel.report.waiting("agreement on the sizes of buckets"):
            slowest = agree(self._channel, mine)
        missing, forward_s, backward_s, other_s, wire_s, free_backward_s, step_s, *ready_s = slowest
        if missing or math.isinf(step_s):
            return None
        gradients = (GradReady(spec.index, spec.nbytes, when) for spec, when in zip(sums.specs, ready_s, strict=True))
        record = StepRecord(tuple(sorted(gradients, key=lambda each: each.ready_s)), forward_s, backward_s, other_s)
        if sums.has_hook:
            return record, self._link, step_s
        buckets = buckets_of(sums.plans_for(sums.limits))
        link = self._link.corrected(len(buckets), sum(bucket.nbytes for bucket in buckets), -wire_s)
        delayed_s, overlapped_s = free_backward_s - backward_s, simulate(record, buckets, link).overlapped_s
        if delayed_s > 0 and overlapped_s > 0:
            link = dataclasses.replace(link, contention=delayed_s / overlapped_s)
        return record, link, step_s


def _are_exact(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether sums have the same bits for any buckets, as those of two ranks have.

    With more ranks, the order of additions in a ring depends on a number's position in its tensor.
    """
    return group.size() <= 2 or adds_in_fixed_order(group, device)
