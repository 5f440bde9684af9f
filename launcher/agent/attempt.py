"""One attempt on this host: its workers and what they share. Owned by agent.py, ended by attempt_end.py."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from launcher.agent.cleanup.run_tag import RunTag, clear_folder
from launcher.agent.host_use import HostUseWatch
from launcher.agent.kept_copy import KeptCopy
from launcher.agent.rendezvous import Rendezvous
from launcher.agent.signs_of_life import SignsOfLife
from launcher.agent.step_times import StepTimesReader
from launcher.agent.store import StoreProcess
from launcher.agent.stream_writer import StreamWriter
from launcher.agent.workers.cores import CoreChooser
from launcher.agent.workers.memory_file import MemoryFile
from launcher.agent.workers.output_pipes import OutputPipes
from launcher.agent.workers.standard_input import StandardInput
from launcher.agent.workers.warm_start import ForkServer
from launcher.agent.workers.worker import BOOTSTRAP, Files, Worker, spawn
from launcher.agent.workers.worker_restarts import WorkerRestarts
from launcher.errors import DtrainError
from launcher.frozen import replace
from launcher.machine.network import socket_interfaces
from launcher.protocol.commands import (
    KillWorker,
    NextGeneration,
    Prepare,
    RestartWorker,
    StartWorker,
)
from launcher.protocol.message import COMPOSED, MEETS_SUCCESSOR, RESILIENT
from launcher.protocol.reports import (
    Exited,
    Returned,
    Started,
    Stepped,
)
from launcher.protocol.two_way import Heartbeat

if TYPE_CHECKING:
    from launcher.machine.oom import OomWatch

__all__ = ["FUNCTION", "Attempt"]

FUNCTION = "function"  # the file in the agent's folder with what workers call

STEP_LOOK_S = 0.01  # between looks for the first step of a worker


class Attempt:
    """Owns the workers of one attempt and its store, from the first order to `close`."""

    def __init__(
        self,
        number: int,
        prepared: Prepare,
        *,
        folder: str,
        run_tag: RunTag,
        selector: selectors.BaseSelector,
        writer: StreamWriter,
        store_process: StoreProcess,
        fork_server: ForkServer,
        kept_copy: KeptCopy,
    ) -> None:
        self.number = number
        self.workers: dict[int, Worker] = {}  # by rank, the newest of each
        self.prefixes: dict[str, str] = {}  # with which the values of some of the workers' variables begin
        self.worker_restarts = WorkerRestarts(run_tag, grace_s=prepared.grace_s)
        self.signs = SignsOfLife()
        self.step_times = StepTimesReader(number, writer, folder=folder, at_most=prepared.step_times)
        self._use = HostUseWatch(number)
        self._reports_steps = prepared.reports_steps
        self._unstepped: list[Worker] = []  # of which the first step is to be reported
        self._heartbeat_s = prepared.heartbeat_s
        self._workdir = prepared.workdir
        self._grace_s = prepared.grace_s
        self._orders: dict[int, StartWorker] = {}
        self._waiting: list[StartWorker] = []  # for the fork server's imports
        # What is to be started again, and waits for these too: its order, and what could not be ended there.
        self._cleared: list[tuple[RestartWorker, str]] = []
        self._fork_server = fork_server
        self._records = 0  # of the workers' imports that were there at the last look
        self._kept_copy = kept_copy
        self._lives: dict[int, int] = {}  # how often a rank was started again alone
        self._generation, self._when = 0, "now"  # the newest that the workers were told of
        self._states: dict[int, MemoryFile] = {}  # by rank; what its lives in this attempt leave to each other
        self._before = (0, 0)  # what the workers that others have succeeded had made: steps, checkpoints
        self._folder = folder
        self._run_tag = run_tag
        self._writer = writer
        self._interfaces = prepared.interfaces
        self._sockets: dict[str, str] | None = None  # variables for gloo and NCCL, once they are known
        self._cores = CoreChooser()
        self._memory: OomWatch | None = None
        self.rendezvous = Rendezvous(number, selector, writer, store_process)
        self._output = OutputPipes(selector, writer)
        self.input = StandardInput(number, selector, writer)

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.status is None]

    @property
    def idle(self) -> bool:
        """Whether nothing of it ever ran: no worker, and no store that anybody connected to."""
        return not self.workers and not self.rendezvous.is_used

    @property
    def progress(self) -> int:
        """A number that changes whenever a worker writes something, makes a step or saves, or waits for input."""
        return (
            self._output.read_bytes
            + self.input.waits
            + sum(self._before)
            + sum(sum(worker.progress) for worker in self.workers.values())
        )

    def look(self, *, counts: bool) -> None:
        """Look around now and then: for workers that have failed and do not end, that are silent, or stopped, and for
        what the kernel has killed.

        What happened long ago is then not taken for the cause of what happens now. `counts`: the workers are to run.
        """
        reader = self.input.waiting_rank()
        self.signs.look(self.running, time.monotonic(), pause_s=self._heartbeat_s, counts=counts, reader=reader)
        if self._memory is not None:
            self._memory.look()
        for worker in self.running:
            failing = worker.look(self.number, grace_s=self._grace_s)
            if failing is not None and not worker.restart_policy:  # else the others go on: its end is what counts
                self._writer.send(failing)
        self._learn_imports()

    def _learn_imports(self) -> None:
        """Have the fork server take in what the workers imported late, once no more of them say what that is."""
        records = [
            str(worker.files.imports)
            for worker in self.running
            if self._fork_server.learns_from(self._orders[worker.rank]) and worker.files.imports.exists()
        ]
        if records and len(records) == self._records:
            self._fork_server.learn(records)
        self._records = len(records)

    def heartbeat(self, now: float) -> Heartbeat:
        signs = self.signs
        return Heartbeat(
            time=now,
            progress=self.progress,
            saved=self.saved,
            steps=self.steps,
            silent_s=signs.silent_s,
            silent_in=signs.silent_in,
            longest_s=signs.longest_s,
            stopped=signs.stopped,
            resilient=self.is_resilient,
        )

    def send_use(self, now: float) -> None:
        """Send what memory and GPUs are used for, if it is time to."""
        orders = self._orders.values()
        gpus = {order.rank: order.gpu for order in orders if order.gpu and "CUDA_VISIBLE_DEVICES" in order.env}
        if self.running and (use := self._use.look(self.running, gpus, now)) is not None:
            self._writer.send(use)

    def send_times(self, now: float, workers: Iterable[Worker] | None = None) -> None:
        """Send what is new of the time of all workers, or of some."""
        looked_at = [*(self.workers.values() if workers is None else workers)]
        for worker in looked_at:
            self.step_times.count(worker.rank, *worker.counted, now)
        self.step_times.send(now, [worker.rank for worker in looked_at])

    @property
    def pause_s(self) -> float:
        """How long nothing is to be done."""
        steps_s = STEP_LOOK_S if self._unstepped else float("inf")
        return min(self.worker_restarts.pause_s, self.input.pause_s, steps_s)

    def report_steps(self) -> None:
        """Report the first step of each worker, where that is wanted."""
        for worker in [*self._unstepped]:
            if worker.status is not None or worker.progress[0]:
                self._unstepped.remove(worker)
                if worker.status is None:
                    self._writer.send(Stepped(attempt=self.number, rank=worker.rank))

    @property
    def saved(self) -> int:
        """How many checkpoints its workers said they saved."""
        return self._before[1] + sum(worker.progress[1] for worker in self.workers.values())

    @property
    def is_resilient(self) -> bool:
        """Whether the workers that run here, if any do, can meet others in another composition."""
        return bool(self.workers) and all(worker.restart_policy == RESILIENT for worker in self.running)

    @property
    def steps(self) -> int:
        """How many training steps its workers said they made."""
        return self._before[0] + sum(worker.progress[0] for worker in self.workers.values())

    def start(self, message: StartWorker) -> None:
        """Start a worker, and report that; once the fork server has its imports done, if there is one."""
        self._orders[message.rank] = message
        self.input.expect(message)
        self._generation = max(self._generation, message.generation)
        if self._must_wait(message):
            self._waiting.append(message)
        else:
            self._start(message, restart_policy=message.restart_policy)

    def restart(self, message: RestartWorker) -> None:
        """Have a worker that has failed started again, once what it left is ended; an order of no sense is ignored."""
        worker = self.workers.get(message.rank)
        if worker is not None and worker.reported and message.attempt == self.number:
            self.worker_restarts.take(message)

    def announce(self, message: NextGeneration) -> None:
        """Tell the workers of a new composition of this attempt; numbers only grow, others are ignored."""
        if message.attempt == self.number and message.number > self._generation:
            self._generation, self._when = message.number, message.when
            for rank, variables in message.variables.items():
                if (order := self._orders.get(int(rank))) is not None:
                    self._orders[int(rank)] = replace(order, env={**order.env, **variables})
            for worker in self.running:
                worker.tell_generation(self._generation, self._when, self._composed(worker.rank))
            if message.when != "at_commit":  # until then they train
                self.signs.regroup(self.running)  # after they were told: each ends one more step at most

    def is_script(self, rank: int) -> bool:
        """Whether a worker is started through bootstrap.py."""
        return bool(self._orders[rank].through)

    def _composed(self, rank: int) -> dict[str, str]:
        """The variables of a worker that change with the composition, as they are now."""
        env = self._orders[rank].env
        return {name: env[name] for name in COMPOSED if name in env}

    def go_on(self) -> None:
        """Go on with those that wait to be started, and those that are to be started again."""
        while self._waiting and not self._must_wait(self._waiting[0]):
            waiting = self._orders[self._waiting.pop(0).rank]  # as it is now
            self._start(waiting, restart_policy=waiting.restart_policy)
        self._cleared += self.worker_restarts.step()
        while self._cleared and not self._must_wait(self._orders[self._cleared[0][0].rank]):
            order, left = self._cleared.pop(0)
            old = self.workers[order.rank]
            if left:
                self._never_started(order.rank, f"processes that it left cannot be ended: {left}", old.restart_policy)
                continue
            first = self._orders[order.rank]
            env = {**first.env, "TORCHELASTIC_RESTART_COUNT": str(order.restart)}
            self._lives[order.rank] = self._lives.get(order.rank, 0) + 1
            if self._start(replace(first, env=env), restart_policy=old.restart_policy):
                self._before = (self._before[0] + old.progress[0], self._before[1] + old.progress[1])
                self._release(old)

    def _must_wait(self, message: StartWorker) -> bool:
        """Whether a worker waits for the imports of the fork server, which is told how long it may."""
        if message.through and self._fork_server.is_loading:
            self._fork_server.wait_s(message.wait_s)
            return True
        return False

    def _start(self, message: StartWorker, *, restart_policy: int) -> bool:
        """Start a worker, and report that; return whether it runs."""
        files = Files(self._folder, self.number, message.rank, self._lives.get(message.rank, 0))
        argv = message.argv
        if message.through:
            more = [f"{self._folder}/{FUNCTION}", str(files.returned)] if message.through == "function" else []
            argv = [sys.executable, "-u", str(BOOTSTRAP), message.through, *argv, *more]
        self.rendezvous.release_ports()
        is_first = message.rank not in self._lives
        try:
            cores = self._cores.choose(message)
        except DtrainError as error:
            self._never_started(message.rank, str(error), restart_policy)
            return False
        env = self._environment(message, cores, message.generation if is_first else self._generation)
        by_exec = self._fork_server.why_not_for(message, {**env, **self._run_tag.variables}, cores)
        stdin: int | None = None
        make = partial(
            Worker,
            message.rank,
            argv,
            env,
            cwd=self._workdir,
            files=files,
            run_tag=self._run_tag,
            cores=cores,
            restart_policy=restart_policy,
        )
        try:
            if self._memory is None:
                from launcher.machine.oom import OomWatch  # only where workers are started

                self._memory = OomWatch()
            if message.rank not in self._states:
                path = f"{self._folder}/{self.number}-{message.rank}.state"
                self._states[message.rank] = MemoryFile("state", path)
            if self._generation:
                files.write_generation(self._generation, self._when, self._composed(message.rank))
            env["DTRAIN_STATE_FILE"] = self._states[message.rank].path
            env["DTRAIN_TIMELINE_FILE"] = self.step_times.open(message.rank, time.monotonic())
            stdin = self.input.open(message.rank)
            try:
                worker = make(stdin=stdin, start=spawn if by_exec else self._fork_server.fork)
            except OSError as error:
                if by_exec:
                    raise
                by_exec = f"it cannot be forked: {error}"
                worker = make(stdin=stdin, start=spawn)
        except OSError as error:
            reason = f"{error.filename or argv[0]}: {error.strerror}{_hint(error.errno)}"
            self._never_started(message.rank, reason, restart_policy)
            return False
        finally:
            if stdin is not None:
                os.close(stdin)
        self.workers[message.rank] = worker
        prevents = by_exec == self._fork_server.why_not
        if by_exec:
            worker.by_exec = by_exec, self._fork_server.unfit_import if prevents else ""
        self.input.begin(worker)
        if is_first and self._generation > message.generation:  # it takes nobody's place, and joins the others too
            worker.tell_generation(self._generation, self._when, self._composed(worker.rank))
        self._writer.send(
            Started(
                attempt=self.number,
                rank=message.rank,
                pid=worker.pid,
                time=worker.began,
                by_exec=by_exec,
                costs_s=self._fork_server.costs_s if prevents else 0.0,
            )
        )
        self._unstepped += [worker] if self._reports_steps else []
        self._output.begin(worker)
        if not by_exec and self._fork_server.has_torch:
            self.rendezvous.serve()  # a forked worker does not import torch, which is what would wake the store
        return True

    def _environment(self, message: StartWorker, cores: Sequence[int], generation: int) -> dict[str, str]:
        """The variables of a worker, but for those that name its files."""
        if self._sockets is None:
            self._sockets = socket_interfaces(message.env.get("MASTER_ADDR", "localhost"), self._interfaces)
        sockets = self._sockets if self._interfaces else {}
        own = {name: self.prefixes.get(name, "") + value for name, value in message.env.items()}
        own["DTRAIN_GENERATION"] = str(generation)
        own["DTRAIN_DEFAULTS"] = ",".join(name for name in message.defaults if name not in os.environ)
        env = {**self._sockets, **message.defaults, **os.environ, **sockets, **own, **self._kept_copy.variables}
        threads = message.defaults.get("OMP_NUM_THREADS")
        if cores and threads is not None and "OMP_NUM_THREADS" not in os.environ:
            env["OMP_NUM_THREADS"] = str(min(int(threads), len(cores)))
        return env

    def _never_started(self, rank: int, reason: str, restart_policy: int) -> None:
        self._writer.send(
            Exited(
                attempt=self.number,
                rank=rank,
                pid=0,
                status=127,
                ran_s=0.0,
                provoked=False,
                killer="",
                error={"type": "", "message": f"could not be started: {reason}", "where": "", "inside": ""},
                error_file=None,
                time=time.monotonic(),
                restart_policy=restart_policy,
            )
        )

    def signal(self, signum: int, *, stop: bool) -> None:
        """Signal the workers; one that has failed may be writing why, and is stopped by `stop_failed`."""
        for worker in self.running:
            if not stop or signum == signal.SIGKILL or not worker.has_failed:
                worker.signal(signum, stop=stop)

    def stop_failed(self) -> None:
        """Stop the workers that have failed and do not end by themselves."""
        for worker in self.running:
            if worker.has_failed:
                worker.signal(signal.SIGTERM, stop=True)

    def kill(self, message: KillWorker) -> None:
        """Signal one worker as somebody else would; an order of no sense is ignored."""
        worker = self.workers.get(message.rank)
        if worker is not None and message.attempt == self.number:
            worker.signal(message.signum, stop=False)

    def ended(self, wait_statuses: Mapping[int, int]) -> None:
        """Take note of children that were reaped, by pid, and report what was ours."""
        for worker in self.running:
            if worker.pid in wait_statuses:
                worker.ended_with(wait_statuses[worker.pid])
                if worker.status == -signal.SIGKILL and not worker.provoked and self._memory is not None:
                    worker.killer = self._memory.killed(worker.pid)
                self._kept_copy.worker_ended(worker.pid)  # before anybody takes its place
        self.report()

    def report(self) -> None:
        """Report workers that have ended and whose output up to then has been passed on."""
        for worker in self.workers.values():
            if worker.status is None or worker.reported:
                continue
            self._output.drain(worker)
            while not self._writer.holding and (data := worker.read_returned()):
                self._writer.send(Returned(attempt=self.number, rank=worker.rank, data=data))
            if not self._writer.holding or self._writer.closed:
                self.input.end(worker)
                worker.reported = True
                self.send_times(time.monotonic(), [worker])
                self._writer.send(worker.exited(self.number))
                has_failed = worker.status != 0 or worker.restart_policy in MEETS_SUCCESSOR
                if has_failed and not worker.provoked and worker.restart_policy:  # the others go on beside it
                    self.worker_restarts.clear(worker)

    @property
    def reported(self) -> bool:
        """Whether there is nothing more to report of it, or nobody to report it to."""
        ended = (worker for worker in self.workers.values() if worker.status is not None)
        return self._writer.closed or (not self._writer.holding and all(worker.reported for worker in ended))

    def close(self) -> None:
        """Pass on what is still to be read, release everything and remove the workers' files."""
        self.rendezvous.close_store(keep_process=True)
        self.rendezvous.release_ports()
        for worker in self.workers.values():
            self._release(worker)
        for state in self._states.values():
            state.close()
        self.step_times.close()
        self.input.close()
        self._use.close()
        self.workers, self._states = {}, {}
        self._memory = None
        clear_folder(self._folder, self.number)

    def _release(self, worker: Worker) -> None:
        self._output.end(worker)
        worker.close()

    def hold(self, hold: bool) -> None:
        """Stop or go on reading what the workers write."""
        for worker in self.workers.values():
            self._output.hold(worker, hold)


def _hint(number: int | None) -> str:
    if number == errno.E2BIG:
        return "; one argument or variable may have 128 KiB, see --export"
    if number in (errno.EMFILE, errno.EAGAIN):
        return "; this user's limits there are too low, see ulimit -n and ulimit -u"
    if number == errno.ENOSPC:
        return "; see TMPDIR"
    return ""
