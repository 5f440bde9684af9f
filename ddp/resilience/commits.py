"""How far a rank's state is, and how it comes back to the newest commit, or gets that of another rank.

A commit copies what a step changes besides the optimizer, which is small: values, the place in the data, learning
rates, buffers. Parameters and the optimizer's state change only in the optimizer's step, between two commits: a rank
that has begun it without committing is `is_dirty`, and takes them from a rank that is not.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.checkpoint import rng
from ddp.comm.broadcast import broadcast_tensors
from ddp.comm.codec import encode
from ddp.comm.objects import ControlGroups
from ddp.data.sampler import DistributedSampler
from ddp.data_parallel.reducer import Reducer
from ddp.data_parallel.wrapper import DistributedDataParallel
from ddp.errors import ArgumentError, CollectiveError, ReplacementError, UnsupportedError
from ddp.horovod.broadcast_state import broadcast_object, broadcast_optimizer_state
from ddp.resilience.join_point import JoinPoint
from ddp.resilience.rank_page import RankPage
from ddp.world import communicating

__all__ = ["Commits"]

_STATES = ("scheduler", "scaler")  # parts whose state is small, and plain


class Commits:
    """Of one State. `number` is that of the newest commit, None while this rank has no state that is whole."""

    def __init__(
        self,
        parts: Mapping[str, Any],
        wrapper: DistributedDataParallel | None,
        values: MutableMapping[str, Any],
    ) -> None:
        """`parts` are those of a checkpoint. Raises ArgumentError for one that cannot be watched or sent."""
        self.number: int | None = None
        self.is_dirty = False
        self.join_point: JoinPoint | None = None  # at which this rank is to meet others that join
        self.parts = parts
        self._model: nn.Module | None = parts.get("model")
        self._wrapper = wrapper
        self._plan: dict[str, Any] | None = None
        self._values = values
        self._optimizer = parts.get("optimizer")
        self._sampler = parts.get("sampler")
        self._page: RankPage | None = None
        self._place = 0, 1  # the rank and the size of the world
        self._kept: dict[str, Any] = {}
        self._counted = 0, 0  # where the sampler began, and samples trained on since then, at the newest commit
        if self._optimizer is not None:
            if not hasattr(self._optimizer, "register_step_pre_hook"):
                raise ArgumentError(
                    f"optimizer={type(self._optimizer).__name__} has no register_step_pre_hook(), so nobody sees when "
                    "it changes the parameters: use one that is a torch.optim.Optimizer"
                )
            self._optimizer.register_step_pre_hook(self._note_step)
        for name in _STATES:
            if name in parts:
                _check_plain(name, parts[name])

    @property
    def _reducer(self) -> Reducer | None:
        return None if self._wrapper is None else self._wrapper.gradient_reducer

    def begin(self, *, has_state: bool) -> None:
        """Begin to keep commits, the first of which is number 0; without state, wait for that of another rank."""
        self._check_others()
        self._page = RankPage([] if self._model is None else list(self._model.buffers()))
        self._place = dist.get_rank(), dist.get_world_size()
        if has_state:
            self.number = -1
            self.take()

    def _check_others(self) -> None:
        """Raise for what would change in a step and not come back after a failure."""
        others = [each for each in communicating() if each is not self._wrapper]
        if names := sorted({type(each).__name__ for each in others if not isinstance(each, ControlGroups)}):
            raise UnsupportedError(
                f"{', '.join(names)}: in a resilient function only the model of its ddp.State may have been wrapped "
                "before: give it to the State, or make it inside of the function"
            )
        given = {id(parameter) for group in self._groups() for parameter in group["params"]}
        for name, parameter in () if self._model is None else self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in given:
                raise ArgumentError(
                    f"{name} is trained, but not by the optimizer of this State, so nobody sees when it changes: give "
                    "State one optimizer of all parameters, or freeze it"
                )
        if self._wrapper is None:
            return
        reducer = self._wrapper.gradient_reducer
        why = {
            'compression="auto"': self._wrapper.decides_compression,
            "a communication hook of your own": reducer is not None and reducer.has_users_hook,
            "LocalSGD": self._wrapper.steps_alone,
        }
        for what, is_so in why.items():
            if is_so:
                raise UnsupportedError(f"{what} in a resilient function: a rank that is replaced would not have it")

    def attach(self, group: dist.ProcessGroup) -> None:
        """Have the model average, and the sampler deal, over the ranks of `group` from now on."""
        self._deal_over(group.rank(), group.size())
        if self._wrapper is None:
            return
        if getattr(self._wrapper, "process_group", None) is not group:  # it has let another one go
            self._wrapper.average_over(group)
        if (reducer := self._reducer) is not None:
            reducer.before_last_bucket = self._note_sent

    def _deal_over(self, rank: int, size: int) -> None:
        """Have the sampler deal to other ranks than before; what is left of the epoch, once it stands at a commit."""
        before, self._place = self._place, (rank, size)
        sampler = self._sampler
        if sampler is None or before == self._place:
            return
        if not isinstance(sampler, DistributedSampler):
            raise UnsupportedError(
                f"sampler={type(sampler).__name__} cannot deal out the rest of an epoch to {size} ranks instead of "
                f"{before[1]}: use ddp.DistributedSampler. All start again"
            )
        if (sampler.rank, sampler.num_replicas) == before:  # else the script has chosen them
            sampler.rank, sampler.num_replicas = self._place

    def interrupted(self) -> None:
        """Keep what the group that has failed knew."""
        reducer = self._reducer
        if reducer is not None and reducer.has_users_hook:
            raise ReplacementError("a communication hook of your own does not come back: all start again")
        if reducer is not None and not reducer.is_first:
            self._plan = reducer.plan_state()

    def take(self) -> None:
        """Commit the present state."""
        self._count_samples()
        if self._page is None:
            return  # nobody could take it over
        assert self.number is not None
        reducer = self._reducer
        if reducer is not None and reducer.last_failed:
            raise CollectiveError(
                f"commit() on rank {dist.get_rank()} after a backward pass that failed: let its exception end the "
                "resilient function",
                rank=dist.get_rank(),
                what="commit",
            )
        self._kept = {
            "values": {name: _copied(value) for name, value in self._values.items()},
            "position": None if self._sampler is None else dict(self._sampler.state_dict()),
            "groups": [_plain_of(group) for group in self._groups()],
        }
        if "scheduler" in self.parts:
            self._kept["scheduler"] = copy.deepcopy(self.parts["scheduler"].state_dict())
        self.number += 1
        self._page.commit(self.number)
        self.is_dirty = False

    def take_over(self, root: int, number: int, group: dist.ProcessGroup) -> None:
        """Stand at commit `number` on every rank, with what rank `root` has of it. All ranks call it; blocks.

        Until it is through, a rank that was not there itself has no state.
        """
        was_there = self.number == number and not self.is_dirty
        has_state = self.number is not None
        if was_there:
            self._roll_back()
        else:
            self.number = None
        is_root = group.rank() == root
        if self._model is not None:
            tensors = [tensor.detach() for tensor in (*self._model.parameters(), *self._model.buffers())]
            broadcast_tensors(group, tensors, root)
        if self._optimizer is not None:
            broadcast_optimizer_state(self._optimizer, root, group=group)
        sent = {
            "values": self._kept.get("values"),
            "position": self._kept.get("position"),
            "plan": self._plan if number else None,
            "states": {name: self.parts[name].state_dict() for name in _STATES if name in self.parts},
        }
        sent = broadcast_object(sent if is_root else None, root, "commit", group=group)
        if not is_root:
            for name, state in sent["states"].items():
                self.parts[name].load_state_dict(state)
            self._set_values(sent["values"])
        if sent["plan"] is not None and (reducer := self._reducer) is not None:
            reducer.load_plan_state(sent["plan"])
        self._stand_at(number, sent["position"], group.rank(), has_state=has_state)

    def _roll_back(self) -> None:
        """Undo what this rank has done since its newest commit; the optimizer has not stepped."""
        assert self._page is not None
        assert self.number is not None
        self._set_values(self._kept["values"])
        self._page.restore_buffers(self.number)
        for group, plain in zip(self._groups(), self._kept["groups"], strict=True):
            group |= {name: _copied(value) for name, value in plain.items()}
        if "scheduler" in self._kept:
            self.parts["scheduler"].load_state_dict(copy.deepcopy(self._kept["scheduler"]))

    def _set_values(self, values: Mapping[str, Any]) -> None:
        self._values.clear()
        self._values.update((name, _copied(value)) for name, value in values.items())

    def _stand_at(self, number: int, position: Mapping[str, Any] | None, rank: int, *, has_state: bool) -> None:
        """Begin after a commit whose model, optimizer and values are there, with this rank's random numbers of then."""
        assert self._page is not None
        parameters = [parameter for group in self._groups() for parameter in group["params"]]
        for parameter in (*parameters, *(() if self._model is None else self._model.parameters())):
            parameter.grad = None
        self._page.restore_buffers(number)
        random = self._page.random_at(number)
        if random is not None:
            rng.restore(random)
        elif not has_state:  # those of its predecessor are not known: others than those of the other ranks will do
            rng.seed_on_host(hash((number, rank)))
            rng.seed_torch(hash((number, rank)) % (1 << 63))
        if self._sampler is not None:
            self._sampler.load_state_dict(position)
            if isinstance(self._sampler, DistributedSampler) and random is not None:
                # A DataLoader draws a number when it is iterated, which the rest of a pass would not have drawn.
                self._sampler.before_rest(partial(rng.restore, random))
        self.number = number - 1
        self.take()

    def _note_step(self, *_: object) -> None:
        self.is_dirty = True

    def _note_sent(self) -> None:
        if self._page is not None and self.number is not None:
            self._page.sent(self.number + 1)

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else self._optimizer.param_groups

    def _count_samples(self) -> None:
        """Advance the sampler by what it has handed out, unless the script does so itself."""
        sampler = self._sampler
        if not isinstance(sampler, DistributedSampler):
            return
        place, trained = self._counted
        if sampler.trained == (trained if sampler.places == place else 0) and sampler.drawn > sampler.trained:
            _check_no_workers()
            sampler.advance(sampler.drawn - sampler.trained)
        self._counted = sampler.places, sampler.trained


def _check_plain(name: str, part: Any) -> None:
    try:
        encode(part.state_dict())
    except ArgumentError as error:
        raise ArgumentError(f"{name}={type(part).__name__} has a state that cannot be sent: {error}") from error


def _check_no_workers() -> None:
    if multiprocessing.active_children():
        raise ArgumentError(
            "this process has children by multiprocessing, perhaps the workers of a DataLoader, which draw samples "
            "ahead, so nobody knows how many this step has trained on: call sampler.advance(len(batch)) before "
            "state.commit()"
        )


def _plain_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) for name, value in group.items() if name != "params"}


def _copied(value: Any) -> Any:
    """A copy that later changes in place do not reach."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, list | dict | set | tuple) else value
