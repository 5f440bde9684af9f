"""The session of a run, from its start to its end: its record, its control socket, and detaching.

cli/control.py makes one for the controller. A failure to write here is reported once and never stops the run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.job.ending import Outcome
from launcher.job.events import Answer, Asked, Event, StatusQuestion
from launcher.job.job import Job
from launcher.job.run import Phase
from launcher.machine.processes import find
from launcher.output.error_json import as_json, brief_cause
from launcher.output.writer import OutputThread
from launcher.placement.job_spec import JobSpec
from launcher.runs.control import Control
from launcher.runs.housekeeping import Limits
from launcher.runs.overview import Overview
from launcher.runs.record import RunRecord
from launcher.runs.registry import registered
from launcher.runs.secrets import WITHHELD, without_secrets
from launcher.timeline.goodput import Parts
from launcher.timeline.records import Timeline
from launcher.timeline.stragglers import Straggler

if TYPE_CHECKING:
    from launcher.runs.detach import Detachment

CONSOLE_LOG = "console.log"  # the terminal output of a detached run


class Session:
    """The session. `argv` are the arguments of `dtrain run`; the last `script` ones are SCRIPT [ARGS], or a function.

    `options` are the values that are not at their default, each with its origin; `timeline` has the records of ranks,
    and `say` prints messages about them. `control` is the socket; start it when there is a controller.
    """

    def __init__(
        self, spec: JobSpec, output: OutputThread, *, argv: list[str], script: int, as_torchrun: bool,
        is_function: bool, options: Mapping[str, tuple[Any, str]], folder: Path, limits: Limits,
        detachment: Detachment | None,
        timeline: Timeline, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._spec = spec
        self._output = output
        self._folder = folder
        self._detachment = detachment
        self._overview = Overview(timeline, say)
        self._job: Job | None = None
        us = find(os.getpid())
        assert us is not None
        kept_argv = without_secrets(argv)
        command = " ".join(kept_argv[len(argv) - script :])
        detached = detachment is not None
        self.control = Control(
            lambda: registered(spec.run_id, folder.absolute(), command, detached=detached),
            # In the foreground of a container, a read-only home is common.
            output.say if detached else lambda _: None,
        )
        about = {
            "command": {
                "as_torchrun": as_torchrun,
                "words": kept_argv,
                "script": script,
                "folder": os.getcwd(),
                "is_function": is_function,
            },
            "options": {
                name: {"value": _without_secrets(value), "from": origin, "text": _text_of(origin)}
                for name, (value, origin) in options.items()
            },
            "controller": {"host": os.uname().nodename, "pid": us.pid, "start": us.start},
        }
        self._record = RunRecord(
            spec, about, folder=folder, limits=limits, keep=output.keep_manifest, on_start=self._leave,
            overview=self._overview,
        )  # fmt: skip

    def watch(self, job: Job, event: Event, now: float) -> None:
        """Update record and overview after an event, and answer `dtrain ps`; the controller's loop calls it."""
        self._job = job
        self._overview.watch(job, event, now)
        self._record.watch(job)
        if isinstance(event, Asked) and isinstance(event.question, StatusQuestion):
            status = self._record.status(job, now, in_full=event.question.in_full)
            self.control.carry_out(Answer(event.asker, status))
        if job.outcome is not None:
            self.control.end_questions()

    def status_line(self) -> str:
        """Format the progress of training in a few words; empty if none runs. Call in the loop."""
        job = self._job
        if job is None or job.attempt is None or job.phase is not Phase.RUNNING or job.outcome is not None:
            return ""
        return self._overview.status_line(job.attempt, self._record.steps_per_s)

    def spent(self, outcome: Outcome) -> tuple[Parts | None, Sequence[Straggler]]:
        """Return how the run spent its time, and the stragglers; call after its end."""
        return self._overview.end((0.0 if self._job is None else self._job.began) + outcome.duration_s)

    def end(self, outcome: Outcome, evidence_file: Path | None, report: str, *, complain: Callable[[str], None]) -> str:
        """Record how the run ended, and notify waiting commands; return its final state.

        `report` is kept, for `dtrain report` and waiting commands. `complain` is called if the list cannot be written.
        Blocks for a while; Ctrl-C ends that early.
        """
        parts, stragglers = self.spent(outcome)
        how = as_json(outcome, self._folder, evidence_file, parts=parts, stragglers=stragglers)
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as at_end:  # the exit code stays
            at_end.callback(self.control.close)
            self._record.end(how, how["ended"], report)
            self._output.keep_report(report)
            if problem := self.control.note_end(how["ended"], outcome.exit_code, brief_cause(how), report):
                complain(problem)
            self._record.finish()
        state: str = how["ended"]
        return state

    def abandon(self) -> None:
        """End the session of a run that ends with an exception, in a process that may continue."""
        self.control.note_end("failed", 1)
        self.control.close()

    def _leave(self) -> None:
        """Make the command that was typed with --detach return."""
        detachment = self._detachment
        if detachment is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            log = os.open(self._folder / CONSOLE_LOG, flags, 0o666)
        except OSError:  # LogFiles has reported why nothing is kept
            log = os.open(os.devnull, flags)

        def leave() -> None:
            self.control.wait_until_listed()
            detachment.leave(self._spec.run_id, log)

        self._output.leave_terminal(log, leave)


def _text_of(origin: str) -> str | None:
    """Return the text of the variable that set an option; None if no variable did."""
    variable = origin.partition(" or ")[0]  # PET_NNODES or a file
    text = os.environ.get(variable) if variable.startswith(("DTRAIN_", "PET_")) else None
    return text if text is None or _without_secrets(text) == text else WITHHELD


def _without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(without_secrets(value.split(" ")))
    return without_secrets(value) if isinstance(value, tuple) and all(isinstance(v, str) for v in value) else value
