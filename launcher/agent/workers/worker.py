"""A worker process, as its agent sees it: its start, its pipes and files, its progress, its end.

The agent is single-threaded, so a worker is made by fork and exec: between the two it gets its own session and the
run tag, is set to die with its agent, and keeps nothing inherited but its three standard streams.

Besides those in its order, a worker gets these variables:

    TORCHELASTIC_ERROR_FILE  where it may write why it failed
    DTRAIN_PROGRESS_FILE     72 bytes to map and write; see ddp/monitoring/progress.py and step_counter.py
    DTRAIN_TIMELINE_FILE     memory to map and record its times in; see ddp/monitoring/timeline.py; empty if it cannot
                             be made
    DTRAIN_GENERATION        the number of the attempt's composition (its generation) that it is started for: 0, or the
                             newest if it replaces a failed worker
    DTRAIN_GENERATION_PIPE   a FIFO from which it may read the numbers of newer ones: 8 bytes each, little-endian, and
                             growing. Opening it for reading does not block; a read blocks until there is one, and gets
                             nothing (end of file) once the agent is gone. Read 8 bytes, or a multiple of that. If
                             they are not read, only the newest number is certain to be kept.
    DTRAIN_GENERATION_FILE   a file with the newest generation, in JSON: its `number`, `when` the workers meet under it
                             (NextGeneration of launcher/protocol), and the `variables` of this worker that may change
                             with it, such as RANK. It is replaced before a number is written to the pipe, and does
                             not exist before the first.
    DTRAIN_STATE_FILE        a file of its rank, empty at first in an attempt; later processes of the rank find what
                             earlier ones wrote. It is in memory and has no folder: open, write or map it, or set its
                             length; it cannot be renamed or replaced.
    DTRAIN_COPY_FILE         a file of the same kind, one for all workers of this host and all attempts of the run, for
                             a copy of a worker's checkpoint; not set if it cannot be made
    DTRAIN_COPY_NOTE         where that worker may note how to save the copy if it ends before that is done: a JSON
                             object with `pid`, its own, and `argv`, a command that gets the copy as its standard input;
                             [] once it is saved
    DTRAIN_LEDGER_FILE       a FIFO to which it may write what its steps made, in lines of JSON: see
                             ddp/data/ledger.py. The agent reads it, also while no process has it open.
    DTRAIN_DEBUGGER_FILE     when a debugger was last open in any rank of the run: `open`, or a time of this host's
                             monotonic clock, in seconds; does not exist if none was
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from launcher.agent.cleanup.run_tag import RunTag
from launcher.machine import processes
from launcher.protocol.message import LEDGER, MAX_PAYLOAD_BYTES
from launcher.protocol.reports import Collectives, Exited, Failing

DEBUGGER_FILE = "debugger"
BOOTSTRAP = Path(__file__).with_name("bootstrap.py")

_PROGRESS = struct.Struct("<9Q")  # fields: ddp/monitoring/progress.py, step_counter.py
_ALONE = (1, 2, 3, 4)  # its failure does not end the attempt: the others continue, or wait for its replacement
_GENERATION = struct.Struct("<Q")
_PIPE_BYTES = 1 << 16
_STDERR = 2
_STDERR_BYTES = 16 << 10  # stacks of C++ frames stand behind the message
_UP = re.compile(rb"\x1b\[([0-9]*)[AF]")  # moves the cursor up
_INTERPRETER_ARGS = 2  # that the kernel puts before a script's: of its first line


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: str,
    stdout: int,
    stderr: int,
    stdin: int | None = None,
    run_tag: RunTag | None = None,
    number: int = 0,
    cores: Sequence[int] = (),
) -> int:
    """Start a program in a session of its own and return its pid; it is killed when this process ends.

    It is bound to the processors `cores` if any are given. It is marked with `run_tag` and its `number` as a worker,
    except for the variables, which `env` must contain. Raises OSError if it cannot be executed.
    """
    parent = os.getpid()
    failed_read, failed_write = os.pipe()  # both close on exec: end of file means that exec succeeded
    try:
        pid = os.fork()
    except OSError:
        os.close(failed_read)
        os.close(failed_write)
        raise
    if pid == 0:
        try:
            processes.die_with_parent(parent)
            if run_tag is not None:
                run_tag.put_on(number)
            if cores:
                os.sched_setaffinity(0, cores)
            _become(argv, env, cwd, (stdin, stdout, stderr))
        except OSError as error:
            named = cwd if error.filename == cwd else argv[0]
            os.write(failed_write, f"{error.errno} ".encode() + os.fsencode(named))
        finally:
            os._exit(127)
    os.close(failed_write)
    with os.fdopen(failed_read, "rb") as failed:
        errno, _, place = failed.read().partition(b" ")
    if errno:
        os.waitpid(pid, 0)
        raise OSError(int(errno), os.strerror(int(errno)), os.fsdecode(place))
    return pid


def _become(argv: Sequence[str], env: Mapping[str, str], cwd: str, streams: tuple[int | None, int, int]) -> None:
    os.setsid()
    processes.restore_file_limit()
    processes.unmark()
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    stdin, stdout, stderr = streams
    os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.chdir(cwd)
    os.execvpe(argv[0], list(argv), dict(env))


class Files:
    """The files of one worker in the agent's folder. Their names begin with the attempt's number.

    `life` counts restarts of the worker alone: files of the dead process must not be taken for those of the new one.
    """

    def __init__(self, folder: str, attempt: int, rank: int, life: int = 0) -> None:
        self.error = Path(folder, f"{attempt}-{rank}{f'-{life}' if life else ''}.json")
        self.facts = Path(f"{self.error}.facts")
        self.stack = Path(f"{self.error}.stack")
        self.imports = Path(f"{self.error}.imports")  # its imports up to the first step; see late_imports.py
        self.took = Path(f"{self.error}.took")  # duration of its imports
        self.progress = Path(f"{self.error}.progress")
        self.generations = Path(f"{self.error}.generations")
        self.generation = Path(f"{self.error}.generation")
        self.ledger = Path(f"{self.error}.ledger")
        self.asked = Path(f"{self.error}.asked")  # a FIFO for questions; see flight_recorder.py
        self.collectives = Path(f"{self.error}.collectives")  # the answer
        self.dump = Path(f"{self.error}.dump-")  # beginning of the name of what torch writes itself
        self.asks = Path(f"{self.error}.asks")  # exists while a debugger waits for a command
        self.returned = Path(f"{self.error}.returned")  # the result of a function, or its exception
        self.variables = {
            "TORCHELASTIC_ERROR_FILE": str(self.error),
            "DTRAIN_PROGRESS_FILE": str(self.progress),
            "DTRAIN_GENERATION_PIPE": str(self.generations),
            "DTRAIN_GENERATION_FILE": str(self.generation),
            "DTRAIN_LEDGER_FILE": str(self.ledger),
            "DTRAIN_DEBUGGER_FILE": os.path.join(folder, DEBUGGER_FILE),
        }

    def write_generation(self, number: int, when: str, variables: Mapping[str, str]) -> None:
        """Write the newest generation; its number is then sent through the pipe. Raises OSError."""
        news = Path(f"{self.generation}.new")
        news.write_text(json.dumps({"number": number, "when": when, "variables": dict(variables)}))
        os.replace(news, self.generation)  # atomic for the worker


class GenerationPipe:
    """The FIFO that announces generations to one worker. Never waits for the worker."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._descriptor = _fifo(path)

    def announce(self, number: int) -> None:
        data = _GENERATION.pack(number)
        try:
            os.write(self._descriptor, data)
        except BlockingIOError:  # full of unread numbers, which this one makes obsolete
            with contextlib.suppress(BlockingIOError):  # the worker has just read them
                os.read(self._descriptor, _PIPE_BYTES)
            os.write(self._descriptor, data)

    def close(self) -> None:
        os.close(self._descriptor)


def _fifo(path: Path) -> int:
    """Make a FIFO and open it both ways: data stays until the other end opens it, and neither end of it is missing."""
    make_fifo(path)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def make_fifo(path: Path) -> None:
    """Make a FIFO, unless an earlier try to start the worker has made it. Raises OSError that names it."""
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


class Worker:
    """A running or ended worker. The agent reads `pipes` (descriptor to stream number) until they end."""

    def __init__(
        self,
        rank: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: str,
        files: Files,
        run_tag: RunTag,
        cores: Sequence[int] = (),
        restart_policy: int = 0,
        stdin: int | None = None,
        start: Callable[..., int] = spawn,
        own_argv: Sequence[str] = (),
    ) -> None:
        """`restart_policy` is that of the worker it replaces, until it reports its own.

        `argv` ends with `own_argv`; what comes before is a launch prefix.

        `stdin` is a descriptor that it reads from; None: no input.

        `start` is `spawn`, or does the same in another way. Raises OSError.
        """
        self.rank = rank
        self.files = files
        self.number = run_tag.number_worker()
        self._argv, self._own_argv = (argv, own_argv) if len(own_argv) < len(argv) else ((), ())
        self._own: processes.Process | None = None  # behind a launch prefix, once it is found
        self.takes_over = env.get("DTRAIN_GENERATION", "0") != "0"  # others wait for it
        self.provoked = False  # the agent has signalled it
        self.killer = ""
        self.status: int | None = None
        self.reported = False
        self.by_exec = ("", "")  # why it was not forked, and the import that prevents that if it was not tried
        self.output_bytes = 0  # read from it
        self._stderr = b""  # its last part
        self._cursor = {1: 0, 2: 0}  # by stream, the line of its cursor: bars below each other move it down and up
        self._reached = {1: 0, 2: 0}  # the lowest line so far
        self._begun: dict[int, str] = {}  # by stream, the kind of its unfinished line: a bar or a prompt
        self.ended = 0.0
        self._kill_at: float | None = None  # set once it has failed although its process still runs
        self._stopped = False  # the agent stopped it after it had failed
        self._returned: BinaryIO | None = None
        self.pipes: dict[int, int] = {}
        self._opened = contextlib.ExitStack()  # its other open files
        write_ends: list[int] = []
        variables = {**files.variables, **run_tag.variables}
        try:
            self._progress = os.open(files.progress, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._opened.callback(os.close, self._progress)
            os.pwrite(self._progress, _PROGRESS.pack(0, 0, restart_policy, 0, 0, 0, 0, 0, 0), 0)
            self._generations = GenerationPipe(files.generations)
            self._opened.callback(self._generations.close)
            for stream in (1, 2):
                read_end, write_end = os.pipe()
                self.pipes[read_end] = stream
                write_ends.append(write_end)
                os.set_blocking(read_end, False)
            self.pipes[_fifo(files.ledger)] = LEDGER
            self.began = time.monotonic()
            self.pid = start(
                argv,
                {**env, **variables},
                cwd=cwd,
                stdout=write_ends[0],
                stderr=write_ends[1],
                stdin=stdin,
                run_tag=run_tag,
                number=self.number,
                cores=cores,
            )
        except OSError:
            self.close()
            raise
        finally:
            for descriptor in write_ends:
                os.close(descriptor)

    @property
    def own_pid(self) -> int:
        """The pid of the command's own process, which a launch prefix may run as a child; `pid` if it is not found."""
        if self._own is None and self._own_argv and self.status is None:
            self._own = _find_behind(self.pid, self._argv, self._own_argv)
        own = self._own
        return self.pid if own is None or (self.status is None and not processes.lives(own)) else own.pid

    def wrote(self, stream: int, data: bytes) -> None:
        """Record output that was read from it."""
        if stream == LEDGER:
            return
        self.output_bytes += len(data)
        if stream == _STDERR:
            self._stderr = (self._stderr + data[-_STDERR_BYTES:])[-_STDERR_BYTES:]
        ups = sum(int(lines or 1) for lines in _UP.findall(data)) if b"\x1b" in data else 0
        self._cursor[stream] += data.count(b"\n") - ups
        self._reached[stream] = max(self._reached[stream], self._cursor[stream])
        _, newline, rest = data.rpartition(b"\n")
        before = "" if newline else self._begun.get(stream, "")
        self._begun[stream] = "bar" if b"\r" in rest or before == "bar" else "prompt" if rest else before

    @property
    def output_lines(self) -> int:
        """Number of lines of its output; redrawing bars below each other adds none."""
        return sum(self._reached.values())

    def end_lines(self) -> None:
        """Record that its unfinished lines were answered with input."""
        self._begun.clear()

    @property
    def has_unfinished_line(self) -> bool:
        """Return whether it has an unfinished line that is no progress bar."""
        return "prompt" in self._begun.values()

    @property
    def progress(self) -> tuple[int, int]:
        """Numbers of steps and checkpoints that it reported."""
        said = self._said()
        return said[0] + (said[6] or said[5]), said[1]

    @property
    def is_known_by_output(self) -> bool:
        """Return whether new lines of output are signs of life: until ddp counts its steps and reports its phases."""
        return self._said()[0] == 0

    @property
    def counted(self) -> tuple[int, float]:
        """Number of steps counted without ddp, and when the last of them ended."""
        said = self._said()
        return said[6] or said[5], said[7] / 1e9

    @property
    def restart_policy(self) -> int:
        """0 for an ordinary worker, else one whose failure does not end the attempt, as it reported."""
        restart_policy = self._said()[2]
        return restart_policy if restart_policy in _ALONE else 0

    @property
    def phase(self) -> int:
        """A number that changes when a phase begins or ends; its remainder by three is the phase."""
        return self._said()[3]

    @property
    def unsaved(self) -> int | None:
        """Number of steps since its newest checkpoint; None if they were counted without ddp."""
        said = self._said()
        return max(0, said[0] - said[4]) if said[0] or not self.progress[0] else None

    @property
    def recorded_step(self) -> int:
        """The step of the ledger that it makes, or was making when it ended; 0 without a ledger."""
        return self._said()[8]

    def _said(self) -> tuple[int, ...]:
        # Read, not mapped: a mapped file truncated by the worker would end the agent with SIGBUS.
        data = os.pread(self._progress, _PROGRESS.size, 0)
        return _PROGRESS.unpack(data) if len(data) == _PROGRESS.size else (0,) * 9

    def announce_generation(self, number: int, when: str, variables: Mapping[str, str]) -> None:
        """Announce the attempt's newest composition; the worker need not read it."""
        try:
            self.files.write_generation(number, when, variables)
        except OSError as error:  # a full disk: without the file it would meet the wrong workers
            folder = self.files.generation.parent
            self.killer = f"dtrain, since {folder} cannot be written: {error.strerror}; see TMPDIR"
            self.signal(signal.SIGKILL, stop=False)  # so that it is replaced
            return
        self._generations.announce(number)

    def ended_with(self, wait_status: int) -> None:
        self.status = os.waitstatus_to_exitcode(wait_status)
        if self.own_pid != self.pid and 128 < self.status <= 128 + signal.NSIG:  # the prefix reports it as shells do
            self.status = 128 - self.status
        self.ended = time.monotonic()

    def signal(self, signum: int, *, stop: bool) -> None:
        """Signal the worker itself, not its children: the worker ends those, and the sweep the rest."""
        if self.status is None:  # not reaped yet, so the pid is still its own
            if stop and self.has_failed:
                self._stopped = True  # report its own failure
            else:
                self.provoked |= stop
            own_pid = self.own_pid
            with contextlib.suppress(ProcessLookupError, PermissionError):  # behind a prefix: gone, or another user's
                os.kill(own_pid, signum)
                if stop and signum != signal.SIGKILL and (process := processes.find(own_pid)) and process.state in "Tt":
                    os.kill(own_pid, signal.SIGCONT)  # a stopped process could not handle the signal
            if own_pid != self.pid and signum == signal.SIGKILL:
                os.kill(self.pid, signum)

    @property
    def has_failed(self) -> bool:
        """Return whether it has failed by itself; its process may still run, held by a thread or exit handlers."""
        return not self.provoked and _read_json(self.files.facts) is not None

    def look(self, attempt: int, *, grace_s: float) -> Failing | None:
        """Report once that it has failed although its process still runs; kill that process `grace_s` later."""
        _ = self.own_pid  # looked for early: a launch prefix's exit code is understood by it
        if self.provoked or (facts := _read_json(self.files.facts)) is None:
            return None
        now = time.monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill_at = math.inf
                self.signal(signal.SIGKILL, stop=True)
            return None
        self._kill_at = now + grace_s
        failed_at = _failed_at(facts, now)
        return Failing(
            attempt=attempt,
            rank=self.rank,
            pid=self.pid,
            status=_exit_code(facts),
            ran_s=failed_at - self.began,
            error=_error(facts, None),
            time=failed_at,
            recorded_step=self.recorded_step,
        )

    def exited(self, attempt: int, collectives: Collectives | None) -> Exited:
        """Return the report of its end; call it once its status is known and its pipes are drained."""
        assert self.status is not None
        facts = _read_json(self.files.facts)
        text = _read_text(self.files.error)
        failed_at = _failed_at(facts, self.ended)
        steps, saved = self.progress
        by_exec, module = self.by_exec
        took = (_read_json(self.files.took) or {}) if module else {}
        return Exited(
            attempt=attempt,
            rank=self.rank,
            pid=self.pid,
            status=_exit_code(facts) if self._stopped else self.status,
            ran_s=failed_at - self.began,
            provoked=self.provoked,
            killer=self.killer,
            error=_error(facts, text),
            error_file=text,
            time=failed_at,
            restart_policy=self.restart_policy,
            steps=steps,
            saved=saved,
            unsaved=self.unsaved,
            recorded_step=self.recorded_step,
            by_exec=by_exec,
            costs_s=float(took.get(module, 0.0)),
            stderr=self._stderr.decode(errors="replace") if self.status == -signal.SIGABRT else "",
            collectives=collectives,
        )

    def read_returned(self) -> bytes:
        """Return the next piece of its function's result or exception; empty at the end, or for a script."""
        if self._returned is None:
            try:
                file = open(self.files.returned, "rb")  # noqa: SIM115  # read in pieces
                self._returned = self._opened.enter_context(file)
            except FileNotFoundError:
                return b""
        return self._returned.read(MAX_PAYLOAD_BYTES)

    def close(self) -> None:
        """Release its descriptors; do not use it afterwards."""
        for descriptor in self.pipes:
            os.close(descriptor)
        self.pipes = {}
        self._opened.close()


def _find_behind(pid: int, argv: Sequence[str], own_argv: Sequence[str]) -> processes.Process | None:
    """Find the process with the arguments `own_argv`: this one, or a descendant. All `argv` are those of the prefix."""
    for candidate in (pid, *processes.descendants(pid)):
        args = processes.arguments(candidate)
        has_only_own = len(args) <= len(own_argv) + _INTERPRETER_ARGS and not _ends_with(args, argv)
        if has_only_own and _ends_with(args, own_argv):
            return processes.find(candidate)
    return None


def _ends_with(args: Sequence[str], argv: Sequence[str]) -> bool:
    """Return whether arguments end with those of a command, which may be named by its path."""
    first, *rest = args[-len(argv) :] or [""]
    return rest == [*argv[1:]] and os.path.basename(first) == os.path.basename(argv[0])


def _failed_at(facts: Mapping[str, str] | None, ended: float) -> float:
    try:
        failed = float(facts["time"]) if facts else ended
    except (KeyError, ValueError):  # a script may write anything there
        return ended
    return failed if failed <= ended else ended


def _exit_code(facts: Mapping[str, str] | None) -> int:
    """Return the exit code of a process that has failed, if it is not killed."""
    status = (facts or {}).get("status", "")
    return int(status) if status.isdecimal() and 0 < len(status) <= 3 else 1


def _error(facts: dict[str, str] | None, error_file: str | None) -> dict[str, str] | None:
    """Return its exception, else the contents of torch elastic's file, else where it called sys.exit."""
    if facts is not None and "type" in facts:
        return facts
    return _elastic_error(error_file) or (facts if facts is not None and facts.get("where") else None)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_bytes()[: 1 << 20].decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return None


def _read_json(path: Path) -> dict[str, str] | None:
    text = _read_text(path)
    try:
        return {str(k): str(v) for k, v in json.loads(text).items()} if text else None
    except (ValueError, AttributeError):  # truncated by a full disk, or killed while writing
        return None


def _elastic_error(text: str | None) -> dict[str, str] | None:
    """Parse the file of torch elastic's `record`: `message` is a string, or contains one."""
    try:
        message = json.loads(text)["message"] if text else None
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(message, dict):
        message = message.get("message")
    if not isinstance(message, str):
        return None
    name, _, rest = message.partition(": ")
    return {"type": name, "message": rest, "where": "", "inside": ""}
