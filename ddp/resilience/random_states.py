"""Save the states of this process's random generators in a page of memory, fast enough for every step, and read them.

NumPy's generator takes 50 us to return its state, so its words are copied from the memory at the address it gives.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

import torch

__all__ = ["RandomStates"]

_WORDS = struct.Struct("<625I")  # of a Mersenne twister: the key, then the position in it
_GAUSS = struct.Struct("<?d")
_NUMPY = struct.Struct("<2496sI?d")  # the key, the position in it, and a second number that is drawn already


class RandomStates:
    """Saves the states of this process in records of a page, at `offset` bytes of each, `size` bytes; see `RankPage`.

    torch's CPU state is a tensor, which the owner copies along with others.
    """

    size = _WORDS.size + _GAUSS.size + _NUMPY.size + 1

    def __init__(self, memory: memoryview, offset: int, stride: int, records: int) -> None:
        self._memory, self._offset, self._stride = memory, offset, stride
        self._generator: Any = None  # of NumPy, and its words
        self._numpy_words: memoryview | None = None
        self._raw = self._numpy = b""
        self._has_gauss = True  # of NumPy: then the raw state does not show each draw
        self._written = [b"?"] * records  # of NumPy's

    def keep(self, record: int) -> None:
        """Copy the present states, except torch's."""
        place = record * self._stride + self._offset
        _, words, gauss = random.getstate()
        _WORDS.pack_into(self._memory, place, *words)
        place += _WORDS.size
        _GAUSS.pack_into(self._memory, place, gauss is not None, gauss or 0.0)
        if (module := sys.modules.get("numpy")) is not None:
            self._look_at_numpy(module.random)
        if self._written[record] is not self._numpy:
            place += _GAUSS.size
            self._written[record] = self._numpy
            data = self._numpy or bytes(_NUMPY.size)
            self._memory[place : place + self.size - _WORDS.size - _GAUSS.size] = bytes([bool(self._numpy)]) + data

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
        """Return the states of a record, except torch's, in the format of `ddp.checkpoint.rng.restore`."""
        place = record * self._stride + self._offset
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
