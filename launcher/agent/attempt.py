"""An attempt on this host: its workers and their shared resources. Owned by agent.py, ended by attempt_end.py."""

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
from launcher.agent.observation.flight_recorder import read_of_failed, recorder_variables
from launcher.agent.observation.signs_of_life import SignsOfLife
from launcher.agent.observation.step_times import StepTimesReader
from launcher.agent.rendezvous import Rendezvous, StoreProcess
from launcher.agent.stream_writer import StreamWriter
from launcher.agent.workers.memory_file import MemoryFile
from launcher.agent.workers.output_pipes import OutputPipes
from launcher.agent.workers.standard_input import StandardInput
from launcher.agent.workers.warm_start import ForkServer
from launcher.agent.workers.worker import BOOTSTRAP, Files, Worker, make_fifo, spawn
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
    from launcher.machine.numa import Topology
    from launcher.machine.oom import OomWatch

FUNCTION = "function"  # file in the agent's folder with the function that workers call

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
        self.workers: dict[int, Worker] = {}  # by rank, the newest
        self.prefixes: dict[str, str] = {}  # prepended to the values of these variables of workers
        self.worker_restarts = WorkerRestarts(run_tag, grace_s=prepared.grace_s)
        self.signs = SignsOfLife()
        self.step_times = StepTimesReader(number, writer, folder=folder, at_most=prepared.step_times)
        self.use = HostUseWatch(number)
        self._reports_steps = prepared.reports_steps
        self._unstepped: list[Worker] = []  # their first step is not reported yet
        self._heartbeat_s = prepared.heartbeat_s
        self._workdir = prepared.workdir
        self._grace_s = prepared.grace_s
        self._orders: dict[int, StartWorker] = {}
        self._waiting: list[StartWorker] = []  # until the fork server has finished its imports
        # Cleared for a restart, but waiting for those imports too: the order, and processes that could not be ended.
        self._cleared: list[tuple[RestartWorker, str]] = []
        self._fork_server = fork_server
        self._records = 0  # files of workers' imports seen at the last look
        self._kept_copy = kept_copy
        self._lives: dict[int, int] = {}  # by rank, restarts of it alone
        self._generation, self._when = 0, "now"  # the newest that was announced to workers
        self._states: dict[int, MemoryFile] = {}  # by rank; passed from a process of the rank to its replacement
        self._before = (0, 0)  # steps and checkpoints of workers that were replaced
        self._folder = folder
        self._run_tag = run_tag
        self._writer = writer
        self._interfaces = prepared.interfaces
        self._records_collectives = prepared.flight_recorder
        self._sockets: dict[str, str] | None = None  # variables for gloo and NCCL, once known
        self._cores = _CoreChooser()
        self._memory: OomWatch | None = None
        self.rendezvous = Rendezvous(number, selector, writer, store_process)
        self._output = OutputPipes(selector, writer)
        self.input = StandardInput(selector, writer)

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.status is None]

    @property
    def idle(self) -> bool:
        """Return whether nothing ever ran: no worker was started, and no client connected to the store."""
        return not self.workers and not self.rendezvous.is_used

    @property
    def progress(self) -> int:
        """A number that changes whenever a worker writes output, makes a step, saves, or waits for input."""
        return (
            self._output.read_bytes
            + self.input.waits
            + sum(self._before)
            + sum(sum(worker.progress) for worker in self.workers.values())
        )

    def look(self, *, counts: bool) -> None:
        """Look for workers that failed but do not end, are silent or stopped, and for the kernel's OOM kills.

        Call it regularly, so that an event long past is not taken for the cause of a later one. `counts` is False while
        the workers are suspended.
        """
        reader = self.input.waiting_rank()
        self.signs.look(self.running, time.monotonic(), pause_s=self._heartbeat_s, counts=counts, reader=reader)
        if self._memory is not None:
            self._memory.look()
        for worker in self.running:
            failing = worker.look(self.number, grace_s=self._grace_s)
            if failing is not None and not worker.restart_policy:  # else the others continue: only its end counts
                self._writer.send(failing)
        self._learn_imports()

    def _learn_imports(self) -> None:
        """Make late imports of the workers in the fork server, once the number of their records has settled."""
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
        """Send the use of memory and GPUs, if it is due."""
        if self.running and (use := self.use.look(self.running, self._gpus, now)) is not None:
            self._writer.send(use)

    @property
    def _gpus(self) -> dict[int, str]:
        """The ids of NVIDIA GPUs by rank."""
        orders = self._orders.values()
        return {order.rank: order.gpu for order in orders if order.gpu and "CUDA_VISIBLE_DEVICES" in order.env}

    def device_troubles(self) -> list[str]:
        """Return a line for each trouble of this host's GPUs since the first worker, by kernel log and driver."""
        if self._memory is None:
            return []
        self._memory.look()
        return [*self._memory.device_errors, *self.use.gpu_troubles(self._gpus)]

    def send_times(self, now: float, workers: Iterable[Worker] | None = None) -> None:
        """Send new step times of all workers, or of some."""
        looked_at = [*(self.workers.values() if workers is None else workers)]
        for worker in looked_at:
            self.step_times.count(worker.rank, *worker.counted, now)
        self.step_times.send(now, [worker.rank for worker in looked_at])

    @property
    def pause_s(self) -> float:
        """Time until something is due."""
        steps_s = STEP_LOOK_S if self._unstepped else float("inf")
        return min(self.worker_restarts.pause_s, self.input.pause_s, steps_s)

    def report_steps(self) -> None:
        """Report the first step of each worker, if the controller wants it."""
        for worker in [*self._unstepped]:
            if worker.status is not None or worker.progress[0]:
                self._unstepped.remove(worker)
                if worker.status is None:
                    self._writer.send(Stepped(attempt=self.number, rank=worker.rank))

    @property
    def saved(self) -> int:
        """Number of checkpoints that the workers reported."""
        return self._before[1] + sum(worker.progress[1] for worker in self.workers.values())

    @property
    def is_resilient(self) -> bool:
        """Return whether the workers here can join a new composition: those that run, and those that start again."""
        unfinished = [worker for worker in self.workers.values() if worker.status != 0 or worker.restart_policy]
        return bool(self.workers) and all(worker.restart_policy == RESILIENT for worker in unfinished)

    @property
    def steps(self) -> int:
        """Number of training steps that the workers reported."""
        return self._before[0] + sum(worker.progress[0] for worker in self.workers.values())

    def start(self, message: StartWorker) -> None:
        """Start a worker and report it; if there is a fork server, wait until its imports are done."""
        self._orders[message.rank] = message
        self.input.expect(message)
        self._generation = max(self._generation, message.generation)
        if self._must_wait(message):
            self._waiting.append(message)
        else:
            self._start(message, restart_policy=message.restart_policy)

    def restart(self, message: RestartWorker) -> None:
        """Restart a worker that failed or was never started, once its leftover processes are ended.

        Ignore an order that does not apply.
        """
        worker = self.workers.get(message.rank)
        has_failed = message.rank in self._orders if worker is None else worker.reported
        if has_failed and message.attempt == self.number:
            self.worker_restarts.add(message)

    def announce(self, message: NextGeneration) -> None:
        """Announce a new composition of this attempt to the workers. Numbers only grow; ignore any other."""
        if message.attempt == self.number and message.number > self._generation:
            self._generation, self._when = message.number, message.when
            for rank, variables in message.variables.items():
                if (order := self._orders.get(int(rank))) is not None:
                    self._orders[int(rank)] = replace(order, env={**order.env, **variables})
            for worker in self.running:
                worker.announce_generation(self._generation, self._when, self._composed(worker.rank))
            if message.when != "at_commit":  # until then they train
                self.signs.regroup(self.running)  # after the announcement: each finishes one more step at most

    def is_script(self, rank: int) -> bool:
        """Return whether a worker is started through bootstrap.py."""
        return bool(self._orders[rank].through)

    def _composed(self, rank: int) -> dict[str, str]:
        """Return a worker's variables that depend on the composition, as they are now."""
        env = self._orders[rank].env
        return {name: env[name] for name in COMPOSED if name in env}

    def go_on(self) -> None:
        """Start workers that wait for imports, and restart those that are cleared."""
        while self._waiting and not self._must_wait(self._waiting[0]):
            waiting = self._orders[self._waiting.pop(0).rank]  # with its newest variables
            self._start(waiting, restart_policy=waiting.restart_policy)
        self._cleared += self.worker_restarts.step()
        while self._cleared and not self._must_wait(self._orders[self._cleared[0][0].rank]):
            order, left = self._cleared.pop(0)
            first, old = self._orders[order.rank], self.workers.get(order.rank)  # None: it was never started
            restart_policy = first.restart_policy if old is None else old.restart_policy
            if left:
                self._never_started(order.rank, f"processes that it left cannot be ended: {left}", restart_policy)
                continue
            env = {**first.env, "TORCHELASTIC_RESTART_COUNT": str(order.restart)}
            self._lives[order.rank] = self._lives.get(order.rank, 0) + 1
            if self._start(replace(first, env=env), restart_policy=restart_policy) and old is not None:
                self._before = (self._before[0] + old.progress[0], self._before[1] + old.progress[1])
                self._release(old)

    def _must_wait(self, message: StartWorker) -> bool:
        """Return whether a worker must wait for the fork server's imports; pass on how long it may."""
        if message.through and self._fork_server.is_loading:
            self._fork_server.wait_s(message.wait_s)
            return True
        return False

    def _start(self, message: StartWorker, *, restart_policy: int) -> bool:
        """Start a worker and report it; return whether it runs."""
        files = Files(self._folder, self.number, message.rank, self._lives.get(message.rank, 0))
        argv = own = message.argv
        if message.through:
            more = [f"{self._folder}/{FUNCTION}", str(files.returned)] if message.through == "function" else []
            own = [sys.executable, "-u", str(BOOTSTRAP), message.through, *argv, *more]
        argv = [*message.prefix, *own]
        self.rendezvous.release_ports()
        is_first = message.rank not in self._lives
        try:
            cores = self._cores.choose(message)
        except DtrainError as error:
            self._never_started(message.rank, str(error), restart_policy)
            return False
        env = self._environment(message, cores, message.generation if is_first else self._generation)
        if self._records_collectives:
            env = {**env, **recorder_variables(env, files)}
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
            own_argv=own,
        )
        try:
            if self._memory is None:
                from launcher.machine.oom import OomWatch  # only if workers are started

                self._memory = OomWatch()
            if message.rank not in self._states:
                path = f"{self._folder}/{self.number}-{message.rank}.state"
                self._states[message.rank] = MemoryFile("state", path, in_memory=not message.prefix)
            if self._records_collectives and message.through:
                make_fifo(files.asked)
            if self._generation:
                files.write_generation(self._generation, self._when, self._composed(message.rank))
            env["DTRAIN_STATE_FILE"] = self._states[message.rank].path
            now = time.monotonic()
            env["DTRAIN_TIMELINE_FILE"] = self.step_times.open(message.rank, now, in_memory=not message.prefix)
            stdin = self.input.open(message.rank)
            try:
                worker = make(stdin=stdin, start=spawn if by_exec else self._fork_server.fork)
            except OSError as error:
                if by_exec:
                    raise
                by_exec = f"it cannot be forked: {error}"
                worker = make(stdin=stdin, start=spawn)
        except OSError as error:
            named = error.filename or (self._folder if error.errno == errno.ENOSPC else argv[0])
            reason = f"{named}: {error.strerror}{_hint(error.errno)}"
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
        if is_first and self._generation > message.generation:  # no predecessor: it must join the others as well
            worker.announce_generation(self._generation, self._when, self._composed(worker.rank))
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
            self.rendezvous.serve()  # a forked worker does not import torch, so the store has no time to start
        return True

    def _environment(self, message: StartWorker, cores: Sequence[int], generation: int) -> dict[str, str]:
        """Return the environment of a worker, except the variables that name its files."""
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
        """Signal the workers. A failed one may be writing its error; `stop_failed` stops it later."""
        for worker in self.running:
            if not stop or signum == signal.SIGKILL or not worker.has_failed:
                worker.signal(signum, stop=stop)

    def stop_failed(self) -> None:
        """Stop workers that have failed but did not end by themselves."""
        for worker in self.running:
            if worker.has_failed:
                worker.signal(signal.SIGTERM, stop=True)

    def kill(self, message: KillWorker) -> None:
        """Signal one worker as another process would; ignore an order that does not apply."""
        worker = self.workers.get(message.rank)
        if worker is not None and message.attempt == self.number:
            worker.signal(message.signum, stop=False)

    def ended(self, wait_statuses: Mapping[int, int]) -> None:
        """Record children that were reaped, by pid, and report the workers among them."""
        for worker in self.running:
            if worker.pid in wait_statuses:
                worker.ended_with(wait_statuses[worker.pid])
                if worker.status == -signal.SIGKILL and not worker.provoked and self._memory is not None:
                    worker.killer = worker.killer or self._memory.killed(worker.own_pid)
                self._kept_copy.worker_ended(worker.own_pid)  # before a replacement starts
        self.report()

    def report(self) -> None:
        """Report workers that have ended, once their output is passed on."""
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
                self._writer.send(
                    worker.exited(self.number, read_of_failed(worker) if self._records_collectives else None)
                )
                has_failed = worker.status != 0 or worker.restart_policy in MEETS_SUCCESSOR
                if has_failed and not worker.provoked and worker.restart_policy:  # the other workers continue
                    self.worker_restarts.clear(worker)

    @property
    def reported(self) -> bool:
        """Return whether there is nothing more to report, or the controller is gone."""
        ended = (worker for worker in self.workers.values() if worker.status is not None)
        return self._writer.closed or (not self._writer.holding and all(worker.reported for worker in ended))

    def close(self) -> None:
        """Pass on unread output, release everything and remove the workers' files."""
        self.rendezvous.close_store(keep_process=True)
        self.rendezvous.release_ports()
        for worker in self.workers.values():
            self._release(worker)
        for state in self._states.values():
            state.close()
        self.step_times.close()
        self.input.close()
        self.use.close()
        self.workers, self._states = {}, {}
        self._memory = None
        clear_folder(self._folder, self.number)

    def _release(self, worker: Worker) -> None:
        self._output.end(worker)
        worker.close()

    def hold(self, hold: bool) -> None:
        """Pause or resume reading the workers' output."""
        self._output.hold(hold)


class _CoreChooser:
    """Chooses the processors that a worker is bound to. Reads the topology once, for the first: it asks drivers."""

    def __init__(self) -> None:
        # With the ids of the GPUs and their NUMA nodes.
        self._topology: tuple[Topology, tuple[str, ...], list[int]] | None = None

    def choose(self, message: StartWorker) -> tuple[int, ...]:
        """Return the processors to bind a worker to; empty: no binding. Raises DtrainError."""
        if not message.numa_binding:
            return ()
        from launcher.machine import numa, processors
        from launcher.machine.gpus.visible import find_gpus

        if self._topology is None:
            gpus = find_gpus(os.environ)
            self._topology = numa.read_topology(processors.cores()), gpus.ids, numa.nodes_of_gpus(gpus)
        topology, ids, nodes = self._topology
        own = ids.index(message.gpu) if nodes and message.gpu in ids else message.local_rank
        return numa.choose_cores(message.numa_binding, topology, nodes, own, message.local_world_size)


def _hint(number: int | None) -> str:
    if number == errno.E2BIG:
        return "; the limit is 128 KiB for one argument or variable, see --export"
    if number in (errno.EMFILE, errno.EAGAIN):
        return "; this user's limits there are too low, see ulimit -n and ulimit -u"
    if number == errno.ENOSPC:
        return "; see TMPDIR"
    return ""
