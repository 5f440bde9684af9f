"""What the scripts of this folder share. Their first argument is the bench's folder, where they note moments."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

FOLDER = Path(sys.argv[1])
MPI = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}


def begin(timeout_s: float = 600) -> int:
    """Join the process group of any launcher; return the rank."""
    for name, theirs in MPI.items():
        if f"OMPI_COMM_WORLD_{theirs}" in os.environ:
            os.environ.setdefault(name, os.environ[f"OMPI_COMM_WORLD_{theirs}"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    dist.barrier()
    return int(os.environ["RANK"])


def note(what: str, text: str = "") -> None:
    """Write down the moment at which something happened on this rank, on the clock that all processes here share."""
    path = FOLDER / f"{what}.{os.environ['RANK']}.{os.getpid()}"
    path.with_suffix(".new").write_text(f"{time.monotonic()} {text}")
    path.with_suffix(".new").rename(path.with_name(path.name + ".noted"))
