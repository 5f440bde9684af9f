"""A folder of checkpoint files: write one atomically, and find the complete ones.

A file is the output of `torch.save`, then a trailer of 60 bytes with a SHA-256 of all before it. It is one file,
because two cannot be renamed at once. It has a trailer, not a header, because the state is hashed while it is written;
torch finds a zip archive from its end, so `torch.load(path)` works on the file.

Knows no ranks; called by `ddp.checkpoint`.
"""

from __future__ import annotations

import hashlib
import os
import socket
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from ddp.checkpoint.copies import HostCopy
from ddp.checkpoint.kept_copy import HEAD, MAGIC, NAME, VERSION, writing
from ddp.errors import CheckpointError

TRAILER_BYTES = HEAD.size + hashlib.sha256().digest_size
_CHUNK_BYTES = 4 << 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # of Linux; no two kernels have the same


@dataclass(frozen=True)
class Trailer:
    """A file's description of itself. Files with equal digests have the same content."""

    step: int
    length: int
    digest: bytes


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:010d}.pt"


def newest_first(folder: Path) -> list[tuple[int, Path]]:
    """Return the files of `folder` with names of checkpoints, and their steps, the last first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = [(int(match[1]), folder / match[0]) for name in names if (match := NAME.fullmatch(name))]
    return sorted(found, reverse=True)


def _read_trailer(file: BinaryIO) -> Trailer:
    """Read the trailer of a file. Raises CheckpointError with the reason if it is not valid."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TRAILER_BYTES))
    tail = file.read(TRAILER_BYTES)
    if len(tail) < TRAILER_BYTES or not tail.startswith(MAGIC):
        raise CheckpointError(_foreign(file, size))
    _, version, step, length = HEAD.unpack_from(tail)
    if version != VERSION:
        raise CheckpointError(f"is of format {version}, and this version of ddp reads format {VERSION}")
    if length != size - TRAILER_BYTES:
        raise CheckpointError(f"says that its state has {length:,} bytes, but has {size - TRAILER_BYTES:,}")
    return Trailer(step, length, tail[HEAD.size :])


def _foreign(file: BinaryIO, size: int) -> str:
    if not size:
        return "is empty"
    file.seek(0)
    if file.read(4) == b"PK\3\4":  # the start of every zip archive, and so of what torch.save writes
        return f"is cut short at {size:,} bytes, or not written by ddp.Checkpoint: its checksum is missing at the end"
    return "is not a checkpoint of ddp: it starts and ends with other bytes"


def verify(file: BinaryIO) -> Trailer:
    """Read all of a file and compare it with its checksum. Raises CheckpointError with the reason."""
    trailer = _read_trailer(file)
    file.seek(0)
    sha = hashlib.sha256()
    left = trailer.length + HEAD.size
    while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
        sha.update(chunk)
        left -= len(chunk)
    if sha.digest() != trailer.digest:
        raise CheckpointError("has other content than its checksum says: it was damaged or changed after it was saved")
    file.seek(0)
    return trailer


def read(file: BinaryIO) -> dict[str, Any]:
    """Return the content of a verified file, from the pages that `verify` has read.

    The tensors have memory of their own: the pages of a file that is removed later may become unreadable.
    """
    try:
        path = f"/dev/fd/{file.fileno()}"  # this file, even if another one has its name by now
    except OSError:  # in memory
        file.seek(0)
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    return dict(HostCopy().of(torch.load(path, map_location="cpu", weights_only=True, mmap=True)))


def identity(path: Path) -> tuple[str, int, int] | None:
    """Return a value that is equal for processes of one host that see the same file or folder at `path`; None if it
    does not exist."""
    try:
        host = _BOOT.read_text(encoding="ascii")
    except OSError:
        host = socket.gethostname()
    try:
        status = path.stat()
    except OSError:
        return None
    return host, status.st_dev, status.st_ino


def write(folder: Path, step: int, content: Mapping[str, Any]) -> Path:
    """Write `content` as `kept_copy.writing` does; return the path."""
    path = path_of(folder, step)
    with writing(path, step) as stream:
        torch.save(dict(content), cast("IO[bytes]", stream))  # it calls write and flush only
    return path


def prune(folder: Path, keep: int, broken: Collection[str]) -> None:
    """Remove all complete files but the newest `keep`. Incomplete ones, and those named in `broken`, stay."""
    for path in [*_whole(folder, broken)][keep:]:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(f"the old checkpoint {path} could not be removed: {error.strerror}", stacklevel=3)


def newest_whole(folder: Path, broken: Collection[str]) -> Path | None:
    """Return the newest complete file that is not named in `broken`."""
    return next(_whole(folder, broken), None)


def _whole(folder: Path, broken: Collection[str]) -> Iterator[Path]:
    return (path for _, path in newest_first(folder) if path.name not in broken and ends_whole(path))


def ends_whole(path: Path) -> bool:
    """Return whether a file ends with a valid trailer, so that it is not truncated. Does not read the rest."""
    try:
        with open(path, "rb") as file:
            _read_trailer(file)
    except (OSError, CheckpointError):
        return False
    return True
