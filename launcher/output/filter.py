"""Selects the worker output shown on the terminal; the log files always have all of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.errors import UsageError
from launcher.frozen import dataclass, field

_ALL = -1  # key of a choice for every local rank


@dataclass(frozen=True)
class OutputFilter:
    """The `ranks` and `local_ranks` to show, None for all; the streams (1, 2) by local rank that are `redirected`,
    and thus not shown, or `teed`, and shown anyway."""

    ranks: frozenset[int] | None = None
    local_ranks: frozenset[int] | None = None
    redirected: Mapping[int, frozenset[int]] = field(default_factory=dict)
    teed: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def shows(self, rank: int, local_rank: int, stream: int) -> bool:
        """Return whether bytes of a worker's stdout (1) or stderr (2) go to the terminal."""
        if self.ranks is not None and rank not in self.ranks:
            return False
        if self.local_ranks is not None and local_rank not in self.local_ranks:
            return False
        return stream not in _of(self.redirected, local_rank) or stream in _of(self.teed, local_rank)


def _of(chosen: Mapping[int, frozenset[int]], local_rank: int) -> frozenset[int]:
    return chosen.get(local_rank, chosen.get(_ALL, frozenset()))


def parse_ranks(text: str | None, option: str) -> frozenset[int] | None:
    """Parse a list of ranks such as 0,4."""
    if not text:
        return None
    try:
        ranks = frozenset(map(int, text.split(",")))
        if min(ranks) < 0:
            raise ValueError(text)
        return ranks
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}; it must be numbers such as 0 or 0,4") from error


def parse_std(text: str | None, option: str) -> Mapping[int, frozenset[int]]:
    """Parse torchrun's choice of streams: 0 none, 1 stdout, 2 stderr, 3 both; for all, or by local rank (0:3,1:1).

    >>> parse_std("0:3,1:1", "--tee")
    {0: frozenset({1, 2}), 1: frozenset({1})}
    """
    if text is None:
        return {}
    if re.fullmatch(r"[0-3]", text):
        return {_ALL: _streams(text)}
    chosen = {}
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6}):([0-3])", item.strip())
        if match is None:
            raise UsageError(f"{option} is {text!r}; write 0 to 3, or LOCAL_RANK:N,... with 1 stdout, 2 stderr, 3 both")
        chosen[int(match[1])] = _streams(match[2])
    return chosen


def _streams(digit: str) -> frozenset[int]:
    return frozenset(stream for stream in (1, 2) if int(digit) & stream)
