"""The queues of the simulated device: operations by stream, and the scheduler that chooses which one runs next.

Operations run in a thread that waits for the device, or in the scheduler's own, which runs only what collectives need:
the peers wait for them, so they make progress without this host. All else is late as long as nothing waits for it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch

_POLL_S = 5e-4
_LIMIT_S = 90.0  # for a wait: the tests' own deadlines are shorter


class DeviceStuck(Exception):
    """The host has waited too long for the device: a collective has not ended."""


class Op:
    """An operation in a stream. `start` runs it, or starts it and returns False: then `Scheduler.end` ends it."""

    has_started: bool
    is_done: bool

    def __init__(self, stream: Stream, start: Callable[[Op], bool], after: Iterable[Op]) -> None:
        self.has_started = self.is_done = False
        self.stream = stream
        self.start = start
        self.after = [op for op in after if not op.is_done]

    @property
    def is_ready(self) -> bool:
        return not self.has_started and all(op.is_done for op in self.after)


class Stream:
    """A queue of operations, which run one after the other. `moves_data` is true for those of communicators."""

    def __init__(self, scheduler: Scheduler, name: str, *, moves_data: bool = False) -> None:
        self.scheduler = scheduler
        self.name = name
        self.moves_data = moves_data
        self.queue: deque[Op] = deque()
        scheduler.streams.append(self)

    @property
    def last(self) -> Op | None:
        """The newest operation, if it is not done."""
        return self.queue[-1] if self.queue else None

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_for(self, op: Op) -> None:
        """Have what is queued from now on wait for an operation."""
        self.scheduler.queue(self, lambda _: True, [op])

    def wait_event(self, event: Event) -> None:
        if event.op is not None:
            self.wait_for(event.op)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """Stands in for torch.Event: a place in a stream's queue."""

    scheduler: Scheduler | None = None  # of events that record without a stream

    def __init__(self, device: object = None, *, enable_timing: bool = False) -> None:
        self.op: Op | None = None
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        if stream is None:
            assert Event.scheduler is not None
            stream = Event.scheduler.current

        def note(_: Op) -> bool:
            self._time = time.perf_counter()
            return True

        self.op = stream.scheduler.queue(stream, note)

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def query(self) -> bool:
        return self.op is None or self.op.stream.scheduler.has_run(self.op)

    def synchronize(self) -> None:
        if self.op is not None:
            self.op.stream.scheduler.finish(self.op)

    def elapsed_time(self, end: Event) -> float:
        if self._time is None or end._time is None:
            raise RuntimeError("both events must be recorded and over before their distance can be taken")
        return (end._time - self._time) * 1e3


class Scheduler:
    """Runs queued operations, by a seed: of those that may run next it takes one at random, and no more than it must.

    `_eagerness` and `_greed` are the probabilities that it runs one that nothing waits for: when one is queued, and
    when the host waits for another.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._own_random = random.Random(seed + 1)  # of the thread: its timing changes no choice of the others
        self._eagerness = self._random.choice((0.0, 0.0, 0.05, 0.4))
        self._greed = self._random.choice((0.0, 0.5))
        self._progress = self._random.choice((0.1, 0.5, 1.0))
        self.changed = threading.Condition()
        self.streams: list[Stream] = []
        self.flying: dict[Op, Callable[[], bool]] = {}  # collectives in transit; each returns whether it is over
        self.freed: deque[tuple[Stream, Callable[[Op], bool]]] = deque()  # by finalizers, which may run anywhere
        self.error: BaseException | None = None  # of an operation: the next wait raises it
        self._current = threading.local()
        self.default = Stream(self, "compute")
        self._is_closed = False
        self._thread = threading.Thread(target=self._make_progress, name="simulated device", daemon=True)
        self._thread.start()

    @property
    def current(self) -> Stream:
        """The current stream of this thread."""
        found: Stream = getattr(self._current, "stream", self.default)
        return found

    @current.setter
    def current(self, stream: Stream) -> None:
        self._current.stream = stream

    def close(self) -> None:
        """Run what is left, except collectives, and end the thread."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self._thread.join()

    def queue(self, stream: Stream, start: Callable[[Op], bool], after: Iterable[Op] = ()) -> Op:
        """Queue an operation and return at once."""
        with self.changed:
            self._queue_freed()
            op = Op(stream, start, after)
            stream.queue.append(op)
            if stream.moves_data:
                self.changed.notify_all()
            while self._random.random() < self._eagerness and self._step(self._random, None):
                pass
            return op

    def finish(self, op: Op) -> None:
        """Have the host wait for an operation."""
        limit = time.monotonic() + _LIMIT_S
        with self.changed:
            self._queue_freed()
            needed = _needed_for(op)
            while not op.is_done:
                is_extra = self._random.random() < self._greed
                if not (is_extra and self._step(self._random, None)) and not self._step(self._random, needed):
                    self.changed.wait(0.05)
                if time.monotonic() > limit:
                    raise DeviceStuck(f"{op.stream.name} does not reach an operation")
            self._raise_error()

    def finish_all(self) -> None:
        for stream in list(self.streams):
            if (last := stream.last) is not None:
                self.finish(last)

    def has_run(self, op: Op) -> bool:
        """Return whether an operation is done. The device does a little while the host asks."""
        with self.changed:
            if not op.is_done and self._random.random() < 0.5:
                self._step(self._random, _needed_for(op))
            return op.is_done

    def end(self, op: Op) -> None:
        """Note that an operation is done."""
        with self.changed:
            op.is_done = True
            op.after.clear()
            self.flying.pop(op, None)
            assert op.stream.queue.popleft() is op
            self.changed.notify_all()

    def _step(self, chooser: random.Random, allowed: set[Op] | None) -> bool:
        """Run one operation that may run, of those allowed; return False without one."""
        heads = [stream.queue[0] for stream in self.streams if stream.queue]
        ready = [op for op in heads if op.is_ready and (allowed is None or op in allowed)]
        if not ready:
            return False
        op = chooser.choice(ready)
        op.has_started = True
        try:
            with torch._C._DisableTorchDispatch():
                is_over = op.start(op)
        except Exception as error:  # as an assertion of a kernel: whoever waits next hears of it
            self.error, is_over = error, True
        if is_over:
            self.end(op)
        return True

    def _queue_freed(self) -> None:
        while self.freed:
            stream, poison = self.freed.popleft()
            if any(other.queue for other in self.streams):
                stream.queue.append(Op(stream, poison, ()))

    def _raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise RuntimeError(f"an operation of the device failed: {error}") from error

    def _make_progress(self) -> None:
        """Start collectives that peers wait for, and end those whose data has arrived."""
        while True:
            with self.changed:
                while not (self._is_closed or any(stream.queue for stream in self.streams if stream.moves_data)):
                    self.changed.wait()
                if self._is_closed:
                    return
                for op, is_over in list(self.flying.items()):
                    if is_over():
                        self.end(op)
                waiting = [stream.queue[0] for stream in self.streams if stream.moves_data and stream.queue]
                if waiting and self._own_random.random() < self._progress:
                    needed = _needed_for(self._own_random.choice(waiting))
                    while self._step(self._own_random, needed):
                        pass
            time.sleep(_POLL_S)


def _needed_for(op: Op) -> set[Op]:
    """Return the operations without which `op` cannot be done, and itself."""
    found: set[Op] = set()
    waiting = [op]
    while waiting:
        next_ = waiting.pop()
        if next_ in found or next_.is_done:
            continue
        found.add(next_)
        waiting.extend(next_.after)
        for earlier in next_.stream.queue:
            if earlier is next_:
                break
            waiting.append(earlier)
    return found
