"""What all compressors are: averages of buckets over a group, and what a checkpoint holds of them.

What a compressor owes, it owes to parameters: it stays with them when the plan of buckets changes, and does not depend
on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddp.errors import CheckpointError
from ddp.monitoring.stall_report import finish, waiting_for_peers

_Named = Mapping[str, torch.Tensor]


class Bucket(Protocol):
    """What compressors use of torch's `GradBucket`, which has no types of its own."""

    def index(self) -> int:
        """Its place in the plan."""

    def buffer(self) -> torch.Tensor:
        """All its gradients, of one dimension."""

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, with the shapes and strides of the parameters."""

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the gradients: the same objects in every pass."""

    def is_last(self) -> bool:
        """Whether no other follows in this backward pass."""


class Compressor(ABC):
    """The state of a communication hook; `name` is the method's. Every rank of `group` must make it alike.

    `parameters` are those of the model by name, which a checkpoint then uses. Without names it uses the order in which
    buckets have brought the parameters in the first pass.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, parameters: _Named | None) -> None:
        self._group: dist.ProcessGroup | None = group
        self._size = group.size()
        self._name = name
        self._has_names = parameters is not None
        self._parameters = dict(parameters or {})  # by key; alive as long as this is, so that ids stay theirs
        self._key_of = {id(parameter): key for key, parameter in self._parameters.items()}
        self._loaded: dict[str, Mapping[str, Any]] = {}  # by key, until the parameter comes by

    @property
    def name(self) -> str:
        """What the method is called in `compression=`."""
        return self._name

    @abstractmethod
    def reduce(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging; the future has the bucket's own buffer, with the averages in it."""

    def rehearse(self, bucket: Bucket) -> None:
        """Compress `bucket` and decompress it, in a `RehearsalGroup`: for a compressor that averages nothing else.

        What rounding loses would be owed.
        """
        self.reduce(bucket)

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

        Raises CheckpointError for the state of another method or of other parameters. Without names, it is the next
        backward pass that finds other parameters.
        """

    def close(self) -> None:
        """Let go of the group, before it is destroyed. The compressor cannot be used after that."""
        self._group = None

    def _keys(self, bucket: Bucket) -> tuple[str, ...]:
        """What the parameters of a bucket are called here, in the order of its gradients."""
        return tuple(map(self._key, bucket.parameters()))

    def _key(self, parameter: torch.Tensor) -> str:
        key = self._key_of.get(id(parameter))
        if key is None:
            key = self._key_of[id(parameter)] = f"parameter {len(self._parameters)}"
            self._parameters[key] = parameter
        return key

    def _read(self, state: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        """What `state` holds of each parameter: tensors named `fields`, the first of the parameter's shape."""
        if not isinstance(state, Mapping) or "method" not in state:
            raise CheckpointError("not the state of a compressor: pass what its state_dict() returned")
        if state["method"] != self._name:
            raise CheckpointError(
                f"the state is that of compression {state['method']}, this is {self._name}: use the same, or go on "
                "without it"
            )
        held = state.get("parameters")
        if not isinstance(held, Mapping):
            raise CheckpointError(
                "not the state of a compressor (no 'parameters'): pass what its state_dict() returned"
            )
        for key, each in held.items():
            if not fields:
                raise CheckpointError(f"compression {self._name} owes nothing, but its state has {key!r}")
            for field in fields:
                if not isinstance(each, Mapping) or not isinstance(each.get(field), torch.Tensor):
                    raise CheckpointError(f"the compressor's state of {key!r} has no tensor {field!r}")
            if self._has_names:
                if key not in self._parameters:
                    raise _misfit(f"the model has no {key!r}")
                _check_shape(key, each[fields[0]], real(self._parameters[key].detach()))
        return dict(held)

    def _claim(self, key: str, gradient: torch.Tensor, field: str) -> Mapping[str, Any] | None:
        """Return what was loaded of a parameter, once, or None. Raises CheckpointError if that has another shape."""
        held = self._loaded.pop(key, None)
        if held is not None:
            _check_shape(key, held[field], gradient)
        return held

    def _check_claimed(self, bucket: Bucket) -> None:
        """Raise CheckpointError if all parameters have come by, and something was loaded of another."""
        if self._loaded and not self._has_names and bucket.is_last():
            raise _misfit(f"the model has no {min(self._loaded)!r}")

    def _pay_all(self, bucket: Bucket, field: str) -> None:
        """Add what was loaded to the gradients: where nothing is compressed, the run before may still owe."""
        with torch.no_grad():
            for key, gradient in zip(self._keys(bucket), real_gradients(bucket), strict=True):
                if (held := self._claim(key, gradient, field)) is not None:
                    gradient.add_(held[field].to(gradient))
        self._check_claimed(bucket)


def _check_shape(key: str, held: torch.Tensor, gradient: torch.Tensor) -> None:
    if held.shape != gradient.shape:
        raise _misfit(f"{key!r} has shape {tuple(gradient.shape)}, that of the checkpoint {tuple(held.shape)}")


def _misfit(text: str) -> CheckpointError:
    return CheckpointError(
        f"the compressor's state does not fit the model: {text}. Load it with the same model, or go on without it "
        "(what compression still owed is lost then, a part of one gradient)"
    )


def real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as a view of real numbers with one more dimension of 2; another as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_gradients(bucket: Bucket) -> list[torch.Tensor]:
    """The gradients of a bucket as real numbers."""
    return list(map(real, bucket.gradients()))


def completed(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that has `buffer` already."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=None if buffer.device.type == "cpu" else [buffer.device]
    )
    future.set_result(buffer)
    return future


def mean_over_ranks(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace `tensor` by its mean over the group, the same bits on every rank. All ranks must call it; blocks."""
    with waiting_for_peers("mean of a residual", group):
        finish(dist.all_reduce(tensor, group=group, async_op=True), device=tensor.device)
    tensor.div_(group.size())
