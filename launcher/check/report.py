"""The output of `dtrain check`: a table of the hosts, the network, the all-reduce, the findings; or all of it as JSON.

Pure. The JSON's schema is `format` 1; fields may be added under the same number, but none is removed or changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher import __version__
from launcher.check.allreduce import Measured
from launcher.check.facts import Probe
from launcher.check.finding import Examined, Finding, Severity, grouped, most_common
from launcher.check.pairs import MOST, summary
from launcher.hosts.folding import fold
from launcher.output.text import count, printable, size, table

FORMAT = 1  # of `dtrain check --json`
FIXES = 2  # of one finding
SAME = 5  # findings of one kind


@dataclass(frozen=True)
class Report:
    """Everything to print. `starts`: whether a run would start and be correct, as far as known."""

    examined: tuple[Examined, ...]
    ways: tuple[Probe, ...]
    findings: tuple[Finding, ...]
    measured: Measured | None
    asked_for_allreduce: bool
    starts: bool
    examined_s: float
    took_s: float


def report_as_json(report: Report) -> str:
    """Return the whole report as JSON.

    `hosts[]`: name, kind, problem, facts (facts.HostFacts) and clock, null if the host could not be examined.
    `network`: a summary, and `pairs[]` with from, to, port, problem (empty: it works), round_trip_s, interface, mtu.
    `allreduce`: null if it was not tried; figures.sizes[] have bytes, median_s, algorithm_mb_s, bus_mb_s.
    `findings[]`: severity (error, warning, note), kind (an identifier), hosts, message, fixes (commands to type here).
    """
    content = {
        "format": FORMAT,
        "dtrain": __version__,
        "starts": report.starts,
        "examined_s": round(report.examined_s, 3),
        "took_s": round(report.took_s, 3),
        "hosts": [_host(one) for one in report.examined],
        "network": {**asdict(summary(report.ways)), "pairs": [_pair(way) for way in report.ways]},
        "allreduce": None if report.measured is None else asdict(report.measured),
        "findings": [
            {
                "severity": finding.severity.value,
                "kind": finding.kind,
                "hosts": finding.hosts,
                "message": finding.message,
                "fixes": finding.fixes,
            }
            for finding in report.findings
        ],
    }
    return json.dumps(content, indent=2) + "\n"


def _pair(way: Probe) -> dict[str, Any]:
    return {
        "from": way.source,
        "host": way.to,
        **{name: value for name, value in vars(way).items() if name != "source"},
    }


def _host(one: Examined) -> dict[str, Any]:
    facts = None if one.facts is None else asdict(one.facts)
    if facts is not None:
        offered = facts.pop("offered")
        facts |= {name: offered[name] for name in _OFFERED} | {"gpu_ids": one.offer.gpus}
    return {
        "name": one.host.name,
        "kind": one.host.kind.value,
        "problem": one.problem or None,
        "facts": facts,
        "clock": None if one.clock is None else asdict(one.clock),
    }


_OFFERED = ("gpu_variable", "gpus_verified", "slots", "room", "room_limit", "cores", "cpu_limit", "problems")


def report_as_text(report: Report) -> str:
    figures = [line for line in (_network(report), _clocks(report.examined), _allreduce(report)) if line]
    lines = [*_table(report.examined), *figures, *_findings(report.findings), _verdict(report)]
    return "\n".join(lines) + "\n"


def _table(examined: Sequence[Examined]) -> list[str]:
    """Return one row per group of equal hosts; values that differ from most hosts are marked."""
    values = {one.name: _values(one) for one in examined if one.facts is not None}
    if not values:
        return []
    alike = grouped(values, lambda name: tuple(values[name].values()))
    rows = [{"hosts": fold(names)} for names in alike.values()]
    for column in next(iter(values.values())):
        usual = most_common(each[column] for each in values.values())
        found = [values[names[0]][column] for names in alike.values()]
        if set(found) != {"-"}:
            for row, value in zip(rows, found, strict=True):
                row[column] = value if value == usual else f"{value} *"
    return [*table(rows), *(["* differs from most hosts"] if len(rows) > 1 else [])]


def _values(one: Examined) -> dict[str, str]:
    facts = one.known
    return {
        "Python": facts.python,
        "torch": facts.torch or "none",
        "CUDA": facts.torch_cuda or "-",
        "NCCL": facts.nccl or "-",
        "driver": facts.driver or "-",
        "GPUs": one.gpus or "-",
        "cores": str(facts.offered.cpu_limit),
        "memory": size(facts.memory_bytes),
        "script": facts.script[:7] if facts.script else "-",
        "dtrain": f"{facts.dtrain} {facts.code[:7]}",
    }


def _network(report: Report) -> str:
    found = summary(report.ways)
    if not found.ways:
        return ""
    text = f"network: {found.ways - found.failed} of {found.ways} connections between the hosts work"
    if to_store := found.ways - len({(way.source, way.to) for way in report.ways}):
        text += f", counting {to_store} to the store's port"
    if len(report.examined) > MOST + 1:
        text += f"; each host tried {MOST} others"
    if found.median_s is not None and found.most_s is not None and found.slowest is not None:
        text += f" ({', '.join(found.interfaces)}, MTU {', '.join(map(str, found.mtus))})"
        text += f"; a round trip takes {_time(found.median_s)}, at most {_time(found.most_s)}"
        text += f" ({found.slowest[0]} > {found.slowest[1]})"
    return printable(text)


def _clocks(examined: Sequence[Examined]) -> str:
    clocks = [(one.clock, one.name) for one in examined if one.clock is not None and one.host.remote]
    if not clocks:
        return ""
    clock, name = max(clocks, key=lambda found: abs(found[0].offset_s))
    return f"clocks: within {_time(abs(clock.offset_s) + clock.uncertainty_s)} of ours ({name})"


def _allreduce(report: Report) -> str:
    measured = report.measured
    if measured is None:
        why = "was skipped" if report.starts else "was not tried, because of the errors below"
        return f"all-reduce: {why}" if report.asked_for_allreduce or report.starts else ""
    if measured.figures is None:
        return f"all-reduce: failed after {measured.took_s:.1f} s, see below"
    small, large = measured.figures["sizes"]
    if measured.figures["ranks"] == 1:
        return f"all-reduce ({measured.backend}): works; with a single rank there is nothing to measure"
    return (
        f"all-reduce ({measured.backend}, {measured.figures['ranks']} ranks on {count(measured.hosts, 'host')}): "
        f"{size(small['bytes'])} in {_time(small['median_s'])}; {size(large['bytes'])} in {_time(large['median_s'])}, "
        f"{_rate(large['algorithm_mb_s'])}, bus {_rate(large['bus_mb_s'])}"
    )


def _findings(findings: Sequence[Finding]) -> list[str]:
    """Return the lines of the findings, the first few of each kind."""
    lines: list[str] = []
    for (severity, kind), same in grouped(findings, lambda finding: (finding.severity, finding.kind)).items():
        for finding in same[:SAME]:
            lines += _finding(finding)
        if rest := same[SAME:]:
            hosts = dict.fromkeys(name for finding in rest for name in finding.hosts)
            lines.append(printable(f"{severity.value}: {fold([*hosts])}: more of these ({kind}); --json has them all"))
    return lines


def _finding(finding: Finding) -> list[str]:
    first, *more = finding.message.splitlines() or [""]
    who = f"{fold(finding.hosts)}: " if finding.hosts else ""
    lines = [printable(f"{finding.severity.value}: {who}{first}"), *(f"  {printable(line)}" for line in more)]
    fixes = finding.fixes
    lines += [f"    fix: {printable(fix)}" for fix in fixes[:FIXES]]
    if len(fixes) > FIXES:
        lines.append(f"    (and the same for {count(len(fixes) - FIXES, 'more host')})")
    return lines


def _verdict(report: Report) -> str:
    of_severity = grouped(report.findings, lambda finding: finding.severity)
    found = [count(len(same), severity.value) for severity, same in of_severity.items()]
    answer = "a run would start" if report.starts else "a run would not start, or would be wrong"
    if report.starts and Severity.ERROR in of_severity:
        bad = {name for finding in of_severity[Severity.ERROR] for name in finding.hosts}
        answer += f" without {fold(sorted(bad))}"
    text = f"{answer}: {', '.join(found)}" if found else f"{answer}; nothing was found"
    parts = f"{count(len(report.examined), 'host')} examined in {report.examined_s:.1f} s"
    if report.measured is not None:
        parts += f", all-reduce {report.measured.took_s:.1f} s"
    return f"{text} ({parts})"


def _rate(mb_s: float) -> str:
    return f"{mb_s / 1e3:.2f} GB/s" if mb_s >= 1e3 else f"{mb_s:.0f} MB/s"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
