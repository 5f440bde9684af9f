"""Hashes of a model's averaged gradients and parameters in the steps of a `ddp.StepLoader`, equal on all ranks.

In each step the parameters of one part of the model are hashed: before the optimizer's step, with their averaged
gradients. The ranks compare the hashes of a step in the status of the next one, so that parameters, gradients or an
optimizer's state that differ are an error; the ledger has the same hashes. Rank 0 chooses the number of parts, so that
hashing takes 2 % of the time of its steps, and sends it in the step status: `every` steps hash the whole model. What
happens on one rank before gradients are averaged is in everyone's average, and no difference.

Called by `ForwardPolicy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain
from statistics import median
from time import perf_counter

import torch

from ddp.comm.channel import Channel
from ddp.comm.fingerprint import Digest, chained
from ddp.data.ledger import record
from ddp.data.micro_batch import MicroBatch
from ddp.data_parallel.buckets.bucket_plan import Member
from ddp.data_parallel.buckets.step_status import StatusSum
from ddp.data_parallel.checksum import drift_among
from ddp.errors import DriftError

_SHARE = 0.02  # of the time of a step, for hashes and the ledger
_LEAST = 0.005  # for hashes, where the ledger alone takes more
_FIRST_STEPS = 8  # of which the time is not typical
_LOOK_EVERY = 64  # steps, at the share
_TOLERANCE = 0.25  # of the number of parts
_MOST = 1 << 10  # parts
_BITS = 48  # of a hash in the step status


class StepHashes:
    """Hashes of the parameters of one model, `members`. `number` is its index among the models of its group."""

    def __init__(self, number: int, members: Sequence[Member]) -> None:
        self._suffix = f" of model {number + 1}" if number else ""
        self._members = members
        self._step: int | None = None  # that runs; None in one that is not recorded
        self._is_writer = False
        self._every, self._from = 0, -1  # number of parts, known for the steps from this one on
        self._parts = 0  # in this step; 0: nothing is hashed
        self._part: list[Member] = []
        self._before: dict[str, int] = {}  # hashes of the parameters in this step
        self._made: dict[str, tuple[int, int]] = {}  # those of gradients and parameters
        self._made_in = -2  # this step
        self._cost_s = 0.0  # of hashes of the whole model, before the first step; measured by rank 0
        self._spent_s = self._rounds = 0.0  # on hashes in steps, and how often they had the whole model
        self._began = 0.0
        self._times_s: list[float] = []  # of steps

    def start(self, micro_batch: MicroBatch | None) -> None:
        """Hash parameters before a pass that ends a step."""
        self._step = None if micro_batch is None else micro_batch.step
        if micro_batch is None or self._step is None:
            return
        self._is_writer = micro_batch.rank == 0
        if record.kind == "full":
            self._every, self._from = 1, self._step
        elif self._is_writer:
            self._measure()
        self._parts = parts = self._every if self._step == self._from else 0
        self._part = _part_of(self._members, self._step % parts, parts) if parts else []
        began = perf_counter()
        self._before = {member.name: _hash(member.parameter) for member in self._part}
        self._spent_s += perf_counter() - began

    def _measure(self) -> None:
        """Measure the times of steps, and once that of hashing."""
        began, self._began = self._began, perf_counter()
        if began:
            self._times_s = [*self._times_s, self._began - began][-_LOOK_EVERY:]
        else:
            _hash(self._members[0].parameter)  # the first hash of a process takes far longer
            self._began = perf_counter()
            for member in self._members:
                _hash(member.parameter)
            self._cost_s = 2 * (perf_counter() - self._began)

    def status(self) -> tuple[bool, int, int]:
        """Return this rank's part of the step status: `hashed` and `hash` of the last step, `every` of the next one."""
        if self._step is None:
            return False, 0, 0
        is_hashed = self._made_in == self._step - 1 and bool(self._made)
        digest = chained(chain.from_iterable(self._made.values())) >> (64 - _BITS) if is_hashed else 0
        return is_hashed, digest, self._choose() if self._is_writer else 0

    def _choose(self) -> int:
        known = self._every or min(len(self._members), _MOST)
        count = len(self._times_s)
        if count < _FIRST_STEPS or (count > _FIRST_STEPS and (self._step or 0) % _LOOK_EVERY):
            return known
        step_s = median(self._times_s)
        allowed_s = max(_SHARE * step_s - median(record.lines_s), _LEAST * step_s)
        # In steps they take longer than before the first one: caches have other contents.
        cost_s = self._spent_s / self._rounds if self._rounds >= 1 else self._cost_s
        best = min(_MOST, math.ceil(cost_s / allowed_s))
        return best if abs(best - known) > _TOLERANCE * known else known

    def check(self, channel: Channel, statuses: StatusSum) -> DriftError | None:
        """Compare the last step's hashes, and note the parts of the next one. Every rank must call it; may block."""
        step = self._step
        if step is None:
            return None
        self._every, self._from = statuses.every, step + 1
        if statuses.hashed < statuses.active or statuses.same_hash:
            return None
        every = channel.gather(self._made, "exchange of hashes")
        drift = drift_among([{name: pair[1] for name, pair in each.items()} for each in every], step - 1)
        if drift is not None:
            return drift
        averages = drift_among([{name: pair[0] for name, pair in each.items()} for each in every], step - 1)
        assert averages is not None
        return DriftError(
            f"the averaged gradients of step {step - 1} differ: {averages.parameter!r} on rank "
            f"{', '.join(map(str, averages.ranks))} of {len(every)}. Something changed them on one rank only, between "
            "backward and the optimizer's step: a hook, clipping that differs, or a faulty device. Start again from a "
            "checkpoint",
            parameter=averages.parameter,
            step=step - 1,
            ranks=averages.ranks,
        )

    def delivered(self) -> None:
        """Hash the averaged gradients of a step, whose parameters were hashed when it began."""
        if self._step is None:
            return
        began = perf_counter()
        self._made = {member.name: (_hash(member.parameter.grad), self._before[member.name]) for member in self._part}
        self._spent_s += perf_counter() - began
        self._rounds += 1 / self._parts if self._parts else 0.0
        self._made_in = self._step
        record.add(max(1, self._every), {name + self._suffix: pair for name, pair in self._made.items()})


def _part_of(members: Sequence[Member], part: int, parts: int) -> list[Member]:
    """Return one of `parts` parts of about the same size."""
    ends = [*accumulate(_weight(member.parameter) for member in members)]
    return [member for member, end in zip(members, ends, strict=True) if (end - 1) * parts // ends[-1] == part]


def _weight(parameter: torch.Tensor) -> int:
    return parameter.nbytes + (1 << 17)  # a call costs as much as these bytes


def _hash(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    if tensor.layout is torch.strided:
        return Digest([tensor]).start()()
    tensor = tensor.coalesce()
    return Digest([tensor.indices(), tensor.values()]).start()()
