"""Find the checkpoint to load, a file or a copy in a host's memory, and send it to the ranks that lack it.

Called by `ddp.checkpoint.checkpoint`.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn

from ddp import rng
from ddp.checkpoint import file as checkpoint_file
from ddp.checkpoint import kept_copy
from ddp.checkpoint.agreement import place
from ddp.checkpoint.state import Stateful, restore_parts, wrapper_of
from ddp.comm.objects import device_of
from ddp.data.step_loader import StepLoader
from ddp.environment import run_of
from ddp.errors import CheckpointError
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.stall_report import at_files, finish, waiting_for_peers

_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Restored:
    """The rest of a loaded checkpoint, besides the states that were restored. Tensors in `values` are on the CPU.

    `world_size` is 0 if another program's checkpoint was converted.
    """

    step: int
    values: dict[str, Any]
    path: Path
    world_size: int


@dataclass(frozen=True)
class LoadNote:
    """The files that a rank has skipped, and the newest complete one that it sees; its step is -1 if there is none.

    `is_kept`: it is a copy in the host's memory.
    """

    refused: tuple[str, ...]
    step: int = -1
    path: str = ""
    size: int = 0
    digest: bytes = b""
    inode: int = 0
    is_kept: bool = False


def identity(path: Path) -> tuple[object, object] | None:
    """Return a value that is equal for ranks that see the same file or folder, and the same copy in memory."""
    if (of_path := checkpoint_file.identity(path)) is None:
        return None
    memory = kept_copy.copy_path()
    return of_path, None if memory is None else checkpoint_file.identity(memory)


def find(
    open_files: contextlib.ExitStack, folder: Path, path: Path | None, broken: set[str]
) -> tuple[LoadNote, BinaryIO | None]:
    """Open the newest complete checkpoint that this rank sees, or the file at `path`; note the skipped files.

    Names of damaged files are added to `broken`.
    """
    refused: list[str] = []
    kept = _open_kept(open_files, folder) if path is None else None
    try:
        candidates = checkpoint_file.newest_first(folder) if path is None else [(None, path)]
    except OSError as error:
        if is_interrupt(error):
            raise
        if kept is not None:
            return kept
        return LoadNote((f"{folder.absolute()}: cannot be read: {error.strerror}",)), None
    for named_step, candidate in candidates:
        if kept is not None and named_step is not None and named_step <= kept[0].step:
            break
        try:
            file = open_files.enter_context(open(candidate, "rb"))  # noqa: SIM115  # what that stack is for
            trailer = checkpoint_file.verify(file)
            if named_step not in (None, trailer.step):
                raise CheckpointError(f"was saved as step {trailer.step} and has another name now")
        except (OSError, CheckpointError) as error:
            if is_interrupt(error):
                raise
            reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            refused.append(f"{candidate.absolute()}: {reason}")
            if path is None:
                broken.add(candidate.name)
        else:
            note = LoadNote(
                tuple(refused),
                trailer.step,
                str(candidate.absolute()),
                trailer.length + checkpoint_file.TRAILER_BYTES,
                trailer.digest,
                os.fstat(file.fileno()).st_ino,
            )
            return note, file
    return LoadNote(tuple(refused)) if kept is None else replace(kept[0], refused=tuple(refused)), kept and kept[1]


def _open_kept(open_files: contextlib.ExitStack, folder: Path) -> tuple[LoadNote, BinaryIO] | None:
    """Open the copy for `folder` that an ended process of the run has left in this host's memory, if any."""
    note, memory = kept_copy.find(), kept_copy.copy_path()
    if note is None or memory is None:
        return None
    if note.attempt >= run_of(os.environ)[1] and not kept_copy.writes_for_dead(note):
        return None  # of this attempt: its file is complete by now
    if Path(note.path).parent.resolve() != folder.resolve():
        return None
    try:
        file = open_files.enter_context(open(memory, "rb"))  # noqa: SIM115  # what that stack is for
    except OSError:
        return None
    status = os.fstat(file.fileno())
    key = bytes.fromhex(note.key)
    return LoadNote((), note.step, note.path, status.st_size, key, status.st_ino, is_kept=True), file


def restore(
    file: BinaryIO, parts: Mapping[str, Stateful], model: nn.Module | None, path: Path, rank: int, world_size: int
) -> Restored:
    with at_files(path):
        state = checkpoint_file.read(file)
    restore_parts(state, parts)
    wrapper = wrapper_of(model)
    if wrapper is not None and "reduction" in state:
        wrapper.load_reduction_state(state["reduction"])
    random_states = state["random"]
    if len(random_states) == world_size:
        rng.restore(random_states[rank])
    elif random_states and any(isinstance(part, StepLoader) for part in parts.values()):
        rng.restore(random_states[0])  # after a step they are the same on every rank
    elif random_states:  # another program's checkpoint has none
        rng.reseed(random_states[0], rank)
    return Restored(state["step"], state["values"], path, state["world_size"])


def open_again(open_files: contextlib.ExitStack, path: Path, inode: int) -> BinaryIO | None:
    """Open the file that another rank of this host has verified; None if it was removed or replaced."""
    try:
        file = open_files.enter_context(open(path, "rb"))  # noqa: SIM115  # what that stack is for
        return file if os.fstat(file.fileno()).st_ino == inode else None
    except OSError:
        return None


def send(source: int, file: BinaryIO | None, size: int, *, is_wanted: bool) -> BinaryIO | None:
    """Send the file of rank `source`, of `size` bytes, to all, and return it where it `is_wanted`.

    Every rank must call it; blocks.
    """
    rank, _ = place()
    device = device_of()
    received = io.BytesIO() if is_wanted else None
    if file is not None:
        file.seek(0)
    for begin in range(0, size, _CHUNK_BYTES):
        buffer = bytearray(min(size - begin, _CHUNK_BYTES))
        if rank == source and file is not None:
            buffer[:] = file.read(len(buffer))
        chunk = torch.frombuffer(buffer, dtype=torch.uint8)
        moved = chunk.to(device)
        with waiting_for_peers("broadcast of a checkpoint"):
            finish(dist.broadcast(moved, src=source, async_op=True), device=moved.device)
        if received is not None:
            chunk.copy_(moved)
            received.write(buffer)
    return received
