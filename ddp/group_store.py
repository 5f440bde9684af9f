"""The store at which the ranks of a job find each other."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from datetime import timedelta
from pathlib import Path

from torch.distributed import (
    FileStore,
    HashStore,
    Store,
    rendezvous,
)

from ddp.environment import Placement
from ddp.errors import LaunchEnvironmentError, RendezvousError

_file_store: FileStore | None = None  # this job's store without MASTER_ADDR


def store_at_address(placement: Placement, timeout: timedelta) -> Store:
    """Return the store at MASTER_ADDR, as init_process_group() itself would."""
    found = rendezvous("env://", placement.rank, placement.world_size, timeout=timeout)
    store: Store = next(found)[0]
    store.set_timeout(timeout)
    return store


def store_without_address(placement: Placement) -> Store:
    """Make a store without MASTER_ADDR: in memory if alone, else in a file that only this job's ranks can name."""
    if placement.world_size == 1:
        return HashStore()
    if not placement.is_single_host or placement.job_key is None:
        raise LaunchEnvironmentError(
            f"rank {placement.rank} of {placement.world_size} does not know where to meet the others: set MASTER_ADDR "
            "to the host of rank 0, by a name that all ranks reach, and MASTER_PORT to a free port on it "
            "(mpirun passes them on with -x MASTER_ADDR -x MASTER_PORT)"
        )
    global _file_store
    path = _private_folder() / hashlib.sha256(placement.job_key.encode()).hexdigest()[:32]
    _file_store = FileStore(str(path), placement.world_size)
    return _file_store


def leave_file(world_size: int) -> None:
    """Remove the file of this job's store, if there is one, as the last of its ranks.

    FileStore does that when its last owner is destroyed, which may not happen at interpreter exit.
    """
    if _file_store is not None and _file_store.add("ddp/left", 1) == world_size:
        Path(_file_store.path).unlink(missing_ok=True)  # type: ignore[attr-defined]  # not in torch's stubs


def _private_folder() -> Path:
    """Return a folder that no other user can read or write: a store in it cannot be forged or watched."""
    path = Path(tempfile.gettempdir()) / f"ddp-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise RendezvousError(
            f"{path} is not a folder that only this user can enter; remove it, or set TMPDIR or MASTER_ADDR"
        )
    return path
