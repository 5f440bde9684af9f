"""Fifteen launch and failure reports of the field, under dtrain, torchrun and mpirun in turns.

    python scripts/bench/failures.py [--repeats 3] [--only 1,5,12] [--launchers dtrain,torchrun] [--json] [--show]

Each case is a small script in failure_reports/scripts. Two or three hosts are real sshd on 127.0.0.2 to .4, started for
this bench with keys and files of their own; torchrun is typed on each of them. Case 3 needs hosts with a network of
their own, so it is left out without root. All processes share this machine's processors.

torchrun has the error handler (`record`), --tee, a log folder, the rank in its prefix, --local-addr, a rendezvous with
short timeouts, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and, where torch's DistributedDataParallel does not crash with it,
TORCH_DISTRIBUTED_DEBUG=DETAIL.

A cause, a rank or a host counts as named if it is in the launcher's own lines (of torchrun's report those of the root
cause), among the first or the last 40 lines of a terminal after the failure. The seconds are from the failure, whose
moment the script notes, until all of them were written. Left: processes with their ports, /dev/shm and temporary files
that are there 10 s after the commands have ended.

--json: an object for each run. --show: what each command wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from failure_reports.cases import CASES, Case
from failure_reports.finding import Finding
from failure_reports.run import Run
from testbed.network import NetworkHosts
from testbed.processes import MARK
from testbed.sshd import SshHosts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turns [%(default)s]")
    parser.add_argument("--only", default="", help="numbers of cases, from 1")
    parser.add_argument("--launchers", default="dtrain,torchrun,mpirun")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    chosen = [int(word) for word in args.only.split(",")] if args.only else range(1, len(CASES) + 1)
    launchers = args.launchers.split(",")
    os.environ[MARK] = uuid.uuid4().hex
    for number in chosen:
        case = CASES[number - 1]
        own = [launcher for launcher in case.launchers if launcher in launchers]
        if case.needs_root and (why := NetworkHosts.why_not()):
            print(f"{number}. {case.name}: left out, {why}", flush=True)
            continue
        found: dict[str, list[Finding]] = {launcher: [] for launcher in own}
        for turn in range(args.repeats):
            for launcher in own:
                with run_of(case, launcher) as run:
                    finding = case.see(run)
                    found[launcher].append(finding)
                    if args.show:
                        print("\n".join(f"{line.at - run.began:7.2f} {line.command} {line.text}" for line in run.lines))
                    if args.json:
                        load = os.getloadavg()[0]
                        about = {"case": number, "launcher": launcher, "turn": turn, "load": round(load, 1)}
                        print(json.dumps({**about, **vars(finding)}), flush=True)
        print(f"{number}. {case.name} ({case.issues}); load {os.getloadavg()[0]:.1f}")
        for launcher, findings in found.items():
            print(row(launcher, findings), flush=True)


@contextlib.contextmanager
def run_of(case: Case, launcher: str) -> Iterator[Run]:
    """Yield a run by the launcher, on hosts that are started for it."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="f") as name:
        folder = Path(name)
        work = folder / "work"
        work.mkdir(mode=0o755)
        if case.needs_root:
            with NetworkHosts(folder / "lab", count=2) as far:
                (folder / "lab/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {' '.join(far.names)}\n")
                with Run(launcher, work, far, [far.address(host) for host in far.names], debug=case.debug) as run:
                    yield run
        else:
            with SshHosts(folder / "lab", count=3) as lab, Run(
                launcher, work, lab, [lab.address(i + 1) for i in range(3)], debug=case.debug
            ) as run:  # fmt: skip
                yield run


def row(launcher: str, findings: Sequence[Finding]) -> str:
    """Return a line for the runs of a case by a launcher: medians, and what was seen in how many of them."""
    runs = len(findings)
    times = [finding.seconds for finding in findings if finding.seconds is not None]
    parts = [f"   {launcher:9}"]
    for what in findings[0].named:
        parts += [f"{what} {sum(finding.named.get(what, False) for finding in findings)}/{runs}"]
    parts.append(f"{statistics.median(times):.2f} s (at most {max(times):.2f})" if times else "-")
    works = [finding.works for finding in findings]
    parts += [] if works[0] is None else [f"works {sum(map(bool, works))}/{runs}"]
    parts.append(f"exit {' / '.join(sorted({finding.code for finding in findings}))}")
    parts.append(f"left {max(len(finding.left) for finding in findings)}")
    last = findings[-1]
    details = [*dict.fromkeys(finding.found for finding in findings if finding.found)]
    details += [f"first: {last.first[:150]}"] if last.first else []
    details += [f"left: {left[:150]}" for left in last.left[:3]]
    return "\n".join([", ".join(parts), *(f"             {detail}" for detail in details)])


if __name__ == "__main__":
    main()
