"""The policy of a distributed optimizer: reduce every n-th backward pass, regardless of the forward passes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ddp.comm.channel import Channel
from ddp.comm.fingerprint import fingerprints
from ddp.data.micro_batch import MicroBatch
from ddp.data_parallel.backward_pass import Action, Pass
from ddp.data_parallel.buckets.bucket_plan import Member
from ddp.data_parallel.buckets.step_status import RankStatus, StatusSum
from ddp.data_parallel.buckets.unbucketed import average_sparse
from ddp.errors import BackwardError, DdpError, DriftError

_COMPARED = 1024  # elements of each parameter that the ranks compare before the first step


class CountingPolicy:
    """Reduces at the end of every `passes`-th backward pass since the last reduction, and counts this rank's steps.

    `steps` counts optimizer steps; `reductions` those since the last step, `averages` those since gradients were
    cleared, by `step()` or `zero_grad()`; `waiting` the passes whose gradients wait for a reduction. The counts outlive
    the attached reducer. `on_sparse` is called after a first pass with sparse gradients that the reducer did not know.
    """

    micro_batch: MicroBatch | None = None
    _channel: Channel
    _members: Sequence[Member]

    def __init__(self, *, passes: int, is_sum: bool, on_sparse: Callable[[frozenset[str]], None] | None) -> None:
        self.passes = passes
        self.steps = self.reductions = self.averages = self.waiting = 0
        self.is_cleared = False
        self._is_sum = is_sum
        self._on_sparse = on_sparse
        self._has_warned = False

    def attach(self, channel: Channel, members: Sequence[Member]) -> None:
        """Attach to a new reducer with these members, whose ranks have not compared their parameters yet."""
        self._channel, self._members = channel, members
        self.is_cleared = False
        self._is_compared = False  # whether the ranks have found their parameters equal
        self._rows: dict[Member, Tensor] = {}  # sparse gradients of this rank in a first pass
        self._dense: set[str] = set()  # names of its dense gradients in that pass
        self._found: frozenset[str] = frozenset()  # names of newly found sparse gradients

    def cleared(self, *, to_none: bool) -> None:
        """Record that the gradients were cleared, between two reductions."""
        self.averages = 0
        self.is_cleared = self.is_cleared or to_none

    def stepped(self) -> None:
        """Record a step of the optimizer."""
        self.steps += 1
        self.reductions = self.averages = 0

    # Called by the reducer: see PassPolicy

    def choose(self, *, by_output: bool) -> Action:
        if self.averages:
            self._check_too_many()
        return Action.REDUCE if self.waiting + 1 >= self.passes else Action.HOLD

    def _check_too_many(self) -> None:
        """Warn about, or for sums refuse, a pass after averages whose gradients were not cleared.

        Averaging averages again is exact; adding sums again is not.
        """
        text = (
            f"more than backward_passes_per_step={self.passes} backward passes reach the parameters of this "
            "DistributedOptimizer between two calls of its step() or zero_grad()"
        )
        if self._is_sum:
            raise BackwardError(f"{text}: a sum of sums would be wrong, so say how many there are")
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{text}: their gradients are exact, but averaged several times; say how many there are (checkpoints "
                "with use_reentrant=True count one by one)",
                stacklevel=2,
            )

    def held(self) -> None:
        self.waiting += 1
        self.is_cleared = False

    def starting(self) -> None:
        """Do nothing."""

    def backward_ended(self, pass_: Pass, unplanned: Sequence[Member]) -> None:
        self.waiting += pass_.has_backward
        self.is_cleared = False
        if self._on_sparse is not None:
            grads = [(member, grad) for member in unplanned if (grad := member.parameter.grad) is not None]
            self._rows = {member: grad for member, grad in grads if grad.is_sparse}
            self._dense = {member.name for member, grad in grads if not grad.is_sparse}

    def status(self, **common: Any) -> RankStatus:
        said = repr((self.steps, self.waiting, None if self._is_compared else self._samples()))
        digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=6).digest(), "little")
        return RankStatus(digest=digest, **common)

    def _samples(self) -> dict[str, int]:
        """Return a fingerprint of the first elements of each parameter."""
        return fingerprints({m.name: m.parameter.detach().reshape(-1)[:_COMPARED] for m in self._members})

    def rank_count(self, statuses: StatusSum) -> int:
        return 1 if self._is_sum else self._channel.group.size()

    def delivered(self, first_used: nn.Parameter, *, is_first: bool) -> None:
        self._is_compared = True
        if is_first and self._on_sparse is not None:
            self._found = self._average_rows()

    def _average_rows(self) -> frozenset[str]:
        """Average again, as rows, gradients that are sparse on some ranks and dense on none; return the names.

        Sparse gradients are only known once they exist; these have just been averaged as dense ones.
        """
        what = "exchange of the names of sparse gradients"
        every = self._channel.gather([member.name for member in self._rows], what)
        found = frozenset(name for names in every for name in names)
        if not found:
            return found
        every = self._channel.gather(sorted(found & self._dense), what)
        found -= {name for names in every for name in names}
        for member in self._members:
            if member.name in found:
                member.parameter.grad = self._rows.get(member)
                average_sparse(self._channel, member, float(self._channel.group.size()) if self._is_sum else 1.0)
        return found

    def ended(self) -> None:
        self.waiting = 0
        self._rows = {}

    def finished(self) -> None:
        self.reductions += 1
        self.averages += 1
        found, self._found = self._found, frozenset()
        if found and self._on_sparse is not None:
            self._on_sparse(found)

    def disagreement(self, statuses: StatusSum, pass_: Pass) -> DdpError | None:
        """Return an error if steps, backward passes or initial values differ between ranks, else None. Collective."""
        if statuses.same_digest:
            return None
        mine = (self.steps, self.waiting, {} if self._is_compared else self._samples())
        every = self._channel.gather(mine, "exchange of how the ranks differ")
        end = "The gradients of this step are dropped (None) on every rank"
        for at, what in enumerate(("optimizer steps so far", "backward passes since the last reduction")):
            if odd := _odd_ones([counts[at] for counts in every]):
                why = (
                    "a rank skipped optimizer.step(), so the replicas are not equal any more"
                    if at == 0
                    else "a rank skipped a backward pass, or called step() without one"
                )
                return BackwardError(f"the ranks have made different numbers of {what}: {odd}; {why}. {end}")
        for name in every[0][2]:
            numbers = [counts[2].get(name) for counts in every]
            if len(set(numbers)) > 1:
                ranks = tuple(rank for rank, number in enumerate(numbers) if number != numbers[0])
                return DriftError(
                    f"parameter {name!r} differs on rank {', '.join(map(str, ranks))} from rank 0 before the first "
                    "step: call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before training. " + end,
                    parameter=name,
                    step=1,
                    ranks=ranks,
                )
        return BackwardError(f"the ranks do not agree on their step: {every}. {end}")


def _odd_ones(numbers: Sequence[int]) -> str:
    """Describe the ranks whose number differs from most; empty if there are none."""
    usual = min(numbers, key=lambda number: (-numbers.count(number), number))
    odd = [f"rank {rank} {number}" for rank, number in enumerate(numbers) if number != usual]
    return f"{', '.join(odd)}, the others {usual}" if odd else ""
