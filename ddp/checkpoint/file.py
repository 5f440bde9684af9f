"""A folder of checkpoint files: writes one so that it is there as a whole or not at all, tells whole ones from others.

A file is what `torch.save` writes, then a trailer of 60 bytes with a SHA-256 of all before it. One file, because two
cannot be renamed at once; a trailer, not a header, because the state is hashed while it is written and torch reads a
zip archive from its end, so that `torch.load(path)` works on the file as it is.

Nothing here knows of ranks; `ddp.checkpoint` calls it.
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
    """What a file says of itself. Two files with one digest have the same content."""

    step: int
    length: int
    digest: bytes


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:010d}.pt"


def newest_first(folder: Path) -> list[tuple[int, Path]]:
    """The files of `folder` that are named as checkpoints, with their steps, the last first, whatever is in them."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = [(int(match[1]), folder / match[0]) for name in names if (match := NAME.fullmatch(name))]
    return sorted(found, reverse=True)


def _read_trailer(file: BinaryIO) -> Trailer:
    """Read what a file says of itself, from its last bytes only. Raises CheckpointError with the reason."""
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
    """Return the content of a file that was verified. Its pages are those that `verify` has read, not read again.

    The tensors have memory of their own: pages of a file that goes away later cannot be relied on.
    """
    try:
        path = f"/dev/fd/{file.fileno()}"  # this file, whatever has its name by now
    except OSError:  # in memory
        file.seek(0)
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    return dict(HostCopy().of(torch.load(path, map_location="cpu", weights_only=True, mmap=True)))


def identity(path: Path) -> tuple[str, int, int] | None:
    """Return what is equal for processes to which `path` is the same file or folder, on the same host; None if it is
    not there."""
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
    """Remove all but the newest `keep` files that end as whole ones do. Others, and those named in `broken`, stay."""
    for path in [*_whole(folder, broken)][keep:]:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(f"the old checkpoint {path} could not be removed: {error.strerror}", stacklevel=3)


def newest_whole(folder: Path, broken: Collection[str]) -> Path | None:
    """Return the newest file that ends as a whole one does, and is not named in `broken`."""
    return next(_whole(folder, broken), None)


def _whole(folder: Path, broken: Collection[str]) -> Iterator[Path]:
    return (path for _, path in newest_first(folder) if path.name not in broken and ends_whole(path))


def ends_whole(path: Path) -> bool:
    """Whether a file ends as a whole one does, which one that was cut short does not. Does not read the rest."""
    try:
        with open(path, "rb") as file:
            _read_trailer(file)
    except (OSError, CheckpointError):
        return False
    return True
