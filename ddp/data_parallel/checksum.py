"""Checksums of weights, to notice replicas that differ.

Called by the reducer's policy in passes, by `check_replicas`, and by checkpoints before they save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from ddp.comm.channel import Channel
from ddp.comm.fingerprint import Digest, fingerprints
from ddp.errors import DriftError

_PRIME = (1 << 48) - 59  # the largest below 2**48
_CAUSES = "an optimizer with other settings, a step taken or skipped there alone, or a faulty device"


class WeightChecksum:
    """One number for all parameters, computed on their device.

    On a device `start` only enqueues the computation and a copy to pinned host memory. `digest`, called at the end of
    backward, waits for the copy: for all work queued on the device before this pass, but for no gradient. Without that
    wait, the ranks could not report in this step that they differ.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._named = dict(named)
        self._digest = Digest(self._named.values())
        self._read: Callable[[], int] = lambda: 0

    def start(self) -> None:
        """Start to sum up every parameter as it is now. Reads all weights once; does not wait for the device."""
        self._read = self._digest.start()

    def digest(self) -> int:
        """Return 48 bits of the sum that was started last; they change if one bit does. Waits for the device."""
        return self._read() % _PRIME

    def compare(self, channel: Channel, step: int, *, counts: bool = True, why: str = "") -> DriftError | None:
        """Find the first parameter that differs between the ranks that count. Every rank must call it; blocks."""
        mine = fingerprints(self._named) if counts else None
        return drift_among(channel.gather(mine, "exchange of checksums"), step, why)


def drift_among(
    every: Sequence[Mapping[str, int] | None], step: int = 0, why: str = "", *, otherwise: str = ""
) -> DriftError | None:
    """Return the error for the first name whose checksum differs between the ranks, or None.

    `every` has None for a rank that does not count. `step` is the next step, 0 outside of training. `otherwise` is
    appended to the error's text.
    """
    counted = {rank: sums for rank, sums in enumerate(every) if sums is not None}
    for name in dict.fromkeys(name for sums in counted.values() for name in sums):
        totals = {rank: sums.get(name) for rank, sums in counted.items()}
        if len(set(totals.values())) > 1:
            usual, _ = Counter(totals.values()).most_common(1)[0]
            ranks = tuple(rank for rank, total in totals.items() if total != usual)
            shown = " ".join("none" if total is None else f"{total:016x}" for total in totals.values())
            when = f" before step {step}" if step else ""
            return DriftError(
                f"the replicas have drifted apart{when}: {name!r} is the first parameter that differs, on rank "
                f"{', '.join(map(str, ranks))} of {len(every)} (checksums by rank: {shown[:200]}). "
                f"{why or 'Something changed it on one rank only: ' + _CAUSES}. Start again from a checkpoint"
                f"{otherwise}",
                parameter=name,
                step=step,
                ranks=ranks,
            )
    return None
