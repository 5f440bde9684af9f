"""Run a training function repeatedly until it ends by itself: a failed rank only ends the others' step."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ddp.checkpoint.checkpoint import checked_saves
from ddp.comm.objects import gather_values
from ddp.data import replay
from ddp.errors import (
    ArgumentError,
    CollectiveError,
    PeerFailedError,
    RendezvousError,
    ReplacementError,
    UnsupportedError,
)
from ddp.generation.announcements import Announcements, Generation
from ddp.monitoring import stall_report, timeline
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.progress import set_restart_policy
from ddp.resilience.commits import Commits
from ddp.resilience.join_point import JoinPoint, Regroup, stop_elsewhere
from ddp.resilience.state import State
from ddp.world import (
    break_connections,
    current_generation,
    has_finished,
    is_on_host,
    lacks_error_handling,
    note_finished,
    own_store,
    refuse,
    rejoin,
)

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

_ORDINARY, _RESILIENT, _RESILIENT_AT_SIZE = 0, 3, 4  # restart policies
_ANNOUNCED_S = 30.0  # a lost peer is announced within this time, or was not lost; a lost host this much later than...
_LOST_AFTER = "DTRAIN_LOST_AFTER_S"  # ...the launcher's wait for a message from it
_LOST_CONNECTION = (
    "CollectiveError:",
    "gloo/transport",
    "onnection closed",
    "onnection reset",
    "roken pipe",
    "ocket closed",
)


def resilient(function: F) -> F:
    """Decorate a training function: a rank that fails in it costs the others one step, not the run.

        state = ddp.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

        @ddp.resilient
        def train(state):
            for state.epoch in range(state.epoch, 10):
                sampler.set_epoch(state.epoch)
                for x, y in loader:
                    loss = criterion(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()
                    state.commit()

        train(state)

    Its first argument is a `ddp.State`, and it starts from the state in it, at any point of the training. When a
    process fails, by an exception, a signal or lack of memory, the launcher starts a replacement, and the function
    starts again on all ranks, from the newest commit of any living rank; no file is read. Until then the others wait.
    Restarts are those of `dtrain run --max-restarts`; without one left, the run ends. An exception of the function
    itself is one of this rank, so it is raised.

    When a host is lost, a spare one takes its ranks; else, with `--nnodes MIN:MAX`, the world shrinks, and grows again
    when hosts join. The function then starts with other ranks: `World`, RANK, WORLD_SIZE and the like have the new
    values, and a `DistributedSampler` in the State deals the rest of the epoch to them. Values that the script derived
    from them before the function stay the same, so compute shares, learning rates and the like inside of it. When a
    host joins, the function ends within `commit()`, on every rank at the same one, and starts again. With a sampler in
    the State that cannot deal to other ranks, all start again then.

    The new process runs the script from the beginning: the code before the function must make no collectives except
    those of `ddp.init()`, `ddp.DistributedDataParallel`, and `DistributedOptimizer`, `broadcast_parameters` and
    `broadcast_optimizer_state` of `ddp.horovod`; else ReplacementError, and all ranks start again. `Checkpoint.load`
    and these broadcasts restore nothing there: the state comes from the others. (Inside of the function, `load` would
    return all ranks to the file.) Create torch's own DistributedDataParallel inside of the function, around the module
    in the State. The function may make any collectives in the default group, including torch's, and none in other
    groups. Only the first such function of a script can be resumed, so put the loop over the epochs inside. Call it on
    every rank; it blocks at its end until all are there.

    Without `dtrain run`, in a world of one, in a group that `ddp.init` did not create, and on devices other than CUDA,
    it just runs the function: a failure ends the attempt. The same holds on CUDA if you have set
    TORCH_NCCL_ASYNC_ERROR_HANDLING to another value than 0, since torch then ends the others when one is lost. The
    support of CUDA follows torch's documentation and has not been tested on a GPU yet. There the host waits for the
    device before each step of an optimizer, since nothing else shows whether the averages have arrived; a replaced rank
    gets the buffers of another one, and so does one that had not reached the newest commit; and if a device or a
    communicator does not recover, its process ends and is replaced. Raises UnsupportedError for state that a replaced
    rank would lack: wrapped models outside of the State, central storage, communication hooks of your own.
    Replicas that step by themselves (`ddp.LocalSGD`, created before the function) continue from the state of one of
    them. `ddp.Trainer.fit` is such a function by itself.

    The pattern is that of Horovod's elastic mode (`hvd.elastic.run`, `State.commit`); here a commit copies nothing
    large, and the failed rank alone is replaced.
    """

    @functools.wraps(function)
    def run(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise ArgumentError(f"{function.__name__}({type(state).__name__}): its first argument must be a ddp.State")
        if (replayed := replay.plan()) is not None and replayed.state is not None:
            state.snapshots.load(replayed.state)
        if lacks_error_handling():
            warnings.warn(
                f"a failure in {function.__name__}() will end the attempt: on CUDA the others can go on only if "
                "torch's watchdog leaves errors to ddp. ddp.init() sees to that, unless you have set "
                "TORCH_NCCL_ASYNC_ERROR_HANDLING to another value than 0, or TORCH_FR_BUFFER_SIZE to 0: unset it",
                stacklevel=2,
            )
        if replayed is not None or current_generation() is None or dist.get_world_size() == 1:
            return function(state, *args, **kwargs)
        return _loop_of_process().run(state.commits, lambda: function(state, *args, **kwargs))

    return cast(F, run)


def can_go_on() -> bool:
    """Return whether a resilient function called now would survive a failure."""
    is_able = current_generation() is not None and dist.get_world_size() > 1
    return is_able and not _loop_of_process().calls


def is_replacement() -> bool:
    """Return whether this process replaces a failed one, and gets its state when it enters the resilient function."""
    return current_generation() == -1


class _Loop:
    """Loop of this process. The thread of the announcements calls `_announced`, the main thread the rest."""

    def __init__(self) -> None:
        # The generation of this process; -1 if it has not joined one yet.
        self._generation = -1 if (joined := current_generation()) is None else joined
        self._joining = self._generation  # or has joined
        self.calls = 0
        self._commits: Commits | None = None
        self._place = dist.get_rank(), dist.get_world_size()
        self._is_inside = self._has_left = False
        self._announcements = Announcements(self._announced)

    def run(self, commits: Commits, call: Callable[[], R]) -> R:
        if self._is_inside:
            raise ArgumentError("a resilient function was called inside of one: decorate the outer one alone")
        self._is_inside, self._has_left = True, False
        self.calls += 1
        try:
            checked = checked_saves(commits.check_save)
            waits = stall_report.ended_with_connections() if is_on_host() else contextlib.nullcontext()
            with stall_report.without_questions(), waits, checked, contextlib.ExitStack() as recovery:
                result = self._run(commits, call, recovery)
        except (ReplacementError, UnsupportedError):
            set_restart_policy(_ORDINARY)  # all have to start again
            raise
        finally:
            self._is_inside, self._commits = False, None
            commits.end()
        self._has_left = True
        note_finished()
        if self._announcements.newest > self._generation:
            self._announced(self._announcements.generation)
        return result

    def _run(self, commits: Commits, call: Callable[[], R], recovery: contextlib.ExitStack) -> R:
        """Call `call` until it ends by itself. `recovery` is recorded from each failure until the next call."""
        has_joined = self._generation >= 0
        self._commits = commits
        commits.begin(has_state=has_joined)
        if has_joined:
            commits.attach(_world())
        set_restart_policy(_RESILIENT if commits.can_deal_over else _RESILIENT_AT_SIZE)
        regroups = False
        if not has_joined:
            recovery.enter_context(timeline.span("recovery"))
        while True:
            is_joining = True
            try:
                if regroups:
                    regroups = False
                    gather_values(None)  # no rank leaves while another one still needs it for this commit
                while self._announcements.newest > self._generation:
                    self._join(commits)
                is_joining = False
                recovery.close()
                result = call()
                # Until then another rank may need this one's state. If others join and one rank knows it, all do.
                newest = max(gather_values(self._announcements.newest))
                if newest > self._generation and self._announcements.wait_newer(newest - 1, _announced_s()):
                    commits.interrupted()
                    continue
            except Regroup:
                recovery.enter_context(timeline.span("recovery"))
                regroups = True
                commits.interrupted()
            except Exception as error:
                if _tells_of_peer(error):  # includes the wait for the launcher's announcement
                    recovery.enter_context(timeline.span("recovery"))
                if not self._is_of_peer(error, is_joining=is_joining):
                    raise
                recovery.enter_context(timeline.span("recovery"))
                commits.interrupted()
                traceback.clear_frames(error.__traceback__)  # graphs, and iterators with their processes
            else:
                set_restart_policy(_ORDINARY)
                return result

    def _join(self, commits: Commits) -> None:
        """Meet the others in the newest generation, and take over the newest commit; or stop for a newer one."""
        news = self._announcements.generation
        number = self._joining = news.number
        point, commits.join_point = commits.join_point, None
        if news.when == "later":
            self._announcements.wait_newer(number, None)  # the launcher ends this process if there is none
            return
        try:
            if news.when == "at_commit" and self._generation >= 0 and not (point and point.is_agreed):
                stop_elsewhere(own_store(number))
            joins = news.when == "at_commit" and commits.number is None
            if not rejoin(number, news.variables, lambda: self._is_over(number, joins=joins), commits.devices):
                return
            self._generation = number
            group = _world()
            self._place = group.rank(), group.size()
            commits.attach(group)
            root, commit = self._choose(commits, group)
            commits.take_over(root, commit, group)
        except ArgumentError as error:
            raise ReplacementError(f"the state cannot be handed over: {error}") from error

    def _is_over(self, number: int, *, joins: bool) -> bool:
        """Return whether generation `number` is obsolete. A process that `joins` others ends if they have finished."""
        if joins and has_finished():
            print("ddp: the ranks that this one was to join have finished", file=sys.stderr, flush=True)
            set_restart_policy(_ORDINARY)
            sys.exit(0)
        return self._announcements.newest > number

    def _choose(self, commits: Commits, group: dist.ProcessGroup) -> tuple[int, int]:
        """Return a rank with the state of the newest commit, and that commit's number; the same on all ranks."""
        mine = {"call": self.calls, "parts": [*commits.parts], "commit": commits.number, "is_dirty": commits.is_dirty}
        states = gather_values(mine, group=group)
        newest = max((each["commit"] for each in states if each["commit"] is not None), default=None)
        if newest is None:
            raise ReplacementError("no rank that is left has a whole state: all start again")
        at_newest = [rank for rank, each in enumerate(states) if each["commit"] == newest]
        other = states[at_newest[0]]
        for rank, each in enumerate(states):
            if (each["call"], each["parts"]) != (other["call"], other["parts"]):
                raise ReplacementError(
                    f"rank {rank} is in call {each['call']} of a resilient function, with {each['parts']}, and rank "
                    f"{at_newest[0]} in call {other['call']}, with {other['parts']}: a rank that starts again comes to "
                    "the first such function of the script only. All start again"
                )
        clean = [rank for rank in at_newest if not states[rank]["is_dirty"]]
        if not clean:
            raise ReplacementError(
                f"every rank that is left had begun the optimizer's step after commit {newest} and not committed it: "
                "make no collective between optimizer.step() and state.commit(). All start again"
            )
        return clean[0], newest

    def _is_of_peer(self, error: Exception, *, is_joining: bool) -> bool:
        """Return whether the loss of another rank, with a newer generation, caused an exception. Blocks.

        Once that is announced, every exception of the function counts as a consequence, except those of signals.
        """
        if isinstance(error, ReplacementError | UnsupportedError) or is_interrupt(error):
            return False
        is_announced = self._announcements.newest > self._generation
        if not _tells_of_peer(error):
            return is_announced and not is_joining
        if not is_announced:
            break_connections()  # so that the others do not wait for this rank
        return self._announcements.wait_newer(self._joining, _announced_s())

    def _announced(self, news: Generation) -> None:
        """Handle an announcement, in another thread. A process ended by an exception leaves it to its replacement."""
        number, commits = news.number, self._commits
        if number <= self._generation:
            return
        if self._is_inside and commits is not None and news.when == "at_commit" and self._generation >= 0:
            threading.Thread(target=self._agree, args=(number, commits), name="join point", daemon=True).start()
        elif self._is_inside:
            break_connections()
        elif self._has_left and news.when == "now":
            refuse(number, "has left the resilient function")

    def _agree(self, number: int, commits: Commits) -> None:
        """Agree with the other ranks on the commit at which they meet joining ranks; in a separate thread."""
        point = JoinPoint(number, lambda: self._announcements.newest > number)
        commits.join_point = point
        try:
            is_agreed = point.agree(own_store(number), *self._place, lambda: commits.number or 0)
        except RuntimeError as error:  # of the store; then its host is lost, or this process ends
            print(f"ddp: generation {number}: {error}", file=sys.stderr, flush=True)
            is_agreed = False
        if not is_agreed and self._announcements.newest == number:
            break_connections()  # another rank does not train any more


def _announced_s() -> float:
    return _ANNOUNCED_S + float(os.environ.get(_LOST_AFTER, "30"))


@functools.cache
def _loop_of_process() -> _Loop:
    return _Loop()


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _tells_of_peer(error: Exception) -> bool:
    if isinstance(error, CollectiveError | PeerFailedError | RendezvousError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_CONNECTION)
