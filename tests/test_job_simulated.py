"""The job against thousands of random worlds: hosts that fail, hang, vanish and lie late, signals at any time.

A world is a queue of events on a simulated clock. Its agents are honest, its hosts and networks are not. Whatever
happens, the job must end in bounded time, with the right exit code, and without a word to a host that is gone.
"""

import heapq
import itertools
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from launcher import __version__
from launcher.events import Close, Command, Connected, Event, Lost, Said, Signalled, Tell, Tick
from launcher.hosts import Host, HostKind
from launcher.job import ANSWER_S, HEARTBEAT_TIMEOUT_S, Job, Phase
from launcher.outcome import FailureKind, Outcome
from launcher.protocol import (
    PROTOCOL,
    Bye,
    Exited,
    Facts,
    Heartbeat,
    Hello,
    OpenStore,
    Prepare,
    Report,
    Started,
    StartWorker,
    Stop,
    StoreFailed,
    StoreOpened,
)
from launcher.spec import Command as Program
from launcher.spec import CommandKind, JobSpec

WORLDS = 4000
PYTHON = "{}.{}.{}".format(*sys.version_info[:3])
GRACE_S, LONGEST_S = 10.0, 120.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Agent:
    """A host's agent, and what the world knows of it. A `mute` one says nothing more; its workers go on."""

    host: Host
    clock: float
    running: dict[int, float] = field(default_factory=dict)  # rank -> when it began
    mute: bool = False
    stopping: bool = False
    gone: bool = False  # as far as the job was told, or has decided
    last: float = 0.0  # when what it said last arrives: a stream keeps its order


class World:
    """One seeded run of a job."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1000.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.number = itertools.count()
        slots = [self.chance.randint(1, 3) for _ in range(self.chance.randint(1, 4))]
        hosts = tuple(Host(f"h{i}", HostKind.SSH, slots=count) for i, count in enumerate(slots))
        self.world_size = sum(slots)
        program = Program(CommandKind.SCRIPT, "train.py")
        self.start_s = self.chance.choice([20.0, 40.0, 200.0])
        spec = JobSpec(program, hosts, run_id="r", start_timeout_s=self.start_s, grace_s=GRACE_S)
        self.job = Job(spec, self.now)
        self.agents = {host.name: Agent(host, self.chance.uniform(-1e6, 1e6)) for host in hosts}
        # How likely it goes wrong at each occasion, by the kind of trouble: most worlds have one or two of them.
        self.trouble = {
            kind: self.chance.choice([0.0, 0.0, 0.02, 0.3]) for kind in ("start", "stream", "worker", "end")
        }
        self.started: list[int] = []
        self.exits: dict[int, Exited] = {}  # heard by the job
        self.failed_at: dict[int, float] = {}  # true times of what workers did by themselves
        self.stopped_at: float | None = None  # when the job began to stop
        self.signals: list[int] = []

    # ---- the clock ----

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + delay_s, next(self.number), action))

    def run(self) -> Outcome:
        for agent in self.agents.values():
            self.later(self.delay(), partial(self.connect, agent))
        for _ in range(self.chance.choice([0, 0, 0, 1, 1, 2, 3])):
            self.later(self.chance.uniform(0, 2 * LONGEST_S), self.signal)
        while self.job.outcome is None:
            deadline = self.job.deadline()
            assert deadline is not None, "nothing would ever happen again"
            if self.queue and self.queue[0][0] <= deadline:
                self.now, _, action = heapq.heappop(self.queue)
                action()
            else:
                self.now = max(self.now, deadline)
                self.handle(Tick())
                after = self.job.deadline()
                assert self.job.outcome is not None or (after is not None and after > self.now), "it would spin"
            assert self.now < 1000 + self.start_s + LONGEST_S + 2 * HEARTBEAT_TIMEOUT_S + GRACE_S + 2 * ANSWER_S
        return self.job.outcome

    def delay(self) -> float:
        return self.chance.choice([0.0, 0.001, self.chance.expovariate(2)])

    def goes_wrong(self, kind: str) -> bool:
        return self.chance.random() < self.trouble[kind]

    # ---- to the job and back ----

    def handle(self, event: Event) -> None:
        commands = self.job.handle(event, self.now)
        if self.job.phase in (Phase.STOPPING, Phase.ENDED) and self.stopped_at is None:
            self.stopped_at = self.now
        for command in commands:
            self.obey(command)

    def obey(self, command: Command) -> None:
        agent = self.agents[command.host]
        if isinstance(command, Close):
            agent.gone = True
            self.stop(agent)  # the end of its input
            return
        assert isinstance(command, Tell)
        assert not agent.gone, f"told to a host that is gone: {command.message}"
        message = command.message
        if isinstance(message, StartWorker):
            assert self.stopped_at is None, "a worker was to start after the stop"
            assert message.rank == len(self.started)
            self.started.append(message.rank)
        self.later(self.delay(), lambda: self.hear(agent, message))

    def hear(self, agent: Agent, message: object) -> None:
        """Let an agent do what it was told."""
        if agent.mute:
            return
        if isinstance(message, Prepare):
            problems = ["no such folder"] if self.goes_wrong("start") else []
            facts = Facts([], "CUDA_VISIBLE_DEVICES", False, [0], 1, problems=problems, time=self.now + agent.clock)
            self.answer(agent, facts)
        elif isinstance(message, OpenStore):
            failed = StoreFailed("port in use", self.now + agent.clock)
            self.answer(agent, failed if self.goes_wrong("start") else StoreOpened("10.0.0.1", 29500))
            if self.goes_wrong("end"):
                self.later(self.chance.uniform(0, LONGEST_S), lambda: self.lose_store(agent))
        elif isinstance(message, StartWorker) and not agent.stopping:
            agent.running[message.rank] = self.now
            self.answer(agent, Started(message.rank, 100 + message.rank, self.now + agent.clock))
            self.later(self.chance.uniform(0, LONGEST_S), lambda: self.end(agent, message.rank))
        elif isinstance(message, Stop):
            self.stop(agent)

    def answer(self, agent: Agent, message: Report) -> None:
        """Send what an agent says; the stream keeps the order, and may break or fall silent."""
        if agent.mute:
            return
        if self.goes_wrong("stream"):
            agent.mute = True
            if self.chance.random() < 0.7:
                self.later(self.delay(), lambda: self.lose(agent))
            return
        agent.last = max(self.now + self.delay(), agent.last)
        heapq.heappush(self.queue, (agent.last, next(self.number), lambda: self.deliver(agent, message)))

    def deliver(self, agent: Agent, message: Report) -> None:
        if isinstance(message, Exited) and not agent.gone:
            self.exits[message.rank] = message
        self.handle(Said(agent.host.name, message))
        if isinstance(message, Bye):
            self.lose(agent)

    def lose(self, agent: Agent) -> None:
        self.handle(Lost(agent.host.name, "the connection broke"))

    # ---- what happens by itself ----

    def connect(self, agent: Agent) -> None:
        if self.goes_wrong("start"):
            if self.chance.random() < 0.7:
                self.lose(agent)
            return
        self.handle(Connected(agent.host.name, "10.0.0.1"))
        python = "3.2.0" if self.goes_wrong("start") else PYTHON
        self.answer(agent, Hello(PROTOCOL, __version__, python, agent.host.name, 1, self.now + agent.clock))
        self.later(5.0, lambda: self.beat(agent))
        if self.goes_wrong("end"):
            self.later(self.chance.uniform(0, LONGEST_S), lambda: self.stop(agent))  # by somebody else

    def beat(self, agent: Agent) -> None:
        if not agent.mute and not agent.stopping and not agent.gone:
            self.answer(agent, Heartbeat(self.now + agent.clock))
            self.later(5.0, lambda: self.beat(agent))

    def lose_store(self, agent: Agent) -> None:
        if not agent.stopping:
            self.answer(agent, StoreFailed("the store's process ended", self.now + agent.clock))

    def end(self, agent: Agent, rank: int) -> None:
        if rank not in agent.running or agent.mute:
            return
        status = self.chance.choice([1, 3, 255, -6, -9, -11]) if self.goes_wrong("worker") else 0
        self.report(agent, rank, status, provoked=False)
        if status != 0:
            self.failed_at[rank] = self.now

    def stop(self, agent: Agent) -> None:
        if agent.stopping or agent.mute:
            return
        agent.stopping = True
        for rank in list(agent.running):
            if self.chance.random() < 0.2:  # it had raised before, and was still ending
                raised_at = self.now - self.chance.uniform(0, min(2.0, self.now - agent.running[rank]))
                error = {"type": "ValueError", "message": "", "where": ""}
                self.failed_at[rank] = raised_at
                self.report(agent, rank, self.chance.choice([1, -15]), provoked=True, error=error, at=raised_at)
            else:
                self.report(agent, rank, self.chance.choice([0, 1, -15, -9]), provoked=True)
        left = ["pid 9 (python, state D)"] if self.goes_wrong("end") else []
        self.later(self.chance.uniform(0, GRACE_S), lambda: self.answer(agent, Bye(swept=0, left=left)))

    def report(
        self,
        agent: Agent,
        rank: int,
        status: int,
        *,
        provoked: bool,
        error: dict[str, str] | None = None,
        at: float | None = None,
    ) -> None:
        began = agent.running.pop(rank)
        time = (self.now if at is None else at) + agent.clock
        self.answer(agent, Exited(rank, 100 + rank, status, self.now - began, provoked, error, None, time))

    def signal(self) -> None:
        signum = self.chance.choice(STOP_SIGNALS)
        self.signals.append(signum)
        self.handle(Signalled(signum))


def _check(world: World, outcome: Outcome) -> None:
    assert world.job.phase is Phase.ENDED
    assert all(agent.gone for agent in world.agents.values()), "every stream is closed"
    _check_exit_code(world, outcome)
    _check_cause(world, outcome)
    if not world.started:
        assert outcome.stopped == 0
        assert outcome.cause is None or outcome.cause.kind is FailureKind.HOST_LOST
    if outcome.signum is not None and world.failed_at == {}:
        assert outcome.exit_code == 128 + outcome.signum
    if len(world.started) == world.world_size:
        _check_what_is_left(world, outcome)


def _check_exit_code(world: World, outcome: Outcome) -> None:
    all_well = len(world.exits) == world.world_size and all(e.status == 0 for e in world.exits.values())
    if outcome.error is not None:
        assert outcome.exit_code == outcome.error.exit_code
    elif outcome.cause is not None:
        assert outcome.exit_code == outcome.cause.exit_code != 0
    elif outcome.signum is not None:
        assert outcome.signum in world.signals
        assert outcome.exit_code == 128 + outcome.signum
    else:
        assert outcome.exit_code == 0
    assert (outcome.exit_code == 0) <= all_well
    if not any(world.trouble.values()) and not world.signals:
        assert outcome.exit_code == 0


def _check_cause(world: World, outcome: Outcome) -> None:
    cause = outcome.cause
    if cause is None or cause.rank is None:
        return
    assert cause.rank in world.failed_at, "it did not fail by itself"
    assert world.stopped_at is not None
    if cause.provoked or outcome.signum is not None:
        assert cause.at < world.stopped_at, "it is a consequence of our stop"
    assert cause.at >= world.failed_at[cause.rank] - 1e-6, "a corrected time is late, if anything"
    kinds = (FailureKind.RAISED, FailureKind.EXITED, FailureKind.KILLED)
    assert cause.kind in kinds


def _check_what_is_left(world: World, outcome: Outcome) -> None:
    """Whoever was told to start workers has said good-bye, or is named as lost or as unknown."""
    named = {host for host, _ in outcome.left}
    lost = outcome.cause is not None or outcome.error is not None
    for agent in world.agents.values():
        if agent.mute and not lost:
            assert agent.host.name in named


@pytest.mark.parametrize("first", range(0, WORLDS, WORLDS // 8))
def test_any_world_ends_well(first: int) -> None:
    for seed in range(first, first + WORLDS // 8):
        world = World(seed)
        try:
            _check(world, world.run())
        except Exception as error:
            raise AssertionError(f"world {seed}: {error!r}") from error


def test_the_worlds_are_of_every_kind() -> None:
    ends: set[str] = set()
    for seed in range(1000):
        outcome = World(seed).run()
        cause = "" if outcome.cause is None else outcome.cause.kind.name
        ends.add(type(outcome.error).__name__ if outcome.error else cause or ("signal" if outcome.signum else "well"))
    errors = {"StartError", "StoreError", "HostError"}
    assert ends == {"well", "signal", "HOST_LOST", "STORE_LOST", "RAISED", "EXITED", "KILLED", *errors}
