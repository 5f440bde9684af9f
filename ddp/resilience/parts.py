"""The parts of a State: how each kind returns to the newest commit, and is sent to a rank that was not there.

Created by `ddp.resilience.state`, called by `ddp.resilience.commits`. `accompany` is for objects that belong to a model
and are not given to a State, such as `ddp.LocalSGD`.
"""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from ddp.comm.broadcast import broadcast_tensors
from ddp.comm.broadcast_objects import broadcast_optimizer_state
from ddp.comm.codec import encode
from ddp.data.replica_loader import ReplicaLoader
from ddp.data.sampler import DistributedSampler
from ddp.data.step_loader import StepLoader
from ddp.data_parallel.reducer import Reducer
from ddp.data_parallel.wrapper import DistributedDataParallel
from ddp.errors import ArgumentError, ReplacementError, UnsupportedError
from ddp.horovod.optimizer import average_over, reducer_of
from ddp.resilience.copies import ATOMS, Copies, copied
from ddp.torch_internals import device_of_scaler, foreach_copy

_companions: weakref.WeakKeyDictionary[nn.Module, Part] = weakref.WeakKeyDictionary()


class Part:
    """A part of a State. Methods that are not overridden do nothing.

    It has hooks in the script's objects from the start of the resilient function until `end()`: some of these live as
    long as a parameter, and would keep the whole State alive.

    Code that changes a model outside of an optimizer's step, on all ranks at once, calls `changed()` of its part then.
    """

    changed: Callable[[], None] = staticmethod(lambda: None)

    def end(self) -> None:
        """Remove all hooks: the function has ended."""

    @property
    def is_dirty(self) -> bool:
        """Whether it has changed since the newest commit, and cannot be restored."""
        return False

    def keep(self) -> None:
        """Save the present state as that of a commit."""

    def roll_back(self) -> None:
        """Undo this rank's changes since the newest commit."""

    def share(self, root: int, group: dist.ProcessGroup) -> None:
        """Copy the tensors of rank `root`, which is at the commit, to all ranks. Every rank must call it; blocks."""

    def to_send(self) -> Any:
        """Return the rest of the commit for the other ranks: a plain value (`ddp.comm.codec`)."""

    def receive(self, sent: Any) -> None:
        """Load the value that another rank's part has sent."""


class ReducingPart(Part):
    """A part whose gradients a reducer may average. The plan of its buckets is that of the newest commit."""

    _plan: dict[str, Any] | None = None

    @property
    def reducer(self) -> Reducer | None:
        raise NotImplementedError

    def attach(self, group: dist.ProcessGroup) -> None:
        """Average over the ranks of `group`, from now on."""

    def keep(self) -> None:
        reducer = self.reducer
        self._plan = None if reducer is None else reducer.sums.plan_state()

    def roll_back(self) -> None:
        self._resume_plan(self._plan)

    def to_send(self) -> Any:
        return self._plan

    def receive(self, sent: Any) -> None:
        self._resume_plan(sent)

    def _resume_plan(self, plan: dict[str, Any] | None) -> None:
        if plan is not None and (reducer := self.reducer) is not None:
            reducer.resume_plan(plan)


class ModelPart(ReducingPart):
    """A module. An optimizer changes its parameters; the rank's page has its buffers."""

    def __init__(self, module: nn.Module, wrapper: DistributedDataParallel | None) -> None:
        self.module, self.wrapper = module, wrapper
        self._handle: RemovableHandle | None = None
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []  # whether each required a gradient at the newest commit
        self.keeps_buffers = False  # those on devices: an ended collective of batch normalization corrupts them
        self._buffers: list[torch.Tensor] = []  # their copies, as at the newest commit

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]

    @property
    def companion(self) -> Part | None:
        return _companions.get(self.module)

    @property
    def reducer(self) -> Reducer | None:
        return None if self.wrapper is None else self.wrapper.gradient_reducer

    def is_trained(self, given: set[int]) -> bool:
        """Return whether it changes in a step, not between the step and the commit; `given` as in `obstacle`."""
        return any(id(parameter) in given for parameter in self.module.parameters())

    def obstacle(self, given: set[int]) -> str:
        """Describe its state that could not be restored, if any; `given` are the ids of the optimizers' parameters."""
        for name, parameter in () if isinstance(self.module, AveragedModel) else self.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in given:
                return (
                    f"{name} is trained, but not by an optimizer of this State, so its changes go unnoticed: give "
                    "State the optimizers of all parameters, or freeze it"
                )
        wrapper, reducer = self.wrapper, self.reducer
        if wrapper is None:
            return ""
        why = {
            "a communication hook of your own": reducer is not None and reducer.has_users_hook,
            "LocalSGD": wrapper.steps_alone and self.companion is None,
        }
        for what, is_so in why.items():
            if is_so:
                return f"{what} in a resilient function: a rank that is replaced would not have it"
        return ""

    def attach(self, group: dist.ProcessGroup) -> None:
        self._train_only(self._trained)
        if self.wrapper is not None and getattr(self.wrapper, "process_group", None) is not group:
            self.wrapper.average_over(group)  # it has released the old one

    def call_before_sending(self, call: Callable[[], None]) -> None:
        """Call `call()` before the last gradients of a step are sent; if that moment is unknown, after each forward."""
        if (reducer := self.reducer) is not None:
            reducer.before_last_bucket = call
        elif self.wrapper is None:
            if self._handle is not None:
                self._handle.remove()
            self._handle = self.module.register_forward_hook(_AfterForward(call))

    def end(self) -> None:
        if (reducer := self.reducer) is not None:
            reducer.before_last_bucket = None
        if self._handle is not None:
            self._handle.remove()

    def interrupted(self) -> None:
        """Handle a failed group: raise ReplacementError for state that the next one would lack."""
        reducer = self.reducer
        if reducer is not None and reducer.has_users_hook:
            raise ReplacementError("a communication hook of your own does not come back: all start again")

    def keep(self) -> None:
        super().keep()
        self._parameters = self._parameters or [*self.module.parameters()]
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        buffers = self._on_devices() if self.keeps_buffers else []
        if not buffers:  # torch copies no empty list
            return
        if [each.shape for each in self._buffers] != [each.shape for each in buffers]:
            self._buffers = [torch.empty_like(each) for each in buffers]
        foreach_copy(self._buffers, buffers)

    def roll_back(self) -> None:
        super().roll_back()
        self.restore_buffers()

    def restore_buffers(self) -> None:
        """Put back the buffers on devices, as of the newest commit of this rank."""
        if self._buffers:
            foreach_copy(self._on_devices(), self._buffers)

    def to_send(self) -> Any:
        return super().to_send(), self._trained

    def receive(self, sent: Any) -> None:
        plan, trained = sent
        self._parameters = [*self.module.parameters()]
        self._train_only(trained)
        super().receive(plan)

    def _train_only(self, trained: Sequence[bool]) -> None:
        for parameter, is_trained in zip(self._parameters, trained, strict=True):
            parameter.requires_grad_(is_trained)

    def _on_devices(self) -> list[torch.Tensor]:
        return [buffer.data for buffer in self.module.buffers() if not buffer.is_cpu]

    def share(self, root: int, group: dist.ProcessGroup) -> None:
        broadcast_tensors(group, [tensor.detach() for tensor in self.tensors], root)


class _AfterForward:
    """A hook for this process's object only: in a copy or a pickle of the module it does nothing."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._call()

    def __reduce__(self) -> tuple[type[_AfterForward], tuple[Callable[[], None]]]:
        return _AfterForward, (_do_nothing,)


def _do_nothing() -> None:
    """Stand in for the call in a copy."""


class OptimizerPart(ReducingPart):
    """An optimizer. A commit copies its settings; the tensors that a step changes are copied only if `keeps_tensors`.

    Otherwise a rank that has begun its step without committing is dirty, and gets the state of a clean rank.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise ArgumentError(
                f"{name}={type(optimizer).__name__} has no register_step_pre_hook(), so its changes go unnoticed "
                "the parameters: use one that is a torch.optim.Optimizer"
            )
        self.optimizer = optimizer
        self.keeps_tensors = False
        self._has_stepped = False
        self._groups: list[dict[str, Any]] = []
        self._values: list[torch.Tensor] = []  # the parameters before the first step since the commit
        self._states: list[dict[str, Any] | None] = []
        self._settle: Callable[[], bool] | None = None
        self._settled = False
        self._handle: RemovableHandle | None = None

    @property
    def is_dirty(self) -> bool:
        return self._has_stepped and not self.keeps_tensors

    @property
    def has_stepped(self) -> bool:
        """Whether it has begun a step since the newest commit."""
        return self._has_stepped

    @property
    def is_settled(self) -> bool:
        """Whether it has begun a step since the newest commit, after a check that all collectives were done."""
        return self._has_stepped and self._settled

    def call_before_step(self, settle: Callable[[], bool] | None) -> None:
        """Call `settle()` before each step, after hooks of others (`ddp.horovod`); it returns False on failure."""
        self._settle = settle
        self._handle = self.optimizer.register_step_pre_hook(self._before_step)

    def end(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def reducer(self) -> Reducer | None:
        return reducer_of(self.optimizer)

    def attach(self, group: dist.ProcessGroup) -> None:
        average_over(self.optimizer, group)

    def _before_step(self, _: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._settle is not None:
            # A closure averages again.
            self._settled = self._settle() and len(args) < 2 and kwargs.get("closure") is None
        if self.keeps_tensors and not self._has_stepped:
            parameters = [parameter.detach() for parameter in self.parameters]
            if len(self._values) != len(parameters):
                self._states = []
                self._values = [torch.empty_like(each) for each in parameters]
            foreach_copy(self._values, parameters)
            state = self.optimizer.state
            before = self._states or [None] * len(parameters)
            self._states = [
                _refreshed(old, state[each]) if each in state else None
                for old, each in zip(before, self.parameters, strict=True)
            ]
        self._has_stepped = True

    def keep(self) -> None:
        super().keep()
        self._groups = [_settings(group) for group in self.optimizer.param_groups]
        self._has_stepped = False

    def roll_back(self) -> None:
        super().roll_back()
        has_stepped, self._has_stepped = self._has_stepped, False
        for group, then in zip(self.optimizer.param_groups, self._groups, strict=True):
            group |= {name: copied(value) for name, value in then.items()}
        if not has_stepped:
            return
        foreach_copy([parameter.detach() for parameter in self.parameters], self._values)
        for parameter, state in zip(self.parameters, self._states, strict=True):
            if state is None:
                self.optimizer.state.pop(parameter, None)
            else:
                self.optimizer.state[parameter] = copied(state)

    def share(self, root: int, group: dist.ProcessGroup) -> None:
        broadcast_optimizer_state(self.optimizer, root, group=group)


class StatefulPart(Part):
    """A scheduler, a scaler, or any object with `state_dict()` and `load_state_dict()`; a commit copies its tensors."""

    def __init__(self, name: str, stateful: Any) -> None:
        try:
            encode(stateful.state_dict())
        except ArgumentError as error:
            raise ArgumentError(f"{name}={type(stateful).__name__} has a state that cannot be sent: {error}") from error
        self._stateful = stateful
        self._copies = Copies()
        self._kept: Any = None

    def keep(self) -> None:
        self._kept = self._copies.of(self._stateful.state_dict())

    def roll_back(self) -> None:
        self.receive(copied(self._kept))

    def to_send(self) -> Any:
        return self._kept

    def receive(self, sent: Any) -> None:
        scaler = self._stateful
        if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
            scaler.scale(torch.zeros((), device=device_of_scaler(scaler)))  # creates its scale: else it has no state
            scaler.update(scaler.get_scale())  # resets its record of optimizers that stepped
        self._stateful.load_state_dict(sent)


class SamplerPart(Part):
    """The place in the data. A DistributedSampler is advanced by the samples handed out, unless the script does so."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._position: dict[str, Any] = {}
        self._counted = 0, 0  # the sampler's start, and samples trained on since then, at the newest commit
        self._advanced = 0  # calls of `advance` until then
        self.stands_still = False  # no sample of the newest commit was drawn after the one before, as far as is known

    def keep(self) -> None:
        self._position = self.sampler.state_dict()

    def to_send(self) -> Any:
        return self._position

    def receive(self, sent: Any) -> None:
        self._position = sent

    def begin(self, before_rest: Callable[[], None] | None) -> None:
        """Move to the commit; call `before_rest()` when an epoch resumes in its middle."""
        self.sampler.load_state_dict(self._position)
        if isinstance(self.sampler, DistributedSampler) and before_rest is not None:
            # iter() of a DataLoader draws a number, which the rest of an uninterrupted epoch would not draw.
            self.sampler.before_rest(before_rest)

    @property
    def is_of_steps(self) -> bool:
        """Whether all ranks have the same buffers and random numbers after each step."""
        return isinstance(self.sampler, StepLoader)

    @property
    def can_deal_over(self) -> bool:
        """Whether it can deal the rest of an epoch to another number of ranks."""
        return isinstance(self.sampler, DistributedSampler | StepLoader) or type(self.sampler) is ReplicaLoader

    def deal_over(self, before: tuple[int, int], place: tuple[int, int]) -> None:
        """Deal to other ranks than `before` (rank, size): the rest of the epoch, from `begin` on."""
        sampler = self.sampler
        if not self.can_deal_over:
            raise UnsupportedError(
                f"sampler={type(sampler).__name__} cannot deal out the rest of an epoch to {place[1]} ranks instead of "
                f"{before[1]}: use ddp.DistributedSampler, or the loader of a ddp.strategy. All start again"
            )
        if isinstance(sampler, ReplicaLoader):
            sampler.deal_over(before, place)
        elif (
            isinstance(sampler, DistributedSampler) and (sampler.rank, sampler.num_replicas) == before
        ):  # otherwise the script has set them
            sampler.rank, sampler.num_replicas = place

    def count(self) -> int:
        """Count the samples trained on since the last commit; return their number on this rank."""
        sampler = self.sampler
        if not isinstance(sampler, DistributedSampler):
            return 0
        place, trained = self._counted
        before = trained if sampler.places == place else 0
        has_advanced = sampler.advanced != self._advanced
        if not has_advanced and sampler.drawn > sampler.trained:
            _check_draws_now(sampler)
            sampler.advance(sampler.drawn - sampler.trained)
        self._counted, self._advanced = (sampler.places, sampler.trained), sampler.advanced
        # With "exact", a rank may have no sample in the last step.
        self.stands_still = not has_advanced and sampler.trained == before and sampler.even != "exact"
        return sampler.trained - before


def accompany(model: nn.Module, part: Part) -> None:
    """Restore `part` along with `model`, which is not the wrapper; for other packages of ddp."""
    _companions[model] = part


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if type(value) in ATOMS else copied(value) for name, value in group.items() if name != "params"}


def _refreshed(copy_: dict[str, Any] | None, state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a parameter's state into the memory of an earlier copy."""
    if copy_ is None or copy_.keys() != state.keys():
        return {name: copied(value) for name, value in state.items()}
    for name, value in state.items():
        old = copy_[name]
        if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor) and _is_alike(value, old):
            old.copy_(value)
        else:
            copy_[name] = copied(value)
    return copy_


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _check_draws_now(sampler: DistributedSampler) -> None:
    why = ""
    if multiprocessing.active_children():
        why = "this process has children by multiprocessing, perhaps the workers of a DataLoader, which draw samples "
    elif sampler.is_drawn_elsewhere:
        why = "another thread draws samples "
    if why:
        raise ArgumentError(
            f"{why}ahead, so it is unknown how many this step has trained on: call sampler.advance(len(batch)) before "
            "state.commit()"
        )
