"""All hosts of a run: which are connected, lost, tried again, and where workers may still live. Pure; owned by job.py.

What is known of a host changes here only; the others read its HostState.

A remote host holds a lease of T (--heartbeat-timeout-s): its agent kills its workers and ends when T is over since it
was heard last, as far as it knows that. Every heartbeat tells it, by the host's own clock and never later than it was
(HostClock.theirs); so neither delays in either direction nor how far apart the clocks are make a lease longer. The
proof that no worker of it lives when its place is given to others, with h the time at which it was heard last:

    its lease ends  <=  h + T + drift  <  h + T + fence_s  =  the time at which it is fenced

`drift` is how far its clock may have run apart from ours while an offset is used (two minutes) and during T: where each
clock is off by 100 ppm at most, 2e-4 * (120 s + T), so 0.03 s for T = 30 s. The rest of fence_s is what the killing may
take, by the agent, or by the guard of one that hangs (lease.LATE). At h + T a silent host is given up; the others'
workers are ended then, and the next attempt begins at h + T + fence_s.

The proof does not hold where the host's monotonic clock stops, or is slewed faster than that: in a virtual machine that
was paused or migrated, and on a machine that slept, workers may live on for the rest of the lease by that clock.

Of a cut of the network a host may bear what is left of T once its heartbeat (every heartbeat_s) and the next one
of ours (every beat_s) were under way: TOLERANCE of T at least, in which a connection must go on again; TCP may take as
long as the cut lasted once more. A link on which the least delays of both ways come near T cannot hold a lease.

Nothing here costs more with the number of hosts than a heap does, but for the rounds of heartbeats.
"""

from __future__ import annotations

import heapq
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from launcher.hosts.host import Host, HostKind
from launcher.job.events import Close, Command, Open, Send
from launcher.job.timers import NEVER, Timer, Timers
from launcher.placement.placement import HostOffer
from launcher.protocol.commands import Stop, Suspend
from launcher.protocol.message import HEARTBEATS, Report, heartbeat_pause_s
from launcher.protocol.reports import Bye, Facts, Hello, Swept
from launcher.protocol.two_way import Heartbeat

BEAT, FENCE = 0.05, 0.1  # parts of the heartbeat timeout
BEAT_AT_MOST_S = 5.0  # however long that is
FENCE_AT_LEAST_S, FENCE_AT_MOST_S = 0.3, 2.0
FENCE_FOR_DRIFT = 2e-3  # that part of a long timeout at least: ten times what clocks run apart
TOLERANCE = 1 - BEAT - 1 / HEARTBEATS
RESUMED = 0.2  # of the timeout: for the order to go on after a suspension to arrive
LOCAL_FENCE_S = 30.0  # for a lost agent of this machine that no other could be started to clean up after
RETRIES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 10.0)  # pauses between attempts to reach a lost host; the last one repeats
USED_S = 2.0  # the most for one that took part: resilient workers there join the others when it is back
STEADY_S = 2.0  # who was ready for less is not tried at once for ever
CONNECT_AT_ONCE = 256  # hosts over SSH: each takes a thread, and most of its time is waiting for DNS and the network
WINDOW_S = 60.0  # clocks drift apart, and stand still while a machine sleeps: old measurements are forgotten
LONG_AGO = -1e300  # a heartbeat of that time renews no lease; infinity is in no message


class HostPhase(Enum):
    AWAY = auto()  # no link: lost, or could not be reached; to be tried again
    CONNECTING = auto()
    GREETING = auto()  # connected, no word yet
    CHECKING = auto()  # asked whether the job can start there
    READY = auto()
    LEAVING = auto()  # ordered to end
    OUT = auto()  # given up for good: never used or tried again


class HostClock:
    """A host's monotonic clock, as far as it is known: the message with the least delay says the most."""

    def __init__(self) -> None:
        self._offset = self._earlier = float("inf")
        self._window_until = float("-inf")

    def hear(self, time: float, now: float) -> None:
        """Take the time at which a message was sent, by the host's clock."""
        if now >= self._window_until:
            self._window_until = now + WINDOW_S
            self._earlier, self._offset = self._offset, float("inf")
        self._offset = min(self._offset, now - time)

    def corrected(self, time: float) -> float:
        """Return a time of this host on the controller's clock: late by the least delay, never early."""
        offset = min(self._offset, self._earlier)
        return time if offset == float("inf") else time + offset

    def theirs(self, now: float) -> float:
        """Return what its clock shows: early by the least delay, never late; LONG_AGO while nothing was heard of it."""
        return max(LONG_AGO, now - min(self._offset, self._earlier))


@dataclass
class HostState:
    """`link` numbers its connections, `heard` is when something last came from it.

    `alive_at` is when it last sent something, as its clock says: what arrives after an outage of the network may have
    been sent before that, and the host be gone.
    `lost_agents` are the identities of those whose processes were not looked for yet. Without a link, workers are
    certainly gone at `fenced_at`.
    """

    host: Host
    phase: HostPhase = HostPhase.AWAY
    link: int = 0
    facts: Facts | None = None
    our_address: str | None = None
    heard: float = 0.0
    alive_at: float = 0.0
    told_heard: float = LONG_AGO  # the newest such time that was sent to it
    rests_until: float | None = None  # its lease rests, unless it says something after that
    clock: HostClock = field(default_factory=HostClock)
    agent_identity: str = ""
    lost_agents: list[str] = field(default_factory=list)
    fenced_at: float | None = None
    tries: int = 0  # to reach it since it was lost
    retry_at: float | None = None
    ready_at: float | None = None  # since then, or was before it was lost
    flaps: int = 0  # how often in a row it was soon lost again
    failed_attempts: int = 0  # attempts in a row that ended through it
    reason: str = ""  # why it cannot be used, in words

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def connected(self) -> bool:
        return self.phase in (HostPhase.GREETING, HostPhase.CHECKING, HostPhase.READY, HostPhase.LEAVING)

    @property
    def greeted(self) -> bool:
        """Whether its agent reads what is sent to it."""
        return self.phase in (HostPhase.CHECKING, HostPhase.READY, HostPhase.LEAVING)

    @property
    def leased(self) -> bool:
        """Whether its agent ends by itself when it hears nothing; at the end of a local pipe it always notices."""
        return self.host.remote

    def offer(self) -> HostOffer:
        """Return what it has for the job; its facts must be known."""
        assert self.facts is not None
        return HostOffer.of(self.host, self.facts)


_ON_THEIR_WAY = (HostPhase.CONNECTING, HostPhase.GREETING, HostPhase.CHECKING)


class Fleet:
    """`states` in the order in which the user named the hosts."""

    def __init__(self, hosts: Iterable[Host], timers: Timers, *, timeout_s: float, join_s: float, now: float) -> None:
        self.states = {host.name: HostState(host, heard=now, alive_at=now) for host in hosts}
        self.busy: set[str] = set()  # the names of those where workers of the attempt may live
        self.coming: set[str] = set()  # the names of those that are on their way at the first try to reach them
        self._untried: deque[str] = deque()  # to be tried as soon as there is a place
        self.used: set[str] = set()  # ever busy
        self.dropped: set[str] = set()  # no longer wanted: each goes OUT once it has left
        self.left: dict[str, list[str]] = {}  # processes that could not be ended
        self.swept = 0  # processes that outlived their workers and were ended
        self.byes: dict[str, Bye] = {}  # the last words of each host
        self.timeout_s = timeout_s
        self.fence_s = min(max(FENCE * timeout_s, FENCE_AT_LEAST_S), max(FENCE_AT_MOST_S, FENCE_FOR_DRIFT * timeout_s))
        self.beat_s = min(BEAT * timeout_s, BEAT_AT_MOST_S)
        agents = max((state.host.parts for state in self), default=1)
        self.heartbeat_s = heartbeat_pause_s(timeout_s, agents)
        self.quiet_s = 2 * self.heartbeat_s  # who says nothing for so long is no longer there
        self._join_s = max(join_s, timeout_s)  # for a host to be ready; a look at its devices may take long
        self._timers = timers
        timers.set(Timer.BEAT, now + self.beat_s)
        timers.set(Timer.LOOK, now + self.beat_s)
        self._counts = Counter({HostPhase.AWAY: len(self.states)})
        self._retries: list[tuple[float, str]] = []  # heaps; what no longer holds is dropped when it comes up
        self._fences: list[tuple[float, str]] = []

    def __iter__(self) -> Iterator[HostState]:
        return iter(self.states.values())

    def __len__(self) -> int:
        return len(self.states)

    def count(self, *phases: HostPhase) -> int:
        return sum(self._counts[phase] for phase in phases)

    def ready(self) -> list[HostState]:
        return [state for state in self if state.phase is HostPhase.READY]

    def wanted(self, state: HostState) -> bool:
        return state.name not in self.dropped

    def works(self, state: HostState) -> bool:
        """Return whether its agent was ordered to take part in an attempt, and has not said that it is over there."""
        return state.phase is HostPhase.READY and state.name in self.busy

    def dirty(self, state: HostState) -> bool:
        """Return whether unwatched processes of the run may still live there."""
        return bool(state.lost_agents) or state.name in self.busy

    def workers_of(self, names: Iterable[str]) -> list[str]:
        """Return those of the hosts whose agents take part in the attempt."""
        return [name for name in names if self.works(self.states[name])]

    def _move(self, state: HostState, phase: HostPhase) -> None:
        self._counts[state.phase] -= 1
        self._counts[phase] += 1
        state.phase = phase
        if phase in _ON_THEIR_WAY and state.tries <= 1 and self.wanted(state):
            self.coming.add(state.name)
        else:
            self.coming.discard(state.name)

    def add(self, host: Host, now: float) -> HostState:
        """Take in a host as the user names it now: it may be new, or have other slots."""
        if host.name not in self.states:
            self.states[host.name] = HostState(host, heard=now, alive_at=now)
            self._counts[HostPhase.AWAY] += 1
        state = self.states[host.name]
        state.host = host
        return state

    def want(self, state: HostState, now: float) -> None:
        """Use a host again that was dropped."""
        self.dropped.discard(state.name)
        state.failed_attempts = state.tries = 0
        if state.phase in (HostPhase.OUT, HostPhase.AWAY):
            self._move(state, HostPhase.AWAY)
            self.try_again(state, now)

    def drop(self, state: HostState, reason: str = "") -> None:
        """Use a host no more; it is still tried again until what it may have left is gone."""
        state.reason = reason or state.reason
        self.dropped.add(state.name)
        self.coming.discard(state.name)

    def stop(self, state: HostState, signum: int = signal.SIGKILL, *, reason: str = "") -> list[Command]:
        """Order a host to end, however far it has come; `signum` is for its workers."""
        state.reason = reason or state.reason
        self._move(state, HostPhase.LEAVING)
        return [Send(state.name, Stop(signum=signum))]

    def give_up(self, state: HostState) -> list[Command]:
        """Give a host up for good, and its link if it has one."""
        has_link = state.phase is not HostPhase.AWAY
        self._move(state, HostPhase.OUT)
        return [Close(state.name)] if has_link else []

    def count_failed(self, state: HostState, *, failed: bool) -> None:
        """Count an attempt that ended through it; one that did not ends the row."""
        state.failed_attempts = state.failed_attempts + 1 if failed else 0

    def occupy(self, state: HostState) -> None:
        """Note that from now on processes of an attempt may live on a host."""
        self.busy.add(state.name)
        self.used.add(state.name)

    def _vacate(self, state: HostState) -> None:
        """Note that it is certain that none do."""
        state.fenced_at = None
        self.busy.discard(state.name)

    def start(self) -> list[Command]:
        """Try every host: those over SSH a bounded number at once, the rest as `open_untried` finds places."""
        for state in self:
            if state.host.kind is HostKind.SSH:
                self._untried.append(state.name)
                self.coming.add(state.name)
        others = [self.open(state) for state in self if state.name not in self.coming]
        return [*others, *self.open_untried()]

    def open_untried(self) -> list[Command]:
        commands: list[Command] = []
        while self._untried and self._counts[HostPhase.CONNECTING] < CONNECT_AT_ONCE:
            state = self.states[self._untried.popleft()]
            if state.link == 0 and state.phase is HostPhase.AWAY and self.wanted(state):
                commands.append(self.open(state))
        return commands

    def open(self, state: HostState) -> Command:
        state.link += 1
        state.tries += 1
        state.retry_at = None
        state.told_heard = LONG_AGO
        state.clock = HostClock()  # it may have been started again
        self._move(state, HostPhase.CONNECTING)
        return Open(state.host, state.link)

    def connected(self, state: HostState, our_address: str | None, now: float) -> None:
        state.our_address, state.heard, state.alive_at = our_address, now, now
        self._move(state, HostPhase.GREETING)

    def hear(self, state: HostState, message: Report | None, now: float) -> None:
        """Note that a host spoke, and what its clock says if the message carries the time of its sending.

        None: it may have spoken; what it says is not read at the moment.
        """
        state.heard = now
        if message is None:
            state.alive_at = now
        elif isinstance(message, Hello | Facts | Heartbeat):
            state.clock.hear(message.time, now)
            state.alive_at = state.clock.corrected(message.time)
            if state.rests_until is not None and state.clock.corrected(message.time) > state.rests_until:
                state.rests_until = None

    def greeted(self, state: HostState, agent_identity: str) -> None:
        state.agent_identity = agent_identity
        state.rests_until = None
        self._move(state, HostPhase.CHECKING)

    def checked(self, state: HostState, facts: Facts) -> None:
        """Note that a host is ready: what lost agents had left there, this one has ended before it answered."""
        state.facts = facts
        state.lost_agents.clear()
        state.tries = 0
        state.ready_at = state.heard
        state.reason = ""
        self._vacate(state)
        self._move(state, HostPhase.READY)

    def said_swept(self, state: HostState, swept: Swept) -> None:
        """Take the end of an attempt on a host."""
        self._vacate(state)
        self._take_swept(state, swept)

    def _take_swept(self, state: HostState, message: Swept | Bye) -> None:
        self.swept += message.swept
        if message.left:
            self.left[state.name] = message.left
            self.drop(state)  # what cannot be ended must not meet the next attempt

    def could_not_clean(self, state: HostState, facts: Facts) -> None:
        """Note that a new agent has looked for what lost ones left, and cannot be used."""
        state.lost_agents.clear()
        self._vacate(state)
        if facts.left:
            self.left.setdefault(state.name, []).extend(facts.left)
            self.drop(state)

    def lost(self, state: HostState, reason: str, now: float) -> list[Command]:
        """Give a link up; the next agent there cleans up what is behind it, or its lease fences it."""
        if state.name in self.busy:
            if state.agent_identity:
                state.lost_agents.append(state.agent_identity)
            if state.fenced_at is None:
                state.fenced_at = self._fence_at(state, now)
                heapq.heappush(self._fences, (state.fenced_at, state.name))
                self._timers.set(Timer.FENCE, self._fences[0][0])
        return self._left(state, reason)

    def _fence_at(self, state: HostState, now: float) -> float:
        if not state.leased:
            return now + LOCAL_FENCE_S
        if state.rests_until is not None:
            return NEVER
        return max(now, state.heard + self.timeout_s + self.fence_s)

    def said_bye(self, state: HostState, bye: Bye, reason: str) -> list[Command]:
        """Take the end of an agent that has swept its host; `reason` says why it ended."""
        self._take_swept(state, bye)
        self.byes[state.name] = bye
        if not state.lost_agents:  # otherwise it ended before it could clean up after another
            self._vacate(state)
        return self._left(state, reason)

    def _left(self, state: HostState, reason: str) -> list[Command]:
        state.agent_identity = ""
        state.reason = reason
        state.facts = None
        self._move(state, HostPhase.AWAY)
        return [Close(state.name)]

    def try_again(self, state: HostState, now: float, *, afresh: bool = False) -> None:
        """Try a host that is away again, after a pause: the longer the more often it was in vain, or for a moment.

        `afresh`: as if it had not been tried yet.
        """
        state.tries = 0 if afresh else state.tries
        if state.ready_at is not None:
            state.flaps = state.flaps + 1 if now - state.ready_at < STEADY_S else 0
            state.ready_at = None
        since_lost, flapping = (RETRIES_S[min(max(n, 0), len(RETRIES_S) - 1)] for n in (state.tries, state.flaps - 1))
        since_lost = min(since_lost, USED_S) if state.name in self.used else since_lost
        state.retry_at = now + max(since_lost, flapping)
        heapq.heappush(self._retries, (state.retry_at, state.name))
        self._timers.set(Timer.RETRY, self._next_retry())

    def retries(self, now: float) -> list[Command]:
        """Try those hosts again whose time has come."""
        commands = []
        while self._next_retry() <= now:
            commands.append(self.open(self.states[heapq.heappop(self._retries)[1]]))
        self._timers.set(Timer.RETRY, self._next_retry())
        return commands

    def _next_retry(self) -> float:
        while self._retries:
            at, name = self._retries[0]
            state = self.states[name]
            if state.phase is HostPhase.AWAY and state.retry_at == at:
                return at
            heapq.heappop(self._retries)
        return NEVER

    def heartbeats(self, now: float) -> list[Command]:
        """Renew the leases of the hosts that were heard since the last time."""
        self._timers.set(Timer.BEAT, now + self.beat_s)
        commands: list[Command] = []
        for state in self:
            if state.greeted and state.leased and state.heard > state.told_heard:
                state.told_heard = state.heard
                commands.append(Send(state.name, Heartbeat(time=state.clock.theirs(state.heard), sent=now)))
        return commands

    def silent(self, now: float) -> list[HostState]:
        """Return the connected hosts that were not heard for too long."""
        self._timers.set(Timer.LOOK, now + self.beat_s)
        return [
            state
            for state in self
            if state.connected
            and now - state.heard
            >= (self._join_s if state.phase in (HostPhase.GREETING, HostPhase.CHECKING) else self.timeout_s)
        ]

    def fence(self, now: float) -> None:
        """Note which lost hosts' workers are certainly gone by now. When that was remains known."""
        while self._fences and self._fences[0][0] <= now:
            at, name = heapq.heappop(self._fences)
            if self.states[name].fenced_at == at:
                self.busy.discard(name)
        self._timers.set(Timer.FENCE, self._fences[0][0] if self._fences else NEVER)

    def never_fenced(self) -> list[str]:
        """Return the lost hosts whose workers are known to be gone only after a look there."""
        return [name for name in sorted(self.busy) if self.states[name].fenced_at == NEVER]

    def suspend(self, suspended: bool, now: float) -> list[Command]:
        """Have the processes of all hosts stopped where they are, or go on; their leases rest meanwhile."""
        commands: list[Command] = []
        for state in self:
            if state.greeted:
                state.rests_until = NEVER if suspended else now + RESUMED * self.timeout_s
                commands.append(Send(state.name, Suspend(suspended=suspended)))
        return commands

    def slept(self, seconds: float) -> None:
        """Leave out a time in which this process did not listen."""
        for state in self:
            state.heard += seconds
            state.alive_at += seconds
