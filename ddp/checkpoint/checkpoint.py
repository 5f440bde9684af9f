"""Saves all that a run needs to go on, and finds it again: one file a checkpoint, in a folder of this run's own.

    checkpoint = ddp.Checkpoint("runs/first/checkpoints")
    restored = checkpoint.load(model=model, optimizer=optimizer, sampler=sampler)
    step = restored.step if restored else 0
    ...
    if checkpoint.due(step, every=100):
        checkpoint.save(step, model=model, optimizer=optimizer, sampler=sampler, best_loss=best_loss)

Rank 0 writes, with `ddp.checkpoint.file`, by default from a copy while training goes on (`ddp.checkpoint.background`).
What the ranks must agree on, they tell each other here before and after, so that an error of one is raised by all and
none waits for another that has given up.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp.checkpoint import background, kept_copy, rng
from ddp.checkpoint import file as checkpoint_file
from ddp.checkpoint.agreement import (
    SaveNote,
    Weights,
    exchange,
    place,
    raise_together,
    reason_of,
    replicated,
    require_agreement,
    require_equal_replicas,
)
from ddp.checkpoint.copy_memory import CopyMemory, is_on_host, needed_bytes
from ddp.checkpoint.failed_saves import FailedSaves, OnError
from ddp.checkpoint.folder_owner import FolderOwner
from ddp.checkpoint.host_copy import HostCopy, HostMemory
from ddp.checkpoint.loading import LoadNote, Restored, find, identity, open_again, restore, send
from ddp.checkpoint.preemption import Warned
from ddp.checkpoint.state import Stateful, check_plain, given_parts, wrapper_of
from ddp.errors import ArgumentError, CheckpointError
from ddp.generation.pending_group import is_pending
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.progress import SAVE, count_checkpoint, phase
from ddp.monitoring.stall_report import at_files

__all__ = ["Checkpoint", "Restored", "checked_saves"]

_checks: list[Callable[[], None]] = []


@contextlib.contextmanager
def checked_saves(check: Callable[[], None]) -> Iterator[None]:
    """In a block, have `check()` raise where this is no time to save."""
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)


class Checkpoint:
    """Keep the last `keep` checkpoints of one run in `folder`, which is made when it is needed.

    Checkpoints are `step-NNNNNNNNNN.pt`. Each is one file with a checksum, readable by
    `torch.load(path, weights_only=True)` without this package: a dict with "step", "world_size", "model" and so on,
    "random" for the random number generators of each rank, and "values". Older ones are removed once a new one
    is durable. What was cut short, damaged or written by another program is never counted and never removed.

    `folder` belongs to one run and one Checkpoint at a time, from its first `save` until `wait`, or until it is deleted
    or its process ends, however that ends: another one that saves there is refused, with the name of the first. A later
    attempt of the same run takes the folder over. Any run may `load`. On several hosts, put it on a file system that
    they share, because a checkpoint on a host that is lost is lost with it. (Where that has no locks across hosts, two
    owners on different hosts are noticed only once both have saved; then one is refused.)

    A save that the file system refuses (a full disk, a quota, a lost permission) costs that save alone: rank 0 says so
    on stderr, once, with the newest checkpoint that is whole, and the next `save` is as usual. After three failed saves
    in a row, it is a CheckpointError on every rank, and with `on_error="stop"` each is. It always is one in `wait` and
    `load` if the newest checkpoint was not written, since nothing would mend that: call `wait` at the end of training.
    Mistakes of the program are errors at once, and so is a folder that this object never could use.

    Before each save of a model in DistributedDataParallel, the ranks compare its weights, which reads them once; not
    while LocalSGD lets them differ, nor with a communication hook of yours. With `check_replicas=False` (hosts whose
    arithmetic differs in the last bits, weights that you average every few steps), those of rank 0 are saved, whatever
    the others have.

    With `in_background`, `save` returns once rank 0 has copied the state to host memory, and a thread of rank 0 writes
    the copy while training goes on, one at a time. Until the file is whole, the one before is the newest. An error of
    the thread is raised on every rank by their next `save`, `load` or `wait`. When SIGUSR1 has said that the job's time
    is nearly up (`due`), and with `in_background=False`, which needs no memory for a copy, `save` returns when the file
    is durable. A copy from CUDA devices lies in pinned memory, about as much as the state, kept for the next one.

    Under `dtrain run`, the copy lies in memory of rank 0's host that outlives the process and is kept until the run
    ends (once more the state's size where that is on devices, whose copy is there when they have finished it). If the
    process is killed before the file is durable, the file is still written; at the end of a run it has 10 s for that.
    `load` in a later attempt takes that copy, without reading a file, while the host lives. Where there is little
    memory, a line on stderr says so, and saves go on without it.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        keep: int = 3,
        in_background: bool = True,
        check_replicas: bool = True,
        on_error: OnError = "warn",
    ) -> None:
        if keep < 1:
            raise ArgumentError(f"keep={keep}; at least the last checkpoint must be kept")
        self.folder = Path(folder)
        self.keep = keep
        self.in_background = in_background
        self.check_replicas = check_replicas
        self._owner = FolderOwner(self.folder)
        self._failed = FailedSaves(self.folder, on_error)
        self._memory = HostMemory()  # for copies of what is on devices; kept
        self._is_uncounted = False  # whether another rank may still write what this one has saved
        self._warned: Warned | None = None
        self._broken: set[str] = set()  # names of files whose end looks whole, but that `load` found damaged
        self._known: set[str] | None = None  # names of the files that are ours, or were there when we began
        self._newest: Path | None = None  # that this object has written
        self._loaded = ""  # name of the file that was loaded, which may still be on its way from a copy in memory

    def due(self, step: int, *, every: int) -> bool:
        """Whether to save now: after every `every` steps, and once more when the job's time is nearly up.

        The latter is when any rank got SIGUSR1, as SLURM sends it ahead of the end; from the first call on it ends no
        process. Every rank must call it after every step; it returns the same on all of them. `every` 0: only then.
        """
        self._warned = self._warned or Warned()
        is_warned = self._warned.together()
        return is_warned or (every > 0 and step % every == 0)

    @phase(SAVE)
    def save(
        self,
        step: int,
        *,
        model: nn.Module | None = None,
        optimizer: Stateful | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        sampler: Stateful | None = None,
        **values: Any,
    ) -> None:
        """Write a checkpoint of what is given and of every rank's random number generators.

        Every rank must call it, with the same step and the same things. It blocks until the checkpoint before is
        durable (written, fsynced and renamed) and rank 0 has copied its state, or, in the foreground, until this one is
        durable; at most as long as the process group's timeout. States and `values` are those of rank 0, but what
        `compression=` still owes is that of all. Values may be None, numbers, strings, tensors, and lists, tuples, sets
        and dicts of them. Wrappers around the model (DDP, torch.compile) are taken off, so that it can be loaded with
        or without.

        Raises CheckpointError on every rank if one of them passes something that cannot be saved or something
        else than rank 0, if the folder has a later step than `step` or belongs to another run, or if `on_error` makes
        an error of what rank 0 could not write, this one or the one before; the checkpoints before are still there
        then. DriftError on every rank if the replicas differ. CollectiveError if a rank is gone. ArgumentError in a
        resilient function if an optimizer has stepped since the last `state.commit()`.
        """
        for check in _checks:
            check()
        rank, _ = place()
        with at_files(self.folder.absolute()):
            lost = background.finish()
        problem: Exception | None = None
        content: dict[str, Any] = {}
        weights: Weights | None = None
        is_urgent = self._warned is not None and self._warned.has_acted
        note = SaveNote(
            step=step,
            random=rng.capture(),
            in_background=self.in_background and not is_urgent,
            is_last_written=not self._failed.is_last_lost,
        )
        # In the foreground only what lies on torch_xla's devices is copied: a file would ask for such a device again.
        copies = HostCopy(self._memory, device_types=None if note.in_background else {"xla"})
        memory: CopyMemory | None = None
        is_copied = False
        try:
            parts = given_parts(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, sampler=sampler)
            position = None if sampler is None else dict(sampler.state_dict())
            note = replace(note, names=(*parts, *sorted(values)), position=position)
            if self.check_replicas:
                weights = replicated(model)
                note = replace(note, replica=None if weights is None else weights.note())
            check_plain(values)
            if rank == 0 and lost is None:
                with at_files(self.folder.absolute()):
                    memory = CopyMemory.of_host() if note.in_background else None
                    note = replace(note, can_write=self._can_write(step))
                    content = {name: part.state_dict() for name, part in parts.items()}
                    for name, part_state in content.items():
                        check_plain(part_state, name)
                    content["values"] = values
                    if memory is not None and not memory.has_room(needed_bytes(content)):
                        memory = None
                    if memory is None or not is_on_host(content):
                        content, is_copied = copies.of(content), True
        except Exception as error:  # whatever a state_dict() raises, the other ranks must not wait for this one
            problem = error
        what = f"save step {step}"
        told = exchange((vars(note), reason_of(lost), reason_of(problem, what)), "notes before saving")
        notes = [SaveNote(**each) for each, _, _ in told]
        self._finish_last([reason for _, reason, _ in told], lost, is_written=notes[0].is_last_written)
        raise_together([reason for _, _, reason in told], problem)
        require_agreement(notes)
        require_equal_replicas(notes, weights)
        if not notes[0].can_write:
            return
        wrapper = wrapper_of(model)
        reduction = None if wrapper is None else wrapper.reduction_state()

        if rank == 0:
            values = content.pop("values")
            random_states = [note.random for note in notes]
            content = {"step": step, "world_size": len(notes), **content, "random": random_states, "values": values}
            if reduction is not None:
                content["reduction"] = copies.of(reduction) if is_copied and note.in_background else reduction
            with at_files(self.folder.absolute()):
                write = partial(self._write, step, partial(checkpoint_file.write, self.folder, step, content))
                begin = partial(self._begin, step, content, copies, memory, is_copied=is_copied)
                background.run(begin if note.in_background else write)
        self._is_uncounted = rank != 0
        if not note.in_background:
            self._wait(is_needed=False)

    @phase(SAVE)
    def wait(self) -> None:
        """Wait until what was saved is durable. Every rank must call it; blocks.

        Call it at the end of training, or before a program reads the file; the folder is free for another Checkpoint
        then, until this one saves again. A process that just ends waits as well, but an error is then raised on rank 0
        alone, whose exit code is 1. One that ends with an exception waits 5 s at most, since other ranks may wait for
        it: the newest checkpoint may be the one before then.

        Raises CheckpointError on every rank if rank 0 could not write the newest checkpoint, whatever `on_error` is;
        CollectiveError if a rank is gone.
        """
        self._wait()
        self._owner.release()

    def _wait(self, *, is_needed: bool = True) -> None:
        """Wait for what was saved. If it `is_needed`, a save that has failed is an error."""
        with at_files(self.folder.absolute()):
            lost = background.finish()
        if is_needed:
            lost = lost or self._failed.take()
        told = exchange((reason_of(lost), not self._failed.is_last_lost), "what each rank saved")
        self._finish_last([reason for reason, _ in told], lost, is_written=told[0][1])

    @phase(SAVE, loads=True)
    def load(
        self,
        path: str | PathLike[str] | None = None,
        *,
        model: nn.Module | None = None,
        optimizer: Stateful | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        sampler: Stateful | None = None,
    ) -> Restored | None:
        """Restore what is given, in place, from the newest whole checkpoint, or from the file at `path`.

        Every rank must call it; it blocks until all have restored. Returns None if the folder has no
        checkpoint. A file that is not whole is passed over with a warning that says why. The ranks take the
        newest checkpoint that any of them sees, and one that does not see it receives it from one that does. On each
        host one rank reads the file and its checksum; the others take it from the page cache.

        Each rank's random number generators go on where they were if the world has the size that was saved;
        otherwise they are seeded anew from the saved state of rank 0 and the rank. A DataLoader without a `generator`
        of its own draws one number whenever it is iterated, so also when a resumed run enters an epoch again.

        Raises CheckpointError on every rank if there are files but none is whole, if `path` is not, if something is
        given that the file lacks or the other way round, or if the model has other keys or shapes. The model is only
        changed if it fits; the rest may be restored in part then. CollectiveError if a rank is gone.
        """
        if dist.is_initialized() and is_pending(dist.group.WORLD):
            return None  # this process takes a failed rank's place, and gets the state from the others
        self._wait()
        rank, world_size = place()
        self._known = None
        given = None if path is None else Path(path)
        source_path = (self.folder if given is None else given).absolute()
        with contextlib.ExitStack() as open_files:
            # Ranks that see one and the same folder have it read by the first of them.
            with at_files(source_path):
                seen_here = identity(source_path)
            seen = exchange(seen_here, "places before loading")
            reader = rank if seen[rank] is None else seen.index(seen[rank])
            with at_files(source_path):
                nothing = LoadNote(()), None
                found, file = nothing if reader != rank else find(open_files, self.folder, given, self._broken)
            told = [LoadNote(**each) for each in exchange(vars(found), "notes before loading")]
            notes = [told[at if seen[at] is None else seen.index(seen[at])] for at in range(world_size)]
            mine = notes[rank]
            chosen = max(notes, key=lambda note: (note.step, note.is_kept))  # the first of several
            if chosen.step < 0:
                if refused := list(dict.fromkeys(line for note in notes for line in note.refused)):
                    raise CheckpointError("no checkpoint is whole:\n" + "\n".join(f"  {line}" for line in refused))
                return None
            # A file that all ranks see is warned of by one; a given path that this rank cannot read comes from another.
            if given is None and (rank == 0 or mine.refused != notes[0].refused):
                for line in mine.refused:
                    warnings.warn(f"this checkpoint is passed over: {line}", stacklevel=3)
            if mine.digest != chosen.digest:
                file = None
            elif reader != rank:
                there = kept_copy.copy_path() if mine.is_kept else given or self.folder / Path(mine.path).name
                with at_files(source_path):
                    file = None if there is None else open_again(open_files, there, mine.inode)
            lacks = exchange(file is None, "who lacks the checkpoint")
            if any(lacks):
                source = next(at for at, note in enumerate(notes) if note == chosen and not lacks[at])
                received = send(source, file, chosen.size, is_wanted=lacks[rank])
                file = received or file
            problem: Exception | None = None
            restored = None
            try:
                assert file is not None
                if lacks[rank] and not chosen.is_kept:
                    with at_files(source_path):
                        checkpoint_file.verify(file)
                parts = given_parts(
                    model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, sampler=sampler
                )
                restored = restore(file, parts, model, Path(chosen.path), rank, world_size)
            except Exception as error:  # whatever a load_state_dict() raises, the other ranks must not wait
                problem = error
        raise_together(exchange(reason_of(problem, f"restore {chosen.path}"), "what each rank loaded"), problem)
        self._loaded = Path(chosen.path).name
        return restored

    def _begin(
        self, step: int, content: dict[str, Any], copies: HostCopy, memory: CopyMemory | None, *, is_copied: bool
    ) -> None:
        """Copy on rank 0 what is not copied yet, and start to write. Errors are kept until the ranks meet again."""
        path = checkpoint_file.path_of(self.folder.absolute(), step)
        note = None
        if memory is not None and not is_copied:
            try:
                note = memory.keep(step, path, content)
            except Exception as error:  # no memory after all, or what torch.save refuses, which `write` meets again
                if is_interrupt(error):
                    raise
                memory = None
                content = copies.of(content)

        def write() -> None:
            nonlocal note, memory
            copies.wait()
            if memory is not None and note is None:
                try:
                    note = memory.keep(step, path, content)
                except Exception:  # as above
                    memory = None
            if memory is None or note is None:
                checkpoint_file.write(self.folder, step, content)
            else:
                memory.write_file(note)

        background.start(partial(self._write, step, write))

    def _write(self, step: int, write: Callable[[], object]) -> None:
        """Write and prune, perhaps in a thread: nothing else uses what this changes until it is finished."""
        try:
            write()
            name = checkpoint_file.path_of(self.folder, step).name
            self._broken.discard(name)
            assert self._known is not None
            self._known.add(name)
            checkpoint_file.prune(self.folder, self.keep, self._broken)
        except OSError as error:
            self._add_failure(step, error)
        except Exception as error:
            raise CheckpointError(str(reason_of(error, f"write step {step} to {self.folder.absolute()}"))) from error
        else:
            self._newest = checkpoint_file.path_of(self.folder.absolute(), step)
            self._failed.end()
            count_checkpoint()

    def _add_failure(self, step: int, error: OSError) -> None:
        rank, _ = place()
        find = partial(checkpoint_file.newest_whole, self.folder.absolute(), self._broken)
        self._failed.add(rank, f"step {step}", error, lambda: self._newest or find())

    def _finish_last(self, problems: Sequence[str | None], mine: Exception | None, *, is_written: bool) -> None:
        """Raise what the last save ended with on any rank, or count it: rank 0 has done so itself when it was over."""
        is_uncounted, self._is_uncounted = self._is_uncounted, False
        raise_together(problems, mine)
        if is_uncounted and is_written:
            count_checkpoint()

    def _can_write(self, step: int) -> bool:
        """Check the folder; return False where the file system refuses what it did not refuse before."""
        try:
            self._check_folder(step)
        except OSError as error:
            if not self._owner.has_claimed:  # most likely, it is the wrong one
                raise
            self._add_failure(step, error)
            return False
        return True

    def _check_folder(self, step: int) -> None:
        """Refuse what is no step, one before others that are there, and a folder in which somebody else saves."""
        if type(step) is not int or step < 0:
            raise ArgumentError(f"step is {step!r}; it must be an int, 0 or more")
        self._owner.claim(0)
        there = checkpoint_file.newest_first(self.folder)
        for found, path in there:
            is_foreign = self._known is not None and path.name not in self._known
            if (found <= step and not is_foreign) or path.name in self._broken or not checkpoint_file.ends_whole(path):
                continue
            if is_foreign:
                raise CheckpointError(
                    f"{path.absolute()} was saved by another run, or by another Checkpoint of this one, since this one "
                    "began: give each a folder of its own"
                )
            raise CheckpointError(  # after a restart those would be loaded instead
                f"{path.absolute()} is later than step {step}: this folder belongs to another run, or to a later part "
                "of this one. load() first to go on from there, use another folder, or move that file away"
            )
        if self._known is None:
            self._known = {*(path.name for _, path in there), self._loaded}
