"""The base class of compressors, which average buckets over a group, and their state in checkpoints.

A compressor's residuals belong to parameters: they stay with them when the plan of buckets changes, and do not depend
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
    """The part of torch's `GradBucket` that compressors use; torch has no types for it."""

    def index(self) -> int:
        """Return its index in the plan."""

    def buffer(self) -> torch.Tensor:
        """Return all gradients as one flat tensor."""

    def gradients(self) -> list[torch.Tensor]:
        """Return views of the buffer, with the shapes and strides of the parameters."""

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of the gradients: the same objects in every pass."""

    def is_last(self) -> bool:
        """Return whether it is the last in this backward pass."""


class Compressor(ABC):
    """The state of a communication hook; `name` is the method's. Every rank of `group` must make the same.

    `parameters` are the model's, by name; checkpoints then use the names. Without them, checkpoints use the order in
    which the parameters came in the buckets of the first pass.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, parameters: _Named | None) -> None:
        self._group: dist.ProcessGroup | None = group
        self._size = group.size()
        self._name = name
        self._has_names = parameters is not None
        self._parameters = dict(parameters or {})  # by key; kept alive, so that their ids are not reused
        self._key_of = {id(parameter): key for key, parameter in self._parameters.items()}
        self._loaded: dict[str, Mapping[str, Any]] = {}  # by key, until the parameter appears in a bucket

    @property
    def name(self) -> str:
        """Name of the method in `compression=`."""
        return self._name

    @abstractmethod
    def reduce(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging; the future's value is the bucket's own buffer, with the averages in it."""

    def rehearse(self, bucket: Bucket) -> None:
        """Compress and decompress `bucket`, in a `RehearsalGroup`, with a compressor that is used for nothing else.

        Rounding errors would be kept as residuals.
        """
        self.reduce(bucket)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state for the next step, in numbers, strings, tensors, lists and dicts, the same on every rank.

        Every rank must call it, between two steps; blocks. Each rank's residual is replaced by the mean over the ranks,
        which changes no later average. The run that continues and one that resumes from here, with any number of
        ranks, thus start from the same state.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned on any rank of a world of any size. Every rank must load the same.

        Raises CheckpointError for the state of another method or of other parameters; without names, other parameters
        are only found in the next backward pass.
        """

    def close(self) -> None:
        """Release the group, before it is destroyed. The compressor cannot be used after that."""
        self._group = None

    def _keys(self, bucket: Bucket) -> tuple[str, ...]:
        """Return the keys of a bucket's parameters, in the order of its gradients."""
        return tuple(map(self._key, bucket.parameters()))

    def _key(self, parameter: torch.Tensor) -> str:
        key = self._key_of.get(id(parameter))
        if key is None:
            key = self._key_of[id(parameter)] = f"parameter {len(self._parameters)}"
            self._parameters[key] = parameter
        return key

    def _read(self, state: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        """Return each parameter's state in `state`: tensors named `fields`, the first with the parameter's shape."""
        if not isinstance(state, Mapping) or "method" not in state:
            raise CheckpointError("not the state of a compressor: pass what its state_dict() returned")
        if state["method"] != self._name:
            raise CheckpointError(
                f"the state is that of compression {state['method']}, this is {self._name}: use the same, or continue "
                "without it"
            )
        held = state.get("parameters")
        if not isinstance(held, Mapping):
            raise CheckpointError(
                "not the state of a compressor (no 'parameters'): pass what its state_dict() returned"
            )
        for key, each in held.items():
            if not fields:
                raise CheckpointError(f"compression {self._name} has no residuals, but its state has {key!r}")
            for field in fields:
                if not isinstance(each, Mapping) or not isinstance(each.get(field), torch.Tensor):
                    raise CheckpointError(f"the compressor's state of {key!r} has no tensor {field!r}")
            if self._has_names:
                if key not in self._parameters:
                    raise _misfit(f"the model has no {key!r}")
                _check_shape(key, each[fields[0]], real(self._parameters[key].detach()))
        return dict(held)

    def _claim(self, key: str, gradient: torch.Tensor, field: str) -> Mapping[str, Any] | None:
        """Return a parameter's loaded state, once, or None. Raises CheckpointError if it has another shape."""
        held = self._loaded.pop(key, None)
        if held is not None:
            _check_shape(key, held[field], gradient)
        return held

    def _check_claimed(self, bucket: Bucket) -> None:
        """Raise CheckpointError if all parameters have appeared, and state of another one was loaded."""
        if self._loaded and not self._has_names and bucket.is_last():
            raise _misfit(f"the model has no {min(self._loaded)!r}")

    def _pay_all(self, bucket: Bucket, field: str) -> None:
        """Add loaded residuals to uncompressed gradients: the saved run may have left some."""
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
        f"the compressor's state does not fit the model: {text}. Load it with the same model, or continue without it "
        "(the residual is lost then, a part of one gradient)"
    )


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a view of real numbers with one more dimension of 2; others unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_gradients(bucket: Bucket) -> list[torch.Tensor]:
    """Return the gradients of a bucket as real numbers."""
    return list(map(real, bucket.gradients()))


def completed(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future with `buffer`."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=None if buffer.device.type == "cpu" else [buffer.device]
    )
    future.set_result(buffer)
    return future


def mean_over_ranks(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace `tensor` by its mean over the group, bitwise equal on every rank. All ranks must call it; blocks."""
    with waiting_for_peers("mean of a residual", group):
        finish(dist.all_reduce(tensor, group=group, async_op=True), device=tensor.device)
    tensor.div_(group.size())
