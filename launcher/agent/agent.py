"""The agent's event loop, between the controller's stream and the processes of its host. It decides nothing.

Single-threaded, with one selector. It lives through all attempts of a run. End of input means that the controller is
gone: it stops everything. It does the same when its lease has run out (cleanup/lease.py).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from functools import partial
from typing import NoReturn

from launcher import __version__
from launcher.agent.attempt import FUNCTION, Attempt
from launcher.agent.attempt_end import AttemptEnd
from launcher.agent.cleanup.guard import reap
from launcher.agent.cleanup.lease import ENDS_WITHIN_S, Lease, Limits
from launcher.agent.cleanup.leftovers import AgentIdentity, LeftoverSweep, find_killed_runs
from launcher.agent.cleanup.run_tag import RunTag, folders_for_files, lock_folder, make_folder
from launcher.agent.debugging.channels import DebuggerChannels, Rest
from launcher.agent.host_facts import find_facts, likely_workers
from launcher.agent.kept_copy import KeptCopy
from launcher.agent.observation.evidence import EvidenceRound
from launcher.agent.rendezvous import StoreProcess
from launcher.agent.sent_files import moved_orders, moved_start
from launcher.agent.stream_writer import StreamWriter
from launcher.agent.workers.warm_start import ForkServer, Warmth
from launcher.errors import ProtocolError
from launcher.frozen import replace
from launcher.machine import processes
from launcher.machine.network import listening_address
from launcher.protocol.commands import (
    CloseDebugger,
    Collect,
    EndAttempt,
    Function,
    KillWorker,
    LoseHost,
    NextGeneration,
    OpenDebugger,
    OpenStore,
    Prepare,
    ReservePorts,
    RestartWorker,
    RestClocks,
    SharePrefixes,
    SignalWorkers,
    StartWorker,
    Stop,
    Suspend,
)
from launcher.protocol.frames import Decoder
from launcher.protocol.message import AGENT_TREES, AGENT_WORKDIR, HEARTBEAT_S, PREAMBLE, PROTOCOL, Message
from launcher.protocol.reports import Bye, Hello, Swept
from launcher.protocol.two_way import ChannelData, ChannelTaken, Heartbeat

FLUSH_S = 5.0
READ_BYTES = 1 << 16


class Agent:
    """Owns the current attempt, the work under way on it, and both directions of the controller's stream."""

    def __init__(self, run_tag: RunTag, limits: Limits, warmth: Warmth) -> None:
        self._run_tag = run_tag
        self._identity = str(AgentIdentity.ours(run_tag))
        self._warmth = warmth
        self._limits = limits
        self._guard = os.getppid()
        self._selector = selectors.DefaultSelector()
        self._decoder = Decoder()
        self._writer = StreamWriter(1, self._selector, self._hold)
        self._lease = Lease(limits)
        self._prepared: Prepare | None = None
        # Read before the user's own exports can change it: "client address, port, server address, port".
        self._reached_at = ([*os.environ.get("SSH_CONNECTION", "").split(" "), "", ""])[2] or None
        self._folder = ""  # for the workers' files, once it is made
        self._killed_runs: list[str] = []  # identities of their agents
        self._fork_server = ForkServer(run_tag, self._selector, warmth)
        self._store_process = StoreProcess(self._fork_server, self._selector)
        self._kept_copy = KeptCopy()
        self._attempt: Attempt | None = None
        self._leftovers: LeftoverSweep | None = None  # work under way, from here...
        self._suspension: processes.Suspension | None = None
        self._evidence_round = EvidenceRound(self._writer)
        self._debuggers = DebuggerChannels(self._writer, self._selector)
        self._rest = Rest()
        self._attempt_end: AttemptEnd | None = None  # ...to here
        self._ending_attempt: int | None = None  # answered with Swept once it has ended
        self._tree = ""  # where code that was sent lies
        self._reason: str | None = None  # set once the agent will exit: why; empty after a Stop
        self._left: list[str] = []
        self._done = False
        self._next_heartbeat = time.monotonic() + HEARTBEAT_S
        self._terminated = False

    def run(self) -> int:
        """Serve until stopped and swept; return 0 if no process is left."""
        wake_read, wake_write = os.pipe()
        for descriptor in (0, 1, wake_read, wake_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        ignored = (signal.SIGCHLD, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # USR: SLURM sends it to all
        for signum in ignored:
            signal.signal(signum, lambda *_: None)
        signal.signal(signal.SIGTERM, self._note_sigterm)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, lambda *_: None)
        self._selector.register(0, selectors.EVENT_READ, self._read_controller)
        self._selector.register(wake_read, selectors.EVENT_READ, partial(self._children_ended, wake_read))
        self._writer.put(PREAMBLE)
        self._writer.send(
            Hello(
                protocol=PROTOCOL,
                version=__version__,
                python="{}.{}.{}".format(*sys.version_info[:3]),
                hostname=socket.gethostname(),
                pid=os.getpid(),
                agent_identity=self._identity,
                time=time.monotonic(),
            )
        )
        try:
            while not self._done:
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                self._on_time(time.monotonic())
            self._writer.flush(FLUSH_S)
        finally:
            self._run_tag.remove()
            if os.getppid() == self._guard:
                os.kill(self._guard, signal.SIGCONT)  # a stopped guard would stay for ever
        return 1 if self._left else 0

    def _note_sigterm(self, *_: object) -> None:
        self._terminated = True

    def _pause_s(self) -> float:
        now = time.monotonic()
        pauses = [self._next_heartbeat - now, self._lease.end - now, self._fork_server.pause_s(now)]
        pauses += [work.pause_s for work in (self._leftovers, self._suspension, self._evidence_round) if work]
        pauses.append(self._debuggers.pause_s)
        if self._attempt_end is not None and self._leftovers is None:
            pauses += [self._attempt_end.pause_s(now), self._kept_copy.pause_s(now)]
        elif self._attempt is not None and self._suspension is None:
            pauses.append(self._attempt.pause_s)
        return max(0.0, min(pauses))

    def _on_time(self, now: float) -> None:
        """Do what is due, and advance all work under way."""
        if now >= self._lease.end:
            self._lease.used_up(now)
            reason = f"it received nothing from dtrain for {self._lease.duration_s:g} s"
            self._exit(signal.SIGKILL, reason)
        if self._terminated:
            self._terminated = False
            lost = os.getppid() != self._guard
            self._exit(signal.SIGTERM, "its guard was killed" if lost else "it received SIGTERM")
        if now >= self._next_heartbeat:
            self._beat(now)
        if self._leftovers is not None and self._leftovers.step():
            self._leftovers_swept(self._leftovers)
        if self._suspension is not None:
            self._suspension.step()
        self._evidence_round.step()
        self._debuggers.step()
        self._fork_server.step(now)
        if self._attempt is not None:
            self._attempt.report()
            if self._attempt_end is None and self._suspension is None and now < self._lease.end:
                self._attempt.go_on()
                self._attempt.report_steps()
                self._attempt.input.look()
        if self._attempt_end is not None and self._leftovers is None and self._attempt_end.step(now):
            self._ended(self._attempt_end)

    def _beat(self, now: float) -> None:
        self._next_heartbeat = now + (HEARTBEAT_S if self._prepared is None else self._prepared.heartbeat_s)
        if self._attempt is not None:
            self._attempt.look(counts=self._suspension is None and not self._rest.now)
        if not self._writer:  # else the controller does not read; unsent data will show that we live
            attempt = self._attempt
            self._writer.send(Heartbeat(now) if attempt is None else attempt.heartbeat(now))
            if attempt is not None:
                attempt.send_times(now)
                if self._attempt_end is None:
                    attempt.send_use(now)

    def _kill_at(self, signum: int) -> float:
        """Return when to kill workers that get this signal now."""
        grace_s = 0.0 if self._prepared is None or signum == signal.SIGKILL else self._prepared.grace_s
        return time.monotonic() + grace_s

    def _hold(self, hold: bool) -> None:
        if self._attempt is not None:
            self._attempt.hold(hold)

    def _children_ended(self, wake_read: int) -> None:
        try:
            os.read(wake_read, READ_BYTES)
        except BlockingIOError:
            return
        wait_statuses = reap()
        self._evidence_round.reaped(wait_statuses)
        for server in self._fork_server.processes:
            if server.pid in wait_statuses:
                server.ended()
        if self._kept_copy.pid in wait_statuses:
            self._kept_copy.ended()
        store = self._store_process.pid
        last_words = self._store_process.ended(wait_statuses[store]) if store in wait_statuses else None
        if self._attempt is not None:
            if last_words is not None:
                self._attempt.rendezvous.store_ended(last_words)
            self._attempt.ended(wait_statuses)
        self._debuggers.reaped(wait_statuses)

    def _read_controller(self) -> None:
        try:
            data = os.read(0, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(0)
            self._writer.close()
            self._exit(signal.SIGTERM, "the controller is gone")
            return
        try:
            for message in self._decoder.feed(data):
                self._obey(message)
        except ProtocolError as error:
            print(f"dtrain agent: {error}", file=sys.stderr)
            self._exit(signal.SIGTERM, str(error))

    def _obey(self, message: Message) -> None:
        attempt = self._attempt
        match message:
            case Heartbeat():
                self._lease.beat(message.time, now := time.monotonic())
                if attempt is not None:
                    attempt.step_times.asked = (message.sent, now)
            case Prepare():
                self._prepare(message)
            case Function():
                self._keep_function(message)
            case StartWorker():
                self._begin(moved_start(message, self._tree))
            case OpenStore() | ReservePorts() | SharePrefixes():
                self._begin(message)
            case RestartWorker() if attempt is not None and self._attempt_end is None:
                attempt.restart(message)
            case NextGeneration() if attempt is not None:
                attempt.announce(message)
            case LoseHost():
                self._vanish()
            case KillWorker() if attempt is not None:
                attempt.kill(message)
            case SignalWorkers() if attempt is not None:
                attempt.signal(message.signum, stop=False)
            case Suspend():
                self._suspend(message.suspended)
            case Collect():
                self._evidence_round.begin(message, attempt if self._attempt_end is None else None)
            case OpenDebugger():
                self._debuggers.open(message, attempt if self._attempt_end is None else None)
            case ChannelData() | ChannelTaken() if message.channel > 0:
                self._debuggers.pass_on(message)
            case ChannelData() if attempt is not None and self._attempt_end is None:
                attempt.input.add(message)
            case CloseDebugger():
                self._debuggers.close(message)
            case RestClocks():
                self._rest.update(message.resting)
            case EndAttempt():
                self._end_attempt(message)
            case Stop():
                self._exit(message.signum, "")

    def _keep_function(self, message: Function) -> None:
        try:
            file = os.open(f"{self._folder}/{FUNCTION}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(file, "wb") as function:
                function.seek(message.at)
                function.write(message.data)
        except OSError as error:  # the function is incomplete for the workers
            print(f"dtrain agent: the function cannot be written: {error}", file=sys.stderr)

    def _vanish(self) -> NoReturn:
        for process in self._run_tag.members(ancestor=os.getpid()):
            processes.send(process, signal.SIGKILL)
        if os.getppid() == self._guard:
            os.kill(self._guard, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def _prepare(self, message: Prepare) -> None:
        message = replace(message, workdir=os.environ.pop(AGENT_WORKDIR, message.workdir))
        self._debuggers.trees = os.environ.pop(AGENT_TREES, "").split(os.pathsep)
        self._tree = self._debuggers.trees[0]
        self._prepared = message = moved_orders(message, self._tree, os.environ)
        self._lease.begin(message.lease_s, time.monotonic())
        self._next_heartbeat = time.monotonic()
        os.environ.update(message.export)
        first_here = not message.lost_agents and message.part == 0  # of the run, on this machine
        self._killed_runs = find_killed_runs() if first_here else []
        self._leftovers = LeftoverSweep(message.lost_agents or self._killed_runs)

    def _leftovers_swept(self, leftovers: LeftoverSweep) -> None:
        """Answer Prepare once leftovers of earlier agents are gone, or known to stay."""
        assert self._prepared is not None
        self._leftovers = None
        problems = []
        try:
            self._folder = make_folder(self._run_tag.value, self._identity)
            lock_folder(self._folder)
            self._rest.set_folder(self._folder)
            self._kept_copy.open(self._folder)
        except OSError as error:
            tried = ", ".join(folders_for_files())
            problems.append(f"no temporary folder can be made in {tried} ({error.strerror}); see TMPDIR")
        if self._run_tag.cgroup is not None:
            self._run_tag.cgroup.make()
        is_counted = self._prepared.workers.isdigit()
        if is_counted:  # as early as can be: what it imports takes seconds
            self._fork_server.prepare(self._prepared, int(self._prepared.workers))
        self._lease.rest()  # drivers may take seconds to answer, and no worker runs yet
        facts = find_facts(self._prepared, problems=problems, left=[] if self._killed_runs else leftovers.left)
        if self._killed_runs:
            runs = len(self._killed_runs)
            facts = replace(facts, killed_runs=runs, ended=leftovers.ended, not_ended=leftovers.left)
        if not is_counted:
            self._fork_server.prepare(self._prepared, likely_workers(self._prepared.workers, facts))
        if self._prepared.parts > 1:
            os.sched_setaffinity(0, facts.cores)
        self._lease.renew(time.monotonic())  # before sending, so that it never starts later than the controller assumes
        self._writer.send(facts)

    def _begin(self, message: OpenStore | ReservePorts | SharePrefixes | StartWorker) -> None:
        """Open an attempt's store, prepare for workers or start one; create the attempt at the first such order."""
        assert self._prepared is not None
        if self._attempt_end is not None or time.monotonic() >= self._lease.end:  # frozen meanwhile: the lease is over
            return
        if self._attempt is None:
            self._attempt = Attempt(
                message.attempt,
                self._prepared,
                folder=self._folder,
                run_tag=self._run_tag,
                selector=self._selector,
                writer=self._writer,
                store_process=self._store_process,
                fork_server=self._fork_server,
                kept_copy=self._kept_copy,
            )
        if isinstance(message, OpenStore):
            self._attempt.rendezvous.open_store(message, self._address(message))
        elif isinstance(message, ReservePorts):
            self._attempt.rendezvous.reserve_ports(message, self._address(message))
        elif isinstance(message, SharePrefixes):
            self._attempt.prefixes = message.prefixes
        else:
            self._attempt.start(message)

    def _address(self, message: OpenStore | ReservePorts) -> str:
        """Return this host's address for the other hosts: the one in the order, or a chosen one."""
        assert self._prepared is not None
        reached_at = self._reached_at if self._prepared.own_connection else None
        return listening_address(message.address, self._prepared.interfaces, message.towards, reached_at)

    def _suspend(self, suspended: bool) -> None:
        if suspended and self._suspension is None and self._attempt_end is None:
            self._lease.rest()
            self._suspension = processes.Suspension(self._members)
            self._suspension.step()
        elif not suspended:
            self._go_on()

    def _go_on(self) -> None:
        if self._suspension is not None:
            self._suspension.release()
            self._suspension = None
            self._lease.renew(time.monotonic())

    def _members(self) -> list[processes.Process]:
        servers = (server.pid for server in self._fork_server.processes)
        kept = (self._guard, self._store_process.pid, *servers, self._kept_copy.pid)
        spare = [pid for pid in kept if pid is not None]
        return self._run_tag.members(ancestor=os.getpid(), spare=spare)

    def _end_attempt(self, message: EndAttempt) -> None:
        self._ending_attempt = message.attempt
        if self._attempt_end is None and (self._attempt is None or self._attempt.idle):
            self._close_attempt()
            self._writer.send(Swept(attempt=message.attempt, swept=0, saved=0, left=[]))
            self._ending_attempt = None
            return
        self._end(message.signum)

    def _exit(self, signum: int, reason: str) -> None:
        """Start to end everything and exit, or hurry if that was started already; the first reason counts."""
        if self._reason is not None or self._lease.over:
            self._kept_copy.kill()
        if self._reason is None:
            self._reason = reason
        if reason:
            self._fork_server.stays = False
        self._limits.ending_by = self._kill_at(signum) + ENDS_WITHIN_S
        if self._leftovers is not None:
            self._leftovers.hurry()
        self._end(signum)

    def _end(self, signum: int) -> None:
        self._evidence_round.stop()
        self._debuggers.stop("the attempt ends")
        if self._attempt is not None:
            self._attempt.worker_restarts.stop()
        if self._attempt_end is not None:
            self._attempt_end.hurry(signum, self._kill_at(signum))
        else:
            self._attempt_end = AttemptEnd(
                self._attempt,
                self._run_tag,
                self._store_process,
                self._fork_server,
                self._kept_copy,
                signum=signum,
                kill_at=self._kill_at(signum),
            )
        self._attempt_end.final = self._reason is not None
        self._go_on()  # after the signal, so that workers see it first

    def _ended(self, attempt_end: AttemptEnd) -> None:
        """Answer once everything is reported; then wait for the next attempt, or exit."""
        if self._attempt is not None and not self._attempt.reported and not self._lease.over:
            return  # the controller reads slowly
        if self._reason is not None and not self._kept_copy.finished(time.monotonic()):
            return
        saved = 0 if self._attempt is None else self._attempt.saved
        swept, self._left = attempt_end.swept, attempt_end.left
        swept += 0 if self._attempt is None else self._attempt.worker_restarts.swept
        self._close_attempt()
        self._attempt_end = None
        if self._ending_attempt is not None:
            self._writer.send(Swept(attempt=self._ending_attempt, swept=swept, saved=saved, left=self._left))
            self._ending_attempt, swept = None, 0
        if self._reason is not None:
            self._store_process.kill()  # it may have been kept when the end began
            not_kept = self._keep_warm()
            self._fork_server.kill()
            bye = Bye(swept=swept, left=self._left, reason=self._reason, not_kept=not_kept)
            self._writer.send(replace(bye, was_warm=self._fork_server.was_warm, cold=self._fork_server.cold))
            self._done = True

    def _keep_warm(self) -> str:
        """Keep the fork server if that was requested; return why it does not stay."""
        prepared = self._prepared
        if prepared is None:
            return "the run ended there before it had started"
        if not prepared.keep_warm_s:
            return ""
        if not self._fork_server.stays or self._left:
            return self._fork_server.why_not or "the run did not end in good order"
        return self._fork_server.keep(prepared)

    def _close_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
