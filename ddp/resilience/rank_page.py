"""What is this rank's own after a step, in memory that outlives the process: random numbers' states, buffers, and more.

DTRAIN_STATE_FILE names a file of the launcher's, the same for each process that takes this rank in turn. It holds four
records: two of commits, two of steps whose gradients are about to leave, each pair written in turn. A record begins
with its number, 0 while it is being written: whoever is killed in between leaves the other one of the pair.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddp.errors import UnsupportedError
from ddp.resilience.random_states import RandomStates
from ddp.torch_internals import foreach_copy

__all__ = ["RankPage"]

_VARIABLE = "DTRAIN_STATE_FILE"
_RECORDS = 4
_HEAD = struct.Struct("<QI")  # number + 1, and how long `own` is
_OWN_BYTES = 1 << 20  # what is not used takes no memory
_RANDOM_AT = 64
_OWN_AT = _RANDOM_AT + RandomStates.size
_MOST_BUFFER_BYTES = 4 << 20  # larger ones would take too long to copy in each step
_ALIGN_BYTES = 64


class RankPage:
    """Of this rank. `buffers` are those of its models that it keeps: all, if they are in host memory, and not large.

    `own` returns what else is to be kept, if anything is: 1 MiB at most, else UnsupportedError when it is to be kept.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], own: Callable[[], bytes] | None) -> None:
        """Raises OSError if the file cannot be mapped."""
        keeps = all(buffer.is_cpu for buffer in buffers) and sum(map(_room, buffers)) <= _MOST_BUFFER_BYTES
        self._buffers = [buffer.detach() for buffer in buffers] if keeps else []
        state = torch.default_generator.get_state()
        has_device = torch.cuda.is_available()
        devices = [torch.cuda.get_rng_state()] if has_device else []
        self._get_states = [torch.default_generator.get_state, *([torch.cuda.get_rng_state] if has_device else [])]
        tensors = [state, *devices, *self._buffers]
        places, stride = [], -(-(_OWN_AT + _OWN_BYTES) // _ALIGN_BYTES) * _ALIGN_BYTES
        for tensor in tensors:
            places.append(stride)
            stride += _room(tensor)
        self._stride = stride
        self._own = own
        length = _RECORDS * stride
        descriptor = os.open(os.environ[_VARIABLE], os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size < length:
                os.ftruncate(descriptor, length)
            self._memory = memory = memoryview(mmap.mmap(descriptor, length))
        finally:
            os.close(descriptor)
        self._random = RandomStates(memory, _RANDOM_AT, stride, _RECORDS)
        # Views of the memory, for each record.
        self._kept = [
            [_view(memory, record * stride + place, tensor) for place, tensor in zip(places, tensors, strict=True)]
            for record in range(_RECORDS)
        ]

    def commit(self, step: int) -> None:
        """Keep what is there now as that after `step`."""
        self._write(step % 2, step)

    def sent(self, step: int) -> None:
        """Keep what is there now as that after `step`, of which the others get this rank's part now."""
        self._write(2 + step % 2, step)

    def at(self, step: int) -> tuple[dict[str, Any], bytes] | None:
        """The random numbers' states after `step`, as `ddp.checkpoint.rng.restore` takes them, and what `own` said.

        None if they are not known.
        """
        if (record := self._record_of(step)) is None:
            return None
        place = record * self._stride
        _, length = _HEAD.unpack_from(self._memory, place)
        own = bytes(self._memory[place + _OWN_AT : place + _OWN_AT + length])
        names = ("torch", "cuda")[: len(self._get_states)]
        states = {name: kept.clone() for name, kept in zip(names, self._kept[record], strict=False)}
        return self._random.at(record) | states, own

    def restore_buffers(self, step: int) -> None:
        """Put the buffers back as they were after `step`, if that is known; else they stay as they are."""
        if (record := self._record_of(step)) is not None and self._buffers:
            foreach_copy([buffer.data for buffer in self._buffers], self._kept[record][len(self._get_states) :])

    def _record_of(self, step: int) -> int | None:
        for record in (step % 2, 2 + step % 2):
            if _HEAD.unpack_from(self._memory, record * self._stride)[0] == step + 1:
                return record
        return None

    def _write(self, record: int, step: int) -> None:
        start = record * self._stride
        _HEAD.pack_into(self._memory, start, 0, 0)
        self._random.keep(record)
        foreach_copy(self._kept[record], [*(get() for get in self._get_states), *self._buffers])
        own = b"" if self._own is None else self._own()
        if len(own) > _OWN_BYTES:
            raise UnsupportedError(
                f"what this rank has by itself, such as sums for metrics, takes {len(own)} bytes, and {_OWN_BYTES} can "
                "come back after a failure: take fewer metrics, or Trainer(resilient=False)"
            )
        self._memory[start + _OWN_AT : start + _OWN_AT + len(own)] = own
        _HEAD.pack_into(self._memory, start, step + 1, len(own))


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _view(memory: memoryview, place: int, like: torch.Tensor) -> torch.Tensor:
    part = (
        torch.frombuffer(memory[place : place + _room(like)], dtype=torch.uint8) if like.nbytes else like.new_empty(0)
    )
    return part[: like.nbytes].view(like.dtype).view(like.shape) if like.nbytes else part.view(like.shape)
