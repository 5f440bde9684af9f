"""What all compressors are: averages of buckets over a group, and what a checkpoint holds of them.

What a compressor owes for a bucket is stored under the bucket's index, so it belongs to a plan of buckets: where the
sizes differ, it is an error, never a guess. It does not depend on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddp.errors import CheckpointError

__all__ = ["Bucket", "Compressor", "LoadedBuckets", "completed", "mean_over_ranks"]


class Bucket(Protocol):
    """What compressors use of torch's `GradBucket`, which has no types of its own."""

    def index(self) -> int:
        """Its place in the plan."""

    def buffer(self) -> torch.Tensor:
        """All its gradients, of one dimension."""

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, with the shapes and strides of the parameters."""

    def is_last(self) -> bool:
        """Whether no other follows in this backward pass."""


class Compressor(ABC):
    """The state of a communication hook; `name` is the method's. Every rank of `group` must make it alike."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._group: dist.ProcessGroup | None = group
        self._size = group.size()
        self._name = name

    @abstractmethod
    def reduce(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging; the future has the bucket's own buffer, with the averages in it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what the next step needs, in numbers, strings, tensors, lists and dicts, the same on every rank.

        Every rank must call it, between two steps; blocks. What each rank owes is replaced by the mean over the ranks,
        which changes no average that will be delivered: so that a run that goes on and one that resumes from here,
        with any number of ranks, start from the same.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict()` returned on any rank of any number. Every rank must load the same.

        Raises CheckpointError for the state of another method, and the next backward pass does if the sizes of the
        buckets are others.
        """

    def close(self) -> None:
        """Let go of the group, before it is destroyed. The compressor cannot be used after that."""
        self._group = None

    def _need_own(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless `state` came from the same method."""
        if not isinstance(state, Mapping) or "method" not in state:
            raise CheckpointError("not the state of a compressor: pass what its state_dict() returned")
        if state["method"] != self._name:
            raise CheckpointError(
                f"the state is that of compression {state['method']}, this is {self._name}: use the same, or go on "
                "without it"
            )


class LoadedBuckets:
    """What a checkpoint held for each bucket, until the first backward pass has come by to fetch it."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.buckets: dict[int, Mapping[str, Any]] = {}
        try:
            for held in state["buckets"] if state is not None else ():
                self.buckets[int(held["index"])] = held
                int(held["numel"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"not the state of a compressor ({type(error).__name__}: {error}): pass what its state_dict() returned"
            ) from error

    def with_rest(self, buckets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return `buckets` and those that have not been fetched, by index."""
        return sorted(map(dict, (*buckets, *self.buckets.values())), key=lambda held: int(held["index"]))

    def fetch(self, bucket: Bucket) -> Mapping[str, Any] | None:
        """Return what was held for `bucket`, once, or None. Raises CheckpointError if it is for other buckets."""
        if not self.buckets:
            return None
        index, numel = bucket.index(), bucket.buffer().numel()
        held = self.buckets.pop(index, None)
        if held is not None and held["numel"] != numel:
            raise self._misfit(f"bucket {index} has {numel} elements, that of the checkpoint {held['numel']}")
        if bucket.is_last() and self.buckets:
            raise self._misfit(f"no bucket {min(self.buckets)}, which the checkpoint has")
        return held

    @staticmethod
    def _misfit(text: str) -> CheckpointError:
        return CheckpointError(
            f"the compressor's state does not fit the model's buckets: {text}. Load it with the same model and "
            "bucket_cap_mb, or go on without it (what compression still owed is lost then, a part of one gradient)"
        )


def completed(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that has `buffer` already."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=None if buffer.device.type == "cpu" else [buffer.device]
    )
    future.set_result(buffer)
    return future


def mean_over_ranks(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace `tensor` by its mean over the group, the same bits on every rank. All ranks must call it; blocks."""
    dist.all_reduce(tensor, group=group)
    tensor.div_(group.size())
