"""The order of an epoch: a permutation of 0 to n - 1, determined by (seed, epoch) and computed position by position.

Called by the sampler and the loader, which save their `Position` in it. Independent of ranks; never touches torch's
global random state.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp.errors import ArgumentError

LARGE = 2**20  # above this many samples, the indices are not materialized
# torch's CPU generator uses only the low 32 bits of a seed.
_EPOCHS_OF_TORCH = range(2**32)
_DIGIT = 16  # bits of a table's index

Permutation = Callable[[Tensor], Tensor]  # from positions (k,) int64, each in 0 to n - 1, to indices (k,)


def choose(n: int, *, seed: int, epoch: int) -> Permutation:
    """Return the order of an epoch of n samples, by the algorithm `Position.order`. Any integers are valid."""
    if n > LARGE:
        return Keyed(n, _key(seed, epoch))
    if seed == 0 and epoch in _EPOCHS_OF_TORCH:
        return functools.partial(_randperm(n, epoch).index_select, 0)
    # Two generators, because one takes 32 bits: among 77,000 epochs, two would probably be equal.
    first, second = struct.unpack("<QQ", _stream(_key(seed, epoch), 2))
    order = _randperm(n, first & 0xFFFFFFFF)[_randperm(n, second & 0xFFFFFFFF)]
    return functools.partial(order.index_select, 0)


@dataclass(frozen=True)
class Position:
    """Progress in an epoch: `position` samples are done, in the order set by the other fields; for any world size."""

    epoch: int
    position: int
    length: int
    shuffle: bool
    seed: int

    @property
    def order(self) -> str:
        """The algorithm of the permutation; a position is only valid for the same algorithm."""
        if self.shuffle and self.length > LARGE:
            return "keyed"
        return "hashed" if self.shuffle and self.seed else "torch"

    def state_dict(self) -> dict[str, int | bool | str]:
        return {**vars(self), "order": self.order}  # asdict() takes five times as long

    def going_on(self, state: Mapping[str, int | bool | str], what: str) -> tuple[int, int]:
        """Return the epoch and the position of a saved state, at most `length`.

        Raises ArgumentError, which names `what` was saved, if its order of samples differs from this one.
        """
        for name in ("length", "shuffle", "seed", "order"):
            saved, mine = state.get(name, "torch"), getattr(self, name)  # older states have torch's order, no field
            if saved != mine:
                raise ArgumentError(
                    f"the {what} was saved with {name} {saved} and now has {mine}: "
                    f"sample {state['position']} of epoch {state['epoch']} is another one here"
                )
        return int(state["epoch"]), min(int(state["position"]), self.length)


class Keyed:
    """A computed order, with random access and the same small memory for any n.

    A Feistel network (Luby and Rackoff 1988) in its generalised form for Z_a x Z_b with cycle walking (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains"): a position is split into high * 2**shift + low, and each
    round adds a random function of one part to the other. The functions are tables of random numbers, which SHAKE128
    draws from the key; parts of more than 16 bits are looked up 16 bits at a time (simple tabulation hashing, Zobrist
    1970), so that the tables take 6 MB at most. Since 2**shift * b exceeds n by less than 2**shift, few positions
    lead outside and are taken through the network once more.

    `rounds` counts pairs. With 64 samples, two pairs can still be distinguished from random orders by their neighbours,
    three cannot (`tests/ddp/data/test_sampler.py`), and the larger the set, the harder it is.
    """

    def __init__(self, n: int, key: bytes, *, rounds: int = 3) -> None:
        bits = (n - 1).bit_length()
        highs = -(-n >> bits // 2)  # number of values of the high part
        self._n = n
        self._dtype = torch.int32 if bits <= 60 else torch.int64  # of the parts: half as wide is twice as fast
        # Tensors, because a Python number costs each operation a conversion of 2.5 us.
        self._shift, self._low_mask = torch.tensor((bits // 2, (1 << bits // 2) - 1), device="cpu")
        self._highs = torch.tensor(highs, dtype=self._dtype, device="cpu")
        self._sign = torch.tensor(torch.iinfo(self._dtype).bits - 1, dtype=self._dtype, device="cpu")
        of_low, of_high = _table_sizes(bits // 2), _table_sizes((highs - 1).bit_length())
        sizes = [*of_low, *of_high] * rounds
        words = torch.frombuffer(bytearray(_stream(key, sum(sizes))), dtype=torch.int64) & (2**63 - 1)
        tables = iter(torch.split(words, sizes))
        self._rounds = [
            (
                # Less the modulus, so that one addition of it, where the sum is below 0, reduces the sum.
                [(next(tables) % highs - highs).to(self._dtype) for _ in of_low],
                [(next(tables) & self._low_mask).to(self._dtype) for _ in of_high],
            )
            for _ in range(rounds)
        ]

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the indices at positions (k,)."""
        indices = self._once(positions)
        while len(indices) and int(indices.max()) >= self._n:
            outside = (indices >= self._n).nonzero().squeeze(1)
            indices[outside] = self._once(indices[outside])
        return indices

    def _once(self, positions: Tensor) -> Tensor:
        high = (positions >> self._shift).to(self._dtype)
        low = (positions & self._low_mask).to(self._dtype)
        for of_low, of_high in self._rounds:
            for values in _look_up(of_low, low):
                high += values
                high += (high >> self._sign).bitwise_and_(self._highs)
            for values in _look_up(of_high, high):
                low ^= values
        indices: Tensor = (high.to(torch.int64) << self._shift).bitwise_or_(low)
        return indices


def _look_up(tables: list[Tensor], part: Tensor) -> list[Tensor]:
    if len(tables) == 1:
        return [tables[0].index_select(0, part)]
    return [table.index_select(0, (part >> (_DIGIT * place)) & (2**_DIGIT - 1)) for place, table in enumerate(tables)]


def _table_sizes(bits: int) -> list[int]:
    """Return the sizes of the tables for a part of `bits` bits: one per digit, and one if the part is always 0."""
    return [2 ** min(_DIGIT, bits - place) for place in range(0, bits, _DIGIT)] or [1]


def _key(seed: int, epoch: int) -> bytes:
    return f"{seed},{epoch}".encode()


def _stream(key: bytes, words: int) -> bytes:
    """Return random words of 8 bytes, the same for a key on every machine and in every version of torch."""
    return hashlib.shake_128(key).digest(8 * words)


def _randperm(n: int, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randperm(n, generator=generator, device="cpu")
