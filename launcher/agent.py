"""The agent: starts, watches and stops the workers of one host, and reports. It decides nothing.

Started by the controller as `python -m launcher.agent`, on this machine or through SSH, with the protocol's stream on
its standard input and output. End of its input means that the controller is gone: stop everything. Single-threaded,
one selector. Its parent is a guard: the same program, forked before anything else, which inherits every process of the
run when the agent dies, whatever killed it, and ends them.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launcher import __version__, devices, processes, scratch
from launcher.errors import DtrainError, ProtocolError, UsageError
from launcher.guard import MARK, guard, reap
from launcher.outbox import Outbox
from launcher.protocol import (
    PREAMBLE,
    PROTOCOL,
    Bye,
    Decoder,
    Exited,
    Facts,
    Heartbeat,
    Hello,
    Message,
    OpenStore,
    Output,
    Prepare,
    Report,
    SignalWorkers,
    Started,
    StartWorker,
    Stop,
    StoreFailed,
    StoreOpened,
    encode,
)
from launcher.rendezvous import Rendezvous
from launcher.worker import Worker

BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
HEARTBEAT_S = 5.0
READ_BYTES = 1 << 16
PIPE_READS = 32  # more than a pipe holds (at most 1 MiB)


def main() -> None:
    processes.adopt_orphans()
    processes.raise_file_limit()
    mark, parent = os.urandom(16).hex(), os.getpid()
    guarded = os.fork()
    if guarded:
        os._exit(guard(guarded, mark))  # not sys.exit: the interpreter's teardown has nothing to add but time
    processes.adopt_orphans()
    processes.die_with_parent(parent, signal.SIGTERM)  # without its guard it stops in good order
    status = 1
    try:
        status = Agent(mark).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _executable(program: str, workdir: Path) -> bool:
    import shutil  # slow to import, and seldom needed

    if os.sep in program:
        return os.access(workdir / program, os.X_OK)
    return shutil.which(program, path=os.environ.get("PATH")) is not None


def _hint(number: int | None) -> str:
    if number == errno.E2BIG:
        return "; one argument or variable may have 128 KiB, see --export"
    if number in (errno.EMFILE, errno.EAGAIN):
        return "; this user's limits there are too low, see ulimit -n and ulimit -u"
    return ""


class Agent:
    """Owns the workers and the store of this host, and both directions of the controller's stream."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._selector = selectors.DefaultSelector()
        self._decoder = Decoder()
        self._outbox = Outbox(1, self._selector, self._hold)
        self._holding = False  # workers' pipes are not read at the moment
        self._prepared: Prepare | None = None
        # Read before the user's own exports can change it: "client address, port, server address, port".
        self._reached_at = ([*os.environ.get("SSH_CONNECTION", "").split(" "), "", ""])[2] or "127.0.0.1"
        self._workers: dict[int, Worker] = {}
        self._store: Rendezvous | None = None
        self._files = ""  # folder for the workers' error files, once it is made
        self._kill_at: float | None = None  # set when stopping
        self._killed = False
        self._sweep: processes.Sweep | None = None
        self._next_heartbeat = time.monotonic() + HEARTBEAT_S
        self._terminated = False
        self._done = False

    @property
    def _grace_s(self) -> float:
        return 0.0 if self._prepared is None else self._prepared.grace_s

    # ---- the loop ----

    def run(self) -> int:
        """Serve until stopped and swept; return 0 if nothing is left here."""
        wake_read, wake_write = os.pipe()
        for descriptor in (0, 1, wake_read, wake_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, self._told_to_end)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, lambda *_: None)
        self._watch(0, self._read_controller)
        self._watch(wake_read, lambda: self._children_ended(wake_read))
        self._outbox.put(PREAMBLE)
        self._send(
            Hello(
                protocol=PROTOCOL,
                version=__version__,
                python="{}.{}.{}".format(*sys.version_info[:3]),
                hostname=socket.gethostname(),
                pid=os.getpid(),
                time=time.monotonic(),
            )
        )
        try:
            while not self._done:
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                self._on_time()
            self._outbox.flush(5.0)
        finally:
            scratch.remove_folder(self._mark)
        return 0 if self._sweep is not None and not self._sweep.left else 1

    def _told_to_end(self, *_: object) -> None:
        self._terminated = True

    def _pause_s(self) -> float:
        now = time.monotonic()
        deadlines = [self._next_heartbeat]
        if self._kill_at is not None and self._sweep is None:
            deadlines.append(self._kill_at)
        if self._sweep is not None:
            deadlines.append(now + self._sweep.pause_s)
        return max(0.0, min(deadlines) - now)

    def _on_time(self) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_S
            if not self._outbox:  # otherwise the controller does not read, and what is unsent says that we live
                self._send(Heartbeat(time=now))
        if self._terminated:
            self._stop(signal.SIGTERM, self._grace_s)
        self._report_ended()
        if self._kill_at is None:
            return
        if now >= self._kill_at and not self._killed:
            self._killed = True
            for worker in self._workers.values():
                worker.signal(signal.SIGKILL, stop=True)
            if self._sweep is None and any(worker.status is None for worker in self._workers.values()):
                self._kill_at = now + 5.0
        self._sweep_up(now)

    def _watch(self, descriptor: int, action: Callable[[], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    # ---- the controller's stream ----

    def _read_controller(self) -> None:
        try:
            data = os.read(0, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(0)
            self._outbox.close()
            self._stop(signal.SIGTERM, self._grace_s)
            return
        try:
            for message in self._decoder.feed(data):
                self._obey(message)
        except ProtocolError as error:
            print(f"dtrain agent: {error}", file=sys.stderr)
            self._stop(signal.SIGTERM, self._grace_s)

    def _obey(self, message: Message) -> None:
        if isinstance(message, Prepare):
            self._prepare(message)
        elif isinstance(message, OpenStore):
            self._open_store(message)
        elif isinstance(message, StartWorker):
            self._start(message)
        elif isinstance(message, SignalWorkers):
            for worker in self._workers.values():
                worker.signal(message.signum, stop=False)
        elif isinstance(message, Stop):
            self._stop(message.signum, message.grace_s)

    def _send(self, message: Report) -> None:
        self._outbox.put(encode(message))

    def _hold(self, hold: bool) -> None:
        """Stop or go on reading what the workers write."""
        if hold == self._holding:
            return
        self._holding = hold
        for worker in self._workers.values():
            for descriptor in worker.pipes:
                if hold:
                    self._selector.unregister(descriptor)
                else:
                    self._watch_pipe(worker, descriptor)

    # ---- what it is told ----

    def _prepare(self, message: Prepare) -> None:
        self._prepared = message
        problems = []
        workdir = Path(message.workdir)
        os.environ.update(message.export)
        if not workdir.is_dir():
            problems.append(f"the working directory {workdir} does not exist; name one with --workdir")
        elif message.script is not None and not (workdir / message.script).exists():
            problems.append(f"the script {workdir / message.script} does not exist; copy it there, or see --workdir")
        if message.program is not None and workdir.is_dir() and not _executable(message.program, workdir):
            problems.append(f"the program {message.program} is not in PATH there")
        try:
            self._files = scratch.make_folder(self._mark)
        except OSError as error:
            problems.append(f"no temporary folder can be made there ({error.strerror}); see TMPDIR")
        gpus = devices.Gpus()
        try:
            gpus = devices.find_gpus(os.environ)
        except UsageError as error:
            problems.append(str(error))
        cores, limit = devices.divide(devices.cores(), devices.cpu_limit(), message.part, message.parts)
        if message.parts > 1:
            os.sched_setaffinity(0, cores)
        self._send(
            Facts(
                gpus=list(devices.share(gpus.ids, message.part, message.parts)),
                gpu_variable=gpus.variable,
                gpus_verified=gpus.verified,
                cores=list(cores),
                cpu_limit=limit,
                problems=problems,
                time=time.monotonic(),
            )
        )

    def _open_store(self, message: OpenStore) -> None:
        address = message.address or self._reached_at
        try:
            self._store = Rendezvous(address, message.port, exact=message.exact)
        except DtrainError as error:
            self._send(StoreFailed(reason=str(error), time=time.monotonic()))
            return
        assert self._store.listening is not None
        self._watch(self._store.listening.fileno(), self._first_client)
        self._send(StoreOpened(address=self._store.address, port=self._store.port))

    def _first_client(self) -> None:
        assert self._store is not None
        assert self._store.listening is not None
        self._selector.unregister(self._store.listening.fileno())
        self._store.start()

    def _start(self, message: StartWorker) -> None:
        assert self._prepared is not None
        if self._kill_at is not None:
            return
        error_file = Path(self._files, f"{message.attempt}-{message.rank}.json")
        env = {**message.defaults, **os.environ, **message.env}
        env["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        argv = message.argv
        if message.through:
            argv = [sys.executable, "-u", str(BOOTSTRAP), message.through, *argv]
        env[MARK] = self._mark
        try:
            worker = Worker(message.rank, argv, env, cwd=self._prepared.workdir, error_file=error_file)
        except OSError as error:
            self._never_started(message.rank, f"{argv[0]}: {error.strerror}{_hint(error.errno)}")
            return
        self._workers[message.rank] = worker
        self._send(Started(rank=message.rank, pid=worker.pid, time=worker.began))
        if not self._holding:
            for descriptor in worker.pipes:
                self._watch_pipe(worker, descriptor)

    def _never_started(self, rank: int, reason: str) -> None:
        self._send(
            Exited(
                rank=rank,
                pid=0,
                status=127,
                ran_s=0.0,
                provoked=False,
                error={"type": "", "message": f"could not be started: {reason}", "where": ""},
                error_file=None,
                time=time.monotonic(),
            )
        )

    def _stop(self, signum: int, grace_s: float) -> None:
        """Begin to stop, or be quicker about it."""
        kill_at = time.monotonic() + (0.0 if signum == signal.SIGKILL else grace_s)
        if self._kill_at is None:
            self._kill_at = kill_at
            for worker in self._workers.values():
                worker.signal(signum, stop=True)
        elif not self._killed:
            self._kill_at = min(self._kill_at, kill_at)
        if self._sweep is not None and signum == signal.SIGKILL:
            self._sweep.hurry()

    # ---- the workers ----

    def _watch_pipe(self, worker: Worker, descriptor: int) -> None:
        self._watch(descriptor, lambda: self._read_pipe(worker, descriptor))

    def _read_pipe(self, worker: Worker, descriptor: int) -> bool:
        """Pass on what a worker wrote; return whether there may be more now."""
        if self._holding or descriptor not in worker.pipes:  # changed since the selector looked
            return False
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(descriptor)
            del worker.pipes[descriptor]
            os.close(descriptor)
            return False
        self._send(Output(rank=worker.rank, stream=worker.pipes[descriptor], data=data))
        return True

    def _children_ended(self, wake_read: int) -> None:
        try:
            os.read(wake_read, READ_BYTES)
        except BlockingIOError:
            return
        ended = reap()
        for worker in self._workers.values():
            if worker.status is None and worker.pid in ended:
                worker.ended_with(ended[worker.pid])
        if self._store is not None and self._store.pid in ended:
            reason = f"the store's process ended: {self._store.ended()}"
            self._send(StoreFailed(reason=reason, time=time.monotonic()))
        self._report_ended()

    def _report_ended(self) -> None:
        """Report workers that have ended and whose output up to then has been passed on."""
        for worker in self._workers.values():
            if worker.status is None or worker.reported:
                continue
            for descriptor in list(worker.pipes):
                for _ in range(PIPE_READS):  # what it wrote; a child of it may go on writing for ever
                    if self._holding or not self._read_pipe(worker, descriptor):
                        break
            if not self._holding or self._outbox.closed:
                worker.reported = True
                self._send(worker.exited())

    def _sweep_up(self, now: float) -> None:
        """When stopping and no worker runs any more: end the processes that they left, then say good-bye."""
        assert self._kill_at is not None
        gone = all(worker.status is not None for worker in self._workers.values())
        if self._sweep is None and (gone or (self._killed and now >= self._kill_at)):
            if self._store is not None:
                self._store.close()
            self._sweep = processes.Sweep(
                lambda: processes.related(ancestor=os.getpid(), mark=f"{MARK}={self._mark}", spare=[os.getppid()]),
                grace_s=0.0 if self._killed else max(0.0, self._kill_at - now),
            )
        if self._sweep is not None and self._sweep.step():
            reported = all(worker.reported for worker in self._workers.values() if worker.status is not None)
            if reported or self._outbox.closed:
                left = [process.describe() for process in self._sweep.left]
                self._send(Bye(swept=self._sweep.ended, left=left))
                self._done = True


if __name__ == "__main__":
    main()
