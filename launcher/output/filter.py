"""Which of the workers' output is shown on the terminal; all of it is kept in files whatever is shown. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.errors import UsageError
from launcher.frozen import dataclass, field

_ALL = -1  # the key of a choice that is for every local rank


@dataclass(frozen=True)
class OutputFilter:
    """`ranks` and `local_ranks` to be shown, None for all; streams (1, 2) by local rank that
    do not go there, and that do all the same."""

    ranks: frozenset[int] | None = None
    local_ranks: frozenset[int] | None = None
    redirected: Mapping[int, frozenset[int]] = field(default_factory=dict)
    teed: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def shows(self, rank: int, local_rank: int, stream: int) -> bool:
        """Whether bytes of a worker's stdout (1) or stderr (2) go to the terminal."""
        if self.ranks is not None and rank not in self.ranks:
            return False
        if self.local_ranks is not None and local_rank not in self.local_ranks:
            return False
        return stream not in _of(self.redirected, local_rank) or stream in _of(self.teed, local_rank)


def _of(chosen: Mapping[int, frozenset[int]], local_rank: int) -> frozenset[int]:
    return chosen.get(local_rank, chosen.get(_ALL, frozenset()))


def parse_ranks(text: str | None, option: str) -> frozenset[int] | None:
    """Read a list of ranks such as 0,4."""
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
    """Read torchrun's choice of streams: 0 none, 1 stdout, 2 stderr, 3 both; for all, or by local rank as in 0:3,1:1.

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
