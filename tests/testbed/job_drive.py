"""A job driven by hand: events and times go in, commands and one outcome come out. No process, no clock."""

import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from launcher import __version__
from launcher.hosts.host import Host, HostKind
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
    Send,
    Tick,
)
from launcher.job.failures.failure import Failure
from launcher.job.job import Job
from launcher.job.run import Phase
from launcher.placement.job_spec import CommandKind, JobSpec
from launcher.placement.job_spec import WorkerCommand as Program
from launcher.protocol.commands import Collect, StartWorker
from launcher.protocol.message import PROTOCOL, Report
from launcher.protocol.reports import Bye, Collected, Evidence, Exited, Facts, Hello, Started, StoreOpened, Swept
from launcher.protocol.two_way import Heartbeat
from testbed.present import present

PYTHON = "{}.{}.{}".format(*sys.version_info[:3])
M = TypeVar("M")
T = 30.0  # --heartbeat-timeout-s


def spec_for(*names: str, **changes: Any) -> JobSpec:
    return JobSpec(
        **{
            "command": Program(CommandKind.SCRIPT, "train.py", ("--lr", "1")),
            "hosts": tuple(Host(name, HostKind.SSH, slots=2) for name in names),
            "run_id": "r1",
            "workdir": Path("/work"),
            "python": "/usr/bin/python3",
            "grace_s": 10.0,
            "start_timeout_s": 60.0,
            **changes,
        }
    )


class Drive:
    """A job and the time; `clocks` says how far each host's monotonic clock is ahead of ours."""

    def __init__(self, *names: str, clocks: dict[str, float] | None = None, **changes: Any) -> None:
        self.now = 1000.0
        self.names = names
        self.clocks = clocks or {}
        self.job = Job(spec_for(*names, **changes), self.now)
        self.commands: list[Command] = self.job.start()  # all so far

    def event(self, event: Event, *, after_s: float = 0.0) -> list[Command]:
        self.now += after_s
        commands = self.job.handle(event, self.now)
        self.commands += commands
        return commands

    def say(self, host: str, *messages: Report, after_s: float = 0.0) -> list[Command]:
        self.now += after_s
        return [c for message in messages for c in self.event(AgentMessage(host, self.link(host), message))]

    def connect(self, host: str, our_address: str | None = "10.0.0.1") -> list[Command]:
        return self.event(Connected(host, self.link(host), our_address))

    def lose(self, host: str, reason: str = "the connection broke", *, after_s: float = 0.0) -> list[Command]:
        return self.event(Lost(host, self.link(host), reason), after_s=after_s)

    def link(self, host: str) -> int:
        return self.job.fleet.states[host].link

    def wait(self, seconds: float, *, heard: Iterable[str] = "") -> list[Command]:
        """Let time pass, with every Tick that the job asks for; the hosts `heard` send heartbeats."""
        until, commands = self.now + seconds, []
        while self.now < until and self.job.outcome is None:
            deadline = self.job.deadline()
            self.now = max(self.now, min(until, deadline))
            for host in heard:
                commands += self.say(host, Heartbeat(self.time(host)))
            commands += self.event(Tick())
        return commands

    def time(self, host: str) -> float:
        return self.now + self.clocks.get(host, 0.0)

    # ---- what hosts say ----

    def join(self, *names: str) -> list[Command]:
        """Let hosts connect and greet."""
        return [c for name in names or self.names for c in [*self.connect(name), *self.say(name, self.hello(name))]]

    def hello(self, host: str, **changes: Any) -> Hello:
        identity = f"{host}{self.link(host)}"
        good = Hello(PROTOCOL, __version__, PYTHON, hostname=host, pid=1, agent_identity=identity, time=self.time(host))
        return replace(good, **changes)

    def facts(self, host: str, **changes: Any) -> Facts:
        good = Facts([], "CUDA_VISIBLE_DEVICES", False, [0, 1], 2, problems=[], time=self.time(host))
        return replace(good, **changes)

    def exited(self, host: str, rank: int, status: int = 0, *, at: float | None = None, **changes: Any) -> Exited:
        """Return the end of a worker; `at` is the time of its end on our clock."""
        time = (self.now if at is None else at) + self.clocks.get(host, 0.0)
        good = Exited(
            attempt=self.number, rank=rank, pid=100 + rank, status=status, ran_s=1.0, provoked=False, killer="",
            error=None, error_file=None, time=time,
        )  # fmt: skip
        return replace(good, **changes)

    # ---- the usual way ----

    @property
    def number(self) -> int:
        return self.job.attempt.number if self.job.attempt is not None else 0

    @property
    def members(self) -> tuple[str, ...]:
        return self.job.attempt.members if self.job.attempt is not None else ()

    def host_of(self, rank: int) -> str:
        return self.members[rank // 2]

    def check(self, *names: str) -> list[Command]:
        return [c for name in names or self.names for c in self.say(name, self.facts(name))]

    def back(self, *names: str) -> list[Command]:
        """Let hosts that were tried again join."""
        return [c for name in names for c in [*self.join(name), *self.check(name)]]

    def begin(self) -> None:
        """Bring all workers of an attempt up, two on a host, once its hosts are ready."""
        assert self.job.phase is Phase.OPENING_STORE
        begun = self.say(self.members[0], self.opened())
        for start in messages(begun, StartWorker):
            host = self.host_of(start.rank)
            self.say(host, Started(self.number, start.rank, 100 + start.rank, self.time(host)))
        assert self.phase() is Phase.RUNNING

    def opened(self) -> StoreOpened:
        return StoreOpened(self.number, "10.0.0.9", 29500)

    def run(self) -> None:
        self.join()
        self.check()
        self.begin()

    def evidence(self, rank: int, **changes: Any) -> Evidence:
        """Return what the newest Collect finds of a rank."""
        number = messages(self.commands, Collect)[-1].number
        return replace(Evidence(number, self.number, rank, 100 + rank, "S", "", 1, 0.0, ""), **changes)

    def collected(self, *names: str) -> list[Command]:
        """Let hosts answer the newest Collect, with nothing found."""
        number = messages(self.commands, Collect)[-1].number
        return [c for name in names or self.members for c in self.say(name, Collected(number))]

    def swept(self, *names: str, saved: int = 0, left: list[str] | None = None) -> list[Command]:
        swept = Swept(self.number, swept=0, saved=saved, left=left or [])
        return [c for name in names or self.members for c in self.say(name, swept)]

    def fail(self, rank: int, status: int = 1, **changes: Any) -> list[Command]:
        """Let a worker fail, and the hosts say where the others stand."""
        commands = self.say(self.host_of(rank), self.exited(self.host_of(rank), rank, status, **changes))
        return commands + self.collected(*(name for name in self.members if self.job.fleet.states[name].connected))

    def goodbye(self, *names: str, **changes: Any) -> None:
        for name in names or self.names:
            self.say(name, replace(Bye(swept=0, left=[], reason=""), **changes))

    def stop_all(self) -> None:
        """Let every worker end as the agents make them, and the agents too."""
        for rank in range(2 * len(self.members)):
            host = self.host_of(rank)
            self.say(host, self.exited(host, rank, -signal.SIGTERM, provoked=True))
        self.goodbye()

    def end_well(self) -> None:
        for rank in range(2 * len(self.members)):
            self.say(self.host_of(rank), self.exited(self.host_of(rank), rank))
        self.goodbye(*(state.name for state in self.job.fleet if state.connected))

    @property
    def outcome(self) -> Outcome:
        return present(self.job.outcome)

    @property
    def cause(self) -> Failure:
        return present(self.outcome.cause)

    def phase(self) -> Phase:
        """Return the job's phase, by a call: mypy takes an attribute to be still what an assertion before said."""
        return self.job.phase


def running(*names: str, **changes: Any) -> Drive:
    """Return a job whose workers all run, two on each host."""
    drive = Drive(*names, **changes)
    drive.run()
    return drive


def tells(commands: Iterable[Command]) -> list[Send]:
    return [command for command in commands if isinstance(command, Send)]


def messages(commands: Iterable[Command], kind: type[M]) -> list[M]:
    return [tell.message for tell in tells(commands) if isinstance(tell.message, kind)]


def receivers(commands: Iterable[Command], kind: type) -> list[str]:
    return [tell.host for tell in tells(commands) if isinstance(tell.message, kind)]


def opened(commands: Iterable[Command]) -> list[str]:
    return [command.host.name for command in commands if isinstance(command, Open)]


def notices(commands: Iterable[Command]) -> list[str]:
    return [command.text for command in commands if isinstance(command, Notice)]


def closed(commands: Iterable[Command]) -> list[str]:
    return [command.host for command in commands if isinstance(command, Close)]
