"""Which tests are slow, and which share of them a run takes in turn.

A test is slow if slow.txt names it or if it is marked so. A run without `--slow` leaves these out. With `--slow K/N` it
takes the K-th of N shares, so that N runs take each of them; in that share of all tests, `dtrain` starts by exec.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

LIST = Path(__file__).parents[1] / "slow.txt"


def slow(*values: Any) -> ParameterSet:
    """Values of parameters whose case is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


@dataclass(frozen=True)
class Share:
    """The `number`-th of `of` shares, from 1."""

    number: int
    of: int

    @classmethod
    def of_option(cls, text: str) -> "Share":
        number, _, of = text.partition("/")
        if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise pytest.UsageError(f"--slow {text}: give a share like 2/5")
        return cls(int(number), int(of))

    def has(self, nodeid: str, turn: int | None = None) -> bool:
        """Return whether it has this test: by its name, so that no other test moves it, or by its mark's `turn`."""
        return (zlib.crc32(nodeid.encode()) if turn is None else turn) % self.of == self.number - 1


def select(items: Iterable[pytest.Item], share: Share | None) -> tuple[list[pytest.Item], list[pytest.Item], set[str]]:
    """Mark the slow ones; return which to run, which to leave out, and the names in slow.txt that no item has."""
    listed = {line for line in LIST.read_text(encoding="utf-8").splitlines() if not line.startswith("#")}
    run: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    found: set[str] = set()
    for item in items:
        if names := listed & {item.nodeid, item.nodeid.partition("[")[0]}:
            found |= names
            item.add_marker(pytest.mark.slow)
        slow = item.get_closest_marker("slow")
        if slow is not None and item.get_closest_marker("control") is not None:
            raise pytest.UsageError(
                f"{item.nodeid} shows that a check can fail: it is never left out, and thus not slow"
            )
        takes = slow is None or (share is not None and share.has(item.nodeid, slow.kwargs.get("turn")))
        (run if takes else left_out).append(item)
    return run, left_out, listed - found


def are_named(arguments: Sequence[str]) -> bool:
    """Return whether the command line names tests (FILE::TEST), which then run though they are slow."""
    return any("::" in each for each in arguments)
