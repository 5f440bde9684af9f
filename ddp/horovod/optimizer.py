"""An optimizer that steps on gradients averaged over the ranks, for scripts that keep their own model object.

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ddp.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    ddp.broadcast_parameters(model.state_dict(), root_rank=0)

The interface is that of Horovod (Sergeev and Del Balso 2018, arXiv:1802.05799). The reduction is that of
DistributedDataParallel (`reducer`: buckets in one order on all ranks, overlapped with backward, and a verdict), but
no forward pass announces it: every `backward_passes_per_step`-th backward pass after a step ends with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ddp.comm.fingerprint import fingerprints
from ddp.comm.layout import check_same_layout, describe
from ddp.comm.objects import device_of, gather_values
from ddp.compression.compressors import Compressor, Half, Int8, PowerSGD, make_compression
from ddp.data_parallel.arguments import bucket_limits, check_initialized, check_plain, control_group, single_device_type
from ddp.data_parallel.buckets.bucket_schedule import Channel
from ddp.data_parallel.buckets.comm_hook import checked_hook
from ddp.data_parallel.buckets.sparse_transfer import average_sparse
from ddp.data_parallel.buckets.step_status import Tally, Word
from ddp.data_parallel.module_watch import Roster
from ddp.data_parallel.reducer import Reducer
from ddp.errors import ArgumentError, BackwardError, DdpError, DriftError
from ddp.horovod.collectives import Average, Call, Sum, agree, member
from ddp.monitoring.progress import count_step
from ddp.monitoring.stall_report import Whereabouts
from ddp.world import before_leaving

__all__ = ["DistributedOptimizer"]

_T = TypeVar("_T", bound=torch.optim.Optimizer)
_Named = tuple[str, nn.Parameter]
_COMPARED = 1024  # elements of each parameter that the ranks compare before the first step
_made: Counter[str] = Counter()  # optimizers, by the name of their group


def DistributedOptimizer(  # Horovod's name, and a class to its users
    optimizer: _T,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    *,
    compression: str | Half | Int8 | PowerSGD | None = None,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float | None = None,
    stall_timeout_s: float | None = None,
) -> _T:
    """Make `optimizer` step on gradients averaged over the ranks, and return it.

    It is the same object, of a subclass of its class: learning rate schedulers, GradScaler, `param_groups`, `state` and
    `state_dict()` are what they were. Every rank must call this, with optimizers of the same parameters in the same
    order; blocks. The replicas must be equal: see `broadcast_parameters`; before the first step the ranks compare.

    - `named_parameters`: names for messages, and for the comparison between the ranks.
    - `compression`: how gradients travel: "bf16", "fp16", "int8", "powersgd" or one with settings (`ddp.compression`).
    - `backward_passes_per_step`: backward passes whose gradients are added up before they are averaged. As in Horovod
      they are not divided by that number: the script divides its loss.
    - `op`: "average" or "sum" over the ranks.
    - `gradient_predivide_factor`, `num_groups`, `groups`: Horovod's, accepted; gradients are divided before they are
      added and travel in buckets anyway.
    - `sparse_as_dense`: sparse gradients become dense ones; else, where they are seen in the first backward pass, only
      the rows that some rank has travel from then on.
    - `group`: the ranks that average with each other; default: all. `bucket_cap_mb`, `stall_timeout_s`: as in
      DistributedDataParallel.

    **What happens when.** When the last of a step's backward passes returns, `.grad` holds the averages: clipping and
    GradScaler need nothing else. `synchronize()` averages what is not averaged yet, after fewer passes, say; `step()`
    calls it by itself, but not inside `skip_synchronize()`. A parameter without a gradient on some ranks counts as
    zeros there; without one on all, its `.grad` stays as it is. More passes than announced are averaged exactly, in
    reductions of their own (a warning says so); for a sum they raise BackwardError. `step(closure)` averages after each
    backward pass in the closure, and the optimizer sees the average of the losses.

    **Errors.** If a backward pass of one rank raises, the others raise PeerFailedError in theirs. Different numbers of
    backward passes or of steps raise BackwardError on every rank, which says who made how many; different parameters
    at the first step DriftError. After these, `.grad` is None on every rank. `zero_grad()` while gradients of passes
    wait to be averaged raises BackwardError on its rank, as in Horovod.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"DistributedOptimizer({optimizer!r}): it must be a torch.optim.Optimizer")
    if isinstance(optimizer, _Distributed):
        raise ArgumentError(f"this {type(optimizer).__name__} is distributed already: call DistributedOptimizer() once")
    _check_numbers(backward_passes_per_step, op, gradient_predivide_factor)
    link = member(group, "DistributedOptimizer")
    settings = _Settings(backward_passes_per_step, op, compression, sparse_as_dense, bucket_cap_mb, stall_timeout_s)
    names = _names_of(optimizer, named_parameters)
    engine = _Engine(optimizer, link, settings, names)
    base = type(optimizer)
    body = {"__module__": base.__module__, "__doc__": base.__doc__, "_base": base}
    optimizer.__class__ = type(base.__name__, (_Distributed, base), body)
    optimizer._engine = engine  # type: ignore[attr-defined]  # of its new class
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    weakref.finalize(optimizer, engine.close).atexit = False
    before_leaving(optimizer, _let_go)
    return optimizer


@dataclasses.dataclass(frozen=True)
class _Settings:
    passes: int
    op: str
    compression: str | Half | Int8 | PowerSGD | None
    sparse_as_dense: bool
    bucket_cap_mb: float | None
    stall_timeout_s: float | None


def _check_numbers(passes: object, op: object, predivide: float) -> None:
    if not isinstance(passes, int) or passes < 1:
        raise ArgumentError(f"backward_passes_per_step={passes!r}; it must be a whole number of at least 1")
    if op not in (Average, Sum):
        raise ArgumentError(f"op={op!r} of gradients; it must be 'average' or 'sum'")
    if not predivide > 0:
        raise ArgumentError(f"gradient_predivide_factor={predivide!r}; it must be more than 0")


def _names_of(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> dict[int, str]:
    """The parameters' names by identity. Raises ArgumentError if one has none, or two have the same."""
    if named is None:
        return {}
    names: dict[int, str] = {}
    for item in named:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise ArgumentError(
                f"named_parameters has a {type(item).__name__}; it must be pairs of a name and a parameter, such as "
                "model.named_parameters()"
            )
        if item[0] in names.values():
            raise ArgumentError(f"named_parameters has two parameters {item[0]!r}: names must be unique")
        names.setdefault(id(item[1]), item[0])
    for number, param_group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(param_group["params"]):
            if id(parameter) not in names:
                raise ArgumentError(
                    f"parameter {index} of the optimizer's group {number}, shape {tuple(parameter.shape)}, is not in "
                    "named_parameters: pass the names of all, or leave named_parameters out"
                )
    return names


# What the optimizer's class becomes


class _Distributed:
    """The methods that a distributed optimizer has besides those of its class."""

    _engine: _Engine | None = None
    _base: type

    def synchronize(self) -> None:
        """Average the gradients of the backward passes since the last time, if there are any. Every rank must call it.

        Blocks. Called without passes on any rank, it changes nothing; `step()` does not repeat it.
        """
        if self._engine is not None:
            self._engine.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` inside not synchronize, after `synchronize()`."""
        if self._engine is None:
            yield
            return
        self._engine.is_skipping = True
        try:
            yield
        finally:
            self._engine.is_skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes of a step, between two steps and on every rank."""
        _check_numbers(passes, Average, 1.0)
        if self._engine is not None:
            self._engine.set_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like the optimizer's own. Raises BackwardError while gradients wait to be averaged."""
        if self._engine is not None:
            self._engine.before_zero_grad()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]  # of the optimizer
        if self._engine is not None and set_to_none:
            self._engine.after_clearing()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the optimizer's own; every rank must call it, between two steps. Blocks."""
        super().add_param_group(param_group)  # type: ignore[misc]  # of the optimizer
        if self._engine is not None:
            self._engine.attach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain optimizer: it would not know its parameters' hooks."""
        return _plain, (self._base,), self.__getstate__()  # type: ignore[attr-defined]  # of the optimizer


def _plain(base: type) -> object:
    return object.__new__(base)


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    engine: _Engine = optimizer._engine
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        engine.before_step()
        return None

    def averaged() -> Any:
        loss = closure()
        engine.synchronize()
        return engine.average(loss)

    if len(args) > 1:
        return (args[0], averaged, *args[2:]), kwargs
    return args, {**kwargs, "closure": averaged}


def _after_step(optimizer: Any, *_: object) -> None:
    optimizer._engine.after_step()


def _let_go(optimizer: Any) -> None:
    optimizer._engine.close()


# What averages


@dataclasses.dataclass
class _Counts:
    """What this rank has done: steps; since the last one, reductions; passes whose gradients wait for one.

    `averages` counts the reductions since gradients were cleared, by `step()` or `zero_grad()`.
    """

    steps: int = 0
    reductions: int = 0
    waiting: int = 0
    averages: int = 0


class _Engine:
    """Owns the reducer of one optimizer, which it does not keep alive. A world of one has no reducer."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, link: dist.ProcessGroup, settings: _Settings, names: dict[int, str]
    ) -> None:
        self.is_skipping = False
        self._optimizer = weakref.ref(optimizer)
        self._settings = settings
        self._names = names
        self._number = 0
        self._counts = _Counts()
        self._sparse: frozenset[str] = frozenset()
        self._reducer: _PassReducer | None = None
        self._compressor: Compressor | None = None
        named = self._named()
        check_plain(named)
        self._device = single_device_type(named)
        check_initialized(named)
        self._link: dist.ProcessGroup | None = link
        if link.size() > 1:
            agree(Call("DistributedOptimizer", None, type(optimizer).__name__), link)
            self._number, self._link = _group_beside(link)
        if settings.compression is not None:
            self._compressor, self._hook = make_compression(settings.compression, self._link)
        self.attach()

    def _named(self) -> list[_Named]:
        """The optimizer's parameters in the order of its groups, with names that all ranks share."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return [
            (self._names.get(id(parameter), f"param_groups[{number}]['params'][{index}]"), parameter)
            for number, param_group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(param_group["params"])
        ]

    def attach(self, sparse: frozenset[str] | None = None) -> None:
        """Compare the parameters with the other ranks' and watch their gradients. Every rank must call it; blocks."""
        link = self._link
        if link is None or link.size() == 1:
            return
        if self._reducer is not None:
            self._reducer.close()
        self._sparse = self._sparse if sparse is None else sparse
        named = self._named()
        for name, parameter in named:
            if any(map(_is_reducers, (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())):
                raise ArgumentError(
                    f"the gradient of {name!r} is averaged already, by DistributedDataParallel or another "
                    "DistributedOptimizer: use one of them for each parameter"
                )
        settings = self._settings
        check_same_layout(link, describe(dataclasses.asdict(settings), named, ()), device_of(link))
        place = Whereabouts(link, timeout_s=settings.stall_timeout_s, device=self._device)
        holder = nn.Module()
        holder._parameters.update(named)
        is_compressed = settings.compression is not None
        self._reducer = _PassReducer(
            Channel(link, control_group(link, self._device), place, self._number),
            named,
            Roster(holder, ()),
            bucket_limits(settings.bucket_cap_mb, None, self._device, is_compressed=is_compressed),
            sparse=self._sparse,
            as_views=False,
            with_checksum=False,
        )
        on_sparse = None if settings.sparse_as_dense else self.attach
        self._reducer.follow(self._counts, settings, sparse=self._sparse, on_sparse=on_sparse)
        if self._compressor is not None:
            self._reducer.use_hook(checked_hook(self._compressor, self._hook))

    def set_passes(self, passes: int) -> None:
        if self._counts.waiting:
            raise BackwardError(self._still_waiting("set_backward_passes_per_step()"))
        self._settings = dataclasses.replace(self._settings, passes=passes)
        if self._reducer is not None:
            self._reducer.settings = self._settings

    def close(self) -> None:
        """Let go of the group and of the parameters; the optimizer stays usable, for this rank alone."""
        if self._reducer is not None:
            self._reducer.close()
        if self._compressor is not None:
            self._compressor.close()
        self._reducer = self._compressor = self._link = None

    # Around the optimizer's methods

    def synchronize(self) -> None:
        """Average what waits; without any reduction since the last step, take part in what other ranks may average."""
        if self._reducer is not None:
            self._reducer.settle()
            if self._counts.waiting or not self._counts.reductions:
                self._reducer.reduce_now()

    def before_step(self) -> None:
        if not self.is_skipping:
            self.synchronize()
        elif self._counts.waiting:
            raise BackwardError(self._still_waiting("step() inside skip_synchronize()"))

    def after_step(self) -> None:
        self._counts.steps += 1
        self._counts.reductions = self._counts.averages = 0
        if self._reducer is not None:
            self._reducer.be_last()
        else:
            count_step()

    def before_zero_grad(self) -> None:
        if self._reducer is not None:
            self._reducer.settle()
            self._reducer.be_last()
        if self._counts.waiting:
            raise BackwardError(self._still_waiting("zero_grad()"))
        self._counts.averages = 0

    def after_clearing(self) -> None:
        if self._reducer is not None:
            self._reducer.is_cleared = True

    def _still_waiting(self, what: str) -> str:
        return (
            f"{what} after {self._counts.waiting} of {self._settings.passes} backward passes, whose gradients are not "
            "averaged yet and would be lost: call synchronize() or step() on every rank first"
        )

    @torch.no_grad()
    def average(self, loss: Any) -> Any:
        """The loss of a closure over the ranks, so that an optimizer that decides by it does so on all alike."""
        if self._reducer is None or self._link is None or not isinstance(loss, Tensor | int | float):
            return loss
        total = torch.as_tensor(loss, dtype=None if isinstance(loss, Tensor) else torch.float64).detach().clone()
        self._link.allreduce([total]).wait()
        total = total / self._link.size() if self._settings.op == Average else total
        return total if isinstance(loss, Tensor) else total.item()


def _is_reducers(hook: object) -> bool:
    return getattr(hook, "__qualname__", "").startswith("Reducer._hook.")


def _group_beside(link: dist.ProcessGroup) -> tuple[int, dist.ProcessGroup]:
    """The number of a new optimizer; for the first of its group `link`, for others a new group of the same ranks.

    One backward pass may reach the parameters of two optimizers, whose buckets may be complete in another order
    elsewhere: in one group they would meet each other's.
    """
    name = link.group_name
    number = _made[name]
    _made[name] += 1
    if number == 0:
        return number, link
    made = dist.new_group(
        dist.get_process_group_ranks(link),
        timeout=getattr(link._get_backend(device_of(link)).options, "_timeout", None),
        backend=dist.get_backend_config(link),
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup)
    return number, made


class _Waiting:
    """The end of a pass that only accumulates, for the engine to call. Dropped before that, the pass has failed."""

    def __init__(self, reducer: _PassReducer) -> None:
        self._reducer: _PassReducer | None = reducer

    def __call__(self) -> None:
        reducer, self._reducer = self._reducer, None
        assert reducer is not None
        reducer.end_waiting()

    def __del__(self) -> None:
        if self._reducer is not None:
            self._reducer.fail("its backward pass raised an exception")


_together: dict[int, list[_PassReducer]] = {}  # those that will end with a backward pass, by the engine's number for it


@contextlib.contextmanager
def _collecting(errors: list[BaseException]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # also Ctrl-C: all are told before the first is raised again
        errors.append(error)


class _PassReducer(Reducer):
    """Reduces at the end of every so many backward passes, whatever forward pass they belong to."""

    _counts = _Counts()
    _in_pass = False
    _is_compared = False  # whether the ranks have found their parameters equal
    _on_sparse: Callable[[frozenset[str]], None] | None = None
    _sparse: frozenset[str] = frozenset()
    _found: frozenset[str] = frozenset()  # names of sparse gradients that nobody had announced
    _task = -1  # the backward pass that reduces
    is_cleared = False  # whether every gradient was None before this pass
    settings: _Settings

    def follow(
        self,
        counts: _Counts,
        settings: _Settings,
        *,
        sparse: frozenset[str],
        on_sparse: Callable[[frozenset[str]], None] | None,
    ) -> None:
        """Count in `counts`. `on_sparse` is called after a first pass with sparse gradients that `sparse` lacks."""
        self._counts = counts
        self.settings = settings
        self._sparse = sparse
        self._on_sparse = on_sparse
        # A sum is what an average over one active rank is.
        self.divides_by_active = settings.op == Sum
        self._rows: dict[int, Tensor] = {}  # sparse gradients of this rank in a first pass, by index
        self._dense: set[str] = set()  # and the names of others

    def be_last(self) -> None:
        """Let hooks that were registered since run before ours."""
        self._be_last()

    def reduce_now(self) -> None:
        """Average the gradients that wait, or take part in what other ranks average. Blocks."""
        self.prepare(iter(()), is_syncing=True, is_training=False)
        self.reduce_alone()

    def fail(self, why: str) -> None:
        _together.pop(self._task, None)  # the pass of all that it reached has failed
        self._in_pass = False
        self._counts.waiting = 0
        super().fail(why)

    def end_waiting(self) -> None:
        self._counts.waiting += 1
        self._in_pass = self.is_cleared = False
        self._place.at("between two backward passes of a step")

    def _may_begin(self) -> bool:
        is_last = self._counts.waiting + 1 >= self.settings.passes
        if not self._in_pass:
            self.settle()
            self._in_pass = True
            if self._counts.averages:
                self._note_too_many()
            if not is_last:
                Variable._execution_engine.queue_callback(_Waiting(self))
        if is_last:
            self._begin()
        return is_last

    def _begin(self) -> None:
        self._in_pass = True
        first = self._members[next(iter(self._touched))].parameter if len(self._touched) == 1 else None
        if self.is_cleared and first is not None:
            # The transfers look now at which gradients are there that backward has not made; this one it has.
            grad, first.grad = first.grad, None
            try:
                super()._begin()
            finally:
                first.grad = grad
        else:
            super()._begin()
        self._task = torch._C._current_graph_task_id()
        _together.setdefault(self._task, []).append(self)

    def _note_too_many(self) -> None:
        """There have been averages since gradients were cleared: exact if they are averaged again, but not added."""
        text = (
            f"more than backward_passes_per_step={self.settings.passes} backward passes reach the parameters of this "
            "DistributedOptimizer between two calls of its step() or zero_grad()"
        )
        if self.settings.op == Sum:
            self.fail(text)
            raise BackwardError(f"{text}: a sum of sums would be wrong, so say how many there are")
        self._warn(
            f"{text}: their gradients are exact, but averaged several times; say how many there are (checkpoints with "
            "use_reentrant=True count one by one)"
        )

    def _word(self) -> Word:
        said = repr((self._counts.steps, self._counts.waiting, None if self._is_compared else self._samples()))
        digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=6).digest(), "little")
        return dataclasses.replace(super()._word(), digest=digest)

    def _samples(self) -> dict[str, int]:
        """A number for the first elements of each parameter."""
        return fingerprints({m.name: m.parameter.detach().reshape(-1)[:_COMPARED] for m in self._members})

    def _finish(self) -> None:
        """End the pass, also for the other optimizers whose parameters it reached, on all ranks in the same order.

        The engine calls each of them, in the order of their first gradients, which may be another one elsewhere.
        """
        if not self._running:
            return  # another one has done it
        together = sorted(_together.pop(self._task, [self]), key=lambda reducer: reducer._channel.number)
        errors: list[BaseException] = []
        for reducer in together:
            reducer._end_pass()
            if len(together) > 1 and reducer._problem is None and reducer._graphs is None:
                with _collecting(errors):
                    reducer._lineup.send_rest(reducer._touched)
        for reducer in together:
            with _collecting(errors):
                reducer._finish_alone()
        if errors:
            raise errors[0]

    def _end_pass(self) -> None:
        self._counts.waiting += self._in_pass
        self._in_pass = self.is_cleared = False
        if self._is_first and self._on_sparse is not None:
            grads = [(m, m.parameter.grad) for m in self._members if m.name not in self._sparse]
            self._rows = {m.index: grad for m, grad in grads if grad is not None and grad.is_sparse}
            self._dense = {m.name for m, grad in grads if grad is not None and not grad.is_sparse}

    def _finish_alone(self) -> None:
        found: frozenset[str] = frozenset()
        try:
            super()._finish()
            found, self._found = self._found, found
        finally:
            self._counts.waiting = 0
            self._rows = {}
        self._counts.reductions += 1
        self._counts.averages += 1
        if found and self._on_sparse is not None:
            self._on_sparse(self._sparse | found)

    def _conclude(self, tally: Tally) -> None:
        is_sound = self._problem is None and not tally.failed
        if is_sound and not tally.same_digest:
            raise self._disagreement()
        is_first = self._is_first
        super()._conclude(dataclasses.replace(tally, active=1) if self.divides_by_active else tally)
        self._is_compared = True
        if is_first and self._on_sparse is not None:
            self._found = self._average_rows()

    def _average_rows(self) -> frozenset[str]:
        """Average once more, as rows, what is sparse on some ranks and dense on none; return the names.

        Nobody knows a sparse gradient before it is there, and this one has travelled as a dense one.
        """
        device = device_of(self._group)
        told = gather_values([self._members[index].name for index in self._rows], device=device, group=self._group)
        found = frozenset(name for names in told for name in names)
        if not found:
            return found
        told = gather_values(sorted(found & self._dense), device=device, group=self._group)
        found -= {name for names in told for name in names}
        for member_ in self._members:
            if member_.name in found:
                member_.parameter.grad = self._rows.get(member_.index)
                factor = float(self._group.size()) if self.divides_by_active else 1.0
                average_sparse(self._group, member_, is_used=True, factor=factor)
        return found

    def _disagreement(self) -> DdpError:
        """Who has made other steps or backward passes than the others, or starts from other values. Collective."""
        counts = self._counts
        mine = (counts.steps, counts.waiting, {} if self._is_compared else self._samples())
        every = gather_values(mine, device=device_of(self._group), group=self._group)
        end = "The gradients of this step are dropped (None) on every rank"
        for at, what in enumerate(("optimizer steps so far", "backward passes since the last reduction")):
            if odd := _odd_ones([told[at] for told in every]):
                why = (
                    "a rank skipped optimizer.step(), so the replicas are not equal any more"
                    if at == 0
                    else "a rank skipped a backward pass, or called step() without one"
                )
                return BackwardError(f"the ranks have made different numbers of {what}: {odd}; {why}. {end}")
        for name in every[0][2]:
            numbers = [told[2].get(name) for told in every]
            if len(set(numbers)) > 1:
                ranks = tuple(rank for rank, number in enumerate(numbers) if number != numbers[0])
                return DriftError(
                    f"parameter {name!r} differs on rank {', '.join(map(str, ranks))} from rank 0 before the first "
                    "step: call ddp.broadcast_parameters(model.state_dict(), root_rank=0) before training. " + end,
                    parameter=name,
                    step=1,
                    ranks=ranks,
                )
        return BackwardError(f"the ranks do not agree on where they are: {every}. {end}")


def _odd_ones(numbers: Sequence[int]) -> str:
    """Which ranks have another number than most, or nothing."""
    usual = min(numbers, key=lambda number: (-numbers.count(number), number))
    odd = [f"rank {rank} {number}" for rank, number in enumerate(numbers) if number != usual]
    return f"{', '.join(odd)}, the others {usual}" if odd else ""
