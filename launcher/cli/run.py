"""One command of a run, from what is asked for to the exit code: the controller's, or that of a node that joins one.

Called by main.py, for `dtrain run`.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.node_role import Place, join_run, open_door
from launcher.cli.request import Request
from launcher.errors import PlaceTakenError
from launcher.hosts.sources import in_slurm
from launcher.placement.job_spec import JobSpec
from launcher.transport.connect import agent_command, start_local_agents

if TYPE_CHECKING:
    from launcher.job.outcome import Outcome
    from launcher.output.writer import OutputThread
    from launcher.transport.tcp.listener import Listener

__all__ = ["Talk", "carry_out"]


@dataclass(frozen=True)
class Talk:
    """How much dtrain says of itself, and by what."""

    quiet: bool
    verbose: bool
    say: Callable[[str], None]

    @property
    def progress(self) -> bool:
        return not self.quiet and os.isatty(2)


def carry_out(request: Request, talk: Talk, *, error_json: Path | None = None) -> int:
    """Run what is asked for to its end and return the exit code. Blocks; from the main thread only."""
    spec, place = request.spec, request.place
    if in_slurm(os.environ):  # which may send them while we start
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda *_: None)
    if place is None or place.lead:
        with contextlib.suppress(PlaceTakenError):  # then another command on this machine was first
            return _control(request, talk, error_json)
        assert place is not None
    # Under srun all tasks share one terminal, where node 0 says everything.
    tell = talk.say if place.by_hand and not talk.quiet else lambda _: None
    return join_run(place, spec, agent_command(spec), request.nproc, tell)


def _control(request: Request, talk: Talk, error_json: Path | None) -> int:
    spec, place = request.spec, request.place
    if place is not None:
        os.environ.update(place.agent_environment(request.nproc, spec.gpus_per_proc))
    # At once: an agent's start takes as long as the imports here. But not before it is certain that we are node 0.
    opened = start_local_agents(spec) if place is None else {}

    from launcher.controller.controller import Controller
    from launcher.machine.processes import raise_file_limit
    from launcher.output.console import Console
    from launcher.output.logfiles import LogFiles, set_aside
    from launcher.output.writer import OutputThread

    raise_file_limit()
    console = Console()
    folder = spec.log_dir / spec.run_id
    if spec.first_attempt == 0 and (moved := set_aside(folder)) is not None and not talk.quiet:
        talk.say(f"there was a run {spec.run_id} before; its files are in {moved} now")
    logs = LogFiles(folder, lambda reason: console.say(reason))
    output = OutputThread(console, logs, shown=request.shown)
    output.start()
    try:
        with _door(place, spec, output) as door:
            controller = Controller(
                spec if door is None else replace(spec, master_addr=door.address),
                output,
                show_progress=output.show_status if talk.progress else lambda _: None,
                tell_user=output.say,
                opened=opened,
                door=door,
            )
            outcome = controller.run()
            if door is not None:
                door.close(outcome.exit_code, _told(outcome))
    finally:
        output.close()
    _tell(request, talk, outcome, output, controller.evidence_file, folder if logs.usable else None, error_json)
    return _requeue(outcome, talk) if outcome.preempted else outcome.exit_code


@contextlib.contextmanager
def _door(place: Place | None, spec: JobSpec, output: OutputThread) -> Iterator[Listener | None]:
    """Open the door, if others join this run, and let them know where it is."""
    if place is None:
        yield None
        return
    with open_door(place, spec, output.say) as door:
        if place.by_hand and place.nodes[1] > 1:
            others = place.nodes[1] - 1
            output.say(f"node 0 waits for {others} other node{'s' if others > 1 else ''} at {door.address}:{door.port}")
        yield door


def _told(outcome: Outcome) -> str:
    """Return in a line what the other nodes are told of the end."""
    from launcher.output.report import report

    return report(outcome, folder=None, tail=lambda *_: []).partition("\n")[0]


def _tell(
    request: Request,
    talk: Talk,
    outcome: Outcome,
    output: OutputThread,
    evidence_file: Path | None,
    folder: Path | None,
    error_json: Path | None,
) -> None:
    from launcher.output.report import report

    spec = request.spec
    if error_json is not None:
        from launcher.output.error_json import write_error_json

        try:
            write_error_json(error_json, outcome, folder=folder, evidence_file=evidence_file)
        except OSError as error:
            talk.say(f"--error-json: {error_json} cannot be written: {error.strerror}")
    if talk.verbose:
        ran = f"{outcome.world_size} workers on {outcome.hosts} hosts for {outcome.duration_s:.1f} s"
        talk.say(f"run {spec.run_id}: {ran}; output in {spec.log_dir / spec.run_id}")
    ranks = request.shown.ranks
    if outcome.error is None and ranks and max(ranks) >= outcome.world_size:
        named = ",".join(map(str, sorted(ranks)))
        talk.say(f"--only-rank {named}: there were only ranks 0 to {outcome.world_size - 1}")
    text = report(outcome, folder=folder, tail=output.tail, evidence_file=evidence_file)
    if text and (not talk.quiet or outcome.left or outcome.unchecked or outcome.exit_code != 0):
        talk.say(text)


def _requeue(outcome: Outcome, talk: Talk) -> int:
    """Have SLURM start the job again, unless it was cancelled; return the exit code."""
    from launcher.hosts.slurm_allocation import is_cancelled, requeue

    if outcome.signum is not None and is_cancelled(os.environ):
        talk.say("the job was cancelled, and is not queued again")
        return 128 + outcome.signum
    problem = requeue(os.environ)
    talk.say("the job is queued again, and goes on from there" if problem is None else problem)
    return outcome.exit_code
