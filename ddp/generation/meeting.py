"""The rendezvous of a generation's ranks at the store, before they connect.

Each rank sets a key and increments a count; the last one sets the key that all wait for, so that each check reads only
one key, for any number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ddp.errors import RendezvousError, ReplacementError

_COUNT, _OUTCOME = "count", "outcome"  # number of ranks that arrived; empty once all have, else why they cannot
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.001, 0.02


def meet(store: Any, rank: int, size: int, is_over: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for all ranks at a store (or a prefix of one) that nothing else uses; return whether they arrived.

    Returns False once `is_over()`: these ranks will not meet. Raises ReplacementError if one of them cannot come,
    RendezvousError, which names the missing ranks, after `timeout_s`, and the store's errors.
    """
    if store.add(str(rank), 1) == 1 and store.add(_COUNT, 1) == size:
        store.set(_OUTCOME, "")
    deadline, pause_s = time.monotonic() + timeout_s, _LEAST_PAUSE_S
    while not store.check([_OUTCOME]):
        if is_over():
            return False
        if time.monotonic() > deadline:
            missing = [each for each in map(str, range(size)) if not store.check([each])]
            raise RendezvousError(
                f"rank {rank} of {size} waited {timeout_s:.0f} s for the others to meet again after a failure; "
                f"missing: {', '.join(missing[:16])}{', ...' * (len(missing) > 16)}"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)
    if why := store.get(_OUTCOME).decode():
        raise ReplacementError(f"{why}, so the others cannot continue: all start again")
    return not is_over()


def refuse(store: Any, why: str) -> None:
    """Notify the ranks that wait at this store that one of them will not come."""
    store.set(_OUTCOME, why)
