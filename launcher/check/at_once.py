"""The same for many hosts at once, in a bounded number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["all_at_once"]

T = TypeVar("T")
R = TypeVar("R")


def all_at_once(work: Callable[[T], R], things: Sequence[T], *, most: int) -> list[R]:
    """Return the results in order. Blocks until all are there: each needs a deadline of its own, and must not raise."""
    waiting: SimpleQueue[int] = SimpleQueue()
    for number in range(len(things)):
        waiting.put(number)
    results: dict[int, R] = {}

    def take_turns() -> None:
        while True:
            try:
                number = waiting.get_nowait()
            except Empty:
                return
            results[number] = work(things[number])

    # No ThreadPoolExecutor: at the interpreter's end that waits for its threads, also for one that hangs.
    threads = [threading.Thread(target=take_turns, daemon=True) for _ in range(min(most, len(things)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(things))]
