"""The job against thousands of random worlds: hosts that fail, freeze, vanish and come back, signals at any time.

A world is a queue of events on a simulated clock. Its agents are honest, its hosts, workers and networks are not. It
knows at every moment which worker of which attempt lives where, and what failed first. `python
tests/launcher/job/test_job_simulated.py SEED` replays one world and prints every event and command.
"""

from __future__ import annotations

import heapq
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from testbed.job_drive import PYTHON, messages, running
from testbed.present import present
from testbed.seeds import Seeds

from launcher import __version__
from launcher.agent.cleanup.lease import Lease, Limits
from launcher.hangs.watch import HangPolicy
from launcher.hosts.host import Host, HostKind
from launcher.job.attempt import AttemptState
from launcher.job.ending import Outcome
from launcher.job.events import (
    AgentMessage,
    Close,
    Command,
    Connected,
    Event,
    Lost,
    Notice,
    Open,
    ReaderBlocked,
    SaveEvidence,
    Send,
    Signalled,
    Slept,
    SuspendSelf,
    Tick,
)
from launcher.job.failures.failure import SLACK_S, Failure, FailureKind, looks_like_consequence
from launcher.job.fleet import BEAT, HostPhase
from launcher.job.job import Job
from launcher.job.recovery.restarts import is_free
from launcher.job.run import Phase
from launcher.placement.job_spec import CommandKind, JobSpec
from launcher.placement.job_spec import WorkerCommand as Program
from launcher.protocol.commands import (
    Collect,
    EndAttempt,
    KillWorker,
    NextGeneration,
    OpenStore,
    Prepare,
    RestartWorker,
    SignalWorkers,
    StartWorker,
    Stop,
    Suspend,
)
from launcher.protocol.message import MEETS_SUCCESSOR, PROTOCOL, RESILIENT, Report
from launcher.protocol.reports import (
    Bye,
    Collected,
    Evidence,
    Exited,
    Facts,
    Failing,
    Hello,
    Started,
    StoreFailed,
    StoreOpened,
    Swept,
)
from launcher.protocol.two_way import Heartbeat

WORLDS, CHUNKS = int(os.environ.get("SIMULATED_WORLDS", "500")), 20
# Each of these has once shown an error, here or in the job.
KEPT = (
    787905405, 271581307, 1640485759, 4049407496, 2752361647, 3141837396, 649958285, 4061452041, 2847861547, 2123441745,
    1354199484, 271747556, 3303918089, 1074928586, 2085579785, 3033561174,
)  # fmt: skip
LIMITS = Limits.shared()  # for no one: the guards here know by themselves
T0 = 1000.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNMET = {"type": "RendezvousError", "message": "waited for the others", "where": "t.py:5", "inside": ""}
PEER = {"type": "RuntimeError", "message": "Connection closed by peer [10.0.0.2]:4711", "where": "t.py:3", "inside": ""}


@dataclass
class Worker:
    """A worker process. `hangs`: it does nothing more, until someone kills it. `restart_policy` as in Exited.

    `generation` is the newest that it has received, `when` it is to meet the others then, as one of `size`; `met` is
    the one in which it met all of them.
    `failing`: it has failed, and its process goes on.
    """

    agent: Agent = field(repr=False)
    attempt: int
    rank: int
    began: float
    restart_policy: int = 0
    generation: int = 0
    when: str = "now"
    size: int = 0
    met: int = 0
    enters_at: float = float("inf")  # its resilient function
    alive: bool = True
    hangs: bool = False
    is_stopped: bool = False  # by a signal, for a while
    was_stopped: bool = False
    failing: Failing | None = None


@dataclass
class Root:
    """Something that failed by itself; the job has the news since `told_at`, and `alone` the attempt went on."""

    attempt: int
    kind: FailureKind
    host: str
    rank: int | None
    at: float
    told_at: float = float("inf")
    alone: bool = False


@dataclass
class Node:
    """A host. `frozen`: nothing runs there. No one notices what does not pass: `cut` both ways, `mute` from it,
    `deaf` to it.
    """

    host: Host
    clock: float
    latency: float
    joins_at: float = 0.0  # not reachable before
    problem: str = ""  # why it is not usable
    slow_evidence: bool = False
    mute: bool = False
    deaf: bool = False
    frozen: bool = False
    agent: Agent | None = None  # the newest
    workers: list[Worker] = field(default_factory=list)
    starts: set[tuple[int, int, int]] = field(default_factory=set)  # attempt, rank, TORCHELASTIC_RESTART_COUNT
    postponed: list[Callable[[], None]] = field(default_factory=list)

    @property
    def cut(self) -> bool:
        return self.mute and self.deaf

    @property
    def troubled(self) -> bool:
        return self.mute or self.deaf or self.frozen


@dataclass
class Agent:
    """The agent behind one link. `up` and `down` are what waits for the cut to end; `lease_end` is by our clock."""

    node: Node
    link: int
    alive: bool = True
    open: bool = True  # the link
    ending: bool = False
    then: Report | None = None  # what it says at its end
    suspended: bool = False
    cleans: bool = False
    lease: Lease = field(default_factory=lambda: Lease(LIMITS))
    lease_end: float = float("inf")
    kill_at: float = float("inf")
    up: list[Report] = field(default_factory=list)
    down: list[object] = field(default_factory=list)
    inbox: list[object] = field(default_factory=list)
    last_up: float = 0.0
    last_down: float = 0.0
    attempt: int | None = None
    generation: int = 0
    when: str = "now"
    envs: dict[int, dict[str, str]] = field(default_factory=dict)
    progress: int = 0
    identity: str = ""


class World:
    """One seeded run of a job."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.seed = seed
        self.trace = trace
        self.chance = chance = random.Random(seed)
        self.now = T0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        self.composes = chance.random() < 0.25  # its workers are resilient, its hosts come and go
        self.spec = self._spec()
        self.job = Job(self.spec, self.now)
        self.beat_s = min(1.0, BEAT * self.spec.heartbeat_timeout_s)
        latency = chance.choice([0.0, 0.001, 0.02])
        if chance.random() < 0.1:
            latency = 0.15 * self.spec.heartbeat_timeout_s
        self.jitter = chance.choice([0.0, 0.0, 0.05, 0.4])
        self.nodes = {
            host.name: Node(host, chance.uniform(-1e5, 1e5), latency * chance.random()) for host in self.spec.hosts
        }
        # Most worlds have one or two kinds of trouble.
        self.p_fail = chance.choice([0.0, 0.0, 0.3, 0.9])
        self.p_peer = chance.choice([0.0, 1.0])
        self.calm_after = T0 + chance.choice([30.0, 60.0, 120.0])
        self.life_s = chance.choice([2.0, 10.0, 30.0])
        self.p_alone = chance.choice([0.0, 0.0, 0.5, 1.0, 1.0])  # that a worker stands alone
        self.resilient = (
            self.composes or chance.random() < 0.2
        )  # all workers are: the others meet one that failed again
        # Of a draw of its own, so that all other worlds stay what they were. 4: they go on among as many ranks only.
        self.policy = 4 if self.resilient and random.Random(f"policy {seed}").random() < 0.2 else RESILIENT
        if self.composes:
            self.p_fail, self.p_peer = chance.choice([0.0, 0.0, 0.3]), 0.0
            self.life_s = chance.choice([30.0, 60.0, 120.0])
        elif self.resilient:
            self.p_fail = chance.choice([0.3, 0.9])
        self.meeting_s = chance.choice([20.0, 100.0])  # so long the workers of a generation wait for each other
        self.troubles = chance.choice([0, 1, 3, 8]) if self.composes else 0  # more of them, while others are met
        self.hosts: dict[int, str] = {}  # of the ranks of the attempt
        self.composed: set[str] = set()  # what has happened of that
        self.p_meeting = chance.choice([0.0, 0.2, 0.5])  # that a worker fails while it meets the others
        self.generation = 0  # of the attempt
        self.ordered: dict[tuple[int, int, int], int] = {}  # the newest when a worker was to be started again
        self.broken = (
            None if self.composes else chance.choice([*[None] * 9, 0])
        )  # the rank that fails soon after each start, and in the same way
        self.lives: dict[tuple[int, int], int] = {}  # by attempt and rank, how often it was started again alone
        self.moved: dict[tuple[int, int], int] = {}  # the same, how often it was started on another host
        self.failed: set[tuple[int, int]] = set()  # those whose last life has failed by itself
        self.restart_policy: dict[tuple[int, int], int] = {}
        self.first_code = chance.choice([1, 1, 2, 3, 77])
        self.last_disturbance = T0
        self.links: dict[str, Agent | int] = {}  # the newest of each host: its agent, or its number while connecting
        self.greeted: set[tuple[str, int]] = set()
        self.closed: set[tuple[str, int]] = set()
        self.cleaning: set[tuple[str, int]] = set()  # that have not answered yet, as far as the job knows
        self.enlisted: set[tuple[str, int]] = set()  # for the attempt
        self.took_part: set[tuple[str, int]] = set()  # of those, without hosts that were to join and have not
        self.roots: list[Root] = []
        self.lost: set[tuple[str, int]] = set()  # hosts that an attempt has gone on without
        self.succeeded: set[tuple[int, int]] = set()
        self.members: tuple[str, ...] = ()
        self.attempt = -1
        self.signals: list[int] = []
        self.lost_hosts = self.grown = 0
        self.clock_error = 0.0
        self.phase = self.job.phase  # before what is handled
        self.spins = 0
        self.steps = self.kills = 0
        self._plan()

    def _spec(self) -> JobSpec:
        chance = self.chance
        count = chance.choice([2, 3, 3, 4, 5] if self.composes else [1, 2, 2, 3, 3, 4])
        kind = chance.choice([HostKind.SSH, HostKind.SSH, HostKind.SSH, HostKind.SIMULATED])
        slots = chance.choice([1, 1, 2])
        hosts = tuple(Host(f"h{i}", kind, slots=slots) for i in range(count))
        nnodes = None
        if chance.random() < (0.85 if self.composes else 0.5) and count > 1:
            least = chance.randint(1, count)
            nnodes = (least, chance.randint(least, count))
        elastic = nnodes is not None and nnodes[0] < count
        return JobSpec(
            Program(CommandKind.SCRIPT, "train.py"),
            hosts,
            nnodes=nnodes,
            run_id="r",
            start_timeout_s=chance.choice([20.0, 60.0]),
            grace_s=chance.choice([0.0, 1.0, 10.0]),
            max_restarts=chance.choice([3, 9] if self.composes else [0, 0, 1, 2, 3, 4, 9]),
            grow=elastic and chance.random() < 0.5,
            heartbeat_timeout_s=chance.choice([10.0, 30.0]),
            stall_timeout_s=chance.choice([None, None, 15.0]),
            hang=HangPolicy(acts=chance.random() < 0.5),
        )

    def _plan(self) -> None:
        """Plan what goes wrong, and when."""
        chance = self.chance
        nodes = list(self.nodes.values())
        for node in nodes:
            if chance.random() < 0.06:
                node.joins_at = T0 + chance.choice([3.0, 10.0, 40.0, 1e9])
                self.last_disturbance = max(self.last_disturbance, node.joins_at if node.joins_at < 1e8 else T0)
            if chance.random() < 0.02:
                node.problem = chance.choice(["problem", "version", "silent"])
            node.slow_evidence = chance.random() < 0.2
        storm = chance.random() < 0.1
        troubles = chance.choice([1, 2, 3, 5] if self.composes else [0, 0, 1, 1, 2, 3])
        for _ in range(chance.randint(5, 12) if storm else troubles):
            at = chance.choice([chance.uniform(0, 5), chance.uniform(0, 30 if storm else 60)])
            kinds = [self.kill_agent, self.cut, self.cut, self.half_cut, self.freeze, self.power_off, self.break_link]
            what = chance.choice(kinds)
            what = self.terminate if chance.random() < 0.1 else what
            self.later(at, what, chance.choice(nodes))
            self.disturbed(at)
        if chance.random() < 0.08:
            self.later(chance.uniform(0, 40), self.lose_store)
        for _ in range(chance.choice([0, 0, 0, 0, 1, 2])):
            at = chance.uniform(0, 60)
            self.later(at, self.signal, chance.choice([*STOP_SIGNALS, signal.SIGQUIT, signal.SIGUSR1, signal.SIGTSTP]))
            self.disturbed(at)
            if chance.random() < 0.3:
                self.later(at + chance.uniform(0, 5), self.signal, signal.SIGINT)

    def disturbed(self, delay_s: float) -> None:
        self.last_disturbance = max(self.last_disturbance, self.now + delay_s)

    # ---- the clock ----

    def later(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now + delay_s, self.count, action, args))

    def run(self) -> Outcome:
        self.obey(self.job.start())
        job, spec = self.job, self.spec
        long = self.life_s + spec.grace_s + 30 + 2 * spec.heartbeat_timeout_s + spec.start_timeout_s + 60
        while job.outcome is None:
            self.steps += 1
            if self.steps % 50 == 0:
                assert isinstance(job.progress, str)
            deadline = job.deadline()
            if self.queue and self.queue[0][0] <= deadline:
                self.now, _, action, args = heapq.heappop(self.queue)
                action(*args)
                self.spins = 0
            else:
                assert deadline > self.now or self.spins < 3, f"it spins: {job.phase}"
                self.spins = self.spins + 1 if deadline <= self.now else 0
                self.now = max(self.now, deadline)
                self.handle(Tick())
            calm = max(self.last_disturbance, self.calm_after)
            assert self.now < calm + (3 + spec.max_restarts) * long, f"it does not end: {job.phase}"
        return job.outcome

    def delay(self, node: Node) -> float:
        delay = node.latency
        if self.jitter and self.chance.random() < self.jitter:
            delay += self.chance.random() * 0.04 * self.spec.heartbeat_timeout_s
        return delay

    def say(self, text: str) -> None:
        if self.trace:
            print(f"{self.now - T0:9.4f} {self.job.phase.name:10} {text}")

    # ---- to the job and back ----

    def handle(self, event: Event) -> None:
        if self.trace and not (isinstance(event, Tick) or _is_beat(event)):
            self.say(f"<- {event}")
        past, attempt = len(self.job.run.past), self.job.attempt
        self.phase = self.job.phase
        commands = self.job.handle(event, self.now)
        newest = self.job.run.past[-1] if len(self.job.run.past) > past else None
        if newest is not None and newest.lost_host:
            self.check_lost(newest.cause)
        elif newest is not None and newest.rank is None:
            assert attempt is not None
            self.check_cause(attempt, self.job.run.past[-1].cause)
            self.check_failed_attempts()
        self.obey(commands)

    def obey(self, commands: list[Command]) -> None:
        starts: list[Send] = []
        news: list[Send] = []
        for command in commands:
            if self.trace and not _is_beat(command):
                self.say(f"   -> {command}")
            if isinstance(command, Send):
                if isinstance(command.message, StartWorker):
                    starts.append(command)
                elif isinstance(command.message, NextGeneration):
                    news.append(command)
                elif isinstance(command.message, RestartWorker):
                    self.check_restart(command, command.message)
                self.tell(command)
            elif isinstance(command, Open):
                self.links[command.host.name] = command.link
                node = self.nodes[command.host.name]
                self.later(0.01 + self.delay(node), self.connect, node, command.link)
            elif isinstance(command, Close):
                for root in self.roots:
                    if (root.kind, root.host) == (FailureKind.HOST_LOST, command.host):
                        root.told_at = min(root.told_at, self.now)
                self.close(self.nodes[command.host])
            elif isinstance(command, SuspendSelf):
                self.suspend()
            else:
                assert isinstance(command, Notice | SaveEvidence)
                self.grown += isinstance(command, Notice) and "has come; attempt" in command.text
        if starts:
            self.check_starts(starts)
        for number in sorted({send.message.number for send in news if isinstance(send.message, NextGeneration)}):
            reported = [send for send in news if getattr(send.message, "number", 0) == number]
            self.check_generation(reported, {start.host for start in starts})

    def tell(self, command: Send) -> None:
        agent = self.links[command.host]
        assert isinstance(agent, Agent), "sent before it was connected"
        key = (command.host, agent.link)
        assert key in self.greeted, f"sent before it greeted: {command}"
        assert key not in self.closed, f"sent on a link that was given up: {command}"
        assert self.job.fleet.states[command.host].phase is not HostPhase.OUT or isinstance(command.message, Stop)
        message = command.message
        if isinstance(message, OpenStore) and message.attempt != self.attempt:
            self.check_begin(message.attempt)
        elif isinstance(message, OpenStore | StartWorker) and self.job.phase is Phase.RUNNING:
            self.enlisted.add(key)  # it takes the place of another, or joins
            self.composed |= {"store"} if isinstance(message, OpenStore) else set()
        of_an_attempt = OpenStore | StartWorker | RestartWorker | NextGeneration | EndAttempt | Collect | SignalWorkers
        of_an_attempt |= KillWorker
        if isinstance(message, of_an_attempt):
            assert key in self.enlisted, f"sent to an agent that takes no part: {command}"
        elif isinstance(message, Prepare) and message.lost_agents:
            self.cleaning.add(key)
        elif isinstance(message, Stop):
            assert key not in self.cleaning or message.signum == signal.SIGKILL, "not to be kept from cleaning up"
        node = agent.node
        at = max(self.now + self.delay(node), agent.last_down)
        agent.last_down = at
        if isinstance(message, Heartbeat) and not (node.deaf or node.frozen or agent.down or agent.inbox):
            if agent.alive and agent.open:
                self.beaten(agent, message, at)
            return
        self.later(at - self.now, self.arrive, agent, message)

    def close(self, node: Node) -> None:
        agent = self.links[node.host.name]
        if not isinstance(agent, Agent):
            self.links[node.host.name] = -1
            return
        self.closed.add((node.host.name, agent.link))
        if self.chance.random() < 0.2:  # the news of it comes late
            self.later(
                self.chance.uniform(0, 3), self.handle, Lost(node.host.name, agent.link, "the connection closed")
            )
        at = max(self.now + self.delay(node), agent.last_down)
        if not node.mute or self.chance.random() < 0.5:  # where nothing is acknowledged, the end may not get out either
            self.later(at - self.now, self.arrive, agent, None)
        else:
            agent.down.append(None)

    def report(self, agent: Agent, message: Report) -> None:
        """Send what an agent says."""
        if not agent.open:
            return
        at = max(self.now + self.delay(agent.node), agent.last_up)
        agent.last_up = at
        self.later(at - self.now, self.deliver, agent, message)

    def deliver(self, agent: Agent, message: Report | None) -> None:
        """Bring a message to the job, or the end of the link (None)."""
        if not agent.open:
            return
        if agent.node.mute:
            agent.up.append(message)  # type: ignore[arg-type]
            return
        name = agent.node.host.name
        if message is None:
            agent.open = False
            self.handle(Lost(name, agent.link, "the connection closed"))
            return
        accepted = (name, agent.link) not in self.closed
        if isinstance(message, Hello) and accepted:
            self.greeted.add((name, agent.link))
        if isinstance(message, Facts):
            self.cleaning.discard((name, agent.link))
        if accepted:
            self.reported(name, message)
        if isinstance(message, Exited | Failing | StoreFailed):
            self.note_clock_error(agent.node)
        if self.chance.random() < 0.01:
            self.handle(ReaderBlocked(name))
        joins = self.job.attempt is not None and name not in self.job.attempt.members  # no one else knows it yet
        self.handle(AgentMessage(name, agent.link, message))
        goes_on = self.job.phase is Phase.RUNNING and getattr(message, "restart_policy", None)
        if accepted and isinstance(message, Exited | Failing) and (joins or goes_on):
            self.went_on(message)
        if self.chance.random() < 0.01 and agent.link > 1:  # of an older link
            self.handle(AgentMessage(name, agent.link - 1, message))

    def reported(self, name: str, message: Report) -> None:
        for root in self.roots:
            if root.host != name:
                continue
            if isinstance(message, Exited):
                is_it = (message.attempt, message.rank) == (root.attempt, root.rank)
            else:
                is_it = isinstance(message, StoreFailed) and root.kind is FailureKind.STORE_LOST
            root.told_at = min(root.told_at, self.now) if is_it else root.told_at

    # ---- links ----

    def connect(self, node: Node, link: int) -> None:
        name = node.host.name
        if self.links[name] != link:
            return
        if node.troubled or self.now < node.joins_at:
            quick = self.chance.random() < 0.5 and not (node.mute or node.deaf)
            self.later(0.0 if quick else 10.0, self.refuse, node, link)
            return
        agent = Agent(node, link)
        node.agent = self.links[name] = agent
        self.handle(Connected(name, link, "10.0.0.1"))
        if node.problem == "silent":
            return
        version = "0.0.0" if node.problem == "version" else __version__
        identity = f"{name}-{link}"
        agent.identity = identity
        self.report(agent, Hello(PROTOCOL, version, PYTHON, name, 1, identity, self.now + node.clock))

    def refuse(self, node: Node, link: int) -> None:
        if self.links[node.host.name] == link:
            self.handle(Lost(node.host.name, link, "connection refused"))

    def end_link(self, agent: Agent) -> None:
        """Let a link end as its stream does: what is under way arrives before that."""
        if agent.open:
            at = max(self.now + self.delay(agent.node), agent.last_up)
            agent.last_up = at
            self.later(at - self.now, self.deliver, agent, None)

    def break_link(self, node: Node) -> None:
        """Break a link: what is under way is lost, and both ends see it."""
        agent = node.agent
        if agent is None or not agent.open or not agent.alive:
            return
        self.say(f"!! the link of {node.host.name} breaks")
        self.host_fails(node)
        agent.open = False
        agent.down, agent.up = [], []
        self.later(0.0, self.handle, Lost(node.host.name, agent.link, "the connection broke"))
        self.later(self.delay(node), self.arrive, agent, None)

    # ---- what agents do ----

    def arrive(self, agent: Agent, message: object) -> None:
        node = agent.node
        if not agent.alive or (not agent.open and message is not None):
            return
        if node.deaf:
            agent.down.append(message)
        elif node.frozen:
            agent.inbox.append(message)
        else:
            self.hear(agent, message)

    def hear(self, agent: Agent, message: object) -> None:
        """Let an agent carry out a command."""
        node = agent.node
        if not agent.alive:
            return
        if message is None:
            agent.open = False
            self.end_workers(agent, self.spec.grace_s, then=None)
        elif isinstance(message, Prepare):
            self.prepare(agent, message)
        elif isinstance(message, Heartbeat):
            self.beaten(agent, message, self.now)
        elif isinstance(message, OpenStore):
            agent.attempt = message.attempt
            if self.fails(0.05):
                self.root(FailureKind.STORE_LOST, node, None, message.attempt)
                self.report(agent, StoreFailed(message.attempt, "port in use", self.now + node.clock))
            elif not self.fails(0.02):
                self.report(agent, StoreOpened(message.attempt, "10.0.0.1", 29500))
            else:
                self.disturbed(0.0)
        elif isinstance(message, StartWorker):
            if not agent.ending:
                count = message.env["TORCHELASTIC_RESTART_COUNT"]
                agent.envs[message.rank] = message.env
                agent.generation = max(agent.generation, message.generation)
                self.start_worker(
                    agent, message.attempt, message.rank, count, fresh=message.generation, policy=message.restart_policy
                )
        elif isinstance(message, RestartWorker):
            if not agent.ending and agent.attempt == message.attempt and agent.kill_at == float("inf"):
                again_s = self.chance.choice([0.0, 0.02, self.chance.uniform(0, self.spec.grace_s)])
                self.later(again_s, self.on_host, agent, self.start_again, agent, message)
        elif isinstance(message, NextGeneration):
            if not agent.ending and agent.attempt == message.attempt:
                self.announce(agent, message)
        elif isinstance(message, KillWorker):
            self.kill_worker(agent, message)
        elif isinstance(message, Suspend):
            if not message.suspended:
                self.go_on(agent)
            elif agent.kill_at == float("inf"):
                agent.suspended = True
                agent.lease.rest()
                self.set_lease(agent)
        elif isinstance(message, Collect):
            self.collect(agent, message)
        elif isinstance(message, EndAttempt):
            self.go_on(agent)
            saved = self.chance.choice([0, 0, 1])
            self.end_workers(agent, self.spec.grace_s, then=Swept(message.attempt, 0, saved, self.left()))
        elif isinstance(message, Stop):
            self.go_on(agent)
            grace_s = 0.0 if message.signum == signal.SIGKILL else self.spec.grace_s
            self.end_workers(agent, grace_s, then=Bye(0, self.left(), ""))
        else:
            assert isinstance(message, SignalWorkers)

    def left(self) -> list[str]:
        """Return processes that nothing can end; none of them is a worker."""
        return ["pid 9 (python, state D)"] if self.fails(0.02) else []

    def fails(self, likely: float) -> bool:
        return self.now < self.calm_after and self.p_fail > 0 and self.chance.random() < likely

    def prepare(self, agent: Agent, message: Prepare) -> None:
        node = agent.node
        agent.lease.begin(message.lease_s, self.now + node.clock)
        assert (message.lease_s > 0) is (node.host.kind is HostKind.SSH)
        self.set_lease(agent)
        self.watch_lease(agent)
        self.later(self.beat_s, self.beat, agent)
        agent.cleans = bool(message.lost_agents)
        clean_s = self.chance.uniform(0.05, 3.0) if message.lost_agents else 0.0
        self.later(clean_s, self.on_host, agent, self.give_facts, agent, message)

    def on_host(self, agent: Agent, action: Callable[..., None], *args: Any) -> None:
        """Do something there, when nothing holds the host up."""
        if agent.node.frozen:
            agent.node.postponed.append(lambda: self.on_host(agent, action, *args))
        else:
            action(*args)

    def give_facts(self, agent: Agent, message: Prepare) -> None:
        node = agent.node
        if not agent.alive or agent.ending:
            return
        self.clean(agent)
        problems = ["no such folder"] if node.problem == "problem" else []
        left = ["pid 9 (python, state D)"] if message.lost_agents and self.fails(0.02) else []
        facts = Facts([], "CUDA_VISIBLE_DEVICES", False, [0], 1, problems, self.now + node.clock, left)
        self.report(agent, facts)

    def clean(self, agent: Agent) -> None:
        """End what earlier agents have left."""
        for worker in agent.node.workers:
            worker.alive = worker.alive and (worker.agent.link >= agent.link or not agent.cleans)
        agent.cleans = False

    def beat(self, agent: Agent) -> None:
        if not agent.alive or not agent.open:
            return
        if not agent.node.frozen:
            if not self.is_stuck():
                agent.progress += 1
            mine = [worker for worker in agent.node.workers if worker.agent is agent]
            lives = {worker.rank: worker for worker in mine if worker.attempt == agent.attempt}
            unfinished = [worker for worker in lives.values() if worker.alive or worker.restart_policy]
            said = agent.attempt is not None and bool(mine)
            said &= all(w.restart_policy == RESILIENT and self.now >= w.enters_at for w in unfinished)
            stopped = [worker.rank for worker in mine if worker.alive and worker.is_stopped]
            beat = Heartbeat(self.now + agent.node.clock, agent.progress, resilient=said, stopped=stopped)
            self.report(agent, beat)
        self.later(self.beat_s, self.beat, agent)

    def is_stuck(self) -> bool:
        return any(w.alive and w.hangs for node in self.nodes.values() for w in node.workers)

    def beaten(self, agent: Agent, message: Heartbeat, at: float) -> None:
        if not agent.lease.over:
            agent.lease.beat(message.time, at + agent.node.clock)
            self.set_lease(agent)

    def go_on(self, agent: Agent) -> None:
        if agent.suspended and not agent.lease.over:
            agent.lease.renew(self.now + agent.node.clock)
            self.set_lease(agent)
            self.watch_lease(agent)
        agent.suspended = False

    def set_lease(self, agent: Agent) -> None:
        if not agent.lease.over:
            agent.lease_end = agent.lease.end - agent.node.clock

    def watch_lease(self, agent: Agent) -> None:
        if not agent.alive or agent.lease_end == float("inf") or agent.lease.over:
            return
        if agent.node.frozen:
            return  # looked at when it thaws
        if self.now < agent.lease_end:
            self.later(agent.lease_end - self.now, self.watch_lease, agent)
            return
        self.say(f"!! the lease of {agent.node.host.name} is over")
        self.host_fails(agent.node)
        agent.lease_end = self.now
        agent.lease.used_up(self.now + agent.node.clock)
        then = agent.then if agent.ending else Bye(0, [], "it received nothing from dtrain")
        self.end_workers(agent, 0.0, then=then)

    def collect(self, agent: Agent, message: Collect) -> None:
        if agent.node.slow_evidence and self.chance.random() < 0.7:
            return
        for worker in agent.node.workers:
            if worker.alive:
                state, pid = "T" if worker.is_stopped else "S", 100 + worker.rank
                evidence = Evidence(message.number, worker.attempt, worker.rank, pid, state, "", 1, 0.0, "", steps=9)
                self.report(agent, evidence)
        self.report(agent, Collected(message.number))

    def end_workers(self, agent: Agent, grace_s: float, *, then: Report | None) -> None:
        """End all workers of this agent, and say so."""
        if isinstance(then, Swept):
            if agent.attempt != then.attempt:
                self.report(agent, then)
                return
        else:
            agent.ending, agent.then = True, then
        stubborn = self.chance.random() < 0.2
        wait_s = grace_s if stubborn and grace_s else min(grace_s, self.chance.uniform(0, 0.05))
        kill_at = self.now + wait_s
        if kill_at >= agent.kill_at and not isinstance(then, Bye):
            return  # it ends them already
        agent.kill_at = kill_at
        self.later(wait_s, self.on_host, agent, self.workers_end, agent, then)

    def workers_end(self, agent: Agent, then: Report | None) -> None:
        if not agent.alive or (isinstance(then, Swept) and agent.attempt != then.attempt):
            return  # another order has ended them before
        for worker in agent.node.workers:
            if worker.alive and worker.agent is agent:
                worker.alive = False
                if worker.failing is not None:
                    self.end_failing(agent, worker)
                    continue
                status = self.chance.choice([0, 1, -15, -9])
                self.exited(agent, worker, status, provoked=True)
        agent.kill_at = float("inf")
        self.clean(agent)
        if then is None:
            agent.alive = False
            return
        self.report(agent, then)
        if isinstance(then, Bye):
            agent.alive = False
            self.end_link(agent)
        else:
            agent.attempt, agent.generation, agent.when = None, 0, "now"
            agent.envs.clear()

    # ---- what workers do ----

    def start_again(self, agent: Agent, message: RestartWorker) -> None:
        if agent.suspended:
            self.later(1.0, self.on_host, agent, self.start_again, agent, message)
        elif agent.alive and not agent.ending and agent.attempt == message.attempt and agent.kill_at == float("inf"):
            self.start_worker(agent, message.attempt, message.rank, str(message.restart), again=True)

    def start_worker(
        self, agent: Agent, attempt: int, rank: int, count: str, *, again: bool = False, fresh: int = 0, policy: int = 0
    ) -> None:
        node, chance = agent.node, self.chance
        key = (attempt, rank, int(count))
        assert key not in node.starts, "started twice"
        node.starts.add(key)
        agent.attempt = attempt
        living = [w for n in self.nodes.values() for w in n.workers if w.alive and self.is_living(w)]
        assert all(w.attempt == attempt for w in living), f"two attempts at once: {living}"
        assert all(w.rank != rank for w in living), f"two lives of rank {rank} at once: {living}"
        restart_policy = self.restart_policy[attempt, rank] if again else 0
        if self.resilient:
            restart_policy = self.policy if again or fresh or self.composes or chance.random() < 0.95 else 0
        elif chance.random() < self.p_alone:  # later it would say so, but before it fails
            restart_policy = chance.choice([1, 1, 2, 3])
        self.restart_policy[attempt, rank] = restart_policy
        if (again or policy) and self.fails(0.1):
            self.root(FailureKind.NEVER_STARTED, node, rank, attempt)
            self.failed.add((attempt, rank))
            error = {"type": "", "message": "could not be started", "where": "", "inside": ""}
            ended = Worker(agent, attempt, rank, self.now, restart_policy, alive=False)
            self.exited(agent, ended, 127, provoked=False, error=error, pid=0)
            return
        self.failed.discard((attempt, rank))
        worker = Worker(agent, attempt, rank, self.now, restart_policy if policy or not fresh else policy)
        worker.enters_at = self.now + chance.choice([0.0, 0.5, 3.0])
        if fresh and not policy:  # until it enters the function, its failure is an ordinary one
            self.later(worker.enters_at - self.now, self.enter, worker)
        node.workers.append(worker)
        if again:
            assert agent.generation >= self.ordered[key], f"rank {rank} starts with generation {agent.generation}"
        if again or fresh:
            self.take_generation(agent, worker, agent.generation)
        self.report(agent, Started(attempt, rank, 100 + rank, self.now + node.clock))
        if rank == self.broken:
            self.later(chance.uniform(0, 0.2), self.fail, agent, worker, 3)
        elif self.fails(self.p_fail / 2):
            at = chance.choice([chance.uniform(0, 0.5), chance.uniform(0, self.life_s)])
            if self.spec.stall_timeout_s is not None and chance.random() < 0.2:
                self.later(at, self.hang, worker)
            elif chance.random() < 0.2:
                self.later(at, self.halt, agent, worker)
            else:
                self.later(at, self.fail, agent, worker)
        self.later(self.life_s + chance.random(), self.finish, agent, worker)

    def enter(self, worker: Worker) -> None:
        worker.restart_policy = self.restart_policy[worker.attempt, worker.rank] = self.policy

    def announce(self, agent: Agent, news: NextGeneration) -> None:
        """Let an agent tell its workers of a generation."""
        number = news.number
        assert number > agent.generation, "generations only grow"
        assert self.policy == RESILIENT or (news.when, news.variables) == ("now", {}), (
            "these go on at the same size only"
        )
        agent.generation, agent.when = number, news.when
        for rank, variables in news.variables.items():
            agent.envs[int(rank)] = {**agent.envs[int(rank)], **variables}
        for worker in agent.node.workers:
            if worker.alive and worker.agent is agent:
                self.take_generation(agent, worker, number)

    def take_generation(self, agent: Agent, worker: Worker, number: int) -> None:
        """Let a worker begin to meet the others; it may fail on the way."""
        worker.generation, worker.when = number, agent.when
        worker.size = int(agent.envs[worker.rank]["WORLD_SIZE"])
        if self.resilient and number:
            if self.troubles and self.chance.random() < 0.3:  # while they meet, or wait for it
                self.troubles -= 1
                what = self.chance.choice([self.kill_agent, self.cut, self.freeze, self.power_off, self.break_link])
                self.later(self.chance.uniform(0, 5), what, self.chance.choice([*self.nodes.values()]))
                self.disturbed(5.0)
            if worker.when != "later":
                self.later(self.chance.uniform(0, 0.2), self.meet, agent, worker, number, self.now + self.meeting_s)
            if self.fails(self.p_meeting):
                self.later(self.chance.uniform(0, 0.4), self.fail, agent, worker)

    def meet(self, agent: Agent, worker: Worker, number: int, until: float) -> None:
        if not worker.alive or worker.hangs or worker.generation != number or worker.met == number:
            return
        if worker.when == "at_commit" and any((worker.attempt, rank) in self.succeeded for rank in self.hosts):
            worker.met = number  # the others have come to their end
            return
        if self.now < worker.enters_at:
            self.later(worker.enters_at - self.now, self.meet, agent, worker, number, until)
            return
        present = {
            other.rank: other
            for node in self.nodes.values()
            for other in node.workers
            if other.alive and not other.hangs and other.generation == number and not node.frozen
        }
        if len(present) == worker.size:
            self.check_met(present, number)
            for other in present.values():
                other.met = number
            return
        joins = worker.agent.node.host.name not in self.members  # it waits until the others are notified
        if self.now > until and not joins:
            self.fail(agent, worker, 1, UNMET)
        self.later(0.5, self.meet, agent, worker, number, until)

    def is_living(self, worker: Worker) -> bool:
        """Say whether a worker runs, or will once more."""
        if not worker.alive:
            return False
        return not (worker.agent.node.frozen and worker.agent.lease_end <= self.now)

    def hang(self, worker: Worker) -> None:
        worker.hangs = worker.alive
        self.disturbed(0.0)

    def halt(self, agent: Agent, worker: Worker) -> None:
        """Let a signal stop a worker; if no one kills it, it goes on after a while."""
        if worker.alive and not worker.hangs and worker.failing is None:
            worker.hangs = worker.is_stopped = worker.was_stopped = True
            self.disturbed(20.0)
            self.later(20.0, self.unhalt, agent, worker)

    def unhalt(self, agent: Agent, worker: Worker) -> None:
        if worker.alive:
            worker.hangs = worker.is_stopped = False
            self.later(1.0, self.finish, agent, worker)
            if self.resilient and worker.met < worker.generation and worker.when != "later":
                self.meet(agent, worker, worker.generation, self.now + self.meeting_s)

    def kill_worker(self, agent: Agent, order: KillWorker) -> None:
        for worker in agent.node.workers:
            if worker.alive and worker.agent is agent and (worker.attempt, worker.rank) == (order.attempt, order.rank):
                assert worker.failing is None
                self.kills += 1
                worker.alive = worker.is_stopped = False
                self.root(FailureKind.HUNG, agent.node, worker.rank, worker.attempt)
                self.failed.add((worker.attempt, worker.rank))
                self.exited(agent, worker, -9, provoked=False)
                self.peers_notice(worker.attempt)

    def fail(
        self, agent: Agent, worker: Worker, status: int | None = None, error: dict[str, str] | None = None
    ) -> None:
        """Let a worker fail by itself."""
        if agent.node.frozen:
            agent.node.postponed.append(lambda: self.fail(agent, worker, status, error))
            return
        if not worker.alive or worker.hangs or worker.failing is not None:
            return
        if agent.suspended or agent.kill_at < float("inf") or not agent.alive:
            return
        leaves = status is None and worker.restart_policy in MEETS_SUCCESSOR and self.chance.random() < 0.1
        status = 0 if leaves else status or self.chance.choice([self.first_code, 1, 3, -9, -11, 127])
        raised = error is not None or leaves or (status == 1 and self.chance.random() < 0.6)
        kind = FailureKind.RAISED if raised else FailureKind.KILLED if status < 0 else FailureKind.EXITED
        if raised and error is None and not leaves:
            error = {"type": "ValueError", "message": "bad batch", "where": "t.py:9", "inside": ""}
        self.root(kind, agent.node, worker.rank, worker.attempt)
        self.failed.add((worker.attempt, worker.rank))
        if status > 0 and not worker.restart_policy and worker.rank != self.broken and self.chance.random() < 0.3:
            self.linger(agent, worker, status, error)
            return
        worker.alive = False
        self.disturbed(0.0)
        late = 0.0 if raised else self.chance.uniform(0, 0.02)  # its agent sees the end a little later
        self.exited(agent, worker, status, provoked=False, error=error, late=late)
        if not worker.restart_policy or self.chance.random() < 0.3:
            self.peers_notice(worker.attempt)
        if self.chance.random() < 0.3:  # another one fails by itself before anything is stopped
            other = self.chance.choice([w for node in self.nodes.values() for w in node.workers])
            self.later(self.chance.uniform(0.3, 0.9), self.fail, other.agent, other)

    def linger(self, agent: Agent, worker: Worker, status: int, error: dict[str, str] | None) -> None:
        """Let a worker that has failed not come to its end: its agent sees that within a second."""
        at = self.now + agent.node.clock
        worker.failing = Failing(
            worker.attempt, worker.rank, 100 + worker.rank, status, self.now - worker.began, error, at
        )
        self.later(self.chance.uniform(0, 1), self.on_host, agent, self.see_failing, agent, worker)
        if self.chance.random() < 0.5:
            self.later(self.chance.uniform(0, 3), self.on_host, agent, self.end_failing, agent, worker)
        self.disturbed(3.0)

    def see_failing(self, agent: Agent, worker: Worker) -> None:
        if worker.alive and agent.alive and worker.failing is not None:
            self.report(agent, worker.failing)

    def end_failing(self, agent: Agent, worker: Worker) -> None:
        said = worker.failing
        if said is None or not agent.alive or not (worker.alive or agent.kill_at < float("inf")):
            return
        worker.alive, worker.failing = False, None
        ended = Exited(
            said.attempt, said.rank, said.pid, said.status, said.ran_s, False, "", said.error, None, said.time
        )
        self.report(agent, ended)

    def peers_notice(self, attempt: int) -> None:
        """Let the workers that are left fail because of a lost peer."""
        if not self.p_peer:
            return
        for node in self.nodes.values():
            for worker in node.workers:
                if worker.alive and worker.attempt == attempt and self.chance.random() < 0.8:
                    self.later(self.chance.choice([0.0005, 0.01, 0.4]), self.fall, node, worker)

    def fall(self, node: Node, worker: Worker) -> None:
        agent = node.agent
        if worker.failing is not None:
            return
        if not worker.alive or worker.hangs or agent is None or not agent.alive or node.frozen or agent.suspended:
            return
        if agent.kill_at < float("inf"):
            return
        worker.alive = False
        self.failed.add((worker.attempt, worker.rank))
        if self.chance.random() < 0.3:
            self.exited(agent, worker, -6, provoked=False)
        else:
            self.exited(agent, worker, 1, provoked=False, error=PEER)

    def finish(self, agent: Agent, worker: Worker) -> None:
        if not worker.alive or worker.hangs or worker.failing is not None:
            return
        if agent.node.frozen or agent.suspended or (self.resilient and worker.met < worker.generation):
            self.later(1.0, self.finish, agent, worker)
            return
        if agent.kill_at < float("inf") or not agent.alive:
            return
        worker.alive = False
        if worker.restart_policy in MEETS_SUCCESSOR:
            worker.restart_policy = 0  # it says so when the function returns
        self.succeeded.add((worker.attempt, worker.rank))
        self.exited(agent, worker, 0, provoked=False)

    def exited(
        self, agent: Agent, worker: Worker, status: int, *, provoked: bool,
        error: dict[str, str] | None = None, late: float = 0.0, pid: int = 100,
    ) -> None:  # fmt: skip
        node = agent.node
        self.report(
            agent,
            Exited(
                attempt=worker.attempt, rank=worker.rank, pid=pid and pid + worker.rank, status=status,
                ran_s=self.now - worker.began, provoked=provoked, killer="", error=error, error_file=None,
                time=self.now + late + node.clock, restart_policy=worker.restart_policy,
                steps=0 if worker.rank == self.broken else self.chance.choice([0, 0, 5]),
            ),
        )  # fmt: skip

    # ---- what happens by itself ----

    def root(self, kind: FailureKind, node: Node, rank: int | None, attempt: int) -> None:
        self.say(f"!! {kind.name} {node.host.name} rank {rank} attempt {attempt}")
        self.roots.append(Root(attempt, kind, node.host.name, rank, self.now))

    def host_fails(self, node: Node) -> None:
        """Note that a host is lost, or may be."""
        self.lost_hosts += 1
        self.root(FailureKind.HOST_LOST, node, None, self.attempt)

    def kill_agent(self, node: Node) -> None:
        """Kill an agent; its guard ends the workers soon."""
        agent = node.agent
        if agent is None or not agent.alive or node.frozen:
            return
        self.say(f"!! the agent of {node.host.name} is killed")
        self.host_fails(node)
        agent.alive = False
        self.end_link(agent)
        late = self.chance.uniform(0, 0.5)
        self.later(late, self.all_die, node, list(node.workers))
        if late < 0.2 and any(worker.alive for worker in node.workers):
            self.later(late, self.peers_notice, self.attempt)

    def terminate(self, node: Node) -> None:
        """Let someone else tell an agent to end."""
        agent = node.agent
        if agent is None or not agent.alive or node.frozen or agent.ending:
            return
        self.say(f"!! the agent of {node.host.name} has to end")
        self.host_fails(node)
        self.end_workers(agent, self.spec.grace_s, then=Bye(0, [], "it received SIGTERM"))

    def all_die(self, node: Node, workers: list[Worker]) -> None:
        for worker in workers:
            worker.alive = False

    def cut(self, node: Node) -> None:
        """Let nothing pass for a while; the link may live through it."""
        self.let_nothing_pass(node, mute=True, deaf=True)

    def half_cut(self, node: Node) -> None:
        """Let nothing pass in one direction."""
        mute = self.chance.random() < 0.7
        self.let_nothing_pass(node, mute=mute, deaf=not mute)

    def let_nothing_pass(self, node: Node, *, mute: bool, deaf: bool) -> None:
        if node.host.kind is not HostKind.SSH or node.troubled:
            return
        self.say(f"!! {node.host.name} is cut{'' if mute and deaf else ', from it only' if mute else ', to it only'}")
        node.mute, node.deaf = mute, deaf
        self.host_fails(node)
        last_s = self.chance.choice([0.5, 3.0, 12.0, 40.0, 100.0])
        if node.agent is not None and self.chance.random() < 0.4:  # only we see the end of the link
            self.later(self.chance.uniform(0, min(3.0, last_s)), self.half_lost, node, node.agent)
        self.later(last_s, self.heal, node, self.chance.random() < 0.5)
        self.disturbed(last_s)

    def half_lost(self, node: Node, agent: Agent) -> None:
        if agent.open and (node.mute or node.deaf):
            self.handle(Lost(node.host.name, agent.link, "the connection broke"))

    def heal(self, node: Node, broken: bool) -> None:
        self.say(f"!! {node.host.name} is back{', its link broken' if broken else ''}")
        node.mute = node.deaf = False
        agent = node.agent
        if agent is None:
            return
        up, down = agent.up, agent.down
        agent.up, agent.down = [], []
        if broken:
            if agent.open:
                agent.open = False
                self.later(0.0, self.handle, Lost(node.host.name, agent.link, "the connection broke"))
                self.later(0.0, self.arrive, agent, None)
            return
        agent.last_up = agent.last_down = self.now + 0.001
        for message in up:
            self.later(0.001, self.deliver, agent, message)
        for order in down:
            self.later(0.001, self.arrive, agent, order)

    def freeze(self, node: Node) -> None:
        if node.host.kind is not HostKind.SSH or node.troubled:
            return
        self.say(f"!! {node.host.name} freezes")
        self.host_fails(node)
        node.frozen = True
        last_s = self.chance.choice([1.0, 5.0, 20.0, 60.0])
        self.later(last_s, self.thaw, node)
        self.disturbed(last_s)

    def thaw(self, node: Node) -> None:
        self.say(f"!! {node.host.name} thaws")
        node.frozen = False
        agent = node.agent
        if agent is not None and agent.alive:
            inbox, agent.inbox = agent.inbox, []
            if agent.lease_end <= self.now:  # the guard has seen to that
                self.all_die(node, node.workers)
                self.watch_lease(agent)
            else:
                for message in inbox:
                    self.hear(agent, message)
                self.watch_lease(agent)
        postponed, node.postponed = node.postponed, []
        for action in postponed:
            action()

    def power_off(self, node: Node) -> None:
        """Take a host away at once, and for a while."""
        if node.host.kind is not HostKind.SSH or node.troubled:
            return
        self.say(f"!! {node.host.name} is powered off")
        self.host_fails(node)
        self.all_die(node, node.workers)
        agent = node.agent
        if agent is not None:
            agent.alive = agent.open = False
            if self.chance.random() < 0.5:
                self.later(0.01, self.handle, Lost(node.host.name, agent.link, "no route to host"))
        back_s = self.chance.choice([5.0, 30.0, 1e9])
        node.joins_at = self.now + back_s
        node.clock = self.chance.uniform(-1e5, 1e5)
        self.disturbed(back_s if back_s < 1e8 else 0.0)

    def lose_store(self) -> None:
        attempt = self.job.attempt
        if attempt is None:
            return
        node = self.nodes[attempt.members[0]]
        agent = node.agent
        if agent is None or not agent.alive or node.frozen or agent.attempt != attempt.number:
            return
        self.root(FailureKind.STORE_LOST, node, None, attempt.number)
        self.report(agent, StoreFailed(attempt.number, "the store's process ended", self.now + node.clock))

    def signal(self, signum: int) -> None:
        self.signals.append(signum)
        self.say(f"!! signal {signum}")
        self.handle(Signalled(signum))

    def suspend(self) -> None:
        """Stop the whole process for a while: nothing is handled, the hosts' words wait."""
        asleep_s = self.chance.choice([1.0, 20.0, 100.0])
        if self.chance.random() < 0.3:
            self.later(self.chance.uniform(0, asleep_s), self.cut, self.chance.choice(list(self.nodes.values())))
        self.disturbed(asleep_s)
        until = self.now + asleep_s
        waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        handle, self.handle = self.handle, lambda event: waiting.append((handle, (event,)))  # type: ignore[method-assign]
        while self.queue and self.queue[0][0] <= until:
            self.now, _, action, args = heapq.heappop(self.queue)
            action(*args)
        self.now = until
        del self.handle
        self.handle(Slept(asleep_s))
        events = [Signalled(signal.SIGCONT), *(args[0] for _, args in waiting)]
        for event in events:
            self.later(0.0, self.handle, event)

    # ---- what must hold ----

    def check_begin(self, number: int) -> None:
        """When an attempt begins, nothing of another may live."""
        assert number == self.attempt + 1
        self.attempt, self.generation = number, 0
        living = [worker for node in self.nodes.values() for worker in node.workers if self.is_living(worker)]
        assert not living, f"attempt {number} begins while {living} live"
        for node in self.nodes.values():
            self.all_die(node, node.workers)  # on a frozen host, whose lease is over: they never run again
            node.workers.clear()
        members = self.job.attempt.members if self.job.attempt is not None else ()
        self.enlisted = {(name, agent.link) for name in members if isinstance(agent := self.links[name], Agent)}
        self.took_part = {*self.enlisted}
        assert self.spec.min_hosts <= len(members) <= self.spec.max_hosts
        assert all(self.job.fleet.states[name].phase is HostPhase.READY for name in members)
        stay = [name for name in self.members if name in members]
        assert [name for name in members if name in stay] == stay, "those that stay keep their order"
        if len(members) == len(self.members):
            assert all(self.members[i] == members[i] for i in range(len(members)) if self.members[i] in members)
        self.members = members

    def check_starts(self, starts: list[Send]) -> None:
        attempt = self.job.attempt
        assert attempt is not None
        first = starts[0].message
        assert isinstance(first, StartWorker)
        if first.generation:
            self.check_more_starts(starts, attempt)
            return
        self.hosts = {worker.rank: worker.host for worker in attempt.placement.workers}
        slots = self.spec.hosts[0].slots or 1
        assert [start.host for start in starts] == [name for name in self.members for _ in range(slots)]
        for rank, start in enumerate(starts):
            message = start.message
            assert isinstance(message, StartWorker)
            env = message.env
            assert (message.attempt, message.rank) == (self.attempt, rank)
            assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), str(len(starts)))
            assert env["TORCHELASTIC_RESTART_COUNT"] == str(self.attempt)
            assert env["DTRAIN_ROLES"] == f"default:{len(starts)}"

    def check_more_starts(self, starts: list[Send], attempt: AttemptState) -> None:
        """Workers of a later generation: beside those that live, with ranks that no one has."""
        assert self.job.phase is Phase.RUNNING
        for start in starts:
            message = start.message
            assert isinstance(message, StartWorker)
            assert message.attempt == self.attempt
            key = (message.attempt, message.rank)
            self.moved[key] = self.moved.get(key, 0) + 1
            joins = start.host not in attempt.members
            assert joins == (message.restart_policy == 0)
            self.composed.add("joins" if joins else "replaced")

    def check_met(self, present: dict[int, Worker], number: int) -> None:
        """All workers of a generation are there, each as another one of the same world; no one lives in an older."""
        envs = [worker.agent.envs[rank] for rank, worker in present.items()]
        assert sorted(int(env["RANK"]) for env in envs) == [*range(len(present))]
        assert len({(env["MASTER_ADDR"], env["MASTER_PORT"], env["WORLD_SIZE"]) for env in envs}) == 1
        if number < self.generation:
            return  # they have not heard yet of the one that makes this one void
        assert {*present} == {*self.hosts}, "they are those of the generation"
        for node in self.nodes.values():
            for worker in node.workers:
                if worker.alive and self.is_living(worker) and worker.rank not in present:
                    assert node.host.name not in self.hosts.values(), f"generation {number} meets while {worker} lives"

    def check_restart(self, tell: Send, order: RestartWorker) -> None:
        """One that is started again alone has failed, where it is, and knows that it is another life."""
        key = (order.attempt, order.rank)
        assert self.job.phase is Phase.RUNNING
        assert order.attempt == self.attempt
        assert tell.host == self.hosts[order.rank]
        assert key in self.failed
        assert self.restart_policy[key] in (1, 2, RESILIENT, 4)
        self.lives[key] = self.lives.get(key, 0) + 1
        self.ordered[order.attempt, order.rank, order.restart] = self.generation
        assert order.restart == order.attempt + self.lives[key] + self.moved.get(key, 0)
        again = sum(lives for (attempt, _), lives in self.lives.items() if attempt == self.attempt)
        past = self.job.run.past
        free = sum(is_free(one, past) for one in past if one.cause.attempt == self.attempt and one.rank is not None)
        assert again - free <= self.spec.max_restarts
        self.disturbed(0.0)

    def check_generation(self, news: list[Send], started: set[str]) -> None:
        """A new generation has a higher number, and every host hears of it that takes part and is not given up."""
        assert self.phase is Phase.RUNNING  # other hosts, lost at the same time, may have ended the attempt right after
        first = news[0].message
        assert isinstance(first, NextGeneration)
        assert first.attempt == self.attempt
        assert first.number > self.generation
        self.generation = first.number
        attempt = self.job.attempt
        assert attempt is not None
        assert {(one.number, one.when) for one in messages(news, NextGeneration)} == {(first.number, first.when)}
        assert len(messages(news, NextGeneration)) == len(news)
        if first.variables:
            self.check_composition(attempt, first)
        links = ((name, agent.link) for name in self.members if isinstance(agent := self.links[name], Agent))
        hosts = [name for name, link in links if (name, link) in self.enlisted and (name, link) not in self.closed]
        wanted = [name for name in hosts if name not in started]
        reported = [send.host for send in news if send.host in wanted]  # another may have been given up right after it
        assert reported == wanted

    def check_composition(self, attempt: AttemptState, news: NextGeneration) -> None:
        """Others take part from now on; where some were lost, none of their workers may live."""
        assert self.spec.min_hosts <= len(attempt.members) <= self.spec.max_hosts
        stay = [name for name in self.members if name in attempt.members]
        assert [name for name in attempt.members if name in stay] == stay
        self.composed |= {"shrunk"} if len(attempt.members) < len(self.members) else set()
        self.composed |= {"grown"} if news.when == "at_commit" else {"composed"}
        self.members = attempt.members
        self.hosts = {worker.rank: worker.host for worker in attempt.placement.workers}
        self.took_part |= {(name, agent.link) for name in self.members if isinstance(agent := self.links[name], Agent)}
        if news.when == "at_commit":
            return
        runs = {
            name
            for name, agent in self.links.items()
            if isinstance(agent, Agent) and (name, agent.link) in self.enlisted
        }
        living = [
            worker
            for name, node in self.nodes.items()
            for worker in node.workers
            if self.is_living(worker) and name not in runs and (name, worker.agent.link) in self.took_part
        ]
        assert not living, f"generation {news.number} begins while {living} live"
        assert sorted(int(env["RANK"]) for env in news.variables.values()) is not None

    def went_on(self, exited: Exited | Failing) -> None:
        """Note that the job has let an attempt go on after one of its processes had failed."""
        for root in self.roots:
            root.alone |= (root.attempt, root.rank) == (exited.attempt, exited.rank)

    def check_cause(self, attempt: AttemptState, cause: Failure) -> None:
        """The cause is the first of what failed by itself, as far as the clocks tell."""
        assert attempt.number == cause.attempt
        roots = [
            root
            for root in self.roots
            if root.attempt == attempt.number or (root.kind is FailureKind.HOST_LOST and root.attempt < attempt.number)
        ]
        slack = 0.1 + max(node.latency for node in self.nodes.values()) * 2
        slack += self.clock_error
        if any(root.kind is FailureKind.HOST_LOST for root in roots):
            slack += self.spec.heartbeat_timeout_s + 3  # a silent host: no one knows when it went
        stopped_at = attempt.stopped_at or self.now
        sure = [
            root
            for root in roots
            if root.told_at <= self.now
            and not root.alone
            and root.at < stopped_at - slack
            and root.kind is not FailureKind.HOST_LOST
        ]
        if cause.kind is FailureKind.STALLED:
            assert any(w.hangs or w.was_stopped for n in self.nodes.values() for w in n.workers) or any(
                root.kind is FailureKind.HOST_LOST for root in roots
            )
            return
        same = [r for r in roots if (r.kind, r.host, r.rank) == (cause.kind, cause.host, cause.rank)]
        if cause.kind is FailureKind.HOST_LOST and not same:
            same = [r for r in roots if (r.kind, r.host) == (FailureKind.HOST_LOST, cause.host)]
            assert same or self.silent_reason(cause), f"{cause.host} was not lost: {roots}"
            return
        if looks_like_consequence(cause) and any(r.alone and cause.at - 0.5 - slack < r.at <= cause.at for r in roots):
            return  # of a failure that had not ended the attempt by itself
        latest = cause.at + SLACK_S - self.clock_error  # what came later may have seemed too late to be the cause
        reported = [
            root
            for root in roots
            if attempt.began <= root.told_at <= stopped_at
            and not root.alone
            and (root.at <= latest or root.kind is FailureKind.HOST_LOST)
        ]
        assert same or not reported, f"the cause is {cause}, but these came by themselves: {reported}"
        if same and sure:
            first = min(root.at for root in sure)
            assert min(root.at for root in same) <= first + slack, f"the cause is {cause}, not the first of {sure}"

    def check_lost(self, cause: Failure) -> None:
        """A host that an attempt goes on without was lost, or may have been."""
        self.disturbed(0.0)
        lost = [root for root in self.roots if (root.kind, root.host) == (FailureKind.HOST_LOST, cause.host)]
        assert lost or self.silent_reason(cause), f"{cause.host} was not lost: {self.roots}"
        self.lost.add((cause.host, cause.attempt))
        for root in self.roots:  # also what failed there by itself, of which no one heard in time
            root.alone |= root in lost or (root.host == cause.host and root.attempt == cause.attempt)

    def check_left_out(self, outcome: Outcome) -> None:
        """A run that went on to its end without some processes: those failed by themselves, all others did not."""
        assert not outcome.signum
        gone = {failure.rank for failure in outcome.left_out}
        well = {rank for attempt, rank in self.succeeded if attempt == self.attempt}
        assert well | gone == set(self.hosts)
        assert well
        assert not well & gone
        assert {(self.attempt, rank) for rank in gone} <= self.failed
        assert all(self.restart_policy[self.attempt, rank] == 1 for rank in gone if rank is not None)

    def check_free(self) -> None:
        """A restart that is not counted is of a resilient worker that may have lost a peer then, or a host of peers."""
        past = self.job.run.past
        slack = 2.0 + self.clock_error + 0.1
        noticed_s = self.spec.heartbeat_timeout_s + 3  # after a host was lost
        for one in past:
            if one.rank is not None and is_free(one, past):
                peers = [root.at for root in self.roots if root.rank not in (None, one.rank)]
                hosts = [root.at for root in self.roots if root.kind is FailureKind.HOST_LOST]
                near = any(abs(at - one.cause.at) <= slack for at in peers)
                near |= any(-slack <= one.cause.at - at <= slack + noticed_s for at in hosts)
                assert near, f"not counted: {one}"
                assert looks_like_consequence(one.cause)

    def note_clock_error(self, node: Node) -> None:
        """Note how far the job is off with the time of a host that says when something failed."""
        clock = self.job.fleet.states[node.host.name].clock
        error = clock.corrected(self.now + node.clock) - self.now
        self.clock_error = max(self.clock_error, error if error < 100 else 0.0)

    def silent_reason(self, cause: Failure) -> bool:
        return any(word in cause.message for word in ("did not say", "was not started", "was not opened"))

    def check_failed_attempts(self) -> None:
        past = [one for one in self.job.run.past if one.rank is None and not one.lost_host]
        if len(past) < 2 or self.job.phase is Phase.STOPPING:
            return
        first, second = (attempt.cause for attempt in past[-2:])
        if not second.host or first.host != second.host or first.attempt + 1 != second.attempt:
            return
        if (second.host, second.attempt) in self.lost:
            return  # the others had gone on without it: a loss in an attempt that had made steps ends the row
        state = self.job.fleet.states[second.host]
        if self.job.fleet.wanted(state):
            assert self.job.fleet.count(HostPhase.READY) - (state.phase is HostPhase.READY) < self.spec.min_hosts

    def check_outcome(self, outcome: Outcome) -> None:
        job, spec = self.job, self.spec
        assert job.phase is Phase.ENDED
        assert job.handle(Tick(), self.now + 1000) == []
        for name, agent in self.links.items():
            if isinstance(agent, Agent):
                assert (name, agent.link) in self.closed, "a link is left open"
        unchecked = {name for name, _ in outcome.unchecked} | {name for name, _ in outcome.left}
        for name, node in self.nodes.items():
            living = [worker for worker in node.workers if self.is_living(worker)]
            assert not living or name in unchecked, f"{living} live on {name}"
        past = job.run.past
        free = sum(is_free(attempt, past) for attempt in past)
        losses = sum(bool(one.lost_host) for one in past)
        assert outcome.attempts - 1 - self.grown - free + losses + outcome.worker_restarts <= spec.max_restarts
        assert spec.elastic or not any(attempt.free for attempt in past)
        self.check_free()
        if outcome.error is not None:
            assert outcome.exit_code == outcome.error.exit_code != 0
        elif outcome.cause is not None:
            assert outcome.exit_code == outcome.cause.exit_code != 0
            assert job.attempt is not None
            if any(failure is outcome.cause for failure in outcome.left_out):
                self.check_left_out(outcome)
            else:
                self.check_cause(job.attempt, outcome.cause)
        elif outcome.signum is not None:
            assert outcome.signum in self.signals
            assert outcome.exit_code == 128 + outcome.signum
        else:
            assert outcome.exit_code == 0
            well = {rank for attempt, rank in self.succeeded if attempt == self.attempt}
            assert well >= set(self.hosts), "not every worker finished successfully"
            assert not outcome.left_out
        if outcome.world_size and outcome.exit_code:
            well = {rank for attempt, rank in self.succeeded if attempt == self.attempt}
            assert outcome.signum or outcome.cause or outcome.error
        if not self.roots and not self.signals and outcome.error is None and outcome.exit_code:
            assert present(outcome.cause).kind in (FailureKind.STALLED, FailureKind.HOST_LOST)


def _is_beat(thing: object) -> bool:
    return isinstance(getattr(thing, "message", None), Heartbeat)


def simulate(seed: int, *, trace: bool = False) -> World:
    world = World(seed, trace=trace)
    try:
        world.check_outcome(world.run())
    except Exception as error:
        how = f"replay: python tests/launcher/job/test_job_simulated.py {seed}"
        raise AssertionError(f"world {seed}: {error!r} at {world.now - T0:.3f}; {how}; {world.spec}") from error
    return world


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_any_world_ends_well(chunk: int, seeds: Seeds) -> None:
    for seed in seeds(WORLDS // CHUNKS, kept=KEPT[chunk::CHUNKS]):
        simulate(seed)


@pytest.mark.control
def test_the_worlds_are_of_every_kind() -> None:
    errors = {"StartError", "StoreError", "HostError"}
    kinds = {"HOST_LOST", "STORE_LOST", "RAISED", "EXITED", "KILLED", "STALLED"}
    wanted = {"well", "signal", "left", "unchecked", "no_restart_reason", "1 attempts", "2 attempts", "3 attempts"}
    wanted |= {*kinds, *errors, "HUNG", "killed and well", "left_out", "alone and well", "without", "loop", "met twice"}
    wanted |= {"free", "replaced", "shrunk", "grown", "another store"}
    few = (342, 384, 106, 47, 488, 1, 2, 3, 11, 22, 50, 198, 565, 912)  # that have had them all; the others, if not now
    for seed in (*few, *range(1200)):
        world = simulate(seed)
        outcome, past = present(world.job.outcome), world.job.run.past
        cause = "" if outcome.cause is None else outcome.cause.kind.name
        wanted.discard(f"{outcome.attempts} attempts")
        wanted.discard(
            type(outcome.error).__name__ if outcome.error else cause or ("signal" if outcome.signum else "well")
        )
        wanted -= {name for name in ("left", "unchecked", "no_restart_reason", "left_out") if getattr(outcome, name)}
        if outcome.worker_restarts and not outcome.exit_code:
            wanted.discard("alone and well")
        if world.kills and world.resilient and not outcome.exit_code:
            wanted.discard("killed and well")
        if world.resilient and world.generation > 1 and not outcome.exit_code:
            wanted.discard("met twice")
        if any(one.rank is not None and is_free(one, past) for one in past):
            wanted.discard("free")
        if not outcome.exit_code:
            wanted -= {"another store" if name == "store" else name for name in world.composed}
        if "times in a row" in outcome.no_restart_reason:
            wanted.discard("loop")
        if any(failure is outcome.cause for failure in outcome.left_out):
            wanted.discard("without")
        if not wanted:
            return
    raise AssertionError(f"no world of 1200 has: {wanted}")


# ---- a large job ---------------------------------------------------------------------------------------------


def test_ten_thousand_ranks_through_a_failure_and_a_restart() -> None:
    began = time.process_time()
    names = [f"n{i}" for i in range(5000)]
    drive = running(*names, nnodes=(2500, 5000), max_restarts=3)
    drive.wait(10, heard=names)
    drive.say("n0", drive.exited("n0", 0, -9))
    for rank in range(1, 5000):
        drive.say(drive.host_of(rank), drive.exited(drive.host_of(rank), rank, 1, error=PEER))
    drive.collected()
    assert drive.phase() is Phase.ENDING
    for rank in range(5000, 10_000):
        drive.say(drive.host_of(rank), drive.exited(drive.host_of(rank), rank, -15, provoked=True))
    drive.swept()
    drive.begin()
    drive.end_well()
    outcome = drive.outcome
    assert (outcome.exit_code, outcome.attempts, outcome.world_size, outcome.hosts) == (0, 2, 10_000, 5000)
    assert [attempt.cause.rank for attempt in drive.job.run.past] == [0]
    print(f"{time.process_time() - began:.1f} s")


if __name__ == "__main__":
    print(simulate(int(sys.argv[1]), trace=True).job.outcome)
