"""Decides the buckets of a model, and whether to compress, by its first steps; the same on every rank.

The reducer tells it of every pass. After the first one, which shows the order of gradients, two passes hold their
buckets back until backward has ended, so that they show when gradients are ready with nothing on the wire; the next two
run as they are. Then the ranks agree on the slowest of each figure, and all take the decision of rank 0; on a device,
two steps later, when it has come by what is to be read.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddp.comm.broadcast import broadcast_tensors
from ddp.comm.channel import Channel
from ddp.comm.failures import changing_together, failing_together
from ddp.data_parallel.buckets.bucket_plan import BucketLimits
from ddp.data_parallel.buckets.bucket_schedule import BucketSchedule
from ddp.data_parallel.planning.choose import Choice, choose
from ddp.data_parallel.planning.clock import Clock
from ddp.data_parallel.planning.link_cost import CompressionCost, LinkCost
from ddp.data_parallel.planning.measure_link import agree
from ddp.data_parallel.planning.recent_steps import RecentSteps
from ddp.data_parallel.planning.simulate import buckets_of, simulate
from ddp.data_parallel.planning.step_record import GradReady, StepRecord
from ddp.data_parallel.planning.step_timer import Moment, StepTimer, StepTimes, TimedStep
from ddp.torch_internals import backend_of

__all__ = ["LEAST_SAVING", "BucketPlanner", "Measurement"]

_HELD_STEPS = 2
_FREE_STEPS = 2

# What compression must save of a simulated step: it costs exactness, and simulations err.
LEAST_SAVING = 0.1

_PIECE_BYTES = 1 << 20
_SLOW_PIECE_S = 0.006  # some 1.4 Gbit/s; on quicker links the processor time of more all-reduces counts


@dataclass(frozen=True)
class Measurement:
    """What the first steps showed, the same on every rank: their record, the link, and what was decided by them.

    `step_s` is the time of a step as measured, with the buckets that there were. `choices` are sizes of buckets with
    their simulated steps without compression, quickest first. `compressed`: for each compression that was considered,
    its name and the step with it.
    """

    record: StepRecord
    link: LinkCost
    step_s: float
    limits: BucketLimits
    choices: tuple[Choice, ...]
    compressed: tuple[tuple[str, Choice], ...] = ()


class BucketPlanner:
    """Watches the first steps of the model that `schedule` has the buckets of. Every rank must make it alike.

    `clock` times them. `replans`: take the sizes of buckets that leave least exposed. `asked`: the argument of the user
    that wants this decided, who is warned if nothing can be. `hosts`: the ranks on each, None if not known.
    `compressions`: what compression would cost, of those that may be used; `compress` is called with the name of one
    that pays, on every rank in the same step.
    """

    def __init__(
        self,
        channel: Channel,
        link: LinkCost,
        clock: Clock,
        *,
        replans: bool,
        hosts: Sequence[int] | None = None,
        asked: str | None = None,
        compressions: Sequence[CompressionCost] = (),
        compressed_limits: BucketLimits | None = None,
        compress: Callable[[str], None] | None = None,
    ) -> None:
        self.clock = clock
        self.timer: StepTimer | None = StepTimer(clock)
        self.measurement: Measurement | None = None
        self.recent = RecentSteps(clock)  # since the decision
        self.hosts = hosts
        self._channel = channel
        self._link = link
        self._replans = replans
        self._asked = asked
        self._compressions = compressions
        self.compressed_limits = compressed_limits
        self._compress = compress
        self.restart()

    def restart(self) -> None:
        """Measure from the next step on: gradients come in another order, or others do."""
        self._steps = 0
        self._held: list[TimedStep] = []
        self._free: list[TimedStep] = []
        self._is_missing = False
        if self.timer is not None:
            self.timer.end_step({})

    def keep_buckets(self) -> None:
        """Measure, but change nothing: what a checkpoint says of buckets and compression is to stay."""
        self._replans, self._compressions, self._asked = False, (), None

    @property
    def holds(self) -> bool:
        """Whether buckets of the next pass must wait for the end of backward."""
        return self.timer is not None and self._steps < _HELD_STEPS

    def count_step(self) -> None:
        """All ranks have sent what a pass has to send, without failures: it is one of the first steps on every rank.

        What a rank alone raises after this must not let its count fall behind that of the others.
        """
        self._steps += 1

    @property
    def decides(self) -> bool:
        """Whether the ranks agree at the end of the pass that is counted now."""
        return self.timer is not None and self._steps >= _HELD_STEPS + _FREE_STEPS + self.clock.late_steps

    def mark(self, moment: Moment) -> None:
        """This moment of a step is now."""
        (self.timer or self.recent).mark(moment)

    def step_failed(self) -> None:
        """A pass has failed on this rank: the next step begins here."""
        if self.timer is not None:
            self.timer.end_step({})

    def step_ended(self, schedule: BucketSchedule, arrived: Mapping[int, Any], *, has_joined: bool) -> None:
        """The averages of a pass are in place. After the last that is measured, agree with the other ranks; blocks.

        Every rank must call it in the same passes, after `count_step`. `has_joined`: this rank had no inputs, so its
        times do not count.
        """
        if self.timer is None:
            self.recent.ended(schedule.waited_s)
            return
        step = self.timer.end_step(arrived)
        if not has_joined and self._steps <= _HELD_STEPS + _FREE_STEPS:
            self._is_missing |= step is None
            if step is not None:
                (self._held if self._steps <= _HELD_STEPS else self._free).append(step)
        if self.decides:
            self.timer = None
            figures = self._agreed(schedule)
            if figures is None:
                self._warn(
                    "the steps that were to be measured were not whole on every rank (uneven inputs, create_graph, a "
                    "forward pass inside of backward)"
                )
                return
            with failing_together(self._channel, "the choice of buckets"):
                measurement, name, limits = self._chosen(schedule, *figures)
            self.measurement = measurement
            self._use(schedule, *self._of_rank_0(name, limits))

    def _chosen(
        self, schedule: BucketSchedule, record: StepRecord, link: LinkCost, step_s: float
    ) -> tuple[Measurement, str | None, BucketLimits]:
        """What is chosen by these figures: a compression or none, and sizes of buckets."""
        if schedule.has_hook:  # what it holds may be of these buckets
            if self._replans:
                self._warn("compression or a communication hook may hold what is of these buckets")
            self.keep_buckets()
        choices = choose(record, link, schedule.limits, lambda limits: buckets_of(schedule.plans_for(limits)))
        best = self._allowed(choices, schedule.limits)
        compressed = []
        for cost in self._compressions:
            assert self.compressed_limits is not None
            among = choose(
                record,
                link,
                self.compressed_limits,
                lambda limits: buckets_of(schedule.plans_for(limits, compressed=True)),
                compression=cost,
            )
            compressed.append((cost.name, self._allowed(among, self.compressed_limits)))
        measurement = Measurement(record, link, step_s, schedule.limits, tuple(choices), tuple(compressed))
        compressed.sort(key=lambda pair: pair[1].step.total_s)
        name = None
        if compressed and compressed[0][1].step.total_s < best.step.total_s * (1 - LEAST_SAVING):
            name, best = compressed[0]
        pieces = None if name is not None or schedule.has_hook else self._piece_bytes(link)
        return measurement, name, dataclasses.replace(best.limits, piece_bytes=pieces)

    def _piece_bytes(self, link: LinkCost) -> int | None:
        """In what pieces gloo should reduce over a slow link; None: whole. Of two ranks' sums, no bit changes by it.

        In a large all-reduce of gloo, what asks for data waits behind data that goes the same way: measured at 100
        Mbit/s, 32 MB take 6 % longer in all-reduces of 4 MB than in those of 1 MB, which take the time of the bytes; at
        1 Gbit/s, 1 or 2 %.
        """
        if self.clock.is_device:  # the group may have no backend for the CPU
            return None
        backend = backend_of(self._channel.group, torch.device("cpu")).name()
        is_slow = _PIECE_BYTES * link.seconds_per_byte > _SLOW_PIECE_S
        return _PIECE_BYTES if is_slow and link.ranks == 2 and backend == "gloo" else None

    def _use(self, schedule: BucketSchedule, name: str | None, limits: BucketLimits) -> None:
        if name is None and limits == schedule.limits:
            return
        with changing_together(self._channel):
            if limits != schedule.limits:
                schedule.use_limits(limits)
            if name is not None and self._compress is not None:
                self._compress(name)

    def _warn(self, why: str) -> None:
        if self._asked is not None:
            warnings.warn(f"{self._asked} decides nothing, buckets stay as they are: {why}", stacklevel=2)

    def _allowed(self, choices: Sequence[Choice], limits: BucketLimits) -> Choice:
        """The quickest of `choices`; the one with `limits` if sizes must not follow from measurement."""
        return choices[0] if self._replans else next(choice for choice in choices if choice.limits == limits)

    def _of_rank_0(self, name: str | None, limits: BucketLimits) -> tuple[str | None, BucketLimits]:
        """The decision of rank 0: simulation gives the same on all, unless their machines add up otherwise."""
        names = [cost.name for cost in self._compressions]
        first, own, piece = limits.first_caps_bytes, limits.own_bytes, limits.piece_bytes
        mine = [
            -1 if name is None else names.index(name),
            limits.cap_bytes,
            -1 if own is None else own,
            -1 if piece is None else piece,
            *first,
        ]
        length = torch.tensor([len(mine)], device="cpu")
        with self._channel.report.waiting("agreement on the sizes of buckets"):
            broadcast_tensors(self._channel.control, [length])
            told = torch.zeros(int(length), dtype=torch.int64, device="cpu")
            if self._channel.control.rank() == 0:
                told = torch.tensor(mine, device="cpu")
            broadcast_tensors(self._channel.control, [told])
        which, cap, *sizes = map(int, told.tolist())
        own_bytes, piece_bytes = (None if size < 0 else size for size in sizes[:2])
        return None if which < 0 else names[which], BucketLimits(cap, tuple(sizes[2:]), own_bytes, piece_bytes)

    def _agreed(self, schedule: BucketSchedule) -> tuple[StepRecord, LinkCost, float] | None:
        """The slowest rank's figures, part by part, and the link as the last one to end backward saw it."""
        order = schedule.order
        held: list[StepTimes] = []
        free: list[StepTimes] = []
        try:
            if not self._is_missing:
                held, free = ([step.times() for step in steps] for steps in (self._held, self._free))
        except RuntimeError:  # the device lost a moment; the others must not wait for this rank
            self._is_missing = True
        mine = [float(self._is_missing), *[-math.inf] * (6 + len(order))]
        if held and free:
            # What disturbs a step makes it longer, so the shortest of each part is the best.
            mine = [
                0.0,
                min(t.forward_s for t in held + free),
                min(t.backward_s for t in held),
                min(t.other_s for t in held + free),
                -min(t.sending_s + t.waiting_s for t in held),
                min(t.backward_s for t in free),
                min(t.total_s for t in free),
                *(min((t.ready_s[index] for t in held if index in t.ready_s), default=0.0) for index in order),
            ]
        with self._channel.report.waiting("agreement on the sizes of buckets"):
            slowest = agree(self._channel, mine)
        missing, forward_s, backward_s, other_s, wire_s, free_backward_s, step_s, *ready_s = slowest
        if missing or math.isinf(step_s):
            return None
        gradients = [
            GradReady(spec.index, spec.nbytes, spec.dtype, when)
            for spec, when in zip(schedule.specs, ready_s, strict=True)
        ]
        gradients.sort(key=lambda gradient: gradient.ready_s)
        record = StepRecord(tuple(gradients), forward_s, backward_s, other_s)
        buckets = buckets_of(schedule.plans_for(schedule.limits))
        if schedule.has_hook:
            return record, self._link, step_s
        link = self._link.corrected(len(buckets), sum(bucket.nbytes for bucket in buckets), -wire_s)
        delayed_s, overlapped_s = free_backward_s - backward_s, simulate(record, buckets, link).overlapped_s
        if delayed_s > 0 and overlapped_s > 0:
            link = dataclasses.replace(link, contention=delayed_s / overlapped_s)
        return record, link, step_s
