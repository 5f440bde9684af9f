"""Where workers may live: leases, fences, and hosts that are tried again."""

import ast
import heapq
import math
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from testbed.seeds import Seeds

from launcher.agent.cleanup.lease import LATE, LATE_S, Lease, Limits
from launcher.hosts.host import Host, HostKind
from launcher.job import fleet as fleet_module
from launcher.job.events import Open, Send
from launcher.job.fleet import (
    LOCAL_FENCE_S,
    LONG_AGO,
    RETRIES_S,
    STEADY_S,
    TOLERANCE,
    Fleet,
    HostClock,
    HostState,
)
from launcher.job.ranks import Rank
from launcher.job.timers import NEVER, Timer, Timers
from launcher.protocol.commands import Suspend
from launcher.protocol.reports import Bye, Facts, Hello
from launcher.protocol.two_way import Heartbeat

T = 30.0


def fleet_of(*names: str, kind: HostKind = HostKind.SSH, timeout_s: float = T, timers: Timers | None = None) -> Fleet:
    hosts = [Host(name, kind) for name in names]
    return Fleet(hosts, timers or Timers(), timeout_s=timeout_s, join_s=60.0, now=0.0)


def ready(fleet: Fleet, now: float) -> None:
    for state in fleet:
        fleet.open(state)
        fleet.connected(state, None, now)
        fleet.greeted(state, f"{state.name}{state.link}")
        fleet.checked(state, Facts([], "", False, [], 1, [], now))


@pytest.mark.parametrize("timeout_s", [1.0, 2.0, 5.0, 10.0, 30.0, 600.0, 1e3, 4e3, 1e5])
def test_the_fence_leaves_time_for_the_guard_and_for_clocks(timeout_s: float) -> None:
    late_s = min(LATE_S, LATE * timeout_s)
    guard_acts_s = late_s + min(0.2, 0.5 * late_s)  # it looks twice
    drift_s = 2e-4 * (120.0 + timeout_s)
    assert guard_acts_s + drift_s < 0.8 * fleet_of("a", timeout_s=timeout_s).fence_s


class OneHost:
    """A host behind a link of any delays, which at some time lets nothing pass in one direction, or in both."""

    def __init__(self, seed: int, timeout_s: float = T) -> None:
        self.timeout_s = timeout_s
        self.gave_up_at: float | None = None  # the controller
        self.chance = chance = random.Random(seed)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.rate, self.ahead = 1 + chance.choice([-2e-4, 0.0, 2e-4]), chance.uniform(-1e5, 1e5)
        self.least = [chance.choice([0.0, 0.01, 0.1, 0.2]) * T for _ in "ud"]  # up, down
        self.jitter = chance.choice([0.0, 0.05, 0.2]) * T
        self.last = [0.0, 0.0]
        ends = chance.uniform(0, 200)
        self.cut_at = [ends + chance.choice([0.0, 0.0, chance.uniform(0, 2 * T), 1e6]) for _ in "ud"]
        self.cut_s = [chance.choice([5.0, 20.0, 1e6, 1e6]) for _ in "ud"]
        self.lost_at = ends + chance.uniform(0, 3 * T) * chance.choice([1.0, 100.0])
        self.fleet = fleet_of("a", timeout_s=timeout_s)
        self.state = self.fleet.states["a"]
        self.lease = Lease(Limits.shared())
        self.ended_at: float | None = None  # the lease, on the controller's clock

    def theirs(self, at: float) -> float:
        return self.ahead + at * self.rate

    def later(self, at: float, action: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (at, self.count, action))

    def send(self, way: int, action: Callable[[], None]) -> None:
        at = max(self.last[way], self.now + self.least[way] + self.chance.random() ** 4 * self.jitter)
        self.last[way] = at
        if at >= self.cut_at[way]:  # it waits, and may arrive when the cut is over
            at = max(at, self.cut_at[way] + self.cut_s[way])
        self.later(at, action)

    def look(self) -> None:
        if self.ended_at is None and self.lease.end <= self.theirs(self.now):
            self.ended_at = (self.lease.end - self.ahead) / self.rate
            self.lease.used_up(self.theirs(self.now))

    def hears(self, message: Heartbeat) -> None:
        self.look()
        self.lease.beat(message.time, self.theirs(self.now))

    def speaks(self) -> None:
        self.look()
        if self.ended_at is None:
            beat = Heartbeat(self.theirs(self.now))
            self.send(0, lambda: self.heard(beat))
            self.later(self.now + self.fleet.heartbeat_s, self.speaks)

    def heard(self, message: Heartbeat) -> None:
        if self.state.connected:
            self.fleet.hear(self.state, message, self.now)

    def beats(self) -> None:
        for command in self.fleet.heartbeats(self.now):
            assert isinstance(command, Send)
            assert isinstance(command.message, Heartbeat)
            self.send(1, lambda message=command.message: self.hears(message))  # type: ignore[misc]
        self.later(self.now + self.fleet.beat_s, self.beats)

    def run(self) -> float:
        """Return how long its workers were gone when it was fenced; below 0 if they were not."""
        self.fleet.open(self.state)
        self.fleet.connected(self.state, None, 0.0)
        self.fleet.hear(self.state, Hello(2, "", "", "", 1, "", self.theirs(-self.least[0])), 0.0)
        self.fleet.greeted(self.state, "a1")
        up_s, down_s = self.least
        self.lease.begin(self.timeout_s, self.theirs(down_s))  # by Prepare, before it answers
        self.now = self.last[0] = down_s + up_s
        facts = Facts([], "", False, [], 1, [], self.theirs(down_s))
        self.fleet.hear(self.state, facts, self.now)
        self.fleet.checked(self.state, facts)
        self.fleet.occupy(self.state)
        self.later(self.now, self.speaks)
        self.beats()
        while self.fleet.busy:
            self.now, _, action = heapq.heappop(self.queue)
            action()
            if self.state.connected and (self.now >= self.lost_at or self.fleet.silent(self.now)):
                self.fleet.lost(self.state, "lost", self.now)
                self.gave_up_at = self.now
            if self.now < (fenced_at := self.state.fenced_at or math.inf):
                continue
            self.now = fenced_at
            self.fleet.fence(self.now)
        self.look()
        return -1.0 if self.ended_at is None else self.now - self.ended_at


def test_a_lost_host_s_workers_are_gone_when_it_is_fenced(seeds: Seeds) -> None:
    for seed in seeds(60):
        host = OneHost(seed)
        assert host.run() > 0.95 * host.fleet.fence_s, f"OneHost({seed}).run()"


@pytest.mark.parametrize("timeout_s", [1.0, 2.0, 5.0, 10.0, 30.0, 60.0])
def test_a_cut_of_the_network_within_the_tolerance_ends_nothing(timeout_s: float, seeds: Seeds) -> None:
    for seed in seeds(50):
        host = OneHost(seed, timeout_s)
        host.least, host.jitter, host.rate = [0.0, 0.0], 0.0, 1.0
        began = host.chance.uniform(timeout_s, 2 * timeout_s)
        cut_s = TOLERANCE * timeout_s - 0.001
        host.cut_at, host.cut_s, host.lost_at = [began] * 2, [cut_s] * 2, began + cut_s + 3 * timeout_s
        assert host.run() > 0.0
        assert host.gave_up_at is not None
        assert host.gave_up_at >= host.lost_at, f"the controller has given it up: {seed}"
        assert host.ended_at is not None
        assert host.ended_at > host.lost_at, f"it has ended its workers: {seed}"


FENCE_S = fleet_of("a").fence_s


@pytest.mark.parametrize(
    ("kind", "heard", "fenced_at"),
    [
        (HostKind.SSH, 99.0, 99.0 + T + FENCE_S),  # it may have heard us until then
        (HostKind.SSH, 85.0, 85.0 + T + FENCE_S),
        (HostKind.SSH, 100.0 - T - FENCE_S, 100.0),
        (HostKind.SIMULATED, 99.0, 100.0 + LOCAL_FENCE_S),  # on this machine only time helps
    ],
)
def test_a_lost_host_is_fenced_once_its_lease_is_over(kind: HostKind, heard: float, fenced_at: float) -> None:
    fleet = fleet_of("a", kind=kind)
    ready(fleet, 0.0)
    state = fleet.states["a"]
    fleet.occupy(state)
    state.heard = heard
    fleet.lost(state, "the connection broke", 100.0)
    assert state.fenced_at == pytest.approx(fenced_at)
    fleet.fence(fenced_at - 0.1)
    assert fleet.busy == {"a"}
    fleet.fence(fenced_at)
    assert (fleet.busy, fleet.dirty(state)) == (set(), True), "its lost agents are still to be looked for"


def test_a_lease_that_rests_never_ends() -> None:
    fleet = fleet_of("a", "b")
    ready(fleet, 0.0)
    assert [c.message for c in fleet.suspend(True, 10.0) if isinstance(c, Send)] == 2 * [Suspend(suspended=True)]
    fleet.suspend(False, 100.0)
    for state in fleet:
        fleet.occupy(state)
    fleet.hear(fleet.states["b"], Heartbeat(106.1), 106.1)  # sent after it was continued
    for state in fleet:
        fleet.lost(state, "the connection broke", 107.0)
    assert [state.fenced_at == NEVER for state in fleet] == [True, False]
    assert fleet.never_fenced() == ["a"]


def test_heartbeats_answer_what_was_heard_since_the_last() -> None:
    fleet = fleet_of("a", "b", "c")
    ready(fleet, 0.0)
    for state in fleet:
        state.clock.hear(1000.0, 100.5)  # half a second on its way
    for name, heard in (("a", 98.0), ("b", 99.0), ("c", 100.0)):
        fleet.states[name].heard = heard
    fleet.stop(fleet.states["c"])
    first = [Send("a", Heartbeat(997.5, sent=100.0)), Send("b", Heartbeat(998.5, sent=100.0))]
    first.append(Send("c", Heartbeat(999.5, sent=100.0)))
    assert fleet.heartbeats(100.0) == first, "by their clock, and no later than that"
    fleet.states["b"].heard = 101.0
    assert fleet.heartbeats(102.0) == [Send("b", Heartbeat(1000.5, sent=102.0))]
    assert fleet_of("a", kind=HostKind.SIMULATED).heartbeats(0.0) == []


def test_many_agents_on_one_machine_send_fewer_heartbeats() -> None:
    def pause_s(parts: int, timeout_s: float) -> float:
        hosts = [Host(f"sim{part}", HostKind.SIMULATED, part=part, parts=parts) for part in range(parts)]
        return Fleet(hosts, Timers(), timeout_s=timeout_s, join_s=60.0, now=0.0).heartbeat_s

    assert [pause_s(parts, T) for parts in (1, 100, 256, 1000)] == [1.0, 1.0, 2.56, 3.0]
    assert pause_s(1000, 2.0) == 0.2


def test_a_host_that_looks_at_its_devices_may_be_silent_longer() -> None:
    fleet = fleet_of("a", "b")
    ready(fleet, 0.0)
    b = fleet.states["b"]
    fleet.lost(b, "gone", 0.0)
    fleet.open(b)
    fleet.connected(b, None, 0.0)
    fleet.greeted(b, "b2")
    assert [state.name for state in fleet.silent(T)] == ["a"]
    assert [state.name for state in fleet.silent(60.0)] == ["a", "b"]


def test_a_lost_host_is_tried_again_with_growing_pauses() -> None:
    timers = Timers()
    fleet = fleet_of("a", timers=timers)
    ready(fleet, 0.0)
    state, now, pauses = fleet.states["a"], 100.0, []
    for _ in range(8):
        fleet.lost(state, "gone", now)
        fleet.try_again(state, now)
        at = timers.at(Timer.RETRY)
        assert fleet.retries(at - 0.01) == []
        assert fleet.retries(at) == [Open(state.host, state.link)]
        assert timers.at(Timer.RETRY) == NEVER
        pauses.append(at - now)
        now = at
    assert pauses == [*RETRIES_S, RETRIES_S[-1], RETRIES_S[-1]]


def test_a_host_that_never_stays_is_tried_with_growing_pauses() -> None:
    timers = Timers()
    fleet = fleet_of("a", timers=timers)
    state, now, pauses = fleet.states["a"], 100.0, []
    for stays_s in (1.0, 1.0, 1.0, STEADY_S, 1.0):
        ready(fleet, now)
        now += stays_s
        fleet.lost(state, "gone", now)
        fleet.try_again(state, now)
        at = timers.at(Timer.RETRY)
        pauses.append(at - now)
    assert pauses == [0.0, 1.0, 2.0, 0.0, 0.0]


def test_what_lost_agents_left_is_known_until_someone_has_looked() -> None:
    fleet = fleet_of("a")
    ready(fleet, 0.0)
    state = fleet.states["a"]
    fleet.occupy(state)
    fleet.lost(state, "gone", 1.0)
    fleet.open(state)
    fleet.connected(state, None, 2.0)
    fleet.greeted(state, "a2")
    fleet.said_bye(state, Bye(0, [], ""), "")
    assert (state.lost_agents, fleet.busy) == (["a1"], {"a"}), "it ended before it looked"
    ready(fleet, 3.0)
    assert (state.lost_agents, fleet.busy, fleet.used) == ([], set(), {"a"})


def test_a_clock_is_known_by_its_quickest_message_of_late() -> None:
    clock = HostClock()
    assert (clock.corrected(5.0), clock.theirs(5.0)) == (5.0, LONG_AGO)
    clock.hear(1000.0, 10.5)
    clock.hear(1001.0, 11.1)
    clock.hear(1002.0, 14.0)
    assert clock.corrected(1003.0) == pytest.approx(13.1)
    assert clock.theirs(13.1) == pytest.approx(1003.0)
    for now in range(20, 200):
        clock.hear(now + 900.0, now)  # it has lost 90 seconds
    assert clock.corrected(1100.0) == pytest.approx(200.0)


# ---- what is known of a host changes in fleet.py only --------------------------------------------------------

CHANGING = {"append", "clear", "extend", "hear", "insert", "pop", "remove"}  # what a field of a host has


def changes_of(kind: type, source: str) -> list[str]:
    """Return the places where a program changes what is known of a host, or of a rank; `run` has a phase too."""
    names = {field.name for field in fields(kind)}

    def is_field(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) not in ("self", "run")

    found = []
    for node in ast.walk(ast.parse(source)):
        changed = is_field(node) and isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = node.func.attr in CHANGING and is_field(node.func.value)
        elif isinstance(node, ast.Call):
            changed = ast.unparse(node.func) in ("setattr", "delattr")
        if changed:
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(("kind", "owner"), [(HostState, "fleet.py"), (Rank, "ranks.py")])
def test_a_host_or_a_rank_is_changed_in_one_module_only(kind: type, owner: str) -> None:
    folder = Path(fleet_module.__file__).parent
    files = [*folder.rglob("*.py"), *folder.with_name("controller").glob("*.py")]
    found = {file.name: changes_of(kind, file.read_text()) for file in files}
    assert len(found.pop(owner)) > 5
    assert {name: places for name, places in found.items() if places} == {}


@pytest.mark.parametrize(
    "change",
    [
        "state.reason = 'gone'",
        "self._fleet.states[name].failed_attempts += 1",
        "state.facts, now = None, 0.0",
        "for state.tries in range(3): pass",
        "del state.clock",
        "state.lost_agents.append('a1')",
        "state.clock.hear(1.0, 2.0)",
        "setattr(state, 'reason', '')",
    ],
)
@pytest.mark.control
def test_a_change_of_a_host_elsewhere_would_be_seen(change: str) -> None:
    assert len(changes_of(HostState, f"def f(self, state, name):\n    {change}")) == 1
    assert changes_of(HostState, "if state.reason == 'gone' and state.clock.theirs(1.0): self.link = state.link") == []
