"""What is this rank's own after a step, in memory that outlives the process: random numbers' states, buffers.

DTRAIN_STATE_FILE names a file of the launcher's, the same for each process that takes this rank in turn. It holds four
records: two of commits, two of steps whose gradients are about to leave, each pair written in turn. A record begins
with its number, 0 while it is being written: whoever is killed in between leaves the other one of the pair.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ddp.torch_internals import foreach_copy

__all__ = ["RankPage"]

_VARIABLE = "DTRAIN_STATE_FILE"
_RECORDS = 4
_RANDOM_BYTES = 16 << 10  # of a record; buffers follow
_MOST_BUFFER_BYTES = 4 << 20  # larger ones would take too long to copy in each step
_ALIGN_BYTES = 64
_HEAD = struct.Struct("<QIIII")  # number + 1, and the lengths of the four states
_PYTHON = struct.Struct("<625I?d")
_NUMPY = struct.Struct("<I?d")  # after the key
_MT19937_BYTES = 625 * 4  # the key and the place in it, as NumPy has them in memory


class RankPage:
    """Of this rank. `buffers` are those of its model that it keeps: all, if they are in host memory, and not large."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        """Raises OSError if the file cannot be mapped."""
        sizes = [-(-buffer.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for buffer in buffers]
        keeps = all(buffer.is_cpu for buffer in buffers) and sum(sizes) <= _MOST_BUFFER_BYTES
        self._buffers = [buffer.detach() for buffer in buffers] if keeps else []
        self._stride = _RANDOM_BYTES + (sum(sizes) if keeps else 0)
        self._packer = _Packer()
        length = _RECORDS * self._stride
        descriptor = os.open(os.environ[_VARIABLE], os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size < length:
                os.ftruncate(descriptor, length)
            self._memory = memoryview(mmap.mmap(descriptor, length))
        finally:
            os.close(descriptor)
        self._kept: list[list[torch.Tensor]] = [[] for _ in range(_RECORDS)]  # views of the memory, for each record
        for record, views in enumerate(self._kept):
            start = record * self._stride + _RANDOM_BYTES
            for buffer, size in zip(self._buffers, sizes, strict=False):
                part = torch.frombuffer(self._memory[start : start + size], dtype=torch.uint8)
                views.append(part[: buffer.nbytes].view(buffer.dtype).view(buffer.shape))
                start += size

    def commit(self, step: int) -> None:
        """Keep what is there now as that after `step`."""
        self._write(step % 2, step)

    def sent(self, step: int) -> None:
        """Keep what is there now as that after `step`, of which the others get this rank's part now."""
        self._write(2 + step % 2, step)

    def random_at(self, step: int) -> dict[str, Any] | None:
        """The random numbers' states after `step`, as `ddp.checkpoint.rng.restore` takes them; None if not known."""
        if (record := self._record_of(step)) is None:
            return None
        start = record * self._stride
        _, *lengths = _HEAD.unpack_from(self._memory, start)
        start += _HEAD.size
        return _unpacked(bytes(self._memory[start : start + sum(lengths)]), lengths)

    def restore_buffers(self, step: int) -> None:
        """Put the buffers back as they were after `step`, if that is known; else they stay as they are."""
        if (record := self._record_of(step)) is not None and self._buffers:
            foreach_copy([buffer.data for buffer in self._buffers], self._kept[record])

    def _record_of(self, step: int) -> int | None:
        for record in (step % 2, 2 + step % 2):
            if _HEAD.unpack_from(self._memory, record * self._stride)[0] == step + 1:
                return record
        return None

    def _write(self, record: int, step: int) -> None:
        parts = self._packer.pack()
        lengths = [len(part) for part in parts]
        data = b"".join(parts)
        start = record * self._stride
        _HEAD.pack_into(self._memory, start, 0, 0, 0, 0, 0)
        self._memory[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        if self._buffers:
            foreach_copy(self._kept[record], self._buffers)
        _HEAD.pack_into(self._memory, start, step + 1, *lengths)


class _Packer:
    """Packs the states; that of NumPy only if it has changed since the last time."""

    def __init__(self) -> None:
        self._raw = self._numpy = b""
        self._has_gauss = True  # of NumPy: then the raw state does not tell of each draw

    def pack(self) -> tuple[bytes, bytes, bytes, bytes]:
        _, words, gauss = random.getstate()
        python = _PYTHON.pack(*words, gauss is not None, gauss or 0.0)
        if (module := sys.modules.get("numpy")) is not None:
            self._pack_numpy(module.random)
        device = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else b""
        return python, self._numpy, torch.default_generator.get_state().numpy().tobytes(), device

    def _pack_numpy(self, module: Any) -> None:
        """Its own way to tell its state takes 50 us, so look at the memory first."""
        raw = b""
        if (find := getattr(module, "get_bit_generator", None)) is not None:  # numpy 1.24
            generator = find()
            if type(generator) is module.MT19937:
                raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if raw and raw == self._raw and not self._has_gauss:
            return
        state = module.get_state(legacy=False)
        self._numpy = b""
        if state["bit_generator"] == "MT19937":  # another one has been put in its place by the user
            inner = state["state"]
            self._numpy = inner["key"].tobytes() + _NUMPY.pack(inner["pos"], bool(state["has_gauss"]), state["gauss"])
        self._raw, self._has_gauss = raw, bool(state["has_gauss"])


def _unpacked(data: bytes, lengths: list[int]) -> dict[str, Any]:
    parts, start = [], 0
    for length in lengths:
        parts.append(bytearray(data[start : start + length]))
        start += length
    python, numpy, host, device = parts
    *words, has_gauss, gauss = _PYTHON.unpack(python)
    states: dict[str, Any] = {
        "python": (3, tuple(words), gauss if has_gauss else None),
        "torch": torch.frombuffer(host, dtype=torch.uint8),
    }
    if numpy:
        key = torch.frombuffer(numpy[: -_NUMPY.size], dtype=torch.int32).numpy().view("uint32")
        position, has_gauss, gauss = _NUMPY.unpack(numpy[-_NUMPY.size :])
        states["numpy"] = {
            "bit_generator": "MT19937", "state": {"key": key, "pos": position}, "has_gauss": int(has_gauss),
            "gauss": gauss,
        }  # fmt: skip
    if device:
        states["cuda"] = torch.frombuffer(device, dtype=torch.uint8)
    return states
