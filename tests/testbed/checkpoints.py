"""The files of a checkpoint's folder, and disks that fail."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist


def listed(folder: str | Path) -> list[str]:
    """The files of a folder but for the one that says whose it is."""
    return [name for name in os.listdir(folder) if name != ".owner"]


@contextlib.contextmanager
def unwritable(folder: Path, what: str = "full disk") -> Iterator[None]:
    """Let rank 0's writes of more than 20 kB fail ("full disk"), or all in the folder ("read-only folder")."""
    is_writer = dist.get_rank() == 0
    if is_writer and what == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    elif is_writer:
        os.chmod(folder, 0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may write anywhere
    try:
        yield
    finally:
        if is_writer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            if os.getuid() == 0:
                os.seteuid(0)
            os.chmod(folder, 0o755)
        dist.barrier()


@contextlib.contextmanager
def caught_stderr(path: Path) -> Iterator[Path]:
    """Let this rank's stderr go to a file of its own, which is returned."""
    own = path.with_name(f"{path.name}.{dist.get_rank()}")
    own.touch()
    with own.open("w") as file, contextlib.redirect_stderr(file):
        yield own


def damage(path: Path) -> None:
    """Change one byte in the middle: the end still looks whole."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
