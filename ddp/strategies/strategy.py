"""One loop for several ways to train: `ddp.strategy(name)` chooses all-reduce, parameter servers and others.

    strategy = ddp.strategy("all_reduce")  # default: DTRAIN_STRATEGY
    model, optimizer = strategy.prepare(model, optimizer)
    for x, y in strategy.loader(dataset, global_batch_size=512, shuffle=True):
        loss = strategy.mean(F.cross_entropy(model(x), y, reduction="none"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

| strategy | tf.distribute | elsewhere |
|---|---|---|
| "all_reduce" on one host | MirroredStrategy | torch's DistributedDataParallel, DataParallel; Horovod's optimizer |
| "all_reduce" on several, `communication="auto"`, "nccl", "gloo", ... | MultiWorkerMirroredStrategy | the same |
| "parameter_server" | ParameterServerStrategy | torch.distributed.rpc's parameter server example, MXNet's kvstore |
| "central_storage" | CentralStorageStrategy | |
| "local_sgd" | | torch's post-local SGD and PeriodicModelAverager, DiLoCo |
| "tpu" | TPUStrategy | torch_xla's SPMD mode |

This module has the common part; the other modules of `ddp.strategies` have the strategies.
"""

from __future__ import annotations

import difflib
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.data import Dataset

from ddp.comm.objects import gather_bytes
from ddp.comm.reduction import combine, payload_of
from ddp.data.micro_batch import current
from ddp.data.replica_loader import ReplicaLoader
from ddp.data_parallel.wrapper import DistributedDataParallel
from ddp.environment import roles_of
from ddp.errors import ArgumentError, LaunchEnvironmentError
from ddp.monitoring.stall_report import waiting_for_peers
from ddp.torch_internals import unwrapped
from ddp.world import World, init

Weighting = Literal["in_backward", "by_exchange", "own", "refused"]

_CLASSES = {  # imported on use: the dependencies of a parameter server may not be installed
    "all_reduce": "ddp.strategies.all_reduce:AllReduce",
    "parameter_server": "ddp.strategies.parameter_server.strategy:ParameterServer",
    "central_storage": "ddp.strategies.central_storage.strategy:CentralStorage",
    "local_sgd": "ddp.strategies.local_sgd.strategy:LocalSteps",
    "tpu": "ddp.strategies.tpu.strategy:Tpu",
}
_IN_TF = {"mirrored": "all_reduce", "multi_worker_mirrored": "all_reduce"}  # names in tf.distribute
_VARIABLE = "DTRAIN_STRATEGY"


def strategy(name: str | None = None, **options: Any) -> Strategy:
    """Return the strategy called `name`; default: the variable DTRAIN_STRATEGY, else "all_reduce".

    Joins this process to the others, as `ddp.init` does; every process of the job must call it with the same
    arguments. A name may have options, as in DTRAIN_STRATEGY: "parameter_server,mode=async"; `options` override
    those. Options by strategy:

    - "all_reduce": `communication` ("auto": as `ddp.init`; or a backend's name), `compression`, and all other
      arguments of `ddp.DistributedDataParallel`.
    - "local_sgd": `every`, `after`, `outer_lr`, `outer_momentum`, `nesterov` of `ddp.LocalSGD`, and `communication`.
    - "central_storage": those of `ddp.strategies.central_storage.strategy.CentralStorage`.
    - "parameter_server": those of `ddp.strategies.parameter_server.strategy.ParameterServer`.
    - "tpu" has none.

    Raises ArgumentError for an unknown name or option, LaunchEnvironmentError if the processes that the launcher
    started do not fit the strategy.
    """
    name, in_name = _parse(os.environ.get(_VARIABLE, "") if name is None else name)
    options = {**in_name, **options}
    if name not in _CLASSES:
        close = [_IN_TF[name]] if name in _IN_TF else difflib.get_close_matches(name, _CLASSES, n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ArgumentError(f"there is no strategy {name!r}; there are {', '.join(map(repr, _CLASSES))}{hint}")
    module, _, attribute = _CLASSES[name].partition(":")
    chosen: type[Strategy] = getattr(importlib.import_module(module), attribute)
    _check_options(name, chosen, options)
    if not chosen.has_servers:
        _refuse_other_roles(name)
    return chosen(**options)


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    """Parse "name,option=value,..."; values are numbers, true, false, none or strings."""
    name, *rest = (part.strip() for part in (text or "all_reduce").split(","))
    options: dict[str, Any] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier():
            raise ArgumentError(f"the strategy {text!r}: {part!r} is no option; write name,option=value,...")
        options[key] = _value(value)
    return name, options


def _value(text: str) -> Any:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _check_options(name: str, chosen: type[Strategy], options: Mapping[str, Any]) -> None:
    known = {*signature(chosen.__init__).parameters, *chosen.passes_on()} - {"self", "options"}
    for option in options:
        if option not in known:
            raise ArgumentError(f"strategy {name!r} has no option {option!r}; it has {', '.join(sorted(known))}")


def _refuse_other_roles(name: str) -> None:
    others = {role: count for role, count in roles_of(os.environ).items() if role in ("ps", "evaluator")}
    if others:
        what = " and ".join(f"{count} of role {role}" for role, count in others.items())
        raise LaunchEnvironmentError(
            f"strategy {name!r} needs workers only, but the run has {what}, which would wait for ever: start it "
            f"without {' and '.join('--' + role for role in others)}, or choose 'parameter_server'"
        )


class Strategy(ABC):
    """A way to train the replicas together; returned by `strategy` and called by the training loop.

    `replica` is this process's index among the `replicas` that train. Their `role` is "worker"; other processes of a
    run with parameter servers have "ps" or "evaluator". `world` has the device.
    """

    name: ClassVar[str]
    has_servers: ClassVar[bool] = False
    collective: bool = True  # whether the workers have a process group, which `ddp.Checkpoint` needs
    comes_back: ClassVar[bool] = False  # whether a process that replaces a failed one can join (`ddp.resilient`)
    averages_in_step: bool = False  # whether gradients are averaged by `optimizer.step()`, not by `backward()`
    role: str = "worker"

    def __init__(self, world: World) -> None:
        self.world = world
        self._batch_size: int | None = None  # of the present global batch: the last that a loader yielded
        self.on_mean: Callable[[torch.Tensor, torch.Tensor], None] | None = None  # gets a mean() and its gradient

    @classmethod
    def passes_on(cls) -> set[str]:
        """Return the names of options that are passed on to another class."""
        return set()

    @property
    def replica(self) -> int:
        """This process's index among those that train, from 0."""
        return self.world.rank

    @property
    def replicas(self) -> int:
        """Number of processes that train; losses and gradients are means over their shares of a batch."""
        return self.world.world_size

    @property
    def weighting(self) -> Weighting:
        """The way in which weighted means of the replicas, such as over labels, become the mean over all.

        "in_backward": the model's `backward` takes the weight of its loss; "by_exchange": the replicas add up the
        weights of a step; "own": there is no mean over all, because a step uses a replica's own gradients, or those
        that come first; "refused": the gradients are averaged by samples, whatever the weights are. It may change
        from step to step, on all replicas alike.
        """
        return "by_exchange"

    @property
    def joined_at(self) -> int:
        """Number of steps that the training had made when this process joined it."""
        return 0

    @property
    def goes_on(self) -> bool:
        """Whether this process joined a training that others had started; it must not restore a checkpoint then."""
        return self.joined_at > 0

    @property
    def is_main(self) -> bool:
        """Whether this is replica 0 of the workers: the one that prints, logs and saves."""
        return self.role == "worker" and self.replica == 0

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and optimizer that the training loop uses instead of its own.

        Every process must call it, with models and optimizers made alike; it blocks until all have. The model is moved
        to this replica's device, and all replicas start from the values of replica 0. Then `model(x)`, `backward()` and
        `optimizer.step()` train as usual, on the gradients averaged over the replicas; learning-rate schedules take the
        optimizer that is returned.

        Raises ArgumentError for models and optimizers that the strategy cannot train, LayoutMismatchError if the
        processes' models differ.
        """
        _check_given(model, optimizer)
        self._move(model)
        return self._prepare(model, optimizer)

    def _move(self, model: nn.Module) -> None:
        """Put the model on this replica's device, in place."""
        model.to(self.world.device)

    @abstractmethod
    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Implement `prepare`, for a model that is on its device."""

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **loading: Any,
    ) -> ReplicaLoader:
        """Return an iterable of this replica's share of each batch of `global_batch_size` samples.

        See `ReplicaLoader`; `loading` are arguments of torch's DataLoader, such as `num_workers`. Raises ArgumentError
        for a data set without a length, for fewer samples in a batch than replicas, and for arguments that the
        strategy sets, such as `batch_size`.
        """
        return self._new_loader(
            dataset,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            on_batch=self.set_batch_size,
            **loading,
        )

    def _new_loader(self, dataset: Dataset[Any], **options: Any) -> ReplicaLoader:
        return ReplicaLoader(dataset, replica=self.replica, replicas=self.replicas, **options)

    def set_batch_size(self, size: int) -> None:
        """Set the size of the global batch for the next `mean()`. Loaders call it with each batch."""
        self._batch_size = size

    def mean(
        self,
        per_sample_loss: torch.Tensor,
        weights: torch.Tensor | None = None,
        *,
        global_batch_size: int | None = None,
    ) -> torch.Tensor:
        """Return this replica's part of the mean loss over the global batch: a scalar to call `backward()` on.

        `per_sample_loss` is (samples, ...); the dimensions after the first are averaged first. It is multiplied by
        `weights` (samples,), summed, and divided by the size of the global batch: `global_batch_size` if given, else
        that of the last batch from a loader of this strategy; without a loader, or with more losses than this
        replica's share, their number times the replicas. (As tf.nn.compute_average_loss; the weights do not change
        the divisor.) The sum over the replicas, `strategy.reduce("sum", loss)`, is the loss of the global batch, also
        when shares are unequal, and micro-batches of a share add up to it.

        The gradient is multiplied by the number of replicas, because strategies average the gradients of the
        replicas: after `backward()` and averaging, it is the gradient of the global mean.

        In a step of `ddp.StepLoader` it is the mean over the micro-batch, whose gradient that loader weighs.

        Does not communicate. Raises ArgumentError for a single number, for weights of another shape, and for a global
        batch of fewer samples than this replica's.
        """
        if per_sample_loss.dim() == 0:
            raise ArgumentError(
                "mean() takes the losses of the samples, shape (samples, ...), and got a single number: call the loss "
                'function with reduction="none"'
            )
        losses = per_sample_loss.flatten(1).mean(1) if per_sample_loss.dim() > 1 else per_sample_loss
        if weights is not None:
            if weights.shape != losses.shape:
                raise ArgumentError(f"mean(): {len(losses)} losses, but weights of shape {tuple(weights.shape)}")
            losses = losses * weights.to(losses)
        if current.micro_batch is not None:
            return losses.sum() / len(losses)
        size = global_batch_size or self._global_size(len(losses))
        if size < len(losses):
            raise ArgumentError(
                f"mean(): {len(losses)} losses of this replica, but a global batch of {size}: pass global_batch_size"
            )
        part = losses.sum() / size
        scaled: torch.Tensor = _ScaledGradient.apply(part, self.replicas)  # type: ignore[no-untyped-call]  # torch's
        if self.on_mean is not None and scaled.requires_grad:
            scaled.register_hook(partial(self.on_mean, part.detach()))
        return scaled

    def _global_size(self, own: int) -> int:
        """Return the size of the global batch if this replica has `own` samples, or a micro-batch of that size."""
        size = self._batch_size or 0
        share = size // self.replicas + (self.replica < size % self.replicas)
        return size if own <= share else own * self.replicas  # more than the share: not from the loader

    def reduce(self, operation: str, value: Any) -> Any:
        """Return the "sum", "mean", "max" or "min" of a value over the replicas, the same on each of them.

        A value is a number, a tensor, or dicts, lists or tuples of them, with the same structure on every replica.
        Every replica must call it; blocks. Not differentiable. Raises ArgumentError if the structures differ. Small
        values are gathered; sums and means of tensors over 64 KiB are all-reduced, if there is a process group.
        """
        large_apart = self.collective and self.replicas > 1
        return combine(value, self._gather(payload_of(operation, value, large_apart=large_apart)))

    def _gather(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of all replicas, in order. Every replica must call it; blocks."""
        if self.replicas == 1:
            return gather_bytes(payload)
        with waiting_for_peers("strategy.reduce"):
            return gather_bytes(payload)

    def sync(self) -> None:  # noqa: B027  # most strategies have nothing to do
        """Bring this replica's model up to date before it is evaluated or saved.

        Every replica must call it; blocks if replicas step by themselves ("local_sgd") or servers have the values.
        """

    def publish(self) -> None:  # noqa: B027  # as above
        """Give all replicas the main replica's model and optimizer state. Every replica must call it."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides model and optimizer, right after `sync()`; the same on every replica.

        Plain values and tensors; empty if there is nothing.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # as above
        """Load what `state_dict` returned, after `prepare` and the model. Every replica must call it."""

    def evaluations(self) -> Iterator[int]:
        """Yield the number of completed steps, on an evaluator, once for each new state of the parameters."""
        return iter(())

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was passed to `prepare`, whose `state_dict()` has its own names."""
        return unwrapped(model)


class _ScaledGradient(torch.autograd.Function):
    """The identity, with a gradient multiplied by `factor`."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, factor: int) -> torch.Tensor:
        context.factor = factor
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * context.factor, None


def _check_given(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"prepare({type(model).__name__}, {type(optimizer).__name__}): it takes a torch.nn.Module and a "
            "torch.optim.Optimizer"
        )
    if isinstance(model, DistributedDataParallel | nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ArgumentError(f"the model is in a {type(model).__name__} already: give prepare() the module itself")
    own = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        foreign = [parameter for parameter in group["params"] if id(parameter) not in own]
        if foreign:
            raise ArgumentError(
                f"the optimizer's group {number} has {len(foreign)} parameters that are not the model's, the first "
                f"of shape {tuple(foreign[0].shape)}: make the optimizer of this model's parameters"
            )


def join(communication: str) -> World:
    """Join the process group with the backend `communication`; "auto": chosen by `init`."""
    return init(None if communication == "auto" else communication)
