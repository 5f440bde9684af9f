"""The place in the data of a State that keeps its global batch, and the handling of steps of several passes on a rank.

A step has as many micro-batches as there were ranks at the start, for any present number of ranks. The script's loop
runs once for each of this rank's, with its `optimizer.step()` and its `commit()`. Except for the last one, the
optimizer finds no gradients, and the commit undoes the loop's other changes to the State since it requested the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from ddp.checkpoint.state import Stateful, wrapper_of
from ddp.data.replica_loader import ReplicaLoader
from ddp.data.sampler import DistributedSampler
from ddp.data_parallel.micro_batches import MicroBatches
from ddp.data_parallel.wrapper import DistributedDataParallel
from ddp.errors import ArgumentError, UnsupportedError
from ddp.horovod.optimizer import is_distributed
from ddp.resilience.copies import copied
from ddp.resilience.parts import ModelPart, OptimizerPart, Part, SamplerPart, StatefulPart
from ddp.torch_internals import call_before_batches, version_of

_KEEPS = "State(keep_global_batch=True)"


class GlobalBatch(SamplerPart):
    """A DistributedSampler that deals to as many shares as at the start; a rank may have several."""

    def __init__(self, sampler: DistributedSampler) -> None:
        super().__init__(sampler)
        self.micro_batches = MicroBatches()
        self.micro_batches.before_pass = self._note_once
        self._batch = 0  # its samples, except for the last of an epoch; 0 before the first commit
        self._place = 0, 1
        self._dealt: tuple[int, int] | None = None  # rank and number of ranks that the sampler deals to
        self._values: MutableMapping[str, Any] = {}
        self._parts: list[OptimizerPart | StatefulPart] = []
        self._wrappers: list[DistributedDataParallel] = []
        self._noted: tuple[dict[str, Any], list[Any], list[int]] | None = None  # when the batch began

    def start(self, place: tuple[int, int], parts: Mapping[str, Part], values: MutableMapping[str, Any]) -> None:
        """Start with as many shares as there are ranks at `place`, (rank, size); a rank that joins gets theirs later.

        In a second function, use as many as in the first one. Raises UnsupportedError if the script has set other
        shares in its sampler.
        """
        if (self.sampler.rank, self.sampler.num_replicas) not in (place, self._dealt):
            raise UnsupportedError(
                f"{_KEEPS}: the sampler deals to rank {self.sampler.rank} of {self.sampler.num_replicas}, and this is "
                f"rank {place[0]} of {place[1]}: leave num_replicas and rank out of DistributedSampler()"
            )
        call_before_batches(self.sampler, self._note)
        self._values, self._place = values, place
        self._parts = [part for part in parts.values() if isinstance(part, OptimizerPart | StatefulPart)]
        models = [part for part in parts.values() if isinstance(part, ModelPart)]
        self._wrappers = [part.wrapper for part in models if part.wrapper is not None]
        for wrapper in self._wrappers:
            wrapper.step_in(self.micro_batches)
        self.micro_batches.deal(self.micro_batches.count or place[1], *place)

    def end(self) -> None:
        """Handle the end of the function: each pass is a step again. The shares stay dealt."""
        for wrapper in self._wrappers:
            wrapper.step_in(None)
        self.micro_batches.end()
        self._batch, self._noted = 0, None

    def obstacle(self, parts: Mapping[str, Part]) -> str:
        """Describe why steps cannot have several passes; empty if they can."""
        wrappers = [part.wrapper for part in parts.values() if isinstance(part, ModelPart) and part.wrapper is not None]
        if any(part.companion is not None for part in parts.values() if isinstance(part, ModelPart)):
            return f"{_KEEPS} and LocalSGD: ranks that step by themselves have no global batch. Leave one of them out"
        if any(wrapper.is_multi_device_module for wrapper in wrappers):
            return f"{_KEEPS} takes a model on one device, and this one is on several"
        return ""

    def deal_over(self, before: tuple[int, int], place: tuple[int, int]) -> None:
        """Keep the shares; `begin` determines this rank's from the commit."""
        self._place = place

    def to_send(self) -> Any:
        return {"position": self._position, "count": self.micro_batches.count, "batch": self._batch}

    def receive(self, sent: Any) -> None:
        self._position, self.micro_batches.count, self._batch = sent["position"], sent["count"], sent["batch"]

    def begin(self, before_rest: Callable[[], None] | None) -> None:
        steps = self.micro_batches
        steps.deal(steps.count, *self._place)
        self._noted = None
        if len(steps.own) > 1 and not self._batch:
            raise UnsupportedError(
                f"{_KEEPS}: the number of ranks has changed before a commit has shown the size of a batch. All start "
                "again"
            )
        self.sampler.hand_out(steps.own, steps.count, self._batch)
        self._dealt = self.sampler.rank, self.sampler.num_replicas
        super().begin(before_rest)

    def count(self) -> int:
        taken = super().count()
        passes = len(self.micro_batches.own) or 1  # none are dealt if the number of ranks cannot change
        each, over = divmod(taken, passes)
        sampler: DistributedSampler = self.sampler
        is_end = sampler.trained == len(sampler)
        is_whole = not over and (each == self._batch or (is_end and each < self._batch))
        if taken and self._batch and not is_whole:
            raise ArgumentError(
                f"{_KEEPS}: this commit is of {taken} samples on this rank, in {passes} "
                f"{'batches' if passes > 1 else 'batch'}, and a batch had {self._batch}: take batches of one size, "
                "each with one commit()"
            )
        if not is_end or (taken == sampler.trained and not sampler.start):  # else a batch may have more
            self._batch = self._batch or each
        return taken

    def ends_step(self) -> bool:
        """Return whether a commit now is that of a step; if not, end the micro-batch.

        Raises ArgumentError for passes that do not match, and UnsupportedError if the loop changes parameters.
        """
        steps = self.micro_batches
        passes, steps.passes = steps.passes, 0
        if steps.users_own or passes > 1:
            raise ArgumentError(
                f"{_KEEPS}: {passes} backward passes were reduced since the last commit, and {steps.users_own} forward "
                "passes were in no_sync(): make one of each for each commit(), and let the State accumulate"
            )
        if passes == 0 and steps.at == 0:
            self._noted = None
            return True  # of values
        if passes == 0:
            raise ArgumentError(
                f"{_KEEPS}: no backward pass has gone through the model in micro-batch {steps.at + 1} of "
                f"{len(steps.own)}: make one for each commit()"
            )
        if steps.is_last:
            steps.at, self._noted = 0, None
            return True
        self._undo()
        self.sampler.advance(0)  # of 0 samples, so that its place can be saved
        self._advanced += 1
        steps.at += 1
        return False

    def _note(self) -> None:
        """Handle the request of a batch. Later changes to values, schedulers and settings are undone or committed.

        A batch requested after the backward pass is for later.
        """
        if self.micro_batches.passes or self.micro_batches.is_last:
            return
        states = [part.now() for part in self._parts]
        self._noted = {name: copied(value) for name, value in self._values.items()}, states, self._versions()

    def _note_once(self) -> None:
        """Handle the start of a forward pass, perhaps on a batch without a DataLoader."""
        if self._noted is None:
            self._note()

    def _undo(self) -> None:
        assert self._noted is not None
        (values, states, versions), self._noted = self._noted, None
        if versions != self._versions():
            raise UnsupportedError(
                f"{_KEEPS}: parameters have changed in a micro-batch that is not the last one of its step, where they "
                "have no gradients: by an optimizer that steps without any, or one of parameters that are not in the "
                "model. Train with a loader of ddp.strategy, which keeps the global batch too"
            )
        self._values.clear()
        self._values.update(values)
        for part, state in zip(self._parts, states, strict=True):
            part.undo(state)

    def _versions(self) -> list[int]:
        optimizers = [part for part in self._parts if isinstance(part, OptimizerPart)]
        return [version_of(parameter) for part in optimizers for parameter in part.parameters]


def check_objects(objects: Mapping[str, Stateful]) -> None:
    """Raise ArgumentError for objects that a State that keeps its global batch must not have, or lacks."""
    for name, kind, what in (
        ("model", DistributedDataParallel, "a model in ddp.DistributedDataParallel"),
        ("optimizer", torch.optim.Optimizer, "an optimizer"),
        ("sampler", DistributedSampler, "a ddp.DistributedSampler"),
    ):
        given: Any = objects.get(name)
        found = wrapper_of(given) if kind is DistributedDataParallel else given
        if isinstance(given, ReplicaLoader):
            raise ArgumentError(f"{_KEEPS}: the loader of a strategy keeps the global batch by itself: leave it out")
        if not isinstance(found, kind):
            was = "none" if given is None else f"{name}={type(given).__name__}"
            raise ArgumentError(f"{_KEEPS} takes {what}, and there is {was}")
    optimizer: Any = objects["optimizer"]
    if is_distributed(optimizer):
        raise ArgumentError(f"{_KEEPS} takes a model in ddp.DistributedDataParallel, no optimizer of ddp.horovod")
    sampler: Any = objects["sampler"]
    if sampler.even == "exact":
        raise ArgumentError(f'{_KEEPS} takes a sampler with even="pad" or "drop": with "exact", ranks differ in steps')
    for name, given in objects.items():
        if isinstance(given, torch.amp.GradScaler) and given.is_enabled():
            raise ArgumentError(
                f"{_KEEPS} and {name}=GradScaler: it looks at the gradients of each micro-batch. Train in bfloat16, "
                "which needs none, or with a loader of ddp.strategy"
            )
        if name not in ("model", "optimizer", "sampler") and isinstance(
            given, nn.Module | torch.optim.Optimizer | DistributedSampler | ReplicaLoader
        ):
            raise ArgumentError(
                f"{_KEEPS} and {name}={type(given).__name__}: it takes one model, one optimizer and one sampler, since "
                "others would go on in each micro-batch. Train with a loader of ddp.strategy"
            )
    if not _ends_batches_early():
        raise UnsupportedError(f"{_KEEPS}: torch {torch.__version__} ends an epoch at its first short batch")


def _ends_batches_early() -> bool:
    """Return whether this torch's BatchSampler continues after an iterator ended a batch early; it is undocumented."""
    sampler = DistributedSampler(range(6), 2, 0, shuffle=False)
    sampler.hand_out((0, 1), 2, 2)
    return [*torch.utils.data.BatchSampler(sampler, 2, drop_last=False)] == [[0, 2], [1, 3], [4], [5]]
