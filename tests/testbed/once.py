"""What all of pytest's processes need is made by the first of them that does, and read by the others."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def folder_of_run(factory: pytest.TempPathFactory) -> Path:
    """The temporary folder that all processes of this run of pytest share."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], T]) -> T:
    """Return what `make` has returned in the first process that called this with `name`, by pickle.

    Blocks while another process makes it. If `make` raises, the next process tries it itself.
    """
    path = folder_of_run(factory) / f"{name}.pickle"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
        found: T = pickle.loads(path.read_bytes())
    return found
