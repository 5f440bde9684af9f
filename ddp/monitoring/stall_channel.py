"""The thread that reports this process's position to the other ranks and asks for theirs, through the world's store.

`stall_report` is its only caller. A StoreThread has a connection of its own to the store and one daemon thread, the
only one that uses it: the store of a frozen host blocks for ever, and then only that thread. Without questions, it
reads one key about once a second and writes nothing. A question is a counter that goes up; every process that sees it
overwrites its one answer, so that any number of questions at once cost one answer. Before the interpreter ends, the
answer becomes this process's last words.

Values in the store are JSON of bounded length (`stall_text.Answer`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from ddp.errors import UnsupportedError
from ddp.generation.connections import clone
from ddp.monitoring.interrupts import has_started, is_interrupt
from ddp.monitoring.process_end import how_it_ends
from ddp.monitoring.stall_text import MOST_POSITIONS, Answer, Heard, Position, printable
from ddp.torch_internals import default_store

_ASKED = "asked"  # number of questions so far
_LAST_WORDS = 2**53  # answers every later question
_TICK_S = 0.05  # between two looks at the answers, while a thread here waits for them
_STORE_TIMEOUT_S = 2.0
_SLACK_S = 1.0  # for the thread to notice a question of its own process


class Reporter(Protocol):
    """The part of a StallReport that the thread uses."""

    @property
    def interval_s(self) -> float: ...
    def position(self) -> Position: ...
    def line(self) -> str: ...
    def look(self) -> None: ...


T = TypeVar("T")
Job = Callable[[Store], None]


class _Question:
    """One question in progress, and its answers so far."""

    def __init__(self, ranks: Sequence[int], patience_s: float, then: Callable[[Heard], None]) -> None:
        self.ranks = ranks
        self.deadline = time.monotonic() + patience_s
        self.then = then
        self.number = 0  # not asked yet
        self.answers: dict[int, Answer] = {}

    def is_settled(self, store: Store) -> bool:
        """Ask, or read new answers; return whether they are complete, or time is up."""
        if not self.number:
            self.number = store.add(_ASKED, 1)
        unsettled = [rank for rank in self.ranks if not self._is_settled(rank)]
        keys = {_answer_key(rank): rank for rank in unsettled}
        present = _present(store, list(keys))
        if present:
            for key, text in zip(present, store.multi_get(present), strict=True):
                answer = Answer.from_json(text)
                if answer is not None and (answer.ended or answer.question >= self.number):
                    self.answers[keys[key]] = answer
        return all(map(self._is_settled, unsettled)) or time.monotonic() > self.deadline

    def _is_settled(self, rank: int) -> bool:
        return rank in self.answers and self.answers[rank].settles(self.number)


class StoreThread:
    """The connection and the thread of one process in one world. `trouble` is why it does not work any more."""

    def __init__(self, store: Store, rank: int) -> None:
        # Its short timeout limits waits for a key; other requests to a frozen TCPStore have no limit at all.
        self._store: Store | None = PrefixStore("ddp/stall_report", clone(store))
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._peer = _peer_of(self._store)
        self._rank = rank
        self._pid = os.getpid()
        self._jobs: SimpleQueue[Job | _Question | None] = SimpleQueue()  # put() may be called in a destructor
        self._questions: list[_Question] = []
        self._reporters: dict[str, weakref.ref[Reporter]] = {}
        self._finished: dict[str, int] = {}
        self._ordinals: dict[str, int] = {}
        self._lock = threading.Lock()  # around the thread's start and end; never held over a request
        self._thread: threading.Thread | None = None
        self._answered = 0
        self._has_left = False  # its answer says that there is no model any more
        self._is_ending = False
        self.trouble = ""

    def enter(self, group_name: str, reporter: Reporter) -> str:
        """Report `reporter` from now on, by weak reference; return its key, which is the same on all ranks."""
        with self._lock:
            ordinal = self._ordinals[group_name] = self._ordinals.get(group_name, -1) + 1
            key = f"{group_name}/{ordinal}"
            self._reporters[key] = weakref.ref(reporter)
            if (self._thread is None or not has_started(self._thread)) and not self.trouble:
                # The thread may end, and set self._thread to None, before start() returns.
                thread = self._thread = threading.Thread(target=self._run, name="ddp-stall-report", daemon=True)
                _running.add(self)
                _threads.add(thread)
                thread.start()
        return key

    def leave(self, key: str, step: int) -> None:
        """Stop reporting it. Takes no lock: this may run in a destructor, in any thread."""
        if self._pid == os.getpid() and self._reporters.pop(key, None) is not None:
            self._finished[key] = step
            for old in list(self._finished)[:-MOST_POSITIONS]:
                self._finished.pop(old, None)

    def ask(self, ranks: Sequence[int], patience_s: float) -> Heard:
        """Ask the processes of `ranks` (global) where they are; block at most a second longer than `patience_s`."""
        reply: SimpleQueue[Heard] = SimpleQueue()
        if self.trouble or self._pid != os.getpid():
            return Heard({}, self.trouble or "this process was forked from the one that trains")
        self.ask_later(ranks, patience_s, reply.put)
        try:
            return reply.get(timeout=patience_s + _SLACK_S)
        except Empty:
            return Heard({}, self.trouble or "the store does not answer: what hosts it is frozen, or cut off from here")

    def ask_later(self, ranks: Sequence[int], patience_s: float, then: Callable[[Heard], None]) -> None:
        """Ask without waiting; the thread calls `then`."""
        self._jobs.put(_Question(ranks, patience_s, then))

    def append(self, key: str, text: str) -> None:
        """Append `text` to the value of `key`; wait for that at most a second. Never raises."""
        self._do(lambda store: store.append(key, text), _SLACK_S)  # type: ignore[attr-defined]  # not in torch's stubs

    def read(self, key: str, patience_s: float) -> bytes:
        """Return the value of `key`, or nothing if it has none or the store does not answer."""
        return self._do(lambda store: store.get(key) if store.check([key]) else b"", patience_s) or b""

    def _do(self, job: Callable[[Store], T], patience_s: float) -> T | None:
        """Run `job` in the thread and return its result, or None on a timeout: then it runs later or not at all."""
        done: SimpleQueue[T] = SimpleQueue()
        if self._is_usable():
            self._jobs.put(lambda store: done.put(job(store)))
            with contextlib.suppress(Empty):
                return done.get(timeout=patience_s)
        return None

    def _is_usable(self) -> bool:
        # The thread itself gets here if the garbage collector runs in it, and must not wait for itself.
        thread = self._thread
        return (
            not self.trouble
            and self._pid == os.getpid()
            and thread is not None
            and thread is not threading.current_thread()
        )

    def end(self) -> None:
        """Make the thread write the last words of this process, and end. `_end_store_threads` waits for it.

        A thread that returns from the store during the interpreter's teardown could abort the process; one in a
        request to a frozen TCPStore does not return.
        """
        if self._thread is not None and self._pid == os.getpid():
            self._is_ending = True
            self._jobs.put(None)

    # The thread

    def _run(self) -> None:
        try:
            while self._goes_on():
                job = self._next_job()
                if not self._is_ending:
                    self._serve(job)
        except RuntimeError as error:  # every error of a store is one
            self.trouble = self.trouble or f"the store failed: {printable(str(error), 160)}"
        finally:
            if self._thread is threading.current_thread():  # else another has been started since
                self._thread = None
                _running.discard(self)
            if self._is_ending:
                self.trouble = self.trouble or "this process is about to end"
            if self.trouble:
                self._drop()
            for question in self._questions:
                question.then(Heard(question.answers, self.trouble))
            self._questions.clear()

    def _goes_on(self) -> bool:
        if self._is_ending:
            # A write has no reply, which could be missing if the store's host ends at the same moment.
            self._tell(self._last_words())
            return False
        if self._reporters:
            return True
        if not self._has_left:
            self._tell(Answer(_LAST_WORDS, finished=dict(self._finished), ended="has deleted its last model"))
            self._has_left = True
        with self._lock:
            if not self._reporters:
                self._thread = None
                _running.discard(self)
                return False
        return True

    def _next_job(self) -> Job | _Question | None:
        # No local variable, which would keep a reporter alive while the thread waits.
        pause_s = min((reporter.interval_s for _, reporter in self._living()), default=1.0)
        try:
            return self._jobs.get(timeout=_TICK_S if self._questions else pause_s)
        except Empty:
            return None

    def _serve(self, job: Job | _Question | None) -> None:
        if isinstance(job, _Question):
            self._questions.append(job)  # first, so that it gets its reply even if the store is gone
        store = self._open()
        if job is not None and not isinstance(job, _Question):
            job(store)
        if self._has_left and self._reporters:
            self._tell(Answer(0))  # there is a model again
            self._has_left = False
        asked = int(store.get(_ASKED)) if store.check([_ASKED]) else 0
        if asked > self._answered:
            self._answered = asked
            self._tell(self._answer(asked))
        for question in list(self._questions):
            if question.is_settled(store):
                self._questions.remove(question)
                question.then(Heard(question.answers))
        for _, reporter in self._living():
            reporter.look()

    def _living(self) -> list[tuple[str, Reporter]]:
        entries = list(self._reporters.items())
        return [(key, reporter) for key, reference in entries if (reporter := reference()) is not None]

    def _answer(self, question: int) -> Answer:
        positions, line = {}, ""
        for key, reporter in self._living()[:MOST_POSITIONS]:
            positions[key], line = reporter.position(), reporter.line()
        return Answer(question, line, positions, dict(self._finished), has_group=dist.is_initialized())

    def _last_words(self) -> Answer:
        ended, is_secondary = how_it_ends()
        steps = {key: reporter.position().step for key, reporter in self._living()[:MOST_POSITIONS]}
        steps.update(self._finished)
        return Answer(_LAST_WORDS, finished=steps, ended=ended, is_secondary=is_secondary)

    def _tell(self, answer: Answer) -> None:
        self._open().set(_answer_key(self._rank), answer.to_json())

    def _open(self) -> Store:
        """Return the store, unless its server has hung up: then torch writes a page of C++ frames for each attempt."""
        if self._store is None or _has_hung_up(self._peer):
            self.trouble = "the store is gone: the process that hosts it (most likely that of rank 0) has ended"
            raise RuntimeError(self.trouble)
        return self._store

    def _drop(self) -> None:
        self._store = None
        if self._peer is not None:
            self._peer.close()
            self._peer = None


_store_threads: weakref.WeakKeyDictionary[Store, StoreThread] = weakref.WeakKeyDictionary()
_running: set[StoreThread] = set()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # also those that end by themselves
_inherited: list[object] = []


def store_thread_of_world() -> StoreThread | None:
    """Return the thread for the default group's store; None without a group, or if its store cannot be cloned."""
    if not dist.is_initialized():
        return None
    try:
        store = default_store()
    except UnsupportedError as error:
        warnings.warn(f"reports of a stall tell where this rank is, and not the others: {error}", stacklevel=2)
        return None
    store_thread = _store_threads.get(store)
    if store_thread is None:
        try:
            store_thread = _store_threads[store] = StoreThread(store, dist.get_rank())
        except (NotImplementedError, RuntimeError) as error:  # a store of the user's own
            if is_interrupt(error):
                raise
            return None
    # Registered again for each, to run before the group is closed at exit: handlers run in reverse order.
    atexit.unregister(_end_store_threads)
    atexit.register(_end_store_threads)
    return store_thread


def _end_store_threads() -> None:
    """End the threads before the interpreter does: one that drops its store afterwards would abort the process.

    Waits for all together at most as long as a store may take.
    """
    for store_thread in list(_running):
        store_thread.end()
    until = time.monotonic() + _STORE_TIMEOUT_S + 0.5
    for thread in list(_threads):
        if has_started(thread):
            thread.join(max(0.0, until - time.monotonic()))


def _forget_store_threads() -> None:
    """Keep the parent's connections untouched and open in a forked child, even when the child frees its objects."""
    global _store_threads, _running, _threads
    _inherited.extend((_store_threads, *_store_threads.values(), *_running))
    _store_threads, _running, _threads = weakref.WeakKeyDictionary(), set(), weakref.WeakSet()


os.register_at_fork(after_in_child=_forget_store_threads)


def _answer_key(rank: int) -> str:
    return f"answer/{rank}"


def _present(store: Store, keys: list[str]) -> list[str]:
    """Return those of `keys` that have a value. A store only checks whether all have, so bisect."""
    if not keys or store.check(keys):
        return keys
    if len(keys) == 1:
        return []
    half = len(keys) // 2
    return _present(store, keys[:half]) + _present(store, keys[half:])


def _peer_of(store: Store) -> socket.socket | None:
    """Return a duplicate of the socket of a TCPStore's connection; None for other stores.

    Only the object's repr contains the descriptor, and only its peer's port shows that it is the right one.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    found = re.search(r"\bfd=(\d+)", repr(store))
    if found is None:
        return None
    try:
        peer = socket.socket(fileno=os.dup(int(found[1])))
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if peer.getpeername()[1] == getattr(store, "port", None):
            return peer
    peer.close()
    return None


def _has_hung_up(peer: socket.socket | None) -> bool:
    """Return whether a store's server has ended. A request would show it too, with a page of C++ frames on stderr."""
    if peer is None:
        return False
    try:
        return peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
