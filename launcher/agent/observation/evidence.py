"""The agent's answer to Collect: where its workers are, from the kernel's data and their stacks.

A Python worker writes its stacks itself when it gets STACK_SIGNAL (see bootstrap.py), which costs it about a
millisecond and needs neither rights nor the interpreter's lock. If a worker does not answer (stopped, stuck in the
kernel, or without the handler), py-spy is tried if installed, then the kernel. If native frames are wanted, py-spy
reads those of each worker as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from launcher.agent.attempt import Attempt
from launcher.agent.observation import flight_recorder
from launcher.agent.observation.signs_of_life import is_traced
from launcher.agent.stream_writer import StreamWriter
from launcher.agent.workers.warm_start import PROGRAM
from launcher.agent.workers.worker import BOOTSTRAP, Files, spawn
from launcher.frozen import dataclass, replace
from launcher.machine.processes import descendants
from launcher.protocol.commands import Collect
from launcher.protocol.reports import Collected, Collectives, Evidence

# Real-time signals in use: glibc 32-33, musl 34, .NET 34, PAPI 36, HPCToolkit 37, LTTng 44-48, the JVM 62, valgrind
# the last. An unhandled signal ends a process, so it is never sent unless /proc shows our handler.
STACK_SIGNAL = 51

ANSWER_S = 1.0  # to wait for an answer to the signal; half of the limit if that is less
# A stack whose file stops growing for so long is complete, if the worker waits; most are recognized by their last line.
QUIET_S = 0.1
MAX_BYTES = 64 << 10
SPAWNS_PER_STEP = 4  # each takes 2 ms or so
NATIVE_AT_ONCE = 4  # each uses a core for seconds, and about 100 MB: it reads the symbols of all libraries
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_NATIVE_THREAD = re.compile(rb"^Thread ", re.MULTILINE)
_NO_PTRACE = (
    "ptrace is not permitted there: sysctl kernel.yama.ptrace_scope=0 as root, or in a container --cap-add SYS_PTRACE"
)
# The last line of the main thread of a worker, started by exec or forked.
_LAST_LINE = re.compile(
    rf'^  File "({re.escape(str(BOOTSTRAP))}|{re.escape(str(PROGRAM))})", line \d+ in <module>\n\Z'.encode(),
    re.MULTILINE,
)


@dataclass(frozen=True)
class Subject:
    """A worker to look at. `stack_file` is where it writes its stacks on request."""

    attempt: int
    rank: int
    pid: int
    stack_file: Path
    silent_s: float = 0.0
    phase: int = 0
    steps: int = 0
    child: int = 0  # behind a launch prefix, the pid of the agent's own child
    files: Files | None = None  # by which it is asked for its collectives; None: it is not


class EvidenceRound:
    """Runs at most one collection: a newer order ends the one before, which is answered with what is missing."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._collection: Collection | None = None
        self._attempt: Attempt | None = None  # that it is of

    @property
    def pause_s(self) -> float:
        return float("inf") if self._collection is None else self._collection.pause_s

    def begin(self, order: Collect, attempt: Attempt | None) -> None:
        """Collect evidence of the workers of an attempt; without an attempt, answer at once."""
        self.stop()
        if attempt is None:
            self._writer.send(Collected(number=order.number))
            return
        self._attempt = attempt
        attempt.use.ask_gpus()
        now = time.monotonic()
        subjects = [
            Subject(
                attempt.number,
                worker.rank,
                worker.own_pid,
                worker.files.stack,
                *attempt.signs.of(worker, now),
                child=worker.pid,
                files=worker.files,
            )
            for worker in attempt.running
            if worker.rank in order.ranks or not order.ranks
        ]
        self._collection = Collection(order.number, subjects, order.limit_s, native=order.native)

    def step(self) -> None:
        if self._collection is None or self._attempt is None:
            return
        if (found := self._collection.step(holds=not self._attempt.use.gpus_answered)) is not None:
            for evidence in found:
                self._writer.send(evidence)
            self.stop()

    def stop(self) -> None:
        """End the collection under way: no one waits for it any more."""
        if self._collection is not None:
            self._collection.close()
            troubles = [] if self._attempt is None else self._attempt.device_troubles()
            self._writer.send(Collected(number=self._collection.number, devices=troubles))
            self._collection = self._attempt = None

    def reaped(self, pids: Iterable[int]) -> None:
        """Record children that were reaped: observed workers, or a py-spy."""
        if self._collection is not None:
            for pid in pids:
                self._collection.reaped(pid)


class Collection:
    """A look at all workers: call `step` every `pause_s` until it returns the result, at the latest after `limit_s`.

    The subjects are children of this process that are not reaped yet, so their pids cannot be reused until `reaped` is
    called.
    """

    def __init__(self, number: int, subjects: Sequence[Subject], limit_s: float, *, native: bool = False) -> None:
        now = time.monotonic()
        self.number = number
        self.pause_s = 0.005
        self._end = now + limit_s
        self._answers_until = now + min(limit_s / 2, ANSWER_S)
        self._looks = [
            look for look in (_Look.at(number, each, native=native) for each in subjects) if look is not None
        ]
        for look in self._looks:  # after reading all of them: the signal would wake them
            look.ask()

    def step(self, *, holds: bool = False) -> list[Evidence] | None:
        """Return an Evidence for each worker that was alive, or None while there is something to wait for.

        `holds`: wait as long as for answers of workers, whatever they have answered.
        """
        now = time.monotonic()
        spawns = SPAWNS_PER_STEP
        native = NATIVE_AT_ONCE - sum(look.is_spied_natively for look in self._looks)
        for look in self._looks:
            look.read(now)
            if now >= self._answers_until:
                look.give_up_answer()
            if look.wants_native and native > 0 and not look.is_waiting_for_stack and now < self._end:
                native -= 1
                look.spy(native=True)
            elif look.wants_py_spy and spawns and now < self._end:
                spawns -= 1
                look.spy()
        waits = any(look.is_waiting for look in self._looks) or (holds and now < self._answers_until)
        if waits and now < self._end:
            self.pause_s = min(1.5 * self.pause_s, 0.02, max(0.0, self._end - now))
            return None
        return [look.result() for look in self._looks]

    def reaped(self, pid: int) -> None:
        """Record that this child was reaped."""
        for look in self._looks:
            look.reaped(pid)

    def close(self) -> None:
        """End what is still running."""
        for look in self._looks:
            look.close()


class _Look:
    """A look at one worker: it is asked first, then py-spy, then the kernel."""

    def __init__(self, subject: Subject, found: Evidence, *, answers: bool, native: bool) -> None:
        self._subject = subject
        self._found = found
        self._answers = answers
        self._size = self._began_at = _size(subject.stack_file)
        self._grew = 0.0
        self._is_gone = False
        self._spy = 0  # the pid of its py-spy, while that runs
        self._output = -1  # its output file
        self.asked = False
        self._asked_for_collectives = False
        self._old_record: object = None
        self._collectives: Collectives | None = None
        self.wants_py_spy = False
        self.wants_native = native  # frames
        self.is_spied_natively = False
        self._stack = b""
        self._native = b""
        self._no_native = "py-spy has not answered in time" if native else ""

    @classmethod
    def at(cls, number: int, subject: Subject, *, native: bool) -> _Look | None:
        """Read the kernel's data; return None if the worker has ended."""
        stat = read_proc(subject.pid, "stat")
        fields = stat.rpartition(b")")[2].split()
        if not fields or fields[0] in (b"Z", b"X"):
            return None
        state = fields[0].decode()
        tree = [stat, *(read_proc(pid, "stat") for pid in descendants(subject.pid))]
        waits_in = read_proc(subject.pid, "wchan").decode("ascii", "replace")
        found = Evidence(
            number=number,
            attempt=subject.attempt,
            rank=subject.rank,
            pid=subject.pid,
            state=state,
            waits_in="" if waits_in == "0" else waits_in,
            rss_bytes=int(fields[21]) * _PAGE_BYTES,
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
            stack="",
            silent_s=subject.silent_s,
            phase=subject.phase,
            steps=subject.steps,
            tree_cpu_s=sum(map(_cpu_s, tree)),
            at_disk=any(each.rpartition(b")")[2].split()[:1] == [b"D"] for each in tree),
            traced=is_traced(subject.pid),
        )
        # A stopped worker would answer once it is continued, which is too late.
        return cls(subject, found, answers=state not in ("T", "t") and _handles(subject), native=native)

    @property
    def is_waiting(self) -> bool:
        return self.is_waiting_for_stack or self.wants_native or self.is_spied_natively or self._asked_for_collectives

    @property
    def is_waiting_for_stack(self) -> bool:
        return self.asked or self.wants_py_spy or (self._spy != 0 and not self.is_spied_natively)

    def ask(self) -> None:
        if self._answers:
            with contextlib.suppress(OSError):  # the worker changed its user
                os.truncate(self._subject.stack_file, 0)  # the worker appends, and earlier answers were read
                self._size = self._began_at = 0
                os.kill(self._subject.pid, STACK_SIGNAL)
                self.asked = True
        self.wants_py_spy = not self.asked
        files = self._subject.files
        if self._answers and files is not None:
            self._old_record = flight_recorder.version(files)
            self._asked_for_collectives = flight_recorder.ask(files)

    def read(self, now: float) -> None:
        """Read the part of the answers that is written so far."""
        files = self._subject.files
        if self._asked_for_collectives and files is not None and flight_recorder.version(files) != self._old_record:
            self._asked_for_collectives = False
            self._collectives = flight_recorder.read(files)
        if not self.asked:
            return
        size = _size(self._subject.stack_file)
        if size > self._size:
            self._size, self._grew = size, now
            self._stack = _read_end(self._subject.stack_file, self._began_at)
            if _LAST_LINE.search(self._stack):
                self.asked = False
        elif self._stack and now - self._grew > QUIET_S and _waits(self._subject.pid):
            self.asked = False

    def give_up_answer(self) -> None:
        self._asked_for_collectives = False
        if self.asked:
            self.asked = False
            self.wants_py_spy = not self._stack and not self._is_gone

    def spy(self, *, native: bool = False) -> None:
        """Start py-spy, if it is installed."""
        if native:
            self.wants_native = False
        else:
            self.wants_py_spy = False
        program = find_py_spy()
        if self._is_gone or program is None:
            self._no_native = "py-spy is not installed there: pip install py-spy" if program is None else ""
            return
        path = f"{self._subject.stack_file}.py-spy"
        # Do not stop the process: looking must not change it, and it has been in this place for a while. Native frames
        # cannot be read that way: they are read only on request, and the process is stopped meanwhile.
        how = "--native" if native else "--nonblocking"
        argv = [program, "dump", "--pid", str(self._subject.pid), how, "--full-filenames"]
        # If this fails (disk full, no more processes), the kernel's data remain.
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            if self._output < 0:
                self._output = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                os.unlink(path)
            os.ftruncate(self._output, 0)
            os.lseek(self._output, 0, os.SEEK_SET)
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            opened.callback(os.close, nowhere)
            errors = self._output if native else nowhere
            self._spy = spawn(argv, os.environ, cwd="/", stdout=self._output, stderr=errors)
            self.is_spied_natively = native

    def reaped(self, pid: int) -> None:
        if pid == (self._subject.child or self._subject.pid):
            self._is_gone = True
            if self.asked:
                self.asked = False
                self._stack = _read_end(self._subject.stack_file, self._began_at)
            self.wants_py_spy = self.wants_native = self._asked_for_collectives = False
        elif pid == self._spy:
            self._spy = 0
            said = os.pread(self._output, MAX_BYTES, 0)
            if self.is_spied_natively:
                self.is_spied_natively = False
                self._add_native(said)
            else:
                self._stack = said

    def _add_native(self, said: bytes) -> None:
        if _NATIVE_THREAD.search(said):
            self._native, self._no_native = said, ""
        elif b"ermission" in said:
            self._no_native = _NO_PTRACE
        else:
            lines = said.decode("utf-8", "replace").split("\n")
            self._no_native = f"py-spy cannot read them: {next(filter(None, map(str.strip, lines)), 'it said nothing')}"

    def result(self) -> Evidence:
        stack = self._stack
        if not stack and not self._is_gone and self._found.state == "D":
            stack = read_proc(self._subject.pid, "stack")  # readable by root only
        return replace(
            self._found,
            stack=(stack or self._native).decode("utf-8", "replace"),
            native=self._native.decode("utf-8", "replace"),
            no_native=self._no_native,
            collectives=self._collectives,
        )

    def close(self) -> None:
        self.asked = self.wants_py_spy = self.wants_native = self.is_spied_natively = False
        self._asked_for_collectives = False
        if self._spy:
            os.kill(self._spy, signal.SIGKILL)  # the agent reaps it, as any child
            self._spy = 0
        if self._output >= 0:
            os.close(self._output)
            self._output = -1


def _waits(pid: int) -> bool:
    """Return whether the main thread of a process waits, and not for a core or a disk, nor is stopped."""
    return read_proc(pid, "stat").rpartition(b")")[2].split()[:1] == [b"S"]


def _cpu_s(stat: bytes) -> float:
    """Return the CPU time that a process has used, including children that it has waited for."""
    fields = stat.rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS


def _handles(subject: Subject) -> bool:
    """Return whether a worker writes its stacks on the signal: it has a handler, and the stack file open."""
    if not catches(subject.pid, STACK_SIGNAL):
        return False
    path = os.path.realpath(subject.stack_file)
    folder = f"/proc/{subject.pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:  # ended meanwhile, or another user's
        return False
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"{folder}/{name}") == path:
                return True
    return False


def find_py_spy() -> str | None:
    """Return the path of py-spy: beside this Python, else in PATH; None if it is not installed."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    if os.access(beside, os.X_OK):
        return beside
    from shutil import which  # slow to import, rarely needed

    return which("py-spy")


def catches(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal, which would end it otherwise."""
    for line in read_proc(pid, "status").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def read_proc(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read(MAX_BYTES) or b""
    except OSError:  # ended meanwhile, or not readable for this user
        return b""


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read_end(path: Path, start: int) -> bytes:
    """Return the content of a file from `start`; if that exceeds MAX_BYTES, only its end, where the main thread is."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = max(start, size - MAX_BYTES)
            file.seek(first)
            data = file.read(MAX_BYTES)
    except OSError:
        return b""
    if first > start:
        data = b"(the newest threads are left out)\n\n" + (data.partition(b"\n\n")[2] or data)
    return data
