"""The status that ranks exchange at the end of every backward pass: a few numbers, added up over the ranks.

They are sent from host memory: behind the gradients of the last bucket, or alone if gradients are on a device, which
the host must not wait for. The reducer writes this rank's numbers when backward has ended, since a rank may fail until
then, and reads the sums when everything else is in transit. Every rank reads the same sums, so all decide the same in
the same iteration.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

# A digest is sent as digits below 64 and their squares: sums of up to 4000 ranks are exact in float32.
_DIGITS = 8
_DIGIT_BITS = 6
_MOST = (1 << _DIGIT_BITS) - 1
_FIELDS = 17
HEADER_NUMEL = _FIELDS + 4 * _DIGITS


@dataclass(frozen=True)
class RankStatus:
    """One rank's report of its pass.

    `failed`: its pass ended with an exception. `joined`: it has no more inputs and only takes part in collectives.
    `weight`: the sum of the weights of its contributions, None if it gave none. `open_forwards`: forward passes since
    the last reduction whose outputs saw no backward. `unfrozen`: parameters that were frozen at the last plan and are
    not now. `number`: index of the wrapper in its group. `digest`: 48 bits of a checksum that should be equal
    everywhere. `steps`: number of optimizer steps since the last reduction. `kept` and `emptied`: the gradients of the
    last reduction were still there, unchanged, or gone, when this pass began; neither if that is unknown.
    `nonfinite`: its own gradients had a value that is infinite or NaN. `warned`: it was notified that the job's time is
    nearly up, which the others may not know. `hashed`: `hash` is 48 bits of what it hashed in the last step of a
    StepLoader. `every`: in how many steps all is hashed from now on; of rank 0 alone.
    """

    failed: bool = False
    joined: bool = False
    weight: float | None = None
    open_forwards: int = 0
    unfrozen: int = 0
    number: int = 0
    digest: int = 0
    steps: int = 0
    kept: bool = False
    emptied: bool = False
    nonfinite: bool = False
    warned: bool = False
    hashed: bool = False
    hash: int = 0
    every: int = 0


@dataclass(frozen=True)
class StatusSum:
    """Sum of all ranks' statuses. `active` ranks are those that have not joined."""

    active: int
    failed: int
    weighted: int
    weight: float
    unfrozen: int
    same_forwards: bool
    same_number: bool
    same_digest: bool
    same_steps: bool
    same_start: bool  # no rank kept gradients that another emptied
    nonfinite: int
    warned: int
    hashed: int
    same_hash: bool
    every: int


_PLAIN = RankStatus()


def write(status: RankStatus, place: torch.Tensor, absent: Sequence[int]) -> None:
    """Write `status` into `place` (HEADER_NUMEL + parameters,), and 1 for every parameter except those `absent`."""
    place[:HEADER_NUMEL].zero_()
    place[HEADER_NUMEL:].fill_(not (status.failed or status.joined))
    if absent:
        place[[HEADER_NUMEL + index for index in absent]] = 0
    if status == _PLAIN:
        return
    place[:HEADER_NUMEL] = _header(status, place.dtype)


@lru_cache(maxsize=16)
def _header(status: RankStatus, dtype: torch.dtype) -> torch.Tensor:
    """Return the header (HEADER_NUMEL,), which is the same in most steps."""
    digits = [number >> (_DIGIT_BITS * at) & _MOST for number in (status.digest, status.hash) for at in range(_DIGITS)]
    compared = [min(status.open_forwards, _MOST), status.number & _MOST, min(status.steps, _MOST), *digits]
    opened, number, steps, *digits = [0] * len(compared) if status.joined else compared
    header = [status.failed, status.joined, status.weight is not None, status.weight or 0.0, status.unfrozen]
    header += [opened, opened**2, number, number**2, steps, steps**2]
    header += [status.kept and not status.joined, status.emptied and not status.joined, status.nonfinite, status.warned]
    header += [status.hashed, status.every]
    header += [*digits, *(digit**2 for digit in digits)]
    return torch.tensor(header, dtype=dtype, device="cpu")


def read(sums: torch.Tensor, size: int) -> StatusSum:
    """Read the sum of the statuses that `write` wrote on each of `size` ranks."""
    header = sums[:HEADER_NUMEL].tolist()
    failed, joined, weighted, weight, unfrozen, opened, opened2, number, number2, *rest = header
    steps, steps2, kept, emptied, nonfinite, warned, hashed, every, *digits = rest
    digits, squares = digits[: 2 * _DIGITS], digits[2 * _DIGITS :]
    active = size - round(joined)
    return StatusSum(
        active=active,
        failed=round(failed),
        weighted=round(weighted),
        weight=weight,
        unfrozen=round(unfrozen),
        same_forwards=_are_equal(opened, opened2, active),
        same_number=_are_equal(number, number2, active),
        same_digest=all(map(_are_equal, digits[:_DIGITS], squares[:_DIGITS], [active] * _DIGITS)),
        same_steps=_are_equal(steps, steps2, active),
        same_start=not (round(kept) and round(emptied)),
        nonfinite=round(nonfinite),
        warned=round(warned),
        hashed=round(hashed),
        same_hash=not hashed or all(map(_are_equal, digits[_DIGITS:], squares[_DIGITS:], [active] * _DIGITS)),
        every=round(every),
    )


def _are_equal(total: float, squares: float, count: int) -> bool:
    """Return whether `count` numbers with this sum and this sum of squares are all equal (Cauchy-Schwarz)."""
    return count * squares == total * total


def used_among(sums: torch.Tensor, indices: Collection[int]) -> frozenset[int]:
    """Return those of `indices` for which any rank had a gradient."""
    if not indices:
        return frozenset()
    counts = sums[HEADER_NUMEL:].tolist()
    return frozenset(index for index in indices if counts[index] > 0)
