"""Checksums of weights, to notice replicas that drift apart. Called by the reducer where the user asked for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from ddp.comm.channel import Channel
from ddp.comm.fingerprint import PendingFingerprints, start_fingerprints
from ddp.errors import DriftError

__all__ = ["WeightChecksum"]

_PRIME = (1 << 61) - 1


class WeightChecksum:
    """One number for each parameter, computed where it is.

    On a device `take` only enqueues that and a copy to pinned host memory. `digest`, which is asked for at the end of
    backward, waits for the copy: for all that the device had to do before this pass, but for no gradient. Without that
    wait the ranks could not say in this step that they differ.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._named = dict(named)
        self._pending: PendingFingerprints | None = None
        self._sums: dict[str, int] = {}

    def take(self) -> None:
        """Sum up every parameter as it is now. Reads all weights once; does not wait for the device."""
        self._pending = start_fingerprints(self._named)

    def digest(self) -> int:
        """48 bits of all that was taken last. Waits until the device has taken it."""
        if self._pending is not None:
            self._sums, self._pending = self._pending.read(), None
        mixed = 0
        for total in self._sums.values():
            mixed = (mixed * 0x9E3779B97F4A7C15 + total) % _PRIME
        return mixed & ((1 << 48) - 1)

    def compare(self, channel: Channel, step: int) -> DriftError:
        """Find the first parameter that differs between the ranks, and where. Every rank must call it; blocks."""
        every = channel.gather(list(self._sums.values()), "exchange of checksums")
        for name, totals in zip(self._sums, zip(*every, strict=True), strict=True):
            if len(set(totals)) > 1:
                usual, _ = Counter(totals).most_common(1)[0]
                ranks = [rank for rank, total in enumerate(totals) if total != usual]
                return DriftError(
                    f"the replicas have drifted apart before step {step}: {name!r} is the first parameter that "
                    f"differs, on rank {', '.join(map(str, ranks))} of {len(every)} (checksums by rank: "
                    f"{' '.join(f'{total:016x}' for total in totals)[:200]}). Something changed it on one rank only "
                    "since the last step: an optimizer with other settings, a step taken or skipped there alone, or a "
                    "faulty device. Start again from a checkpoint",
                    parameter=name,
                    step=step,
                    ranks=tuple(ranks),
                )
        return DriftError(
            f"the digests of the replicas differ before step {step}, but every parameter has the same checksum "
            "everywhere: please report this",
            parameter="",
            step=step,
            ranks=(),
        )
