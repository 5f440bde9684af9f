"""Seeds that are new in each run of the tests, can be repeated, and are kept once a test has failed with one."""

import random
from collections.abc import Iterable


class Seeds:
    """The seeds of one test. `run` is the seed of the whole run, which `--seed` repeats."""

    def __init__(self, run: int, test: str) -> None:
        self._random = random.Random(f"{run} {test}")
        self.drawn: list[int] = []

    def __call__(self, count: int, *, kept: Iterable[int] = ()) -> list[int]:
        """Return `kept`, with which the test has failed before, and then `count` new ones."""
        self.drawn += (drawn := [*kept, *(self._random.randrange(2**32) for _ in range(count))])
        return drawn
