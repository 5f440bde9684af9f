"""`dtrain check`: checks whether a run would start on its hosts, and finds problems before the job.

Starts an examiner on every host (examiner.py), asks all of them concurrently, makes them probe each other,
then runs an all-reduce as a separate run (allreduce.py). hosts.py and pairs.py decide what is wrong, report.py prints.
Leaves nothing on any host.
"""

from __future__ import annotations

import os
import queue
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

from launcher.check.allreduce import Measured, allreduce_spec, measure_allreduce
from launcher.check.examiner import AT_ONCE, all_at_once
from launcher.check.examiner_host import code_digest, file_digest
from launcher.check.facts import Clock, HostFacts, Listening, Probe
from launcher.check.finding import Examined, Finding, Severity, merged
from launcher.check.hosts import host_findings
from launcher.check.pairs import pair_findings, store_findings, targets
from launcher.check.report import Report, report_as_json, report_as_text
from launcher.controller.link import Link, close_links
from launcher.decode import decode_dataclass, decode_value
from launcher.errors import DtrainError, HostError
from launcher.hosts.host import Host, HostKind, own_name
from launcher.job.events import AgentMessage, Connected, Event, Lost
from launcher.job.orders import prepare
from launcher.output.text import size
from launcher.placement.job_spec import DEFAULT_PORT, CommandKind, JobSpec
from launcher.protocol.reports import Hello
from launcher.protocol.two_way import Answer, Question
from launcher.timeline.clock_offset import ClockOffset
from launcher.transport.connect import Connector

FACTS_S = 20.0  # a driver without persistence mode takes seconds per card
PROBE_S = 3.0
LOGS_BYTES = 100 << 20
HOSTS_AT_ONCE = 256
ROUND_TRIPS = 8
CONNECT_S = 1.0  # beyond the deadline: the connector reports better why it takes so long

T = TypeVar("T")


def run_check(asked: JobSpec, *, as_json: bool, say: Callable[[str], None], allreduce: bool = True) -> int:
    """Check the hosts of a run, print the findings, and return 0 if it would start, 1 if not, 128+n at signal n.

    Blocks; call from the main thread only.
    """
    began = time.monotonic()
    spec, findings = _from_here(asked)
    findings += _log_dir(spec)
    with closing(_Examination(spec)) as examination:
        examination.run()
    findings = merged([*findings, *examination.findings])
    examined_s = time.monotonic() - began
    usable = _usable(spec, examination.examined, findings)
    starts = len(usable) >= spec.min_hosts
    measured: Measured | None = None
    if allreduce and starts and spec.hosts == asked.hosts:
        measured = measure_allreduce(*allreduce_spec(spec, usable))
        if measured.signum is not None:
            say(f"stopped by {signal.Signals(measured.signum).name} during the all-reduce")
            return 128 + measured.signum
        findings = merged([*findings, *_failed(spec, measured)])
        starts = starts and measured.figures is not None
    report = Report(
        examined=tuple(examination.examined),
        ways=tuple(examination.ways),
        findings=tuple(findings),
        measured=measured,
        asked_for_allreduce=allreduce,
        starts=starts,
        examined_s=examined_s,
        took_s=time.monotonic() - began,
    )
    sys.stdout.write(report_as_json(report) if as_json else report_as_text(report))
    sys.stdout.flush()
    return 0 if starts else 1


def _from_here(spec: JobSpec) -> tuple[JobSpec, list[Finding]]:
    """Leave out the nodes to be started by hand; if there are no other hosts, check this machine."""
    joined = [host for host in spec.hosts if host.kind is HostKind.JOINED]
    if not joined:
        return spec, []
    hosts = tuple(host for host in spec.hosts if host.kind is not HostKind.JOINED)
    message = "nodes started by hand cannot be reached from here; type `dtrain check` on each of them"
    found = Finding(Severity.NOTE, "by-hand", tuple(host.name for host in joined), message, "dtrain check")
    return replace(spec, hosts=hosts or (Host(own_name(), HostKind.LOCAL),), nnodes=None), [found]


def _log_dir(spec: JobSpec) -> list[Finding]:
    """Check whether the output of a run could be kept; it is written on this machine."""
    folder = spec.log_dir.absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    where = (own_name(),)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        message = f"the log folder {folder} cannot be written; a run's output would not be kept (--log-dir)"
        return [Finding(Severity.WARNING, "log-dir", where, message, f"ls -ld {shlex.quote(str(there))}")]
    if (free := shutil.disk_usage(there).free) < LOGS_BYTES:
        message = f"the log folder {folder} has {size(free)} free (--log-dir)"
        return [Finding(Severity.WARNING, "log-dir", where, message, f"df -h {shlex.quote(str(there))}")]
    return []


def _usable(spec: JobSpec, examined: Iterable[Examined], findings: Iterable[Finding]) -> list[Examined]:
    """Return the hosts without an error."""
    bad = {name for finding in findings if finding.severity is Severity.ERROR for name in finding.hosts}
    return [one for one in examined if one.name not in bad][: spec.max_hosts]


def _failed(spec: JobSpec, measured: Measured) -> list[Finding]:
    if measured.figures is not None and all(each["correct"] for each in measured.figures["sizes"]):
        return []
    message = f"the all-reduce failed: {measured.problem}" if measured.problem else "the all-reduce's sum is wrong"
    hosts = ",".join(host.name for host in spec.hosts)
    fix = f"NCCL_DEBUG=INFO TORCH_CPP_LOG_LEVEL=INFO dtrain run --hosts {hosts} -m ddp.comm.allreduce_speed"
    return [Finding(Severity.ERROR, "allreduce", (), message, fix)]


class _Examination:
    """The requests to the examiners of all hosts; owns their streams until it is closed."""

    def __init__(self, spec: JobSpec) -> None:
        self.examined: list[Examined] = []
        self.ways: list[Probe] = []
        self.findings: list[Finding] = []
        self._spec = spec
        self._links = {host.name: _HostLink(host, spec.python) for host in spec.hosts}
        self._connector = Connector(spec, module="launcher.check.examiner")
        self._token = secrets.token_hex(16)

    def close(self) -> None:
        """End the examiners by closing their input, and release everything."""
        close_links([each.link for each in self._links.values()])
        self._connector.close()

    def run(self) -> None:
        self._examine()
        there = {one.name: one for one in self.examined if one.facts is not None}
        listening = self._listen(there)
        if len(listening) > 1:
            self._probe(there, listening)

    def _examine(self) -> None:
        """Connect to every host and ask for its facts."""
        spec = self._spec
        until = time.monotonic() + spec.start_timeout_s

        def examine(link: _HostLink) -> Examined:
            greeting = link.open(self._connector, until)
            clock = link.find_clock(until)
            question = vars(prepare(spec, link.host, lease_s=0.0, lost_agents=()))
            facts = decode_value(HostFacts, link.ask(time.monotonic() + FACTS_S, ask="facts", prepare=question))
            return Examined(link.host, "", greeting, facts, clock, spec.ssh)

        answers, reasons = self._ask(examine, self._links)
        self.examined = [
            answers.get(name) or Examined(link.host, reasons[name], ssh=spec.ssh) for name, link in self._links.items()
        ]
        script = file_digest(spec.workdir / spec.command.target) if spec.command.kind is CommandKind.SCRIPT else None
        self.findings += host_findings(spec, self.examined, code_here=code_digest(), script_here=script)

    def _listen(self, there: Mapping[str, Examined]) -> dict[str, Listening]:
        """Make every examiner listen on the address that a run would use; the first one on the store's port as well."""
        spec = self._spec
        seen_from = [address for name in there if (address := self._links[name].our_address)]
        alone = not any(self._links[name].host.remote for name in there)
        here = "" if spec.interfaces else next(iter(seen_from), "127.0.0.1" if alone else "")

        def listen(link: _HostLink) -> Listening:
            first = link.host.name == spec.hosts[0].name
            address = "" if link.host.remote else here
            answer = link.ask(
                time.monotonic() + FACTS_S,
                ask="listen",
                address=(spec.master_addr or address) if first else address,
                interfaces=list(spec.interfaces),
                towards=next((name for name in there if name != link.host.name), ""),
                own_connection=link.host.has_own_connection,
                token=self._token,
                store_port=(spec.master_port or DEFAULT_PORT) if first else 0,
            )
            return decode_dataclass(Listening, answer)

        listening, reasons = self._ask(listen, there)
        self._not_answered(there, reasons, "cannot-listen", "it cannot listen on the address for the others")
        for name, found in listening.items():
            self.findings += store_findings(spec, name, found)
        return listening

    def _probe(self, there: Mapping[str, Examined], listening: Mapping[str, Listening]) -> None:
        """Make every listening host connect to the others."""
        where = {name: targets(listening, name) for name in listening}
        rounds = -(-max(map(len, where.values())) // AT_ONCE)

        def probe(link: _HostLink) -> tuple[tuple[Probe, ...], str]:
            ways, variables = link.ask(
                time.monotonic() + FACTS_S + rounds * PROBE_S,
                ask="probe",
                targets=[vars(target) for target in where[link.host.name]],
                token=self._token,
                limit_s=PROBE_S,
                master_addr=next(iter(listening.values())).address,
                interfaces=list(self._spec.interfaces),
            )
            return decode_value(tuple[Probe, ...], ways), str(variables.get("GLOO_SOCKET_IFNAME", ""))

        found, reasons = self._ask(probe, listening)
        self._not_answered(there, reasons, "unusable", "while it tried to reach the others")
        self.ways = [way for ways, _ in found.values() for way in ways]
        gloo = {name: interface for name, (_, interface) in found.items()}
        self.findings += pair_findings(list(there.values()), listening, self.ways, gloo)

    def _ask(self, question: Callable[[_HostLink], T], names: Iterable[str]) -> tuple[dict[str, T], dict[str, str]]:
        """Ask hosts concurrently; return the answers, and the reasons of those that failed."""
        answers: dict[str, T] = {}
        reasons: dict[str, str] = {}

        def ask(name: str) -> None:
            try:
                answers[name] = question(self._links[name])
            except DtrainError as error:
                reasons[name] = getattr(error, "reason", str(error))
            except Exception as error:  # an unexpected failure of a host must be reported, too
                reasons[name] = f"{type(error).__name__}: {error}"

        all_at_once(ask, list(names), most=HOSTS_AT_ONCE)
        return {name: answers[name] for name in names if name in answers}, reasons

    def _not_answered(self, there: Mapping[str, Examined], reasons: Mapping[str, str], kind: str, failed: str) -> None:
        for name, reason in reasons.items():
            finding = there[name].finding(Severity.ERROR, kind, f"{failed}: {reason}", "ip -brief address")
            self.findings.append(finding)


class _HostLink:
    """The link to one examiner: requests, answers, and the offset of its clock. Used by one thread at a time.

    Every wait has a deadline. `link` ends the examiner when it is closed.
    """

    def __init__(self, host: Host, python: str) -> None:
        self.host = host
        self.our_address: str | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.link = Link(host, 1, python=python, events=self._events)

    def open(self, connector: Connector, deadline: float) -> Hello:
        """Connect and wait for the greeting. Raises HostError."""
        self.link.open(lambda: connector.connect(self.host, deadline))
        connected = self._next(deadline + CONNECT_S)
        assert isinstance(connected, Connected)
        self.our_address = connected.our_address
        return self._hear(Hello, deadline)

    def ask(self, deadline: float, ask: str, **about: Any) -> Any:
        """Send a request and return the answer, decoded from JSON. Raises HostError."""
        self.link.send(Question(ask, about))
        answer = self._hear(Answer, deadline)
        if answer.problem:
            raise HostError(self.host.name, f"could not answer: {answer.problem}")
        return answer.value

    def find_clock(self, deadline: float) -> Clock:
        """Compare the clocks by the fastest of several requests."""
        clock = ClockOffset()
        for _ in range(ROUND_TRIPS):
            asked = time.time()
            theirs = decode_value(float, self.ask(deadline, ask="time"))
            clock.hear(theirs, time.time(), asked=asked, asked_at=theirs)
        return Clock(-clock.offset_s, clock.error_s, 2 * clock.error_s)

    def _hear(self, expected: type[T], deadline: float) -> T:
        event = self._next(deadline)
        assert isinstance(event, AgentMessage)
        message: object = event.message
        if not isinstance(message, expected):
            raise HostError(self.host.name, f"sent {event.message.kind} instead of {expected.__name__}")
        return message

    def _next(self, deadline: float) -> Event:
        """Return the next event. Raises HostError at the end of the link, and at the deadline."""
        try:
            event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise HostError(self.host.name, "did not answer in time; see --start-timeout-s") from None
        if isinstance(event, Lost):
            raise HostError(self.host.name, event.reason)
        return event
