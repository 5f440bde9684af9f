"""The contents of files as they travel: one after the other, in blocks, each compressed if that takes less time."""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections.abc import Iterator, Sequence

from launcher.sync import receiver
from launcher.sync.tree import File

BLOCK_BYTES = 1 << 20
SHARED_BYTES = 64 << 20  # of blocks that are kept for the other hosts
_FADES = 0.9  # how much the pace of earlier blocks counts: one wait of 0.1 s, as at the start, says nothing of the link
_INFLATES = 1.4  # what compressing and the opposite take, to compressing alone
_PROBE_BYTES = 1 << 14


def compressed_block(data: bytes) -> bytes:
    """Return a block as it is sent, from its compressed bytes."""
    return receiver.LENGTH.pack(len(data) | receiver.COMPRESSED) + data


class Block:
    """A part of the contents of files; compressed when a host first wants it so."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._packed: bytes | None = None
        self._lock = threading.Lock()

    def packed(self) -> bytes:
        with self._lock:
            if self._packed is None:
                self._packed = zlib.compress(self.data, 1)
            return self._packed


class Blocks:
    """The contents of files, one after the other, in blocks; kept for other hosts while they are few."""

    def __init__(self, files: Sequence[File]) -> None:
        self.size = sum(file.size for file in files)
        self._files = files
        self._kept: list[Block] = []
        self._source = self._make() if self.size <= SHARED_BYTES else None
        self._lock = threading.Lock()

    def all(self) -> Iterator[Block]:
        if self._source is None:
            yield from self._make()
            return
        for at in itertools.count():
            with self._lock:
                if at == len(self._kept):
                    if (block := next(self._source, None)) is None:
                        return
                    self._kept.append(block)
                block = self._kept[at]
            yield block

    def _make(self) -> Iterator[Block]:
        pieces: list[bytes] = []
        size = 0
        for piece in itertools.chain.from_iterable(map(_read, self._files)):
            pieces.append(piece)
            size += len(piece)
            if size >= BLOCK_BYTES:
                yield Block(b"".join(pieces))
                pieces, size = [], 0
        if pieces:
            yield Block(b"".join(pieces))


def _read(file: File) -> Iterator[bytes]:
    """Yield a file's content, in the announced size: the receiver notices if it has changed."""
    left = file.size
    try:
        with open(file.path, "rb", 0) as source:
            while left and (data := source.read(min(left, BLOCK_BYTES))):
                left -= len(data)
                yield data
    except OSError:  # it was removed
        pass
    while left:
        data = bytes(min(left, BLOCK_BYTES))
        left -= len(data)
        yield data


class Pace:
    """Decides for each block whether to compress it: if that takes less time than sending the bytes that it saves."""

    def __init__(self) -> None:
        self._written_bytes, self._written_s = 1.0, 0.0  # newest first: older ones count less and less
        self._compress_s = 0.0  # for a byte; 0: not known

    def frame(self, block: Block) -> bytes:
        """Return a block as it is sent."""
        began = time.monotonic()
        gain = 1 - len(zlib.compress(block.data[:_PROBE_BYTES], 1)) / min(len(block.data), _PROBE_BYTES)
        self._compress_s = self._compress_s or (time.monotonic() - began) / min(len(block.data), _PROBE_BYTES)
        if gain * self._written_s / self._written_bytes > _INFLATES * self._compress_s:
            return compressed_block(block.packed())
        return receiver.LENGTH.pack(len(block.data)) + block.data

    def wrote(self, size: int, took_s: float) -> None:
        self._written_bytes = _FADES * self._written_bytes + size
        self._written_s = _FADES * self._written_s + took_s
