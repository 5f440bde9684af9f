"""`dtrain check`: whether a run would start on its hosts, and what would be wrong with it, before the job.

Starts an examiner on every host (link.py, examiner.py), asks all at once, lets them probe each other, then runs an
all-reduce as a run of its own (allreduce.py). What is wrong is decided by hosts.py and pairs.py, told by report.py.
Leaves nothing anywhere.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from launcher.check.allreduce import Measured, allreduce_spec, measure_allreduce
from launcher.check.examiner_host import SHA_DIGITS, code_digest
from launcher.check.examiner_network import AT_ONCE, all_at_once
from launcher.check.facts import HostFacts, Listening, Probe
from launcher.check.finding import Examined, Finding, Severity, merged, on_host, size
from launcher.check.hosts import host_findings
from launcher.check.link import HostLink
from launcher.check.pairs import pair_findings, store_findings, targets
from launcher.check.report import Report, report_as_json, report_as_text
from launcher.decode import decode_dataclass, decode_value
from launcher.errors import DtrainError
from launcher.hosts.host import Host, HostKind, own_name
from launcher.job.orders import prepare
from launcher.placement.job_spec import DEFAULT_PORT, CommandKind, JobSpec
from launcher.transport.connect import Connector

__all__ = ["run_check"]

FACTS_S = 20.0  # a driver without persistence mode takes seconds for each card
PROBE_S = 3.0
LOGS_BYTES = 100 << 20
HOSTS_AT_ONCE = 256

T = TypeVar("T")


def run_check(asked: JobSpec, *, as_json: bool, say: Callable[[str], None], allreduce: bool = True) -> int:
    """Check the hosts of a run, print what was found, and return 0 if it would start, 1 if not.

    Blocks; from the main thread only. 128+n where signal n ended it.
    """
    began = time.monotonic()
    spec, findings = _from_here(asked)
    findings += _log_dir(spec)
    with _Examination(spec) as examination:
        examination.run()
        findings += examination.findings
    findings = merged(findings)
    examined_s = time.monotonic() - began
    well = _well(spec, examination.examined, findings)
    starts = len(well) >= spec.min_hosts
    measured: Measured | None = None
    if allreduce and starts and spec.hosts == asked.hosts:
        facts = [one.facts for one in examination.examined if one.host in well and one.facts is not None]
        measured = measure_allreduce(*allreduce_spec(spec, well, facts))
        if measured.signum is not None:
            say(f"stopped by {signal.Signals(measured.signum).name} during the all-reduce")
            return 128 + measured.signum
        findings = merged([*findings, *_failed(spec, measured)])
        starts = starts and measured.figures is not None
    report = Report(
        spec=spec,
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
    """Leave out the hosts on which somebody has to type the command; if that is all of them, take this machine."""
    joined = [host for host in spec.hosts if host.kind is HostKind.JOINED]
    if not joined:
        return spec, []
    hosts = tuple(host for host in spec.hosts if host.kind is not HostKind.JOINED)
    message = "nodes on which the command is typed cannot be reached from here; type `dtrain check` on each of them"
    found = Finding(Severity.NOTE, "by-hand", tuple(host.name for host in joined), message, "dtrain check")
    return replace(spec, hosts=hosts or (Host(own_name(), HostKind.LOCAL),), nnodes=None), [found]


def _log_dir(spec: JobSpec) -> list[Finding]:
    """Say whether the output of a run could be kept; it is written on this machine."""
    folder = spec.log_dir.absolute()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    where = (own_name(),)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        message = f"the log folder {folder} cannot be written; a run's output would not be kept (--log-dir)"
        return [Finding(Severity.WARNING, "log-dir", where, message, f"ls -ld {shlex.quote(str(there))}")]
    space = os.statvfs(there)
    if (free := space.f_bavail * space.f_frsize) < LOGS_BYTES:
        message = f"the log folder {folder} has {size(free)} free (--log-dir)"
        return [Finding(Severity.WARNING, "log-dir", where, message, f"df -h {shlex.quote(str(there))}")]
    return []


def _well(spec: JobSpec, examined: Iterable[Examined], findings: Iterable[Finding]) -> list[Host]:
    """Return the hosts of which no error is known."""
    bad = {name for finding in findings if finding.severity is Severity.ERROR for name in finding.hosts}
    return [one.host for one in examined if one.host.name not in bad][: spec.max_hosts]


def _failed(spec: JobSpec, measured: Measured) -> list[Finding]:
    if measured.figures is not None and all(size["correct"] for size in measured.figures["sizes"]):
        return []
    message = f"the all-reduce failed: {measured.problem}" if measured.problem else "the all-reduce's sum is wrong"
    hosts = ",".join(host.name for host in spec.hosts)
    fix = f"NCCL_DEBUG=INFO TORCH_CPP_LOG_LEVEL=INFO dtrain run --hosts {hosts} -m ddp.comm.allreduce_speed"
    return [Finding(Severity.ERROR, "allreduce", (), message, fix)]


# ---- asking the hosts ----------------------------------------------------------------------------------------


@dataclass
class _Examination:
    """The examiners of all hosts, asked at once; owns their streams within the `with` block."""

    spec: JobSpec
    examined: list[Examined] = field(default_factory=list)
    ways: list[Probe] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._links = {host.name: HostLink(host, self.spec.python) for host in self.spec.hosts}
        self._connector = Connector(self.spec, module="launcher.check.examiner")
        self._token = secrets.token_hex(16)

    def __enter__(self) -> _Examination:
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links.values():
            link.end()
        _ask_all(HostLink.close, self._links)
        self._connector.close()

    def run(self) -> None:
        spec = self.spec
        until = time.monotonic() + spec.start_timeout_s
        self.examined = list(_ask_all(lambda link: self._examine(link, until), self._links).values())
        code, script = code_digest()[:SHA_DIGITS], _script_here(spec)
        self.findings += host_findings(spec, self.examined, code_here=code, script_here=script)
        there = {one.name: self._links[one.name] for one in self.examined if one.facts is not None}
        listening = self._listen(there)
        if len(listening) > 1:
            self._probe({name: there[name] for name in listening}, listening)

    def _examine(self, link: HostLink, until: float) -> Examined:
        try:
            greeting = link.open(self._connector, until)
            clock = link.find_clock(until)
            question = vars(prepare(self.spec, link.host, lease_s=0.0, lost_agents=()))
            facts = decode_value(HostFacts, link.ask(time.monotonic() + FACTS_S, ask="facts", prepare=question))
            return Examined(link.host, "", greeting, facts, clock)
        except DtrainError as error:
            return Examined(link.host, getattr(error, "reason", str(error)))
        except Exception as error:  # a host that fails in a way nobody thought of must still be answered for
            return Examined(link.host, f"{type(error).__name__}: {error}")

    def _listen(self, there: Mapping[str, HostLink]) -> dict[str, Listening]:
        """Have every examiner listen where a run would be reached; the first one at the store's port as well."""
        spec = self.spec
        seen_from = [link.our_address for link in there.values() if link.our_address]
        here = "" if spec.interfaces else (seen_from or ["127.0.0.1"])[0]

        def listen(link: HostLink) -> Listening:
            first = link.host.name == spec.hosts[0].name
            address = "" if link.host.remote else here
            answer = link.ask(
                time.monotonic() + FACTS_S,
                ask="listen",
                address=(spec.master_addr or address) if first else address,
                interfaces=list(spec.interfaces),
                towards=next((name for name in there if name != link.host.name), ""),
                token=self._token,
                store_port=(spec.master_port or DEFAULT_PORT) if first else 0,
            )
            return decode_dataclass(Listening, answer)

        listening = self._ask(listen, there, "cannot-listen", "it cannot listen where the others would reach it")
        for name, found in listening.items():
            self.findings += store_findings(spec, name, found)
        return listening

    def _probe(self, there: Mapping[str, HostLink], listening: Mapping[str, Listening]) -> None:
        where = {name: targets(listening, name) for name in there}
        rounds = -(-max(map(len, where.values())) // AT_ONCE)

        def probe(link: HostLink) -> tuple[tuple[Probe, ...], str]:
            ways, variables = link.ask(
                time.monotonic() + FACTS_S + rounds * PROBE_S,
                ask="probe",
                targets=[vars(target) for target in where[link.host.name]],
                token=self._token,
                limit_s=PROBE_S,
                master_addr=next(iter(listening.values())).address,
                interfaces=list(self.spec.interfaces),
            )
            return decode_value(tuple[Probe, ...], ways), str(variables.get("GLOO_SOCKET_IFNAME", ""))

        found = self._ask(probe, there, "unusable", "while it tried to reach the others")
        self.ways += [way for ways, _ in found.values() for way in ways]
        gloo = {name: interface for name, (_, interface) in found.items()}
        self.findings += pair_findings(self.spec, self.examined, listening, self.ways, gloo)

    def _ask(
        self, question: Callable[[HostLink], T], links: Mapping[str, HostLink], kind: str, failed: str
    ) -> dict[str, T]:
        """Return the answers of the hosts that give one; the others are found to be of this kind of failure."""

        def ask(link: HostLink) -> T | DtrainError:
            try:
                return question(link)
            except DtrainError as error:
                return error

        answers = {}
        for name, answer in _ask_all(ask, links).items():
            if isinstance(answer, DtrainError):
                message = f"{failed}: {getattr(answer, 'reason', answer)}"
                fix = on_host(self.spec, links[name].host)("ip -brief address")
                self.findings.append(Finding(Severity.ERROR, kind, (name,), message, fix))
            else:
                answers[name] = answer
        return answers


def _ask_all(work: Callable[[HostLink], T], links: Mapping[str, HostLink]) -> dict[str, T]:
    return dict(zip(links, all_at_once(work, list(links.values()), most=HOSTS_AT_ONCE), strict=True))


def _script_here(spec: JobSpec) -> str | None:
    """Return the beginning of the SHA-256 of the script here, if it is here."""
    if spec.command.kind is not CommandKind.SCRIPT:
        return None
    try:
        return hashlib.sha256((spec.workdir / spec.command.target).read_bytes()).hexdigest()[:SHA_DIGITS]
    except OSError:
        return None
