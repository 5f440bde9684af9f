"""Agreement of all ranks through a store, before there is a group: rank 0 collects, decides, and publishes the answers.

Ranks therefore cannot reach different answers from the same data. Each key has one reader, which deletes it: a store
that outlives a group has no keys of an earlier agreement.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ddp.errors import RendezvousError
from ddp.monitoring.interrupts import is_interrupt


def agree(
    store: Any, rank: int, size: int, value: Any, decide: Callable[[list[Any]], Sequence[Any]], timeout_s: float
) -> Any:
    """Return this rank's answer: rank 0 calls `decide` with the values of all ranks, and it returns an answer for each.

    Values and answers are JSON values. All ranks must call it, with a store (or a prefix of one) that nothing else
    uses. Blocks until all have; raises RendezvousError after `timeout_s`.
    """
    try:
        if rank == 0:
            return _collect(store, size, value, decide, timeout_s)
        store.delete_key(f"answer/{rank}")  # of an earlier agreement that this rank did not finish
        store.set(f"value/{rank}", json.dumps(value))
        return json.loads(_take(store, [f"answer/{rank}"], timeout_s)[0])
    except RuntimeError as error:  # DistError is one
        late = ""
        with contextlib.suppress(RuntimeError):
            if rank == 0:
                missing = [each for each in range(1, size) if not store.check([f"value/{each}"])]
                late = f" (missing: {', '.join(map(str, missing[:16]))})"
            else:
                store.delete_key(f"value/{rank}")
        if is_interrupt(error):
            raise
        raise RendezvousError(
            f"rank {rank} of {size} waited {timeout_s:.0f} s for the other ranks to choose how to move tensors{late}: "
            f"{error}"
        ) from error


def _collect(store: Any, size: int, value: Any, decide: Callable[[list[Any]], Sequence[Any]], timeout_s: float) -> Any:
    others = _take(store, [f"value/{each}" for each in range(1, size)], timeout_s)
    answers = decide([value, *map(json.loads, others)])
    for each in range(1, size):
        store.set(f"answer/{each}", json.dumps(answers[each]))
    return answers[0]


def _take(store: Any, keys: list[str], timeout_s: float) -> list[bytes]:
    """Wait for keys, return their values, and delete them."""
    if not keys:
        return []
    store.wait(keys, timedelta(seconds=timeout_s))
    values: list[bytes] = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    for key in keys:
        store.delete_key(key)
    return values
