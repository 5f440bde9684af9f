"""DistributedDataParallel's choice of backward passes to reduce: those of the forward passes that it has announced."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ddp.comm.channel import Channel
from ddp.data.micro_batch import MicroBatch, current
from ddp.data_parallel.backward_pass import Action, Pass
from ddp.data_parallel.buckets.bucket_plan import Member
from ddp.data_parallel.buckets.step_status import RankStatus, StatusSum
from ddp.data_parallel.checksum import WeightChecksum
from ddp.data_parallel.forward_buffers import ForwardBuffers
from ddp.data_parallel.status_errors import drifted_meanwhile, forwards_differ, starts_differ, steps_of_each
from ddp.data_parallel.step_hashes import StepHashes
from ddp.data_parallel.step_watch import InBackwardOptimizers, StepWatch
from ddp.errors import BackwardError, DdpError, UnsupportedError

_MOST_OF_EQUAL_REPLICAS = 3  # times that replicas stay equal though ranks step unequally: then the user equalises them


class Forward:
    """A forward pass whose gradients will be reduced; open until a backward pass has reached one of its outputs.

    `is_opaque`: its outputs could not be found, so any backward pass may belong to it.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.is_opaque = True


class ForwardPolicy:
    """Reduces the backward passes of announced forward passes.

    `members` are the reducer's, and `step_watch` watches the same parameters. With `checksum`, every pass compares the
    weights.
    """

    is_cleared = False
    micro_batch: MicroBatch | None = None

    def __init__(
        self,
        channel: Channel,
        members: Sequence[Member],
        step_watch: StepWatch,
        buffers: ForwardBuffers,
        *,
        checksum: WeightChecksum | None,
    ) -> None:
        self.divides_by_active = False  # whether only ranks that have not joined count in the average
        self._channel = channel
        self._members = members
        self._watch = step_watch
        self._buffers = buffers
        self._checksum = checksum
        self._hashes = StepHashes(channel.number, members)
        self._next = Action.STRAY  # the last forward's announcement for the next gradients; STRAY after a pass
        self._forwards: list[Forward] = []
        self._in_backward_optimizers: InBackwardOptimizers | None = None  # from the first forward pass on
        self._is_kept: bool | None = None  # the gradient of the last reduction, when this pass began
        self._steps_alone = False
        self._equal_after_other_steps = 0

    # Called by the wrapper

    def enter_forward(self, parameters: Sequence[torch.nn.Parameter], *, steps_alone: bool = False) -> None:
        """Begin a forward pass of the module with these parameters.

        With `steps_alone`, this rank's next steps are not compared with the others' (LocalSGD).
        """
        if torch.is_grad_enabled():
            self._enter_micro_batch()
        if steps_alone or self._steps_alone:
            self._watch.restart()
        self._steps_alone = steps_alone
        if self._in_backward_optimizers is None:
            self._in_backward_optimizers = InBackwardOptimizers(parameters)

    def _enter_micro_batch(self) -> None:
        before, self.micro_batch = self.micro_batch, current.micro_batch
        if self.micro_batch is not None and self.micro_batch is not before and self.micro_batch.is_first:
            if self._watch.is_kept():
                raise BackwardError(
                    "a step of ddp.StepLoader began while .grad held the averages of the last one, which would be "
                    "added: call optimizer.zero_grad() in each step"
                )
            for member in self._members:
                member.parameter.grad = None  # zeros may be -0.0 after a sum, which a fresh gradient would not be

    def take_part(self, micro_batch: MicroBatch) -> None:
        """Prepare for a reduction in a step in which this rank has no micro-batch."""
        self.micro_batch = micro_batch

    def announce_local(self) -> None:
        """Announce that gradients of the next backward pass are only accumulated."""
        if self.micro_batch is not None:
            raise UnsupportedError(
                "no_sync() in a step of ddp.StepLoader: leave it out, since the step accumulates its micro-batches"
            )
        self._next = Action.LEAVE

    def announce(self, *, is_training: bool) -> Forward:
        """Announce that the next backward pass is reduced, or one of a step that will be; return its forward pass."""
        is_last = self.micro_batch is None or self.micro_batch.is_last
        self._next = Action.REDUCE if is_last else Action.HOLD
        forward = Forward()
        if is_training:
            self._forwards.append(forward)
        return forward

    @property
    def is_announced(self) -> bool:
        """Whether the other ranks wait for the next backward pass, or for a later one of the same step."""
        return self._next not in (Action.LEAVE, Action.STRAY)

    def close_last_forward(self) -> None:
        """Record that the last forward pass has no backward pass, and needs none."""
        for forward in self._forwards[-1:]:
            forward.is_open = False

    def replicas_equalised(self) -> None:
        """Forget earlier steps: every rank has the weights of one now."""
        self._watch.restart()

    # Called by the reducer: see PassPolicy

    def choose(self, *, by_output: bool) -> Action:
        return Action.REDUCE if by_output and self._next is not Action.HOLD else self._next

    def held(self) -> None:
        self._next = Action.STRAY
        self._close_opaque()

    def starting(self) -> None:
        self._is_kept = None if self.micro_batch is not None else self._watch.is_kept()
        if self._checksum is not None:
            self._checksum.start()
        self._hashes.start(self.micro_batch)
        self._close_opaque()

    def _close_opaque(self) -> None:
        opaque = [forward for forward in self._forwards if forward.is_opaque and forward.is_open]
        if opaque:
            opaque[-1].is_open = False

    def backward_ended(self, pass_: Pass, unplanned: Sequence[Member]) -> None:
        """Leave the step before its last gradients are sent: then a resilient rank keeps its buffers."""
        if self.micro_batch is not None:
            self._buffers.leave_step()

    def status(self, **common: Any) -> RankStatus:
        hashed, digest, every = self._hashes.status()
        return RankStatus(
            open_forwards=self._open_forwards(),
            digest=0 if self._checksum is None else self._checksum.digest(),
            steps=self._watch.steps if self._equal_after_other_steps < _MOST_OF_EQUAL_REPLICAS else 0,
            kept=self._is_kept is True,
            emptied=self._is_kept is False,
            hashed=hashed,
            hash=digest,
            every=every,
            **common,
        )

    def _open_forwards(self) -> int:
        return sum(forward.is_open for forward in self._forwards)

    def disagreement(self, statuses: StatusSum, pass_: Pass) -> DdpError | None:
        channel, counts = self._channel, not pass_.has_joined
        if (drift := self._hashes.check(channel, statuses)) is not None:
            return drift
        if not statuses.same_forwards:
            return forwards_differ(channel, self._open_forwards())
        if self._checksum is not None and not statuses.same_digest:
            return self._drift(self._checksum, counts=counts) or drifted_meanwhile(channel.report.step + 1)
        if not statuses.same_start:
            return starts_differ(channel, self._is_kept)
        if not statuses.same_steps:
            why = steps_of_each(channel, self._watch.steps)
            checksum = WeightChecksum([(each.name, each.parameter) for each in self._members])
            self._equal_after_other_steps += 1
            return self._drift(checksum, counts=counts, why=why)
        return None

    def _drift(self, checksum: WeightChecksum, *, counts: bool, why: str = "") -> DdpError | None:
        """Find out how the replicas differ now. Every rank must call it; blocks."""
        return checksum.compare(self._channel, self._channel.report.step + 1, counts=counts, why=why)

    def rank_count(self, statuses: StatusSum) -> int:
        return statuses.active if self.divides_by_active else self._channel.group.size()

    def delivered(self, first_used: torch.nn.Parameter, *, is_first: bool) -> None:
        self._buffers.wait()
        if self.micro_batch is not None:
            self._buffers.end_step(self.micro_batch)
            self._hashes.delivered()
        if self._in_backward_optimizers is not None:
            self._in_backward_optimizers.step()
        self._watch.delivered(first_used)

    def ended(self) -> None:
        self._watch.pass_ended()
        self._forwards.clear()
        self._next = Action.STRAY

    def finished(self) -> None:
        """Do nothing."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output, however nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
