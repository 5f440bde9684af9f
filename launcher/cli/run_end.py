"""The end of a run: its report, requeueing the job in SLURM, the command of --on-end.

Called by control.py and its callers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.caller import Caller, Verbosity, write_all
from launcher.cli.options import Options
from launcher.cli.request import Request
from launcher.frozen import dataclass

if TYPE_CHECKING:
    from launcher.job.ending import Outcome
    from launcher.output.writer import OutputThread
    from launcher.placement.job_spec import JobSpec
    from launcher.timeline.goodput import Parts
    from launcher.timeline.stragglers import Straggler

NOTABLE_S = 0.1  # a start that takes this much longer is worth a message
GOODPUT_FROM_S = 60.0  # the time of a shorter run is mostly its start


@dataclass(frozen=True)
class Ended:
    """The end of a run. `caught`: signals to this process that ended the run, and would have ended this process.

    `state` is the one in its record; `folder` is None if its files could not be written.
    """

    outcome: Outcome
    report: str
    caught: tuple[int, ...]
    state: str
    folder: Path | None

    @property
    def line(self) -> str:
        """The report's first line, with the message of an exception; all of an error, if no worker was started."""
        from launcher.job.failures.failure import FailureKind

        if self.outcome.error is not None:
            return " ".join(str(self.outcome.error).split())
        first, *rest = self.report.splitlines() or [""]
        raised = self.outcome.cause is not None and self.outcome.cause.kind is FailureKind.RAISED
        return f"{first}: {rest[0].strip()}" if raised and rest else first


@dataclass(frozen=True)
class Ending:
    """Everything known at the end of a run, and the caller to report it to."""

    request: Request
    verbosity: Verbosity
    caller: Caller
    outcome: Outcome
    folder: Path | None
    evidence_file: Path | None
    parts: Parts | None
    stragglers: Sequence[Straggler]

    def report(self, output: OutputThread) -> str:
        """Print how the run ended, and return the report."""
        self._write_error_json()
        self._print_notes()
        text = self._report(output, self.folder, self.evidence_file)
        self._show(text)
        return text

    def kept_report(self, output: OutputThread) -> str:
        """Return the report for the run's record: with absolute paths, valid in any folder."""
        folder, evidence_file = self.folder, self.evidence_file
        return self._report(output, folder and folder.absolute(), evidence_file and evidence_file.absolute())

    def _report(self, output: OutputThread, folder: Path | None, evidence_file: Path | None) -> str:
        from launcher.output.logfiles import LEDGER_FILE, log_folder
        from launcher.output.report import report

        cause, replays = self.outcome.cause, False
        if folder is not None and cause is not None and self.caller.read_ledger is None and not self.caller.is_program:
            replays = any(log_folder(folder, cause.attempt).glob(f"*/{LEDGER_FILE}"))
        return report(self.outcome, folder=folder, tail=output.tail, evidence_file=evidence_file, replays=replays)

    def _write_error_json(self) -> None:
        file = self.verbosity.error_json
        if file is None:
            return
        from launcher.output.error_json import write_error_json

        try:
            write_error_json(
                file,
                self.outcome,
                folder=self.folder,
                evidence_file=self.evidence_file,
                parts=self.parts,
                stragglers=self.stragglers,
            )
        except OSError as error:
            self.verbosity.say(f"--error-json: {file} cannot be written: {error.strerror}")

    def _print_notes(self) -> None:
        """Print what else is worth knowing."""
        from launcher.output.insight import goodput_line
        from launcher.output.text import count

        spec, verbosity, outcome, parts = self.request.spec, self.verbosity, self.outcome, self.parts
        if verbosity.verbose:
            workers, hosts = count(outcome.world_size, "worker"), count(outcome.hosts, "host")
            ran = f"{workers} on {hosts} for {outcome.duration_s:.1f} s"
            verbosity.say(f"run {spec.run_id}: {ran}")
            if outcome.forked:
                were = f"{count(outcome.forked, 'worker')} {'was' if outcome.forked == 1 else 'were'}"
                verbosity.say(f"{were} forked from processes that had imported their packages")
        for reason, costs_s in outcome.by_exec:
            longer = f"; each such start takes at least {costs_s:.1f} s longer" if costs_s >= NOTABLE_S else ""
            if longer or verbosity.verbose or spec.start_method == "fork":
                verbosity.inform(f"workers were started by exec: {reason}{longer}")
        ranks = self.request.output_filter.ranks
        placed = outcome.error is None and outcome.world_size > 0  # else the run was stopped before
        if placed and ranks and max(ranks) >= outcome.world_size:
            named = ",".join(map(str, sorted(ranks)))
            verbosity.say(f"--only-rank {named}: there were only ranks 0 to {outcome.world_size - 1}")
        if placed and spec.stdin_rank is not None and spec.stdin_rank >= outcome.world_size:
            verbosity.say(
                f"--stdin {spec.stdin_rank}: there were only ranks 0 to {outcome.world_size - 1}; none read it"
            )
        for line in _warm_lines(spec, outcome, verbose=verbosity.verbose):
            verbosity.inform(line)
        if parts is not None and (verbosity.verbose or parts.wall_s >= GOODPUT_FROM_S):
            verbosity.inform(goodput_line(parts))

    def _show(self, text: str) -> None:
        from launcher.output.console import takes_colour

        outcome, verbosity = self.outcome, self.verbosity
        if self.caller.is_program and outcome.exit_code != 0:
            return
        if not text or (verbosity.quiet and not (outcome.left or outcome.unchecked or outcome.exit_code != 0)):
            return
        failed = outcome.error is not None or outcome.cause is not None
        if verbosity.as_json:
            from launcher.output.error_json import as_json
            from launcher.output.json_lines import report_line

            facts = as_json(outcome, self.folder, self.evidence_file, parts=self.parts, stragglers=self.stragglers)
            write_all(self.caller.err, report_line(text, facts, failed=failed))
            return
        first, newline, rest = text.partition("\n")
        colour = failed and takes_colour(self.caller.err)
        verbosity.say(f"\x1b[1;31m{first}\x1b[0m{newline}{rest}" if colour else text)


def run_at_end(ended: Ended, options: Options, verbosity: Verbosity, caller: Caller) -> None:
    """Run the command of --on-end, which may start the run again with the same name. Blocks."""
    if options.on_end is None:
        return
    from launcher.runs.on_end import IN_ON_END, run_on_end

    is_from_file = dict(options.origins).get("on_end") not in ("command line", "DTRAIN_ON_END")
    if is_from_file and IN_ON_END in os.environ:  # the end of each run would start another one, endlessly
        return
    run_on_end(
        options.on_end, ended.outcome, ended.state, ended.folder,
        say=verbosity.say, out=caller.out, err=caller.err,
    )  # fmt: skip


def requeue(outcome: Outcome, verbosity: Verbosity) -> int:
    """Have SLURM start the job again, unless it was cancelled; return the exit code."""
    from launcher.hosts import slurm_allocation

    if outcome.signum is not None and slurm_allocation.is_cancelled(os.environ):
        verbosity.inform("the job was cancelled; it is not requeued")
        return 128 + outcome.signum
    verbosity.inform("requeueing the job")
    problem = slurm_allocation.requeue(os.environ)  # SLURM then ends this process, perhaps before it answers
    if problem is not None:
        verbosity.say(problem)
    return outcome.exit_code


def _warm_lines(spec: JobSpec, outcome: Outcome, *, verbose: bool) -> list[str]:
    """Return the lines on processes kept warm."""
    from launcher.output.text import count, local_time

    lines = []
    if spec.keep_warm_s:
        kept = [host for host, bye in outcome.warm if not bye.not_kept]
        if kept:
            verb = "stays" if len(kept) == 1 else "stay"
            until = local_time(time.time() + spec.keep_warm_s)
            lines.append(f"{count(len(kept), 'host')} {verb} warm until {until}: dtrain warm --stop")
        lines += _by_reason("nothing stays warm", ((host, bye.not_kept) for host, bye in outcome.warm))
    if verbose:
        if warm := sum(bye.was_warm for _, bye in outcome.warm):
            lines.append(f"{count(warm, 'host')} had the packages imported since an earlier run")
        lines += _by_reason("warm processes could not be used", ((host, bye.cold) for host, bye in outcome.warm))
    return lines


def _by_reason(what: str, reasons: Iterable[tuple[str, str]]) -> list[str]:
    from launcher.hosts.folding import lines_by_reason

    return [f"{what}: {line}" for line in lines_by_reason({host: why for host, why in reasons if why})]
