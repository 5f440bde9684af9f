"""`dtrain warm`: lists, starts and stops processes kept warm between runs on this machine. Called by main.py."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.agent.warm.kept import describe, stop
from launcher.errors import SocketError, UsageError
from launcher.hosts.folding import lines_by_reason
from launcher.hosts.host import HostKind
from launcher.job.orders import prepare
from launcher.output.text import count, local_time, printable, size, table
from launcher.placement.job_spec import JobSpec
from launcher.transport.connect import warm_key
from launcher.transport.local import start_process

KEEP_S = 600.0


def list_warm(spec: JobSpec, *, as_json: bool, say: Callable[[str], None]) -> int:
    """List warm processes; return the exit code."""
    found, problem = _asked(spec, describe)
    if as_json:
        print(json.dumps({spec.hosts[0].name: {"problem": problem, "warm": found}}, indent=2))
    elif found:
        sys.stdout.write("".join(f"{line}\n" for line in table(list(map(_row, found)))))
    elif not problem:
        say("nothing is warm")
    return _exit_code(problem, say)


def stop_warm(spec: JobSpec, *, say: Callable[[str], None]) -> int:
    """Stop all warm processes; return the exit code."""
    runs, problem = _asked(spec, stop)
    if not problem:
        say(f"stopped {count(len(runs), 'warm process')}" if runs else "nothing was warm")
    if in_use := sum(map(bool, runs)):
        say(f"{in_use} of them are in use by a run and end with it")
    return _exit_code(problem, say)


def start_warm(spec: JobSpec, *, say: Callable[[str], None]) -> int:
    """Import a script's packages in a process for each host of the run; return the exit code. Blocks."""
    spec = replace(spec, keep_warm_s=spec.keep_warm_s or KEEP_S)
    deadline = time.monotonic() + spec.start_timeout_s
    started = {}
    for host in spec.hosts:
        process = start_process([spec.python, "-m", "launcher.agent.warm.start", warm_key(spec, host)])
        started[host.name] = process
        order = prepare(spec, host, lease_s=0.0, lost_agents=[])
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it ended, and reports why
            process.stdin.write(json.dumps(vars(order)).encode())
        process.stdin = None  # for communicate()
    problems = {name: _problem_of(process, deadline) for name, process in started.items()}
    problems = {name: problem for name, problem in problems.items() if problem}
    if kept := len(started) - len(problems):
        until = local_time(time.time() + spec.keep_warm_s)
        say(f"{count(kept, 'host')} warm until {until}: dtrain warm --stop")
    for line in lines_by_reason(problems):
        say(line)
    return 1 if problems else 0


def _problem_of(process: subprocess.Popen[bytes], deadline: float) -> str:
    """Wait for the end of launcher.agent.warm.start; return why it left nothing warm."""
    with process:
        try:
            output, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            return "the imports take too long; see --start-timeout-s"
    lines = (errors or output).decode("utf-8", "replace").strip().splitlines()
    if process.returncode != 0:
        return (lines or [f"it ended with {process.returncode}"])[-1]
    return output.decode("utf-8", "replace").strip()


def _asked(spec: JobSpec, ask: Callable[[], list[Any]]) -> tuple[list[Any], str]:
    """Return the answers of the warm processes, and why they cannot be asked."""
    if any(host.kind is HostKind.SSH for host in spec.hosts):
        raise UsageError("dtrain warm is for this machine; type it on the other machine, without --hosts")
    try:
        return ask(), ""
    except (OSError, SocketError) as error:
        return [], str(error)


def _exit_code(problem: str, say: Callable[[str], None]) -> int:
    if problem:
        say(problem)
    return 1 if problem else 0


def _row(found: Mapping[str, Any]) -> dict[str, str]:
    interpreter = Path(found["interpreter"])
    home = os.path.expanduser("~/")
    packages = ", ".join(found["packages"][:4])
    more = len(found["packages"]) - 4
    return {
        "since": local_time(found["since"]),
        "until": local_time(time.time() + found["left_s"]),
        "runs": str(found["runs"]),
        "memory": size(found["memory_bytes"]),
        "interpreter": printable(str(interpreter)).removeprefix(home),
        "packages": printable(packages) + (f" and {more} more" if more > 0 else ""),
        "script": printable(os.path.join(found["workdir"], found["script"])).removeprefix(home),
    }
