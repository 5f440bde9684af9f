"""What makes a run one that can be found again, from its start to its end: record, control socket, and leaving.

cli/run.py makes one for the controller. Nothing here keeps a run from its work: what cannot be written is said once.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.job.events import Event
from launcher.job.job import Job, Phase
from launcher.job.outcome import Outcome
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
from launcher.timeline.stragglers import Straggler
from launcher.timeline.timeline import Timeline

if TYPE_CHECKING:
    from launcher.controller.controller import Controller
    from launcher.runs.detach import Detachment

CONSOLE_LOG = "console.log"  # what a detached run would show on its terminal


class Session:
    """`words` were typed after `dtrain run`; `script` of them are SCRIPT [ARGS], or the name of a function.

    `options` are the values that are not at their default, each with where it is from; `timeline` has the records of
    ranks, `say` prints what becomes known of them.
    """

    def __init__(
        self, spec: JobSpec, output: OutputThread, *, words: list[str], script: int, as_torchrun: bool,
        is_function: bool, options: Mapping[str, tuple[Any, str]], folder: Path, limits: Limits,
        detachment: Detachment | None,
        timeline: Timeline, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._spec = spec
        self._output = output
        self._folder = folder
        self._detachment = detachment
        self._control: Control | None = None
        self._overview = Overview(timeline, say)
        self._job: Job | None = None
        us = find(os.getpid())
        assert us is not None
        kept_words = without_secrets(words)
        self._command = " ".join(kept_words[len(words) - script :])
        about = {
            "command": {
                "as_torchrun": as_torchrun,
                "words": kept_words,
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
        """Look at what an event has changed; the controller's loop calls it."""
        self._job = job
        self._overview.watch(job, event, now)
        self._record.watch(job)

    def status_line(self) -> str:
        """Say in a few words how training goes; empty while it does not. In the loop."""
        job = self._job
        if job is None or job.attempt is None or job.phase is not Phase.RUNNING or job.outcome is not None:
            return ""
        return self._overview.status_line(job.attempt, self._record.steps_per_s)

    def spent(self, outcome: Outcome) -> tuple[Parts | None, Sequence[Straggler]]:
        """Return what the time of the run went to, and who was slow; after its end."""
        return self._overview.end((0.0 if self._job is None else self._job.began) + outcome.duration_s)

    def listen(self, controller: Controller) -> None:
        """List the run, and answer whoever asks it."""

        def answer(what: str) -> Mapping[str, Any]:
            if what in ("status", "top"):
                return self._record.status(controller.wake, in_full=what == "top")
            if what in ("stop", "kill"):
                controller.signal(signal.SIGTERM)
                if what == "kill":
                    controller.signal(signal.SIGINT)  # while it stops: at once
                return {"ok": True}
            return {"error": f"it does not know how to {what}"}

        detached = self._detachment is not None
        self._control = Control(
            lambda: registered(self._spec.run_id, self._folder.absolute(), self._command, detached=detached),
            answer,
            # A home that cannot be written is nothing new to a run in the foreground of a container.
            self._output.say if detached else lambda _: None,
            controller.take_asker,
        )
        self._control.start()

    def end(self, outcome: Outcome, evidence_file: Path | None, report: str) -> str:
        """Write down how the run has ended, and tell who waits for it; return the state that it has ended in.

        `report` is kept, for `dtrain report` and those who wait.
        Blocks for a while; Ctrl-C ends that early.
        """
        parts, stragglers = self.spent(outcome)
        how = as_json(outcome, self._folder, evidence_file, parts=parts, stragglers=stragglers)
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as at_end:  # the exit code stays
            if self._control is not None:
                at_end.callback(self._control.close)
            self._record.end(how, how["ended"], report)
            self._output.keep_report(report)
            if self._control is not None:
                self._control.note_end(how["ended"], outcome.exit_code, brief_cause(how), report)
            self._record.finish()
        state: str = how["ended"]
        return state

    def abandon(self) -> None:
        """Let go of a run that ends with an exception here, in a process that may go on."""
        if self._control is not None:
            self._control.note_end("failed", 1)
            self._control.close()

    def _leave(self) -> None:
        """Let the command return that was typed with --detach."""
        detachment = self._detachment
        if detachment is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            log = os.open(self._folder / CONSOLE_LOG, flags, 0o666)
        except OSError:  # the log files have said why nothing is kept
            log = os.open(os.devnull, flags)

        def leave() -> None:
            if self._control is not None:
                self._control.wait_until_listed()
            detachment.leave(self._spec.run_id, log)

        self._output.leave_terminal(log, leave)


def _text_of(origin: str) -> str | None:
    """Return the text of the variable that an option is from; None where it is from no variable."""
    variable = origin.partition(" or ")[0]  # PET_NNODES or a file
    text = os.environ.get(variable) if variable.startswith(("DTRAIN_", "PET_")) else None
    return text if text is None or _without_secrets(text) == text else WITHHELD


def _without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(without_secrets(value.split(" ")))
    return without_secrets(value) if isinstance(value, tuple) and all(isinstance(v, str) for v in value) else value
