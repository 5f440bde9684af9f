"""How the ranks of a generation find each other, before they connect."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ddp.errors import RendezvousError, ReplacementError

__all__ = ["REFUSED", "meet"]

REFUSED = "refused"  # by a rank, in words
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.001, 0.02


def meet(store: Any, rank: int, size: int, is_over: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for all ranks at a store (or a prefix of one) that nothing else uses; return whether they are there.

    False once `is_over` says that these ranks will not meet. Raises ReplacementError if one of them cannot come,
    RendezvousError, which names the missing ranks, after `timeout_s`, and what the store raises.
    """
    store.set(str(rank), "")
    deadline, pause_s = time.monotonic() + timeout_s, _LEAST_PAUSE_S
    everybody = [str(each) for each in range(size)]
    while not store.check(everybody):
        if is_over():
            return False
        if store.check([REFUSED]):
            raise ReplacementError(f"{store.get(REFUSED).decode()}, so the others cannot go on: all start again")
        if time.monotonic() > deadline:
            missing = [each for each in everybody if not store.check([each])]
            raise RendezvousError(
                f"rank {rank} of {size} waited {timeout_s:.0f} s for the others to meet again after a failure; "
                f"missing: {', '.join(missing[:16])}{', ...' * (len(missing) > 16)}"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)
    return not is_over()
