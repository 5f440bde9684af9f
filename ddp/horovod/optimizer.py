"""An optimizer that steps on gradients averaged over the ranks, for scripts that keep their own model object.

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

The interface is that of Horovod (Sergeev and Del Balso 2018, arXiv:1802.05799). The reduction is that of
DistributedDataParallel (`reducer`: buckets in one order on all ranks, overlapped with backward, and a status), but
without a forward pass that announces it: every `backward_passes_per_step`-th backward pass after a step ends with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.comm.call_check import Call, check_same_call, host_side
from ddp.comm.channel import Channel
from ddp.comm.layout import check_same_layout, describe
from ddp.comm.objects import device_of, gather_values
from ddp.compression import Half, Int8, PowerSGD, make_compression
from ddp.compression.compressor import Compressor
from ddp.data_parallel.arguments import bucket_limits, checked_device
from ddp.data_parallel.backward_pass import is_reducers
from ddp.data_parallel.buckets.comm_hook import checked_hook
from ddp.data_parallel.module_watch import ModuleWatch
from ddp.data_parallel.reducer import Reducer
from ddp.errors import ArgumentError, BackwardError
from ddp.generation.pending_group import is_pending
from ddp.horovod.calls import Average, Sum, own_group
from ddp.horovod.counting_policy import CountingPolicy
from ddp.monitoring import timeline
from ddp.monitoring.progress import count_step
from ddp.monitoring.stall_report import finish, waiting_for_peers
from ddp.torch_internals import gradient_hooks, not_split_off, parameters_of, timeout_of
from ddp.world import before_leaving

_T = TypeVar("_T", bound=torch.optim.Optimizer)
_Named = tuple[str, nn.Parameter]
_places: weakref.WeakKeyDictionary[dist.ProcessGroup, _Places] = weakref.WeakKeyDictionary()
_engines: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Engine] = weakref.WeakKeyDictionary()


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

    It is the same object, with five new methods: learning rate schedulers, GradScaler, `param_groups`, `state` and
    `state_dict()` work as before. Every rank must call this, with optimizers of the same parameters in the same
    order; blocks. The replicas must be equal (see `broadcast_parameters`); the ranks check this before the first step.

    - `named_parameters`: names for messages, and for the comparison between the ranks.
    - `compression`: "bf16", "fp16", "int8", "powersgd" or one with settings (`ddp.compression`).
    - `backward_passes_per_step`: backward passes whose gradients are added up before they are averaged. As in Horovod
      they are not divided by that number: the script divides its loss.
    - `op`: "average" or "sum" over the ranks.
    - `gradient_predivide_factor`, `num_groups`, `groups`: Horovod's, accepted; gradients are divided before they are
      added and sent in buckets anyway.
    - `sparse_as_dense`: sparse gradients become dense ones; else, if they are seen in the first backward pass, only
      the rows that some rank has are sent from then on.
    - `group`: the ranks that average with each other; default: all. `bucket_cap_mb`, `stall_timeout_s`: as in
      DistributedDataParallel.

    **What happens when.** When the last of a step's backward passes returns, `.grad` holds the averages: clipping and
    GradScaler need nothing else. `synchronize()` averages what is not averaged yet, for example after fewer passes;
    `step()` calls it automatically, except inside `skip_synchronize()`. A missing gradient counts as zeros if another
    rank has one; if no rank has one, `.grad` stays as it is. More passes than announced are averaged exactly, in
    additional reductions (with a warning); for a sum they raise BackwardError. `step(closure)` averages after each
    backward pass in the closure, and the optimizer sees the average of the losses.

    **Errors.** If a backward pass of one rank raises, the others raise PeerFailedError in theirs. Different numbers of
    backward passes or of steps raise BackwardError on every rank, with the numbers of each rank; different parameters
    at the first step DriftError. After these, `.grad` is None on every rank. `zero_grad()` while gradients of passes
    wait to be averaged raises BackwardError on its rank, as in Horovod.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"DistributedOptimizer({optimizer!r}): it must be a torch.optim.Optimizer")
    if optimizer in _engines:
        raise ArgumentError(f"this {type(optimizer).__name__} is distributed already: call DistributedOptimizer() once")
    _check_numbers(backward_passes_per_step, op, gradient_predivide_factor)
    link = own_group(group, "DistributedOptimizer")
    settings = _Settings(op, compression, sparse_as_dense, bucket_cap_mb, stall_timeout_s)
    names = _names_of(optimizer, named_parameters)
    engine = _Engine(optimizer, link, settings, names, backward_passes_per_step)
    timeline.prepare(optimizer)
    _engines[optimizer] = engine
    for name in _METHODS:  # on this object only: a copy is a plain optimizer, whose parameters have no hooks
        setattr(optimizer, name, getattr(engine, name))
    optimizer.register_step_pre_hook(engine.before_step)
    optimizer.register_step_post_hook(engine.after_step)
    weakref.finalize(optimizer, engine.close).atexit = False
    before_leaving(optimizer, lambda _: engine.close())
    return optimizer


def average_over(optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Average over the ranks of `group` from now on, if `optimizer` is distributed. All must call it; blocks."""
    if (engine := _engines.get(optimizer)) is not None:
        engine.average_over(group)


def reducer_of(optimizer: torch.optim.Optimizer) -> Reducer | None:
    """Return the reducer of `optimizer`; None if it has none."""
    engine = _engines.get(optimizer)
    return None if engine is None else engine.reducer


def is_distributed(optimizer: torch.optim.Optimizer) -> bool:
    return optimizer in _engines


_METHODS = ("synchronize", "skip_synchronize", "set_backward_passes_per_step", "zero_grad", "add_param_group")


@dataclasses.dataclass(frozen=True)
class _Settings:
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
    """Return the parameters' names by identity. Raises ArgumentError if one is missing or not unique."""
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


class _Engine:
    """Owns the reducer of one optimizer, which it does not keep alive. A world of one has no reducer.

    The optimizer's methods in `_METHODS` are replaced by the engine's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        link: dist.ProcessGroup,
        settings: _Settings,
        names: dict[int, str],
        passes: int,
    ) -> None:
        self._is_skipping = False
        self._optimizer = weakref.ref(optimizer)
        self._settings = settings
        self._names = names
        self._number = 0
        self.reducer: Reducer | None = None
        self._policy = self._new_policy(passes)
        self._compressor: Compressor | None = None
        self._device = checked_device(self._named())
        self._link: dist.ProcessGroup | None = link
        self._release: Callable[[], None] = _nothing
        if is_pending(link):  # `average_over` comes later
            return
        if link.size() > 1:
            check_same_call(Call("DistributedOptimizer", None, type(optimizer).__name__), link)
            self._number, self._link, self._release = _reserve_group(link)
        try:
            if settings.compression is not None:
                self._compressor, self._hook = make_compression(settings.compression, self._link)
            self.attach()
        except BaseException:
            if self._link is not link:
                dist.destroy_process_group(self._link)
            raise

    def _users(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _named(self) -> list[_Named]:
        """Return the optimizer's parameters in the order of its groups, with names that are the same on all ranks."""
        optimizer = self._users()
        return [
            (self._names.get(id(parameter), f"param_groups[{number}]['params'][{index}]"), parameter)
            for number, param_group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(param_group["params"])
        ]

    def _new_policy(self, passes: int) -> CountingPolicy:
        settings = self._settings
        on_sparse = None if settings.sparse_as_dense else self.attach
        return CountingPolicy(passes=passes, is_sum=settings.op == Sum, on_sparse=on_sparse)

    def attach(self, sparse: frozenset[str] | None = None) -> None:
        """Compare the parameters with the other ranks' and watch their gradients. Every rank must call it; blocks."""
        link = self._link
        if link is None or link.size() == 1:
            return
        if self.reducer is not None:
            self.reducer.close()
            sparse = self.reducer.sparse | (sparse or frozenset())
        named = self._named()
        for name, parameter in named:
            if any(map(is_reducers, (gradient_hooks(parameter) or {}).values())):
                raise ArgumentError(
                    f"the gradient of {name!r} is averaged already, by DistributedDataParallel or another "
                    "DistributedOptimizer: use one of them for each parameter"
                )
        settings = self._settings
        entries = describe({"passes": self._policy.passes, **dataclasses.asdict(settings)}, named, ())
        channel = Channel.open(link, self._device, self._number, stall_timeout_s=settings.stall_timeout_s)
        with channel.closing_on_error(), channel.report.waiting("comparison of the optimizers"):
            check_same_layout(channel.control, entries)
        holder = nn.Module()
        parameters_of(holder).update(named)
        is_compressed = settings.compression is not None
        reducer = Reducer(
            channel,
            named,
            ModuleWatch(holder, ()),
            bucket_limits(settings.bucket_cap_mb, None, self._device, is_compressed=is_compressed),
            sparse=sparse or frozenset(),
            as_views=False,
        )
        self.reducer = reducer
        self._policy.attach(channel, reducer.members)
        reducer.policy = self._policy
        if self._compressor is not None:
            reducer.use_hook(checked_hook(self._compressor, self._hook))

    def average_over(self, group: dist.ProcessGroup) -> None:
        if self._link is group:
            return
        self.close()
        self._link, self._number, self._policy = group, 0, self._new_policy(self._policy.passes)
        if self._settings.compression is not None:
            self._compressor, self._hook = make_compression(self._settings.compression, group)
        self.attach()

    def close(self) -> None:
        """Release the group and the parameters; the optimizer stays usable, for this rank alone."""
        if self.reducer is not None:
            self.reducer.close()
        if self._compressor is not None:
            self._compressor.close()
        self.reducer = self._compressor = self._link = None
        release, self._release = self._release, _nothing
        release()

    def synchronize(self) -> None:
        """Average the gradients of the backward passes since the last reduction, if there are any.

        Every rank must call it; blocks. If no rank has such passes, nothing changes; `step()` does not repeat it.
        """
        if self.reducer is not None:
            self._settle(self.reducer)
            # Without a reduction since the last step, other ranks may have gradients to average.
            if self._policy.waiting or not self._policy.reductions:
                self.reducer.hooks.be_last()
                self.reducer.reduce_now()

    def _settle(self, reducer: Reducer) -> None:
        """Wait for a failed pass to end, between backward passes: one that still seems to run was interrupted."""
        reducer.report.check_in_step()
        reducer.settle()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Skip the synchronization in `step()`, after an explicit `synchronize()`."""
        self._is_skipping = True
        try:
            yield
        finally:
            self._is_skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes of a step, between two steps and on every rank."""
        _check_numbers(passes, Average, 1.0)
        if self._policy.waiting:
            raise BackwardError(self._still_waiting("set_backward_passes_per_step()"))
        self._policy.passes = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like the optimizer's own. Raises BackwardError while gradients wait to be averaged."""
        if self.reducer is not None:
            self._settle(self.reducer)
            self.reducer.hooks.be_last()
        if self._policy.waiting:
            raise BackwardError(self._still_waiting("zero_grad()"))
        optimizer = self._users()
        type(optimizer).zero_grad(optimizer, set_to_none=set_to_none)
        self._policy.cleared(to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the optimizer's own; every rank must call it, between two steps. Blocks."""
        optimizer = self._users()
        type(optimizer).add_param_group(optimizer, param_group)
        self.attach()

    def before_step(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Average the waiting gradients; with a closure, after each call of it, since none wait before."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            if not self._is_skipping:
                self.synchronize()
            elif self._policy.waiting:
                raise BackwardError(self._still_waiting("step() inside skip_synchronize()"))
            self._look_for_nonfinite()
            return None

        def averaged() -> Any:
            loss = closure()
            self.synchronize()
            self._look_for_nonfinite()
            return self._average(loss)

        if len(args) > 1:
            return (args[0], averaged, *args[2:]), kwargs
        return args, {**kwargs, "closure": averaged}

    def _look_for_nonfinite(self) -> None:
        if self.reducer is not None:
            self.reducer.nonfinite.before_step()

    def after_step(self, *_: object) -> None:
        self._policy.stepped()
        if self.reducer is not None:
            self.reducer.hooks.be_last()
        else:
            count_step()

    def _still_waiting(self, what: str) -> str:
        return (
            f"{what} after {self._policy.waiting} of {self._policy.passes} backward passes, whose gradients are not "
            "averaged yet and would be lost: call synchronize() or step() on every rank first"
        )

    @torch.no_grad()
    def _average(self, loss: Any) -> Any:
        """Average a closure's loss over the ranks, so that an optimizer that depends on it acts alike on all."""
        if self.reducer is None or self._link is None or not isinstance(loss, Tensor | int | float):
            return loss
        total = loss if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64, device="cpu")
        total = total.detach().clone()
        with waiting_for_peers("average of the closure's losses", self._link):
            group = host_side(self._link) if total.device.type == "cpu" else self._link
            finish(group.allreduce([total]), device=total.device)
        total = total / self._link.size() if self._settings.op == Average else total
        return total if isinstance(loss, Tensor) else total.item()


@dataclasses.dataclass
class _Places:
    """The groups in which the optimizers over one group average: itself, and further groups of the same ranks.

    One backward pass may reach the parameters of two optimizers, and the order in which their buckets become complete
    may differ between ranks: in one group they would be mixed up.
    """

    made: int = 0
    free: dict[int, dist.ProcessGroup | None] = dataclasses.field(default_factory=dict)  # None: the group itself


def _nothing() -> None:
    pass


def _reserve_group(link: dist.ProcessGroup) -> tuple[int, dist.ProcessGroup, Callable[[], None]]:
    """Return the number of a new optimizer over `link`, its group, and a function that releases them. Blocks.

    Reuses a number and group that an earlier optimizer released on all ranks; else makes a group.
    """
    places = _places.setdefault(link, _Places())
    free = set.intersection(*map(set, gather_values([*places.free], group=link)))
    if free:
        number = min(free)
        group = places.free.pop(number)
    else:
        number = places.made
        places.made += 1
        group = _group_beside(link) if number else None  # the first needs none
    return number, group or link, partial(places.free.__setitem__, number, group)


def _group_beside(link: dist.ProcessGroup) -> dist.ProcessGroup:
    is_part = link.size() < dist.get_world_size()
    with not_split_off() if is_part else contextlib.nullcontext():
        made = dist.new_group(
            dist.get_process_group_ranks(link),
            timeout=timeout_of(link, device_of(link)),
            backend=dist.get_backend_config(link),
            # If set, torch derives the name from the number of groups in this process; if that differs, it hangs.
            use_local_synchronization=is_part,
        )
    assert isinstance(made, dist.ProcessGroup)
    return made
