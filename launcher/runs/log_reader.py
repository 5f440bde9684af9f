"""Reads the log files of an active or ended run in the order in which its workers wrote, second by second."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launcher.output.logfiles import STREAM_NAMES, attempts_in, log_folder, times_file

PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Piece:
    """Bytes of one rank's stdout (1) or stderr (2)."""

    attempt: int
    rank: int
    stream: int
    data: bytes


@dataclass
class _Attempt:
    times_read: int = 0  # bytes of its times.log
    read: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes of each file


class LogReader:
    """Reads what was written since the last `read`. `ranks`: all if None; `since`: seconds since the epoch."""

    def __init__(self, folder: Path, *, ranks: Collection[int] | None = None, since: float = 0.0) -> None:
        self._folder = folder
        self._ranks = ranks
        self._since = int(since)
        self._attempts: dict[int, _Attempt] = {}

    def skip(self) -> None:
        """Skip everything written so far."""
        for _ in self.read():
            pass

    def read(self) -> Iterator[Piece]:
        """Yield new output, attempt by attempt."""
        for number in sorted(attempts_in(self._folder)):
            if number >= max(self._attempts, default=0):
                yield from self._read_attempt(number, self._attempts.setdefault(number, _Attempt()))

    def _read_attempt(self, number: int, state: _Attempt) -> Iterator[Piece]:
        sizes = {key: self._size(number, key) for key in self._files(number)}
        # By file, the starts of its parts: the second, the index of the entry in times.log, the offset. Within a second
        # the order of entries is the order of writing.
        begins: dict[tuple[int, int], list[tuple[int, int, int]]] = {key: [] for key in sizes}
        for order, (second, key, offset) in enumerate(self._times(number, state), start=1):
            if key in begins and offset < sizes[key]:
                begins[key].append((second, order, offset))
        parts = []  # second, order, rank and stream, first and last byte
        for key, size in sizes.items():
            first = state.read.get(key, 0)
            if not begins[key] and key not in state.read:  # no times recorded: treat all of it as old
                begins[key] = [(0, 0, 0)]
            cuts = [(second, order, max(first, offset)) for second, order, offset in begins[key]]
            if not cuts or cuts[0][2] > first:
                cuts.insert(0, (self._since, 0, first))  # continues after what was read before
            ends = [offset for *_, offset in cuts[1:]] + [size]
            parts += [(second, order, key, begin, end) for (second, order, begin), end in zip(cuts, ends, strict=True)]
        for second, _, key, begin, end in sorted(parts):
            state.read.setdefault(key, 0)
            if second >= self._since:
                for piece in self._pieces(number, *key, begin, end):
                    begin += len(piece.data)
                    state.read[key] = max(state.read[key], begin)
                    yield piece  # Ctrl-C may end this round here
            state.read[key] = max(state.read[key], end)

    def _files(self, number: int) -> list[tuple[int, int]]:
        folder = log_folder(self._folder, number)
        ranks = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
        wanted = sorted(rank for rank in ranks if self._ranks is None or rank in self._ranks)
        return [(rank, stream) for rank in wanted for stream in STREAM_NAMES]

    def _path(self, number: int, key: tuple[int, int]) -> Path:
        return log_folder(self._folder, number, key[0]) / f"{STREAM_NAMES[key[1]]}.log"

    def _size(self, number: int, key: tuple[int, int]) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self._path(number, key).stat().st_size
        return 0

    def _times(self, number: int, state: _Attempt) -> Iterator[tuple[int, tuple[int, int], int]]:
        try:
            with open(times_file(self._folder, number), "rb") as file:
                file.seek(state.times_read)
                text = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return
        state.times_read += len(text) + bool(text)
        for line in text.splitlines():
            second, rank, stream, offset = map(int, line.split())
            yield second, (rank, stream), offset

    def _pieces(self, number: int, rank: int, stream: int, begin: int, end: int) -> Iterator[Piece]:
        if begin >= end:
            return
        with open(self._path(number, (rank, stream)), "rb") as file:
            file.seek(begin)
            while begin < end and (data := os.read(file.fileno(), min(PIECE_BYTES, end - begin))):
                yield Piece(number, rank, stream, data)
                begin += len(data)
