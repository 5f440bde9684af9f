"""Records a run's timeline from the events and commands of the controller's loop.

The ranks' records also go to `timeline`, for live subscribers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launcher.errors import ProtocolError
from launcher.job.events import AgentMessage, Command, Connected, Event, Lost, Notice, Open, Send, Signalled
from launcher.job.failures.failure import signal_name
from launcher.job.job import Job
from launcher.placement.placement import Placement
from launcher.protocol.commands import OpenStore, Prepare, ReservePorts, RestartWorker, StartWorker
from launcher.protocol.message import Report
from launcher.protocol.reports import Bye, Exited, Facts, Hello, PortsReserved, Started, StoreOpened, Timings
from launcher.protocol.two_way import Heartbeat
from launcher.timeline.clock_offset import ClockOffset
from launcher.timeline.file import TimelineFile
from launcher.timeline.records import Detail, Record, Span, StepTimes, Timeline, unpack


class Recording:
    """Timeline of one run. Only the loop calls it, and only `close` blocks: it waits for the file.

    Calls `failed` in another thread if the file cannot be written.
    """

    def __init__(
        self, folder: Path, run_id: str, *, say: Callable[[str], None], failed: Callable[[OSError], None]
    ) -> None:
        self.timeline = Timeline()
        self._file = TimelineFile(folder, run_id, failed)
        self._say = say
        self._clocks: dict[str, tuple[int, ClockOffset]] = {}  # by host, with the number of its link
        self._since: dict[tuple[str, str], float] = {}  # by host and phase, its start
        self._ordered: dict[int, float] = {}  # by rank, when its start was ordered
        self._gone: set[str] = set()  # hosts that have sent Bye
        self._attempt = -1
        self._placement: Placement | None = None
        self._hosts: dict[int, str] = {}  # by rank
        self._has_complained = False

    def sent(self, command: Command, now: float) -> None:
        """Record a command that is carried out."""
        match command:
            case Open():
                self._gone.discard(command.host.name)
                self._since[command.host.name, "connect"] = now
            case Notice():
                self._file.add("event", "notice", self._file.at(now), command.text)
            case Send(message=Prepare()):
                self._since[command.host, "check"] = now
            case Send(message=OpenStore() | ReservePorts()):
                self._since.setdefault((command.host, "rendezvous"), now)
            case Send(message=(StartWorker() | RestartWorker()) as order):
                self._ordered[order.rank] = now

    def heard(self, event: Event, job: Job, now: float) -> None:
        """Record an event that the job has handled."""
        self._look_at(job, now)
        if isinstance(event, Signalled):
            self._file.add("event", "signal", self._file.at(now), signal_name(event.signum))
        elif isinstance(event, Connected | AgentMessage | Lost):
            if event.link != job.fleet.states[event.host].link:
                return
            if isinstance(event, Connected):
                self._end_phase(event.host, "connect", now)
                self._since[event.host, "agent"] = now
            elif isinstance(event, AgentMessage):
                self._take(event.host, event.link, event.message, now)
            elif event.host not in self._gone:
                self._file.add("event", "host lost", self._file.at(now), f"{event.host}: {event.reason}")

    def close(self) -> None:
        """Write the remaining lines. Blocks for some seconds at most."""
        self._file.close()

    def _look_at(self, job: Job, now: float) -> None:
        attempt = job.attempt
        if attempt is None or attempt.placement is self._placement:
            return
        if attempt.number != self._attempt:
            self._attempt = attempt.number
            self.timeline.begin_attempt()
        self._placement = attempt.placement
        self._hosts = {worker.rank: worker.host for worker in attempt.placement.workers}
        self._file.begin()
        self._file.add("attempt", attempt.number, self._file.at(now), [*map(list, self._hosts.items())])

    def _take(self, host: str, link: int, message: Report, now: float) -> None:
        if isinstance(message, Bye):
            self._gone.add(host)
        if host not in self._clocks or self._clocks[host][0] != link:
            self._clocks[host] = link, ClockOffset()
        clock = self._clocks[host][1]
        match message:
            case Timings():
                self._take_times(host, clock, message, now)
            case Hello() | Facts() | Heartbeat():
                clock.hear(message.time, now)
        match message:
            case Hello():
                self._end_phase(host, "agent", now)
            case Facts():
                self._end_phase(host, "check", now)
            case StoreOpened() | PortsReserved():
                self._end_phase(host, "rendezvous", now)
            case Started():
                started = message.time + clock.offset_s
                ordered = min(self._ordered.pop(message.rank, started), started)
                times = self._file.at(ordered), self._file.at(started)
                self._file.add("start", message.attempt, message.rank, *times, "exec" if message.by_exec else "fork")
            case Exited():
                ended = self._file.at(message.time + clock.offset_s)
                self._file.add("end", message.attempt, message.rank, ended, message.status, _fault(message))

    def _take_times(self, host: str, clock: ClockOffset, message: Timings, now: float) -> None:
        error_s, offset_s = clock.error_s, clock.offset_s
        clock.hear(message.time, now, asked=message.asked, asked_at=message.asked_at)
        if (error_s, offset_s) != (clock.error_s, clock.offset_s):
            known = None if clock.error_s == float("inf") else round(clock.error_s, 6)
            self._file.add("clock", host, round(clock.offset_s, 6), known)
        try:
            records = unpack(message.data, message.attempt, clock.offset_s)
        except ProtocolError as error:
            if not self._has_complained:
                self._has_complained = True
                self._say(f"{host}: {error}; dtrain trace will lack its times")
            return
        for record in records:
            if message.attempt == self._attempt and self._hosts.get(record.rank) == host:
                self._add(record)

    def _add(self, record: Record) -> None:
        self.timeline.add(record)
        at = self._file.at
        match record:
            case StepTimes():
                phases_s = [round(each_s, 6) for each_s in record.phases_s]
                self._file.add(
                    "steps", record.attempt, record.rank, record.step, record.steps, at(record.ended), phases_s
                )
            case Span():
                self._file.add("span", record.attempt, record.rank, record.kind, at(record.began), at(record.ended))
            case Detail():
                times = at(record.began), at(record.ended)
                self._file.add("detail", record.attempt, record.rank, record.step, record.phase, record.bucket, *times)

    def _end_phase(self, host: str, phase: str, now: float) -> None:
        if (since := self._since.pop((host, phase), None)) is not None:
            self._file.add("host", host, phase, self._file.at(since), self._file.at(now))


def _fault(exited: Exited) -> str:
    """Describe the fault in a worker's end; empty if there is none or dtrain ended it."""
    if exited.status == 0 or exited.provoked:
        return ""
    if exited.error and exited.error.get("type"):
        return f"{exited.error['type']}: {exited.error.get('message', '')}"[:200]
    return f"killed by {signal_name(-exited.status)}" if exited.status < 0 else f"exit code {exited.status}"
