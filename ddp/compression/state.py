"""What compressors have in common: what a checkpoint holds of them, and a future that needs no waiting.

What a compressor owes for a bucket is stored under the bucket's index, so it belongs to a plan of buckets: where the
sizes differ, it is an error, never a guess. It does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddp.errors import CheckpointError

__all__ = ["Bucket", "LoadedBuckets", "completed", "mean_over_ranks", "need_method"]


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


class LoadedBuckets:
    """What a checkpoint held for each bucket, until the first backward pass has come by to fetch it."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._buckets: dict[int, Mapping[str, Any]] = {}
        try:
            for held in state["buckets"] if state is not None else ():
                self._buckets[int(held["index"])] = held
                int(held["numel"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"not the state of a compressor ({type(error).__name__}: {error}): pass what its state_dict() returned"
            ) from error

    def __len__(self) -> int:
        return len(self._buckets)

    def rest(self) -> list[Mapping[str, Any]]:
        """What has not been fetched, by index."""
        return [self._buckets[index] for index in sorted(self._buckets)]

    def fetch(self, bucket: Bucket) -> Mapping[str, Any] | None:
        """Return what was held for `bucket`, once, or None. Raises CheckpointError if it is for other buckets."""
        if not self._buckets:
            return None
        index, numel = bucket.index(), bucket.buffer().numel()
        held = self._buckets.pop(index, None)
        if held is not None and held["numel"] != numel:
            raise self._misfit(f"bucket {index} has {numel} elements, that of the checkpoint {held['numel']}")
        if bucket.is_last() and self._buckets:
            raise self._misfit(f"no bucket {min(self._buckets)}, which the checkpoint has")
        return held

    @staticmethod
    def _misfit(text: str) -> CheckpointError:
        return CheckpointError(
            f"the compressor's state does not fit the model's buckets: {text}. Load it with the same model and "
            "bucket_cap_mb, or go on without it (what compression still owed is lost then, a part of one gradient)"
        )


def need_method(state: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError unless `state` came from the compressor `name`."""
    if not isinstance(state, Mapping) or "method" not in state:
        raise CheckpointError("not the state of a compressor: pass what its state_dict() returned")
    if state["method"] != name:
        raise CheckpointError(
            f"the state is that of compression {state['method']}, this is {name}: use the same, or go on without it"
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
