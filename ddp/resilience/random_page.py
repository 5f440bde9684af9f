"""The states of this rank's random number generators, in memory that outlives the process.

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
from typing import Any

import torch

__all__ = ["RandomPage"]

_VARIABLE = "DTRAIN_STATE_FILE"
_SLOT_BYTES = 16 << 10
_HEAD = struct.Struct("<QIIII")  # number + 1, and the lengths of the four states
_PYTHON = struct.Struct("<625I?d")
_NUMPY = struct.Struct("<I?d")  # after the key
_MT19937_BYTES = 625 * 4  # the key and the place in it, as NumPy has them in memory


class RandomPage:
    """`commit` and `sent` say for which step the present states are; `at` returns those of a step."""

    def __init__(self) -> None:
        """Raises OSError if the file cannot be mapped."""
        descriptor = os.open(os.environ[_VARIABLE], os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size < 4 * _SLOT_BYTES:
                os.ftruncate(descriptor, 4 * _SLOT_BYTES)
            self._packer = _Packer()
            self._memory = memoryview(mmap.mmap(descriptor, 4 * _SLOT_BYTES))
        finally:
            os.close(descriptor)

    def commit(self, step: int) -> None:
        """Keep the states as those after `step`."""
        self._write(step % 2, step)

    def sent(self, step: int) -> None:
        """Keep the states as those after `step`, of which the others get this rank's part now."""
        self._write(2 + step % 2, step)

    def at(self, step: int) -> dict[str, Any] | None:
        """The states after `step`, as `ddp.checkpoint.rng.restore` takes them; None if they are not known."""
        for slot in (step % 2, 2 + step % 2):
            memory = self._memory[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES]
            number, *lengths = _HEAD.unpack_from(memory)
            if number == step + 1:
                return _unpacked(bytes(memory[_HEAD.size : _HEAD.size + sum(lengths)]), lengths)
        return None

    def _write(self, slot: int, step: int) -> None:
        parts = self._packer.pack()
        lengths = [len(part) for part in parts]
        data = b"".join(parts)
        start = slot * _SLOT_BYTES
        _HEAD.pack_into(self._memory, start, 0, 0, 0, 0, 0)
        self._memory[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._memory, start, step + 1, *lengths)


class _Packer:
    """Packs the states; what has not changed since the last time is not packed again."""

    def __init__(self) -> None:
        self._words: tuple[int, ...] = ()
        self._python = b""
        self._raw = self._numpy = b""
        self._has_gauss = True  # of NumPy: then the raw state does not tell of each draw

    def pack(self) -> tuple[bytes, bytes, bytes, bytes]:
        _, words, gauss = random.getstate()
        if words != self._words or gauss is not None:
            self._python = _PYTHON.pack(*words, gauss is not None, gauss or 0.0)
            self._words = () if gauss is not None else words
        if (module := sys.modules.get("numpy")) is not None:
            self._pack_numpy(module.random)
        device = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else b""
        return self._python, self._numpy, torch.default_generator.get_state().numpy().tobytes(), device

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
