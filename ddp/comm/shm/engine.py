"""Schedules the operations of one group over threads.

Collectives wait in one queue and run in order; messages run concurrently. The thread that has the lock drives: the
caller of a synchronous operation or of `wait`, else a thread of the group, which is started when an asynchronous
operation is left. An asynchronous call does the part that needs no other rank (it fills its slot and increments its
counter), finishes if all ranks are there, and never waits.

An error breaks the group: all queued and later operations fail with it, and it is reported to the other ranks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from ddp.comm.shm.collectives import Steps
from ddp.comm.shm.driver_lock import DriverLock
from ddp.comm.shm.messages import Messages, Receive, Send
from ddp.comm.shm.process_end import LEAVE_S, end_with_process, join_at_end
from ddp.comm.shm.rounds import Lost, Rounds, not_done, refused
from ddp.monitoring.debuggers import debugged_until
from ddp.monitoring.interrupts import has_started, is_interrupt

_PAUSE_S = 0.0002  # the thread pauses so long for a caller that waits at once: this saves a switch of threads
_LOOK_S = 0.05


class Operation:
    """A collective or a message in progress. `results` are the tensors of its future."""

    __slots__ = (
        "calls", "done", "error", "event", "in_inference", "results", "source", "steps", "then", "timeout_s", "waited",
        "what",
    )  # fmt: skip

    def __init__(
        self, what: str, steps: Steps | Send | Receive, results: Sequence[torch.Tensor], timeout_s: float
    ) -> None:
        self.what, self.steps, self.results, self.timeout_s = what, steps, results, timeout_s
        self.done = False
        self.error: BaseException | None = None
        self.event: threading.Event | None = None
        self.calls: list[Callable[[], None]] = []
        self.source = -1
        self.waited = 0.0  # the time of the first wait for it
        self.in_inference = False
        self.then: Callable[[], None] | None = None  # at the end of a message


class Engine:
    """Runs the operations of a group on this rank."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.broken: BaseException | None = None
        self._queue: deque[Operation] = deque()  # collectives; the head of it runs
        self._inbox: deque[Operation] = deque()  # messages that the driver has not started yet
        self._carried: dict[Send | Receive, Operation] = {}  # messages that it has started
        self._messages = Messages(rounds, self._finish_message)
        self._round_open = False  # the head of the queue waits for the other ranks
        self._moved = 0.0  # when a collective last progressed
        self._looked = 0.0  # when the driver last looked for lost ranks
        self._asked = False  # an operation was added: the driver must look again
        self._closed = False  # no thread may drive any more
        self._ended = False  # the end was reported to the other ranks
        self._last_words = ""  # the failure to report to them, if there is one
        self._driving = DriverLock()
        self._telling = threading.RLock()  # for `done`, `event` and `calls`; again, where a group is collected inside
        self._calls: deque[Callable[[], None]] = deque()  # due, when no thread has the lock
        self._thread: threading.Thread | None = None
        self._thread_calls = False  # it calls callbacks, and drives nothing meanwhile
        self._left = threading.Event()  # something for the thread
        end_with_process(self)

    # For callers.

    def run(self, operation: Operation, *, wait: bool) -> None:
        """Start an operation; with `wait`, return when it is done, and raise its error."""
        if self.broken is not None:
            raise refused(operation.what, self.rounds.rank, self.broken)
        (self._inbox if isinstance(operation.steps, Send | Receive) else self._queue).append(operation)
        self._fail_late()
        if wait:
            self.wait(operation, None)
            return
        if self._driving.take():
            try:
                self._advance()
            finally:
                self._release()
        else:
            self._ask()
            self._call_thread()

    def _fail_late(self) -> None:
        """Fail operations that were queued while the group broke: no thread may drive any more."""
        if self.broken is not None:
            self._driving.take_within(float("inf"))
            try:
                self._fail_all(self.broken)
            finally:
                self._driving.release()
            self._call_back()

    def run_now(self, what: str, steps: Steps, results: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Run a collective; block until it is done, or raise its error.

        If nothing else runs, and the others arrive soon, this costs little more than its own steps.
        """
        operation = None
        if self.broken is None and self._driving.take():
            try:
                if self.broken is None and not self._pending():
                    operation = self._run_at_once(what, steps, results, timeout_s)
                    if operation is None:
                        return
                    self._drive(operation, float("inf"))
            finally:
                self._release()
            if operation is not None:
                self.wait(operation, None)
                return
        self.run(Operation(what, steps, results, timeout_s), wait=True)

    def _run_at_once(
        self, what: str, steps: Steps, results: Sequence[torch.Tensor], timeout_s: float
    ) -> Operation | None:
        """Return None if it is done, else the rest of it as an operation."""
        rounds = self.rounds
        rounds.what = what
        try:
            next(steps)
            while rounds.spin():
                next(steps)
        except StopIteration:
            return None
        except BaseException as error:
            self._break(error if isinstance(error, Exception) else self.rounds.error("it was interrupted"))
            raise
        operation = Operation(what, steps, results, timeout_s)
        self._queue.append(operation)
        self._round_open, self._moved = True, time.monotonic()
        return operation

    def wait(self, operation: Operation, timeout_s: float | None) -> None:
        """Drive, or let another thread drive, until an operation is done; raise its error.

        Raises CollectiveError after `timeout_s`. Ctrl-C ends the wait; the operation continues.
        """
        if not self._is_done(operation, float("inf") if timeout_s is None else time.monotonic() + timeout_s):
            raise not_done(operation.what, self.rounds.rank, timeout_s)
        if operation.error is not None:
            raise operation.error

    def _is_done(self, operation: Operation, until: float) -> bool:
        operation.waited = operation.waited or time.monotonic()
        while not operation.done:
            if not self._closed and self._driving.take():
                try:
                    self._drive(operation, until)
                finally:
                    self._release()
            else:
                self._wait_for_driver(operation, until)
            if time.monotonic() >= until:
                break
        return operation.done

    def _wait_for_driver(self, operation: Operation, until: float) -> None:
        self._ask()
        with self._telling:
            if operation.done:
                return
            event = operation.event = operation.event or threading.Event()
        event.wait(max(min(_LOOK_S, until - time.monotonic()), 0))

    def when_done(self, operation: Operation, call: Callable[[], None]) -> None:
        """Run `call` when the operation is done, at once if it already is."""
        with self._telling:
            if not operation.done:
                operation.calls.append(call)
                return
        call()

    def drain(self) -> None:
        """Wait until the started collectives are done or have failed, at the latest by their timeouts."""
        while self.broken is None and not self._closed:
            try:
                last = self._queue[-1]
            except IndexError:  # there is none
                return
            self._is_done(last, float("inf"))

    def close(self, last_words: str = "", limit_s: float = LEAVE_S) -> None:
        """Fail unfinished operations, notify the other ranks, with `last_words` of a failure, and end the thread.

        Waits for other threads up to `limit_s` each: if one still drives then, it does the rest. May be repeated.
        """
        if self._ended:
            return
        self._last_words = self._last_words or last_words
        self._closed = True
        self._ask()
        self._left.set()
        self._end(limit_s)
        with self._telling:
            thread = self._thread
        if limit_s > 0 and thread is not None and has_started(thread) and thread is not threading.current_thread():
            thread.join(limit_s)
        self._call_back()

    def _end(self, limit_s: float) -> None:
        if not self._closed or self._ended:
            return
        if not (self._driving.take_within(limit_s) if limit_s > 0 else self._driving.take_free()):
            return
        try:
            if not self._ended:
                self._ended = True
                if self._last_words:
                    self.rounds.tell_failure(self._last_words)
                self._fail_all(self.rounds.error("the group was destroyed"))
                self.rounds.close()
        finally:
            self._driving.release()

    def leave_to_parent(self) -> None:
        """Give up the group in a forked child: it belongs to the parent."""
        self._closed, self._ended, self._thread = True, True, None
        self._driving, self._telling = DriverLock(), threading.RLock()
        self.broken = self.rounds.error("this process was forked from the rank that made the group: make another one")
        for operation in self._drop():
            operation.error, operation.done = self.broken, True
        self.rounds.close(in_child=True)

    # The driver, which has the lock.

    def _drive(self, target: Operation | None, until: float) -> None:
        """Advance until `target` is done, nothing is left, a callback is due, or the time is over."""
        while True:
            self._asked = False
            self._advance()
            if target.done if target is not None else not self._pending():
                return
            if self._closed or self._calls or time.monotonic() >= until:
                return
            is_short = self.rounds.sleep(self._can_advance)  # always, if many threads wait: each of them wakes it
            if not is_short or time.monotonic() - self._looked >= _LOOK_S:
                self._look_for_lost()

    def _advance(self) -> None:
        """Make all progress that is possible without waiting. An error breaks the group."""
        try:
            while self._step():
                pass
        except Exception as error:
            self._break(error)
            if is_interrupt(error):
                raise
        except BaseException:
            self._break(self.rounds.error("it was interrupted"))  # Ctrl-C in the middle of a copy
            raise

    def _step(self) -> bool:
        """Make one step; return whether there was one."""
        moved = False
        while self._inbox:
            operation = self._inbox.popleft()
            assert isinstance(operation.steps, Send | Receive)
            self.rounds.what = operation.what
            self._carried[operation.steps] = operation
            self._messages.add(operation.steps)
        if self._messages.pending:
            moved = self._messages.advance()
        if not self._queue or (self._round_open and not self.rounds.all_posted()):
            return moved
        operation = self._queue[0]
        assert not isinstance(operation.steps, Send | Receive)
        self.rounds.what = operation.what
        try:
            if operation.in_inference:
                with torch.inference_mode():
                    next(operation.steps)
            else:
                next(operation.steps)
            self._round_open = True
        except StopIteration:
            self._round_open = False
            self._queue.popleft()
            self._finish(operation)
        self._moved = time.monotonic()
        return True

    def _can_advance(self) -> bool:
        return (
            (self._round_open and self.rounds.all_posted())
            or self._asked
            or (self._messages.pending > 0 and self._messages.can_advance())
        )

    def _pending(self) -> bool:
        return bool(self._queue or self._inbox or self._messages.pending)

    def _look_for_lost(self) -> None:
        """Break the group if the awaited ranks are lost or late.

        A collective is late if it made no progress for its timeout; a message if a caller has waited so long.
        """
        self._looked = now = time.monotonic()
        try:
            if self._queue:
                self.rounds.what = self._queue[0].what
                limit_s = self._queue[0].timeout_s
                is_late = now - self._moved >= limit_s and now - debugged_until() >= limit_s
                self.rounds.look_for_lost(self.rounds.absent, limit_s if is_late else None)
            if self._carried:
                self.rounds.what = next(iter(self._carried.values())).what
                self.rounds.look_for_lost(self._messages.absent, None)
                if not self._messages.can_advance():
                    self._look_for_late(now)
        except Lost as error:
            self._break(error)

    def _look_for_late(self, now: float) -> None:
        for message, operation in self._carried.items():
            limit_s = operation.timeout_s
            since = max(operation.waited or now, self._messages.moved(message))
            if operation.waited and now - since >= limit_s and now - debugged_until() >= limit_s:
                self.rounds.what = operation.what
                if message.rank >= 0:
                    raise self.rounds.error(f"rank {message.rank} did not come within {limit_s:g} s")
                raise self.rounds.error(f"no rank sent it within {limit_s:g} s")

    def _break(self, error: Exception) -> None:
        try:
            if self.broken is None:
                self.broken = error
                self.rounds.tell_failure(str(error))
        finally:
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        self.broken = self.broken or error
        for operation in self._drop():
            operation.error = error
            self._finish(operation)

    def _drop(self) -> list[Operation]:
        """Remove all operations; return them."""
        self._messages.drop()
        left = [*self._queue, *self._inbox, *self._carried.values()]
        self._queue.clear()
        self._inbox.clear()
        self._carried.clear()
        self._round_open = False
        return left

    def _finish_message(self, message: Send | Receive) -> None:
        operation = self._carried.pop(message)
        if isinstance(message, Receive):
            operation.source = message.source
        if operation.then is not None:
            operation.then()
        self._finish(operation)

    def _finish(self, operation: Operation) -> None:
        with self._telling:
            operation.done = True
            self._calls.extend(operation.calls)
            operation.calls = []  # they hold the work, and that the group
        if operation.event is not None:
            operation.event.set()

    # Who drives.

    def _release(self) -> None:
        self._driving.release()
        self._end(0)  # `close` may not have waited
        if self._pending() and self.broken is None:
            self._call_thread()  # first: a callback may wait for the remaining operations
        self._call_back()

    def _call_back(self) -> None:
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread took it
                return
            call()

    def _ask(self) -> None:
        self._asked = True
        self.rounds.wake_driver()

    def _call_thread(self) -> None:
        self._left.set()
        with self._telling:
            if self._closed:
                return
            if self._thread is None or self._thread_calls or not has_started(self._thread):
                self._thread = threading.Thread(target=self._serve, name="shm", daemon=True)
                self._thread_calls = False
                join_at_end(self._thread)
                self._thread.start()

    def _serve(self) -> None:
        """Drive what is left. A thread that runs callbacks gets a successor: they may wait for another operation."""
        while self._thread is threading.current_thread() and not self._closed:
            self._left.wait()
            self._left.clear()
            time.sleep(_PAUSE_S)
            while self._pending() and not self._closed and self._driving.take():
                try:
                    self._drive(None, float("inf"))
                finally:
                    self._driving.release()
                self._end(0)
                self._thread_calls = bool(self._calls)
                if self._thread_calls and self._pending():
                    self._call_thread()
                self._call_back()
                if self._thread is not threading.current_thread():
                    return
                self._thread_calls = False
