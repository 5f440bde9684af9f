"""This rank's own state after a step, in memory that outlives the process: random numbers' states, buffers, and more.

DTRAIN_STATE_FILE names a file of the launcher, the same for each successive process of this rank. It holds four
records: two of commits, two of steps whose gradients are about to be sent; each pair is written alternately. A record
begins with its number, 0 while it is being written: a process killed in between leaves the pair's other record intact.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import sys
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch

from ddp.errors import ReplacementError, UnsupportedError
from ddp.torch_internals import foreach_copy

_VARIABLE = "DTRAIN_STATE_FILE"
_RECORDS, _COMMITS = 4, 2
_HEAD = struct.Struct("<QI?")  # number + 1, the length of `own`, and whether buffers had another form
_WORDS = struct.Struct("<625I")  # of a Mersenne twister: the key, then the position in it
_GAUSS = struct.Struct("<?d")
_NUMPY = struct.Struct("<2496sI?d")  # the key, the position in it, and a second number that is drawn already
_RANDOM_BYTES = _WORDS.size + _GAUSS.size + _NUMPY.size + 1
_OWN_BYTES = 1 << 20  # unused parts take no memory
_RANDOM_AT = 64
_OWN_AT = _RANDOM_AT + _RANDOM_BYTES
_MOST_BUFFER_BYTES = 4 << 20  # larger ones would take too long to copy in each step
_ALIGN_BYTES = 64


class RankPage:
    """Page of this rank. `buffers` returns its models' buffers, `later` those that change after gradients are sent.

    Both are kept if all are in host memory and small; else only those of `buffers`, under the same condition. `own`
    returns other data to keep, if there is any: 1 MiB at most, else UnsupportedError when it is saved.
    """

    def __init__(
        self,
        buffers: Callable[[], Sequence[torch.Tensor]],
        own: Callable[[], bytes] | None,
        later: Callable[[], Sequence[torch.Tensor]] = tuple,
    ) -> None:
        """Raises OSError if the file cannot be mapped."""
        if not _can_keep([*buffers(), *later()]):
            later = tuple
        if not _can_keep(buffers()):
            buffers = tuple
        self._parts = buffers, later
        self._buffers = self._find_buffers()
        self._sent_count = len(buffers())
        self._forms = [_form(buffer) for buffer in self._buffers]
        self._shapes = [shape for shape, _, _ in self._forms]
        state = torch.default_generator.get_state()
        has_device = torch.cuda.is_initialized()
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
        self._random = _RandomStates(memory, stride)
        # Views of the memory, for each record.
        self._kept = [
            [_view(memory, record * stride + place, tensor) for place, tensor in zip(places, tensors, strict=True)]
            for record in range(_RECORDS)
        ]

    def commit(self, step: int) -> None:
        """Save the present state as that after `step`."""
        self._write(step % 2, step)

    def sent(self, step: int) -> None:
        """Save the present state as that after `step`, when this rank's part of the step is about to be sent."""
        self._write(2 + step % 2, step)

    def at(self, step: int) -> tuple[dict[str, Any], bytes] | None:
        """Return the random states after `step`, in the format of `ddp.rng.restore`, and the data of `own`.

        None if they are not known.
        """
        if (record := self._record_of(step)) is None:
            return None
        place = record * self._stride
        _, length, _ = _HEAD.unpack_from(self._memory, place)
        own = bytes(self._memory[place + _OWN_AT : place + _OWN_AT + length])
        names = ("torch", "cuda")[: len(self._get_states)]
        states = {name: kept.clone() for name, kept in zip(names, self._kept[record], strict=False)}
        return self._random.at(record) | states, own

    def restore_buffers(self, step: int) -> None:
        """Restore the buffers of `step`, as far as they are known; others stay unchanged.

        Raises ReplacementError if they had, or have, another form than at the start.
        """
        if (record := self._record_of(step)) is None or not self._forms:
            return
        has_changed = _HEAD.unpack_from(self._memory, record * self._stride)[2]
        if has_changed or not self._look_for_buffers():
            raise ReplacementError(
                "a buffer of the model has another shape or dtype than when the resilient function began, so it cannot "
                "be put back: all start again"
            )
        count = self._count_in(record)
        kept = self._kept[record][len(self._get_states) :][:count]
        foreach_copy([buffer.data for buffer in self._buffers[:count]], kept)

    def _count_in(self, record: int) -> int:
        """Return the number of buffers in a record."""
        return len(self._buffers) if record < _COMMITS else self._sent_count

    def before(self, step: int, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return `buffers` as of the commit before `step`, if this rank had not reached the commit of `step` itself.

        An empty list if that is not known.
        """
        record = (step - 1) % 2
        if self._record_of(step) in (None, step % 2) or self._record_of(step - 1) != record:
            return []
        kept = dict(zip(map(id, self._buffers), self._kept[record][len(self._get_states) :], strict=True))
        return [kept[id(buffer)] for buffer in buffers if id(buffer) in kept]

    def _find_buffers(self) -> list[torch.Tensor]:
        """Return the present buffers: a module may have assigned a new one."""
        return [buffer for part in self._parts for buffer in part()]

    def _look_for_buffers(self) -> bool:
        """Find the present buffers; return whether all have the same form as at the start."""
        found = self._find_buffers()
        if len(found) == len(self._buffers) and all(map(is_, found, self._buffers)):
            return [buffer.shape for buffer in found] == self._shapes  # one may be resized in place
        if [_form(buffer) for buffer in found] != self._forms:
            return False
        self._buffers = found
        return True

    def _record_of(self, step: int) -> int | None:
        for record in (step % 2, 2 + step % 2):
            if _HEAD.unpack_from(self._memory, record * self._stride)[0] == step + 1:
                return record
        return None

    def _write(self, record: int, step: int) -> None:
        start = record * self._stride
        _HEAD.pack_into(self._memory, start, 0, 0, False)
        self._random.keep(record)
        has_buffers = self._look_for_buffers()
        buffers = self._buffers[: self._count_in(record)] if has_buffers else ()
        now = [*(get() for get in self._get_states), *buffers]
        with torch.no_grad():
            foreach_copy(self._kept[record][: len(now)], now)
        own = b"" if self._own is None else self._own()
        if len(own) > _OWN_BYTES:
            raise UnsupportedError(
                f"what this rank has by itself, such as sums for metrics, takes {len(own)} bytes, and {_OWN_BYTES} can "
                "come back after a failure: take fewer metrics, or Trainer(resilient=False)"
            )
        if own:
            self._memory[start + _OWN_AT : start + _OWN_AT + len(own)] = own
        _HEAD.pack_into(self._memory, start, step + 1, len(own), not has_buffers)


def _can_keep(buffers: Sequence[torch.Tensor]) -> bool:
    return all(buffer.is_cpu for buffer in buffers) and sum(map(_room, buffers)) <= _MOST_BUFFER_BYTES


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _view(memory: memoryview, place: int, like: torch.Tensor) -> torch.Tensor:
    part = (
        torch.frombuffer(memory[place : place + _room(like)], dtype=torch.uint8) if like.nbytes else like.new_empty(0)
    )
    return part[: like.nbytes].view(like.dtype).view(like.shape) if like.nbytes else part.view(like.shape)


class _RandomStates:
    """Saves the states of this process's random generators in the records of a page, `stride` bytes apart.

    NumPy's generator takes 50 us to return its state, so its words are copied from the memory at the address it gives.
    torch's CPU state is a tensor, which the owner copies along with others.
    """

    def __init__(self, memory: memoryview, stride: int) -> None:
        self._memory, self._stride = memory, stride
        self._generator: Any = None  # of NumPy, and its words
        self._numpy_words: memoryview | None = None
        self._raw = self._numpy = b""
        self._has_gauss = True  # of NumPy: then the raw state does not show each draw
        self._written = [b"?"] * _RECORDS  # of NumPy's

    def keep(self, record: int) -> None:
        """Copy the present states, except torch's."""
        place = record * self._stride + _RANDOM_AT
        _, words, gauss = random.getstate()
        _WORDS.pack_into(self._memory, place, *words)
        place += _WORDS.size
        _GAUSS.pack_into(self._memory, place, gauss is not None, gauss or 0.0)
        if (module := sys.modules.get("numpy")) is not None:
            self._look_at_numpy(module.random)
        if self._written[record] is not self._numpy:
            place += _GAUSS.size
            data = self._numpy or bytes(_NUMPY.size)
            self._memory[place : place + _RANDOM_BYTES - _WORDS.size - _GAUSS.size] = bytes([bool(self._numpy)]) + data
            self._written[record] = self._numpy

    def _look_at_numpy(self, module: Any) -> None:
        raw = b""
        if (find := getattr(module, "get_bit_generator", None)) is not None:  # numpy 1.24
            if (generator := find()) is not self._generator:
                self._generator, self._numpy_words = generator, None
                if type(generator) is module.MT19937:
                    found = (ctypes.c_char * _WORDS.size).from_address(generator.ctypes.state_address)
                    self._numpy_words = memoryview(found).cast("B")
            raw = b"" if self._numpy_words is None else bytes(self._numpy_words)
        if raw and raw == self._raw and not self._has_gauss:
            return
        state = module.get_state(legacy=False)
        self._numpy = b""
        if state["bit_generator"] == "MT19937":  # the user has replaced the generator by another kind
            inner = state["state"]
            self._numpy = _NUMPY.pack(inner["key"].tobytes(), inner["pos"], bool(state["has_gauss"]), state["gauss"])
        self._raw, self._has_gauss = raw, bool(state["has_gauss"])

    def at(self, record: int) -> dict[str, Any]:
        """Return the states of a record, except torch's, in the format of `ddp.rng.restore`."""
        place = record * self._stride + _RANDOM_AT
        words = _WORDS.unpack_from(self._memory, place)
        has_gauss, gauss = _GAUSS.unpack_from(self._memory, place := place + _WORDS.size)
        states: dict[str, Any] = {"python": (3, words, gauss if has_gauss else None)}
        place += _GAUSS.size
        if self._memory[place]:
            key, index, has_gauss, gauss = _NUMPY.unpack_from(self._memory, place + 1)
            states["numpy"] = {
                "bit_generator": "MT19937",
                "state": {
                    "key": torch.frombuffer(bytearray(key), dtype=torch.int32).numpy().view("uint32"),
                    "pos": index,
                },
                "has_gauss": int(has_gauss),
                "gauss": gauss,
            }
        return states
