"""The all-reduce of `dtrain check`: a short normal run whose workers measure (ddp/comm/allreduce_speed.py).

If it succeeds, a run would start. It writes no log files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.check.finding import Examined
from launcher.placement.job_spec import CommandKind, JobSpec, WorkerCommand, new_run_id
from launcher.placement.roles import Roles

STALL_S = 120.0  # torch may come from a slow network folder
LINES = 12  # of a failure's report


@dataclass(frozen=True)
class Measured:
    """The result of the run. `figures` are what allreduce_speed.py prints; `problem` is the report if there are none.

    `signum` is the signal that stopped dtrain.
    """

    backend: str
    hosts: int
    took_s: float
    figures: dict[str, Any] | None
    problem: str = ""
    exit_code: int = 0
    signum: int | None = None


def allreduce_spec(spec: JobSpec, examined: Sequence[Examined]) -> tuple[JobSpec, str]:
    """Return the run, and the backend: NCCL with all workers if every host has GPUs that its torch supports.

    Otherwise gloo, with one worker per host.
    """
    usable = all(one.known.offered.gpus and one.known.torch_cuda for one in examined)
    on_gpus = usable and not spec.oversubscribe
    hosts = tuple(one.host for one in examined)
    if not on_gpus:
        spec = replace(spec, nproc=1, gpus_per_proc=None, oversubscribe=True)
        hosts = tuple(replace(host, slots=None, max_slots=None) for host in hosts)
    backend = "nccl" if on_gpus else "gloo"
    args = ("--backend", backend)
    folders = {one.known.ddp for one in examined}
    command = WorkerCommand(CommandKind.MODULE, "ddp.comm.allreduce_speed", args)
    if len(folders) == 1 and (folder := folders.pop()):
        command = WorkerCommand(CommandKind.SCRIPT, str(Path(folder) / "comm" / "allreduce_speed.py"), args)
    made = replace(
        spec,
        command=command,
        hosts=hosts,
        nnodes=None,
        run_id=f"check-{new_run_id()}",
        max_restarts=0,
        stdin_rank=None,
        chaos=None,
        grow=False,
        hosts_script=None,
        first_attempt=0,
        requeue=False,
        grace_s=min(spec.grace_s, 1.0),
        stall_timeout_s=STALL_S,
        roles=Roles(),
        env_for=(),
        pass_local_rank=False,
    )
    return made, backend


def measure_allreduce(spec: JobSpec, backend: str) -> Measured:
    """Run the all-reduce to its end. Blocks; call from the main thread only, for the signals."""
    from launcher.controller.controller import Controller
    from launcher.output.console import Console
    from launcher.output.logfiles import LogFiles
    from launcher.output.report import report
    from launcher.output.writer import OutputThread

    began = time.monotonic()
    logs = LogFiles(Path(os.devnull), lambda _: None)
    logs.usable = False
    with open(os.devnull, "wb") as nowhere:
        console = Console(out=nowhere.fileno(), err=nowhere.fileno(), colour=False)
        output = OutputThread(console, logs)
        output.start()
        try:
            controller = Controller(spec, output, show_progress=lambda _: None, notify_user=lambda _: None, opened={})
            outcome = controller.run()
        finally:
            output.close()
    took_s = time.monotonic() - began
    figures = None if outcome.exit_code else _figures(output.tail(0, 1))
    problem = ""
    if figures is None:
        problem = "\n".join(report(outcome, folder=None, tail=output.tail).splitlines()[:LINES])
    return Measured(backend, len(spec.hosts), took_s, figures, problem, outcome.exit_code, outcome.signum)


def _figures(lines: Sequence[str]) -> dict[str, Any] | None:
    """Return the figures printed by rank 0; torch may have printed something before."""
    for line in reversed(lines):
        if line.startswith('{"dtrain_allreduce":1'):
            found: dict[str, Any] = json.loads(line)
            return found
    return None
