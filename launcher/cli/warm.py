"""`dtrain warm`: lists, starts and stops on all hosts what stays warm between runs. Called by main.py."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.check.link import HostLink, close_all
from launcher.errors import HostError, UsageError
from launcher.hosts.folding import lines_by_reason
from launcher.hosts.host import Host, HostKind
from launcher.job.orders import mismatch, prepare
from launcher.output.text import count, printable, size, table
from launcher.output.warm import local_time, options_for
from launcher.placement.job_spec import JobSpec
from launcher.transport.connect import Connector, warm_key

__all__ = ["run_warm"]

KEEP_S = 600.0
FINISH_S = 5.0
_PROGRAM = "launcher.agent.warm.answers"


@dataclass
class _Answer:
    value: Any = None
    problem: str = ""


def run_warm(spec: JobSpec, *, start: bool, stop: bool, as_json: bool, say: Callable[[str], None]) -> int:
    """Do one of the three on all hosts of a run; return 0, or 1 if a host could not. Blocks."""
    spec = replace(spec, keep_warm_s=spec.keep_warm_s or KEEP_S) if start else spec
    deadline = time.monotonic() + spec.start_timeout_s
    if any(host.kind is HostKind.JOINED for host in spec.hosts):
        raise UsageError("nodes on which the command is typed cannot be reached from here; type dtrain warm there")
    # Simulated hosts share a folder, in which each has its own.
    hosts = [host for host in spec.hosts if start or host.part == 0]
    answers = {host.name: _Answer() for host in hosts}
    connector = Connector(spec, module=_PROGRAM)
    word = "start" if start else "stop" if stop else "list"
    threads = [
        threading.Thread(
            target=_ask,
            args=(spec, host, connector, word, deadline, answers[host.name]),
            name=host.name,
            daemon=True,
        )
        for host in hosts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline + FINISH_S - time.monotonic()))
        if thread.is_alive():
            answers[thread.name].problem = "did not answer in time; see --start-timeout-s"
    connector.close()
    problems = {host: answer.problem for host, answer in answers.items() if answer.problem}
    if as_json:
        found = {host: {"problem": answer.problem, "warm": answer.value or []} for host, answer in answers.items()}
        print(json.dumps(found, indent=2))
    else:
        _say(spec, word, answers, say)
    for line in lines_by_reason(problems):
        say(line)
    return 1 if problems else 0


def _ask(spec: JobSpec, host: Host, connector: Connector, word: str, deadline: float, answer: _Answer) -> None:
    link = HostLink(host, spec.python)
    try:
        reason = mismatch(spec, link.open(connector, deadline))
        if reason is not None:
            answer.problem = reason
            return
        about: Mapping[str, Any] = {}
        if word == "start":
            order = prepare(spec, host, lease_s=0.0, lost_agents=[])
            about = {"prepare": vars(order), "key": warm_key(spec, host)}
        answer.value = link.ask(deadline, word, **about)
    except HostError as error:
        answer.problem = error.reason
    finally:
        close_all([link])


def _say(spec: JobSpec, word: str, answers: Mapping[str, _Answer], say: Callable[[str], None]) -> None:
    done = {host: answer.value for host, answer in answers.items() if not answer.problem}
    if word == "start" and done:
        until = local_time(time.time() + spec.keep_warm_s)
        say(f"{count(len(done), 'host')} warm until {until}: dtrain warm --stop{options_for(spec)}")
    elif word == "stop":
        runs = [each for value in done.values() for each in value or []]
        say(f"stopped {count(len(runs), 'warm process')}" if runs else "nothing was warm")
        if in_use := sum(map(bool, runs)):
            say(f"{in_use} of them in use by a run, with which they end")
    elif word == "list":
        rows = [_row(host, each) for host, value in done.items() for each in value or []]
        if rows:
            sys.stdout.write("".join(f"{line}\n" for line in table(rows)))
        elif done:
            say("nothing is warm")


def _row(host: str, found: Mapping[str, Any]) -> dict[str, str]:
    interpreter = Path(found["interpreter"])
    home = os.path.expanduser("~/")
    packages = ", ".join(found["packages"][:4])
    more = len(found["packages"]) - 4
    return {
        "host": host,
        "since": local_time(found["since"]),
        "until": local_time(time.time() + found["left_s"]),
        "runs": str(found["runs"]),
        "memory": size(found["memory_bytes"]),
        "interpreter": printable(str(interpreter)).removeprefix(home),
        "packages": printable(packages) + (f" and {more} more" if more > 0 else ""),
        "script": printable(os.path.join(found["workdir"], found["script"])).removeprefix(home),
    }
