"""Save the state that a run needs to continue, and load it: one file per checkpoint, in a folder of the run's own.

    checkpoint = ddp.Checkpoint("runs/first/checkpoints")
    restored = checkpoint.load(model=model, optimizer=optimizer, sampler=sampler)
    step = restored.step if restored else 0
    ...
    if checkpoint.due(step, every=100):
        checkpoint.save(step, model=model, optimizer=optimizer, sampler=sampler, best_loss=best_loss)

Rank 0 writes, by default from a copy while training continues (`ddp.checkpoint.writer`). Before and after, the ranks
exchange what they must agree on, so that all raise the error of one, and none waits for a rank that has failed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp import rng
from ddp.checkpoint import file as checkpoint_file
from ddp.checkpoint import kept_copy, writer
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
from ddp.checkpoint.loading import LoadNote, Restored, find, identity, open_again, restore, send
from ddp.checkpoint.state import Stateful, check_plain, given_parts, wrapper_of
from ddp.checkpoint.writer import OnError, Writer
from ddp.comm.objects import control_group, device_of
from ddp.comm.sums.small_sum import reduce_options
from ddp.data import replay
from ddp.data.ledger import record
from ddp.data.step_loader import StepLoader
from ddp.errors import ArgumentError, CheckpointError
from ddp.generation.pending_group import is_pending
from ddp.monitoring.progress import SAVE, count_checkpoint, phase
from ddp.monitoring.stall_report import at_files, finish, waiting_for_peers
from ddp.monitoring.time_warning import time_warning
from ddp.world import before_leaving

_checks: list[Callable[[], None]] = []


@contextlib.contextmanager
def checked_saves(check: Callable[[], None]) -> Iterator[None]:
    """Call `check()` before each save in the block; it raises if a save is not possible at that moment."""
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)


class Checkpoint:
    """Keep the last `keep` checkpoints of one run in `folder`, which is created when needed.

    Checkpoints are `step-NNNNNNNNNN.pt`. Each is one file with a checksum, readable by
    `torch.load(path, weights_only=True)` without this package: a dict with "step", "world_size", "model" and so on,
    "random" for the random number generators of each rank, and "values". Older ones are removed once a new one
    is durable. Incomplete and damaged files, and those of other programs, are never counted and never removed.

    `folder` belongs to one run and one Checkpoint at a time, from its first `save` until `wait`, or until it is deleted
    or its process ends in any way: another one that saves there is refused, and the error names the first. A later
    attempt of the same run takes over the folder. Any run may `load`. On several hosts, put it on a shared file system:
    a checkpoint on a lost host is lost too. (If that has no locks across hosts, two owners on different hosts are
    noticed only after both have saved; then one is refused.)

    If the file system refuses a save (a full disk, a quota, a lost permission), only that save fails: rank 0 reports it
    on stderr, once, with the newest complete checkpoint, and training continues. Three failed saves in a row are a
    CheckpointError on every rank; with `on_error="stop"` each failed save is. In `wait` and `load` it always is one if
    the newest checkpoint was not written, since no later save would replace it: call `wait` at the end of training.
    Errors of the program are raised at once, and so is a folder that this object never could use.

    Before each save of a model in DistributedDataParallel, the ranks compare its weights, which reads them once; but
    not between two averages of LocalSGD, nor with a communication hook of yours. With `check_replicas=False` (hosts
    whose arithmetic differs in the last bits, weights that you average every few steps), the weights of rank 0 are
    saved without a comparison.

    With `in_background`, a thread of rank 0 writes a copy of the state while training continues, one at a time (see
    `wait`). A copy from CUDA devices uses pinned memory, about as much as the state, which is kept for the next copy.
    With `in_background=False`, no memory for a copy is needed.

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
        self.folder = replay.folder(folder)
        self.keep = keep
        self.in_background = in_background
        self.check_replicas = check_replicas
        self._writer = Writer(self.folder, on_error)
        self._is_uncounted = False  # whether another rank may still write what this one has saved
        self._warned: _Warned | None = None

    def due(self, step: int, *, every: int) -> bool:
        """Return whether to save now: after every `every` steps, and once more when the job's time is nearly up.

        The time is nearly up once any rank has received SIGUSR1, which SLURM sends before the end; from the first call
        on, that signal ends no process. With `every=0`, only then. Every rank must call it after every step; it returns
        the same on all of them.
        """
        self._warned = self._warned or _Warned()
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

        Every rank must call it, with the same step and the same arguments. It blocks as described in `wait`, at most as
        long as the process group's timeout. States and `values` are those of rank 0, but the error feedback of
        `compression=` is that of all ranks. Values may be None, numbers, strings, tensors, and lists, tuples, sets and
        dicts of them. Wrappers around the model (DDP, torch.compile) are removed, so that it can be loaded with or
        without them.

        Raises CheckpointError on every rank if one of them passes something that cannot be saved or other arguments
        than rank 0, if the folder has a later step than `step` or belongs to another run, or, depending on `on_error`,
        if rank 0 could not write this checkpoint or the previous one; earlier checkpoints are kept then. DriftError on
        every rank if the replicas differ. CollectiveError if a rank is gone. ArgumentError in a resilient function if
        an optimizer has stepped since the last `state.commit()`.
        """
        for check in _checks:
            check()
        rank, _ = place()
        with at_files(self.folder.absolute()):
            lost = writer.finish()
        problem: Exception | None = None
        content: dict[str, Any] = {}
        weights: Weights | None = None
        is_urgent = self._warned is not None and self._warned.has_acted
        note = SaveNote(
            step=step,
            random=rng.capture(),
            in_background=self.in_background and not is_urgent,
            is_last_written=not self._writer.failed.is_last_lost,
        )
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
                    can_write = self._writer.can_write(step, rank, in_background=note.in_background)
                    note = replace(note, can_write=can_write)
                    content = {name: part.state_dict() for name, part in parts.items()}
                    for name, part_state in content.items():
                        check_plain(part_state, name)
        except Exception as error:  # whatever a state_dict() raises, the other ranks must not wait for this one
            problem = error
        what = f"save step {step}"
        reports = exchange((vars(note), reason_of(lost), reason_of(problem, what)), "notes before saving")
        notes = [SaveNote(**each) for each, _, _ in reports]
        self._finish_last([reason for _, reason, _ in reports], lost, is_written=notes[0].is_last_written)
        raise_together([reason for _, _, reason in reports], problem)
        require_agreement(notes)
        require_equal_replicas(notes, weights)
        if not notes[0].can_write:
            return
        wrapper = wrapper_of(model)
        reduction = None if wrapper is None else wrapper.reduction_state()

        if rank == 0:
            random_states = [note.random for note in notes]
            content = {"step": step, "world_size": len(notes), **content, "random": random_states, "values": values}
            if reduction is not None:
                content["reduction"] = reduction
            if isinstance(sampler, StepLoader):
                content["ledger_step"] = sampler.steps
                record.add_checkpoint(checkpoint_file.path_of(self.folder, step), sampler.steps)
            with at_files(self.folder.absolute()):
                self._writer.start(step, rank, content, keep=self.keep, in_background=note.in_background)
        self._is_uncounted = rank != 0
        if not note.in_background:
            self._wait(is_needed=False)

    @phase(SAVE)
    def wait(self) -> None:
        """Wait until the last save is durable: written, fsynced and renamed. Every rank must call it; blocks.

        When `save` returns, rank 0 has copied its state (tensors on devices are copied in stream order), and the
        previous checkpoint is durable. This one is durable when the next `save`, `load` or `wait` returns, unless
        writing it has failed; until its file is complete, the previous one is the newest. That call raises an error of
        the copy, or of the thread that writes it, on every rank. With `in_background=False`, or after SIGUSR1 (`due`),
        the file of a `save` is durable when that `save` returns.

        Call it at the end of training, or before a program reads the file. Then another Checkpoint may use the folder,
        until this one saves again. A process that ends without it waits as well, but then only rank 0 raises an error,
        and its exit code is 1. A process that ends with an exception waits for 5 s at most, since other ranks may wait
        for it; then the newest checkpoint may be the previous one.

        Raises CheckpointError on every rank if rank 0 could not write the newest checkpoint, whatever `on_error` is;
        CollectiveError if a rank is gone.
        """
        self._wait()
        self._writer.owner.release()

    def _wait(self, *, is_needed: bool = True) -> None:
        """Wait for the last save. If it `is_needed`, a failed one is an error."""
        with at_files(self.folder.absolute()):
            lost = writer.finish()
        if is_needed:
            lost = lost or self._writer.failed.take()
        reports = exchange((reason_of(lost), not self._writer.failed.is_last_lost), "what each rank saved")
        self._finish_last([reason for reason, _ in reports], lost, is_written=reports[0][1])

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
        """Restore the arguments, in place, from the newest complete checkpoint, or from the file at `path`.

        Every rank must call it; it blocks until all have restored. Returns None if the folder has no
        checkpoint. An incomplete or damaged file is skipped with a warning that says why. The ranks take the newest
        checkpoint that any of them sees; a rank that does not see it receives it from one that does. On each host one
        rank reads and verifies the file; the others read it from the page cache.

        Each rank's random number generators continue from their saved states if the world has the same size;
        otherwise they are seeded from the saved state of rank 0 and the rank, or, with a `ddp.StepLoader`, go on from
        that of rank 0. A DataLoader without a `generator` of its own draws one number whenever it is iterated, so also
        when a resumed run enters an epoch again.

        Raises CheckpointError on every rank if there are files but none is complete, if `path` is not, if an argument
        is missing in the file or the other way round, or if the model has other keys or shapes. The model is only
        changed if it fits; the rest may have been restored in part. CollectiveError if a rank is gone.
        """
        if path is None and (replayed := replay.plan()) is not None:
            if replayed.checkpoint is None:
                return None
            path = replayed.checkpoint
        if dist.is_initialized() and is_pending(dist.group.WORLD):
            return None  # this process replaces a failed rank, and receives the state from the others
        self._wait()
        rank, world_size = place()
        self._writer.forget_files()
        given = None if path is None else Path(path)
        source_path = (self.folder if given is None else given).absolute()
        with contextlib.ExitStack() as open_files:
            # The first of the ranks that see the same folder reads it for all of them.
            with at_files(source_path):
                seen_here = identity(source_path)
            seen = exchange(seen_here, "places before loading")
            reader = rank if seen[rank] is None else seen.index(seen[rank])
            with at_files(source_path):
                nothing = LoadNote(()), None
                found, file = nothing if reader != rank else find(open_files, self.folder, given, self._writer.broken)
            reports = [LoadNote(**each) for each in exchange(vars(found), "notes before loading")]
            notes = [reports[at if seen[at] is None else seen.index(seen[at])] for at in range(world_size)]
            mine = notes[rank]
            chosen = max(notes, key=lambda note: (note.step, note.is_kept))  # the first of several
            if chosen.step < 0:
                if refused := list(dict.fromkeys(line for note in notes for line in note.refused)):
                    raise CheckpointError("no checkpoint is whole:\n" + "\n".join(f"  {line}" for line in refused))
                return None
            # One rank warns of a file that all see; a given path that this rank cannot read is received from another.
            if given is None and (rank == 0 or mine.refused != notes[0].refused):
                for line in mine.refused:
                    warnings.warn(f"this checkpoint is skipped: {line}", stacklevel=3)
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
        self._writer.loaded = Path(chosen.path).name
        if isinstance(sampler, StepLoader):
            record.add_checkpoint(Path(chosen.path), sampler.steps)
        return restored

    def _finish_last(self, problems: Sequence[str | None], mine: Exception | None, *, is_written: bool) -> None:
        """Raise the error of the last save on any rank, or count the save; rank 0 has counted its own."""
        is_uncounted, self._is_uncounted = self._is_uncounted, False
        raise_together(problems, mine)
        if is_uncounted and is_written:
            count_checkpoint()


class _Warned:
    """Notices that the job's time is nearly up, on all ranks in the same call of `Checkpoint.due`.

    Hears warnings from its construction on (`ddp.monitoring.time_warning`).
    """

    def __init__(self) -> None:
        self._acted = 0  # on how many
        self._statuses = 0  # known at the call before
        self._most: tuple[dist.Work, torch.Tensor] | None = None  # (1,) that any rank has heard, on its way
        time_warning.listen()
        before_leaving(self, _Warned._reset)

    def _reset(self) -> None:
        """With the next group: a rank that is new there does not know what the others have shared."""
        self._most, self._acted, self._statuses = None, 0, time_warning.statuses
        time_warning.shared = 0

    @property
    def has_acted(self) -> bool:
        """Whether `together` has returned True, which is so on all ranks or on none."""
        return self._acted > 0

    def together(self) -> bool:
        """Return True once for each warning, on all ranks in the same call: the one after the first rank has heard it.

        Every rank must call it equally often. It communicates nothing where a backward pass was averaged over all ranks
        since the call before: the status of that has said it. Else it starts an all-reduce of one number in host
        memory, which waits for no device, and waits for that of the call before, which is over by then unless a rank is
        a whole step behind.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            time_warning.shared = time_warning.heard
        else:
            time_warning.settle()
            if time_warning.statuses == self._statuses:
                self._exchange()
            self._statuses = time_warning.statuses
        is_warned = time_warning.shared > self._acted
        self._acted = time_warning.shared
        return is_warned

    def _exchange(self) -> None:
        # Counts, not flags: the ranks hear one warning in different steps, and it is still one.
        if self._most is not None:
            work, heard = self._most
            with waiting_for_peers("agreement on a warning that the time is nearly up"):
                finish(work, device=heard.device)
            time_warning.shared = max(time_warning.shared, int(heard))
        heard = torch.tensor([time_warning.heard], dtype=torch.int32, device="cpu")
        world = dist.group.WORLD
        assert world is not None
        control = control_group(world, device_of(world))
        self._most = control.allreduce([heard], reduce_options(dist.ReduceOp.MAX)), heard
