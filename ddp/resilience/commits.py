"""Commits of a rank's state: return to the newest one, or receive that of another rank.

A commit copies the small part of the state that a step changes besides the optimizer: values, the place in the data,
learning rates, buffers. Parameters and the optimizer's state change only in the optimizer's step, between two commits:
a rank that has begun it without committing is dirty, and receives them from a clean rank. With several optimizers,
gradients are reduced between their steps, so each copies what it is about to change.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp import rng
from ddp.comm.broadcast_objects import broadcast_object
from ddp.comm.sums.tree_sum import prefer_trees
from ddp.errors import ArgumentError, CollectiveError, ReplacementError, UnsupportedError
from ddp.generation.pending_group import left_out
from ddp.horovod.optimizer import is_distributed
from ddp.resilience.copies import copied
from ddp.resilience.join_point import JoinPoint
from ddp.resilience.parts import ModelPart, OptimizerPart, Part, ReducingPart, SamplerPart
from ddp.resilience.rank_page import RankPage
from ddp.torch_internals import buffers_of, foreach_copy
from ddp.world import communicating, settle


class OwnState(Protocol):
    """A part with state of each rank's own, besides a `state_dict` that is the same on all."""

    def own_state(self) -> bytes: ...

    def load_own_state(self, state: bytes) -> None: ...


class Commits:
    """Commits of one State. `number` is that of the newest, None while this rank has no complete state."""

    def __init__(
        self, parts: Mapping[str, Part], values: MutableMapping[str, Any], own: OwnState | None = None
    ) -> None:
        self.number: int | None = None
        self.join_point: JoinPoint | None = None  # at which this rank will meet others that join
        self.parts = dict(parts)
        self._values = values
        self._own = own
        self._models = {name: part for name, part in parts.items() if isinstance(part, ModelPart)}
        self._optimizers = [part for part in parts.values() if isinstance(part, OptimizerPart)]
        self._samplers = [part for part in parts.values() if isinstance(part, SamplerPart)]
        self._reducing: list[ReducingPart] = [*self._models.values(), *self._optimizers]
        self._page: RankPage | None = None
        self._averages: list[tuple[AveragedModel, nn.Module]] = []  # and the models that they average
        self._place = 0, 1  # rank and world size
        self._kept: dict[str, Any] = {}
        self.devices: list[torch.device] = []  # of models and optimizers, except the CPU
        for optimizer in self._optimizers:
            optimizer.keeps_tensors = len(self._optimizers) > 1

    @property
    def is_dirty(self) -> bool:
        """Whether this rank has begun a change that it cannot undo."""
        return any(part.is_dirty for part in self.parts.values())

    @property
    def can_deal_over(self) -> bool:
        """Whether it can continue with another number of ranks; not if a lost rank's own state would be missing."""
        return self._own is None and all(part.can_deal_over for part in self._samplers)

    def begin(self, *, has_state: bool) -> None:
        """Start to keep commits, from number 0; without state, wait for that of another rank.

        Raises UnsupportedError or ArgumentError for state that changes in a step and could not be restored.
        """
        if problem := self.obstacle():
            raise UnsupportedError(problem)
        given = self._trained()
        trained = [part.module for part in self._models.values() if part.is_trained(given)]
        others = [part.module for part in self._models.values() if not part.is_trained(given)]
        self._averages = [
            (module, source)
            for module in others
            if isinstance(module, AveragedModel) and (source := _averaged_by(module, trained)) is not None
        ]
        own = None if self._own is None else self._own.own_state
        self._page = RankPage(partial(_buffers, _tables(trained)), own, partial(_buffers, _tables(others)))
        tensors = [each for model in self._models.values() for each in model.tensors]
        tensors += [each for optimizer in self._optimizers for each in optimizer.parameters]
        self.devices = sorted({each.device for each in tensors if each.device.type != "cpu"}, key=str)
        for name, model in self._models.items():
            model.keeps_buffers = bool(self.devices)
            if (companion := model.companion) is not None:
                self.parts[f"what goes with {name}"] = companion
                companion.changed = self.amend
        for optimizer in self._optimizers:
            optimizer.call_before_step(self._settle if self.devices else None)
        for model in self._models.values():
            if model.wrapper is None:
                model.call_before_sending(self.sending)
        self._place = dist.get_rank(), dist.get_world_size()
        if has_state:
            self.number = -1
            self._count()
            self._keep()
        else:
            self._check_left_out()

    def end(self) -> None:
        """Handle the end of the function."""
        self._page = None
        for part in self.parts.values():
            part.end()
            part.changed = Part.changed

    def check_save(self) -> None:
        """Raise ArgumentError if a checkpoint cannot be saved now."""
        if self.is_dirty:
            raise ArgumentError(
                "checkpoint.save() between optimizer.step() and state.commit(): call state.commit() first. A failure "
                "in between would leave no rank with a whole state, and all would start again"
            )

    def obstacle(self) -> str:
        """Describe state that changes in a step and could not be restored after a failure; empty if there is none."""
        known: list[Any] = [part.wrapper for part in self._models.values()]
        known += [part.optimizer for part in self._optimizers if is_distributed(part.optimizer)]
        gc.collect()  # unreachable wrappers must not count on any rank
        wrapped = [each for each in communicating() if isinstance(each, nn.Module | torch.optim.Optimizer)]
        others = [each for each in wrapped if not any(each is one for one in known)]
        if any(each is part.optimizer for each in others for part in self._optimizers):
            return (
                "central storage in a resilient function: all ranks step one copy of the parameters together, which a "
                'rank that is lost leaves half stepped. Take strategy "all_reduce", or no ddp.resilient: then all '
                "start again after a failure, from a ddp.Checkpoint"
            )
        if names := sorted({type(each).__name__ for each in others}):
            return (
                f"{', '.join(names)}: in a resilient function only what its ddp.State holds may have been wrapped "
                "before: give it to the State, or make it inside of the function"
            )
        if sum(is_distributed(part.optimizer) for part in self._optimizers) > 1:
            return (
                "several optimizers of ddp.horovod in a resilient function: wrap the models in "
                "ddp.DistributedDataParallel, or give all parameters to one optimizer"
            )
        given = self._trained()
        for part in self._models.values():
            if problem := part.obstacle(given):
                return problem
            if part.companion is not None and not all(tensor.is_cpu for tensor in part.tensors):
                return (
                    "LocalSGD on a device in a resilient function: an average that a lost rank leaves half done stays "
                    "in the parameters. Train on the CPU, or without ddp.resilient: then all start again"
                )
        return ""

    def _trained(self) -> set[int]:
        """Return the ids of the parameters that optimizers step."""
        return {id(parameter) for part in self._optimizers for parameter in part.parameters}

    def _check_left_out(self) -> None:
        """Raise for objects that the script broadcast before the function, which this process did not receive."""
        tensors = [each for part in self._models.values() for each in part.tensors]
        known = {tensor.data_ptr() for tensor in tensors} | {id(part.optimizer) for part in self._optimizers}
        for each in left_out:
            if (each.data_ptr() if isinstance(each, torch.Tensor) else id(each)) not in known:
                raise ReplacementError(
                    f"a {type(each).__name__} was broadcast before the resilient function, and its ddp.State does not "
                    "hold it, so that this process did not get it: give State its model or optimizer. All start again"
                )
        left_out.clear()  # else they would live as long as this process

    def attach(self, group: dist.ProcessGroup) -> None:
        """Let models average and samplers deal over the ranks of `group` from now on. All ranks call it; blocks."""
        before, self._place = self._place, (group.rank(), group.size())
        if self._place != before:
            for sampler in self._samplers:
                sampler.deal_over(before, self._place)
        for model in self._models.values():
            model.attach(group)
            if model.wrapper is not None:
                model.call_before_sending(self.sending)
        for optimizer in self._optimizers:
            optimizer.attach(group)
        prefer_trees(group)

    def interrupted(self) -> None:
        """Handle a failed group: raise ReplacementError for state that the next one would lack."""
        for model in self._models.values():
            model.interrupted()

    def take(self) -> None:
        """Commit the present state."""
        if self._page is None:  # no other process could take over
            self._count()
            return
        self._check_passed()
        has_stepped = any(part.has_stepped for part in self._optimizers)
        if self._count() and has_stepped:
            raise ArgumentError(
                "the optimizer has stepped, and nothing was drawn from the sampler since the last commit. If the loop "
                "draws samples ahead, no one knows which ones were trained on: call sampler.advance(len(batch)) before "
                "each state.commit(). For several commits on one batch, call sampler.advance(0) before each, and "
                "advance(len(batch)) before the last: else the batch is not drawn again after a failure. Call "
                "sampler.advance(0) also if this step has no samples"
            )
        self._keep()

    def _count(self) -> bool:
        """Count the samples trained on since the last commit; return whether the samplers stand still."""
        for sampler in self._samplers:
            sampler.count()
        return bool(self._samplers) and all(sampler.stands_still for sampler in self._samplers)

    def _keep(self) -> None:
        """Save the present state as that of the next commit."""
        assert self._page is not None
        assert self.number is not None
        if self.devices and not (self._optimizers and all(part.is_settled for part in self._optimizers)):
            self._settle()
        for part in self.parts.values():
            part.keep()
        self._kept = copied(self._values)
        self.number += 1
        self._page.commit(self.number)

    def _check_passed(self) -> None:
        for part in self._reducing:
            if (reducer := part.reducer) is not None and reducer.last_failed:
                raise CollectiveError(
                    f"commit() on rank {dist.get_rank()} after a backward pass that failed: let its exception end the "
                    "resilient function",
                    rank=dist.get_rank(),
                    what="commit",
                )

    def amend(self) -> None:
        """Commit a change of the model between two steps; the place in the data and the values stay."""
        if self._page is None or self.number is None or self.is_dirty:
            return
        for part in self.parts.values():
            if not isinstance(part, SamplerPart):
                part.keep()
        self.number += 1
        self._page.commit(self.number)

    def sending(self) -> None:
        """Record that the others receive this rank's part of the next commit now, and may commit before this rank."""
        if self._page is not None and self.number is not None:
            self._page.sent(self.number + 1)

    def take_over(self, root: int, number: int, group: dist.ProcessGroup) -> None:
        """Move every rank to commit `number`, with the state of rank `root`. All ranks must call it; blocks.

        Until it has succeeded, a rank that was not at that commit itself has no state.
        """
        was_there = self.number == number and not self.is_dirty
        has_state = self.number is not None
        is_root = group.rank() == root
        if was_there:
            self._roll_back()
        # A partial transfer changes the old state, on devices, and where that of each rank is another one (LocalSGD).
        changes_it = bool(self.devices) or any(model.companion is not None for model in self._models.values())
        if not was_there or (changes_it and not is_root):
            self.number = None
        for part in self.parts.values():
            part.share(root, group)
        sent = {
            "values": self._kept,
            "parts": {name: part.to_send() for name, part in self.parts.items()},
        }
        sent = broadcast_object(sent if is_root else None, root, "commit", group=group)
        if not is_root:
            for name, state in sent["parts"].items():
                self.parts[name].receive(state)
            self._set_values(sent["values"])
        if was_there:  # they are this rank's own; its page has those in host memory
            for model in self._models.values():
                model.restore_buffers()
        self._settle()
        self._stand_at(number, group.rank(), has_state=has_state)

    def _settle(self) -> bool:
        """Wait for the devices, to be sure that the collectives there have succeeded."""
        return settle(self.devices)

    def _roll_back(self) -> None:
        """Undo this rank's changes since its newest commit."""
        assert self._page is not None
        assert self.number is not None
        self._set_values(self._kept)
        self._page.restore_buffers(self.number)
        for part in self.parts.values():
            part.roll_back()

    def _set_values(self, values: Mapping[str, Any]) -> None:
        self._values.clear()
        self._values.update(copied(values))

    def _stand_at(self, number: int, rank: int, *, has_state: bool) -> None:
        """Start from a commit whose parts and values are in place, with this rank's random numbers of that time."""
        assert self._page is not None
        parameters = [parameter for part in self._optimizers for parameter in part.parameters]
        for parameter in (*parameters, *(each for part in self._models.values() for each in part.module.parameters())):
            parameter.grad = None
        known, found = number, self._page.at(number)
        if found is None and not has_state:
            # A replaced rank that was lost before it sent gradients after a commit is where it was at that commit.
            known, found = number - 1, self._page.at(number - 1)
        if not any(sampler.is_of_steps for sampler in self._samplers):
            self._page.restore_buffers(known)  # else all have those of the root, and a lost rank's are of another time
        for average, source in self._averages:
            _catch_up(average, source, self._page.before(number, [*average.buffers()]))
        random = None
        if found is not None:
            random, own = found
            rng.restore(random)
            if self._own is not None and own and known == number:
                self._own.load_own_state(own)
        elif not has_state:  # its predecessor's are unknown: any that differ from the other ranks' will do
            rng.seed_on_host(hash((number, rank)))
            rng.seed_torch(hash((number, rank)) % (1 << 63))
        for sampler in self._samplers:
            sampler.begin(None if random is None else partial(rng.restore, random))
        self.number = number - 1
        self._keep()


def _tables(modules: Sequence[nn.Module]) -> list[Mapping[str, torch.Tensor | None]]:
    return [table for module in modules for part in module.modules() if (table := buffers_of(part))]


def _buffers(tables: Sequence[Mapping[str, torch.Tensor | None]]) -> list[torch.Tensor]:
    return [buffer for table in tables for buffer in table.values() if buffer is not None]


def _averaged_by(average: AveragedModel, models: Sequence[nn.Module]) -> nn.Module | None:
    """Return the one of `models` that it averages; None if that is not known."""
    forms = _forms(average.module)
    found = [model for model in models if type(model) is type(average.module) and _forms(model) == forms]
    return found[0] if len(found) == 1 else None


def _forms(module: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


@torch.no_grad()
def _catch_up(average: AveragedModel, source: nn.Module, before: Sequence[torch.Tensor]) -> None:
    """Update the buffers as the other ranks did in the step that led to the present `average`.

    The parameters of an average are the same on all ranks, so another rank sends them. Its buffers follow those of this
    rank's model: after a step that the others have finished, they need one more update.

    `before` are all of its buffers at the commit before that step. Without them, or after more than one update, it
    stays unchanged.
    """
    buffers = dict(average.named_buffers())
    if len(before) != len(buffers):
        return
    kept = dict(zip(buffers, before, strict=True))
    now = int(average.n_averaged)
    updates = now - int(kept["n_averaged"])
    if updates not in (0, 1):
        return
    parameters = [parameter.data for parameter in average.parameters()]
    theirs = [parameter.clone() for parameter in parameters]
    foreach_copy([buffer.data for buffer in buffers.values()], list(before))
    if updates:
        average.update_parameters(source)
    foreach_copy(parameters, theirs)
    average.n_averaged.fill_(now)
