"""The shared state and progress of a training's replicas, which survive the failure of a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddp.checkpoint.state import Stateful, given_parts, wrapper_of
from ddp.comm.codec import encode
from ddp.data.replica_loader import ReplicaLoader
from ddp.data.sampler import DistributedSampler
from ddp.data.step_loader import StepLoader
from ddp.errors import ArgumentError
from ddp.resilience.commits import Commits
from ddp.resilience.parts import ModelPart, OptimizerPart, Part, SamplerPart, StatefulPart
from ddp.resilience.snapshots import Snapshots

_ATOMS = frozenset({type(None), bool, int, float, str})


class State:
    """State that all replicas of a training have in common, for `ddp.resilient`.

    `model` (in its wrapper), `optimizer`, `scheduler`, `scaler` and `sampler` are as in `ddp.Checkpoint.save`. Further
    objects of any of these kinds have keywords of their own: `generator=`, `generator_optimizer=`. Other keywords are
    objects with `state_dict()` and `load_state_dict()`, or values of the script's own, such as `epoch=0`: None,
    numbers, strings, bytes, tensors, and tuples, lists, sets and dicts of them. All are attributes:
    `state.epoch += 1`.

    `commit()` marks a step as done. After a failure every rank continues from the newest step that any of them has
    committed, with the values, the place in the data, the learning rates, the buffers, the random numbers, the plan of
    buckets and the frozen parameters of that step.
    State outside of it, such as a running loss in a local variable, starts again with the function. A rank's own
    buffers and random numbers are restored to the bit if the buffers take 4 MiB at most; larger buffers become those of
    one rank, as they are. The same holds for a module that no optimizer steps, unless it is an `AveragedModel`, on a
    rank that died between its last gradients and its commit.

    A commit copies nothing large except the tensors in the `state_dict()` of other objects. With several optimizers,
    each copies its parameters and its state before its step, so that a failure between two of their steps also costs
    one commit. Modules that no optimizer steps, such as averages of weights, should change only between the optimizer's
    step and the commit.

    With a `ddp.StepLoader`, as `loader=`, a step has the same samples and the same bits on any number of ranks, so the
    number of ranks may change.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        sampler: Stateful | None = None,
        **others: Any,
    ) -> None:
        """Collect the objects, without communication.

        Raises ArgumentError for one without state, or unsendable values.
        """
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
        objects: dict[str, Any] = {name: given for name, given in named.items() if given is not None}
        given_parts(**objects)
        own = vars(self)
        own["values"] = {}
        own["objects"] = objects
        for name, value in others.items():
            setattr(self, name, value)
        parts = {name: _part(name, given) for name, given in objects.items()}
        owners = [each for each in objects.values() if hasattr(each, "own_state")]
        own["snapshots"] = Snapshots(self.objects, self.values)
        own["commits"] = Commits(parts, self.values, owners[0] if owners else None)

    values: dict[str, Any]
    objects: dict[str, Any]  # everything except values
    commits: Commits
    snapshots: Snapshots

    def __getattr__(self, name: str) -> Any:
        for found in (vars(self).get("values", {}), vars(self).get("objects", {})):
            if name in found:
                return found[name]
        raise AttributeError(f"this State has no value {name!r}: give it to State({name}=...)")

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(State, name) or name in State.__annotations__:
            raise ArgumentError(f"{name} is a name of ddp.State itself: choose another one for the value")
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            if "commits" in vars(self):
                raise ArgumentError(f"{name}={type(value).__name__} has a state: give it to State({name}=...)")
            self.objects[name] = value
            return
        if name in self.objects:
            raise ArgumentError(f"{name} is a {type(self.objects[name]).__name__} of this State: make a new State")
        if type(value) not in _ATOMS:
            encode(value)  # raises if it cannot be sent
        self.values[name] = value

    def commit(self) -> None:
        """Mark the step as done: it will be neither repeated nor lost.

        Call it on every rank after each step of the optimizer, with no collective between the two; with several
        optimizers, after the last one's. Communicates nothing. A DistributedSampler is advanced by the samples that it
        has handed out, unless the script has called its `advance`; advance(0) counts as a call. ArgumentError asks for
        that call if samples may be drawn ahead: if a DataLoader may have workers, if another thread draws, and, if
        other ranks could continue without this one (not in a world of one), when the optimizer has stepped after a
        commit without a sample drawn. So a loader that draws one batch ahead is only noticed at the end of the epoch,
        and several steps on one batch, each with a commit, need advance(0). Raises CollectiveError after a backward
        pass that failed.
        """
        self.commits.take()
        self.snapshots.committed()
        if (join_point := self.commits.join_point) is not None and self.commits.number is not None:
            join_point.committed(self.commits.number)


def _part(name: str, given: Any) -> Part:
    if isinstance(given, nn.Module):
        return ModelPart(given_parts(model=given)["model"], wrapper_of(given))  # type: ignore[arg-type]  # a module
    if name == "optimizer" or isinstance(given, torch.optim.Optimizer):
        return OptimizerPart(name, given)
    if name == "sampler" or isinstance(given, DistributedSampler | ReplicaLoader | StepLoader):
        return SamplerPart(given)
    return StatefulPart(name, given)
