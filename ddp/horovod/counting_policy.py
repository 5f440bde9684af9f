"""The policy of a distributed optimizer: reduce every n-th backward pass, regardless of the forward passes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ddp.comm.fingerprint import fingerprints
from ddp.data_parallel.backward_pass import EndOfBackward, Pass
from ddp.data_parallel.buckets.step_status import RankStatus, StatusSum
from ddp.data_parallel.buckets.unbucketed import average_sparse
from ddp.data_parallel.reducer import Reducer
from ddp.errors import BackwardError, DdpError, DriftError
from ddp.torch_internals import call_after_backward, current_backward

_COMPARED = 1024  # elements of each parameter that the ranks compare before the first step
_together: dict[int, list[CountingPolicy]] = {}  # policies that reduce in a backward pass, by autograd's task id


@contextlib.contextmanager
def _collecting(errors: list[BaseException]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # Ctrl-C too: all optimizers are ended before the first error is raised again
        errors.append(error)


class CountingPolicy:
    """Reduces at the end of every `passes`-th backward pass since the last reduction, and counts this rank's steps.

    `steps` counts optimizer steps; `reductions` those since the last step, `averages` those since gradients were
    cleared, by `step()` or `zero_grad()`; `waiting` the passes whose gradients wait for a reduction. The counts outlive
    the attached reducer. `on_sparse` is called after a first pass with sparse gradients that the reducer did not know.
    """

    _reducer: Reducer

    def __init__(self, *, passes: int, is_sum: bool, on_sparse: Callable[[frozenset[str]], None] | None) -> None:
        self.passes = passes
        self.steps = self.reductions = self.averages = self.waiting = 0
        self.is_cleared = False  # whether every gradient was None before this backward pass
        self._is_sum = is_sum
        self._on_sparse = on_sparse

    def attach(self, reducer: Reducer) -> None:
        """Attach to a new `reducer`, whose ranks have not compared their parameters yet."""
        reducer.policy = self
        self._reducer = reducer
        self.is_cleared = False
        self._backward: object | None = None  # the identity of the backward pass that runs
        self._task = -1  # autograd's id of the backward pass that reduces
        self._is_compared = False  # whether the ranks have found their parameters equal
        self._rows: dict[int, Tensor] = {}  # sparse gradients of this rank in a first pass, by index
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

    def settle(self) -> None:
        """Wait for a failed pass to end, between backward passes: one that still seems to run was interrupted."""
        self._reducer.report.check_in_step()
        with self._reducer.lock:
            if self._backward is not None and current_backward() == -1:
                self._reducer.fail("its backward pass was interrupted")
        self._reducer.settle()

    def reduce_now(self) -> None:
        """Average the waiting gradients, or take part in the other ranks' average. Blocks."""
        self._reducer.hooks.be_last()
        self._reducer.reduce_now()

    # Called by the reducer: see PassPolicy

    def may_begin(self) -> bool:
        is_last = self.waiting + 1 >= self.passes
        if self._backward is None:
            self._reducer.report.check_in_step()
            self._reducer.settle()
            self._backward = backward = object()
            if self.averages:
                self._note_too_many()
            if not is_last:
                call_after_backward(EndOfBackward(self._end_waiting, partial(self._abandon, backward)))
        if is_last:
            self.begin()
        return is_last

    def begin(self) -> None:
        self._backward = self._backward or object()
        reducer = self._reducer
        first = reducer.members[next(iter(reducer.touched))].parameter if len(reducer.touched) == 1 else None
        if self.is_cleared and first is not None:
            # The transfers check now which gradients existed before this backward; this one was made by it.
            grad, first.grad = first.grad, None
            try:
                reducer.begin()
            finally:
                first.grad = grad
        else:
            reducer.begin()
        self._task = current_backward()
        _together.setdefault(self._task, []).append(self)

    def _end_waiting(self) -> None:
        self.waiting += 1
        self._backward = None
        self.is_cleared = False
        self._reducer.report.at("between two backward passes of a step")

    def _abandon(self, backward: object) -> None:
        with self._reducer.lock:
            if self._backward is backward:
                self._reducer.fail("its backward pass raised an exception")

    def _note_too_many(self) -> None:
        """Warn about, or for sums refuse, a pass after averages whose gradients were not cleared.

        Averaging averages again is exact; adding sums again is not.
        """
        text = (
            f"more than backward_passes_per_step={self.passes} backward passes reach the parameters of this "
            "DistributedOptimizer between two calls of its step() or zero_grad()"
        )
        if self._is_sum:
            self._reducer.fail(text)
            raise BackwardError(f"{text}: a sum of sums would be wrong, so say how many there are")
        self._reducer.warn(
            f"{text}: their gradients are exact, but averaged several times; say how many there are (checkpoints with "
            "use_reentrant=True count one by one)"
        )

    def end(self, pass_: Pass) -> None:
        """End the pass, also for the other optimizers whose parameters it reached, on all ranks in the same order.

        Autograd calls each of them, in the order of their first gradients, which may differ between ranks.
        """
        if self._reducer.current is not pass_:
            return  # already ended by another optimizer
        together = sorted(_together.pop(self._task, [self]), key=lambda policy: policy._reducer.channel.number)
        passes = [(policy, policy._reducer.current) for policy in together]
        errors: list[BaseException] = []
        for policy, current in passes:
            policy._note_end()
            if len(together) > 1 and current is not None:
                with _collecting(errors):
                    policy._reducer.send_rest(current)
        for policy, current in passes:
            if current is not None:
                with _collecting(errors):
                    policy._finish(current)
        if errors:
            raise errors[0]

    def _note_end(self) -> None:
        self.waiting += self._backward is not None
        self._backward = None
        self.is_cleared = False
        if not self._reducer.is_planned and self._on_sparse is not None:
            grads = [(m, m.parameter.grad) for m in self._reducer.members if m.name not in self._reducer.sparse]
            self._rows = {m.index: grad for m, grad in grads if grad is not None and grad.is_sparse}
            self._dense = {m.name for m, grad in grads if grad is not None and not grad.is_sparse}

    def _finish(self, pass_: Pass) -> None:
        self._reducer.finish(pass_)
        found, self._found = self._found, frozenset()
        self.reductions += 1
        self.averages += 1
        if found and self._on_sparse is not None:
            self._on_sparse(self._reducer.sparse | found)

    def starting(self) -> None:
        """Nothing to prepare."""

    def fill(self, **common: Any) -> RankStatus:
        said = repr((self.steps, self.waiting, None if self._is_compared else self._samples()))
        digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=6).digest(), "little")
        return RankStatus(digest=digest, **common)

    def _samples(self) -> dict[str, int]:
        """Return a fingerprint of the first elements of each parameter."""
        return fingerprints({m.name: m.parameter.detach().reshape(-1)[:_COMPARED] for m in self._reducer.members})

    def rank_count(self, statuses: StatusSum) -> int:
        return 1 if self._is_sum else self._reducer.channel.group.size()

    def delivered(self, *, is_first: bool) -> None:
        self._is_compared = True
        if is_first and self._on_sparse is not None:
            self._found = self._average_rows()

    def ended(self, *, has_failed: bool) -> None:
        if has_failed:
            _together.pop(self._task, None)  # it failed for all optimizers that it reached
        self._backward = None
        self.waiting = 0
        self._rows = {}

    def _average_rows(self) -> frozenset[str]:
        """Average again, as rows, gradients that are sparse on some ranks and dense on none; return the names.

        Sparse gradients are only known once they exist; these have just been averaged as dense ones.
        """
        channel, members = self._reducer.channel, self._reducer.members
        what = "exchange of the names of sparse gradients"
        every = channel.gather([members[index].name for index in self._rows], what)
        found = frozenset(name for names in every for name in names)
        if not found:
            return found
        every = channel.gather(sorted(found & self._dense), what)
        found -= {name for names in every for name in names}
        for member in members:
            if member.name in found:
                member.parameter.grad = self._rows.get(member.index)
                average_sparse(channel, member, float(channel.group.size()) if self._is_sum else 1.0)
        return found

    def disagreement(self, statuses: StatusSum) -> DdpError | None:
        """Return an error if steps, backward passes or initial values differ between ranks, else None. Collective."""
        if statuses.same_digest:
            return None
        mine = (self.steps, self.waiting, {} if self._is_compared else self._samples())
        every = self._reducer.channel.gather(mine, "exchange of how the ranks differ")
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
