"""One run that this process controls, from the request to the outcome: opens what its output goes to, and reports.

Called by run.py for the command line, and by functions/launch.py for a function of the user's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.options import Options
from launcher.cli.request import Request
from launcher.errors import UsageError
from launcher.frozen import dataclass, replace
from launcher.runs.housekeeping import Limits
from launcher.transport.connect import start_agents

if TYPE_CHECKING:
    from launcher.job.outcome import Outcome
    from launcher.output.writer import OutputThread
    from launcher.protocol.reports import Exited, Returned
    from launcher.runs.detach import Detachment
    from launcher.timeline.goodput import Parts
    from launcher.timeline.stragglers import Straggler

__all__ = ["Caller", "Ended", "Verbosity", "control", "error_file", "run_at_end", "write_all"]

GOODPUT_FROM_S = 60.0  # of a run of which no steps are known, a shorter one needs no words on its time
_SWITCH_S = 0.0005  # what threads that connect wait for at each of their steps, while this one imports


@dataclass(frozen=True)
class Verbosity:
    """How much dtrain says of itself, in what form, by what, and where it writes how the run ended."""

    quiet: bool
    verbose: bool
    as_json: bool
    say: Callable[[str], None]
    error_json: Path | None

    def tell(self, text: str) -> None:
        """Say what is neither an error nor the report."""
        if not self.quiet:
            self.say(text)


@dataclass(frozen=True)
class Caller:
    """Who asks for a run: the `words` that its record keeps, and the descriptors that it writes to.

    Of a Python program: `function` are the frames with what the workers call, and `take` gets what they say of that.
    """

    words: list[str]
    out: int = 1
    err: int = 2
    detachment: Detachment | None = None
    function: Sequence[bytes] = ()
    take: Callable[[str, Returned | Exited], None] | None = None

    @property
    def is_program(self) -> bool:
        return self.take is not None


@dataclass(frozen=True)
class Ended:
    """How a run ended. `caught`: signals to this process that ended it, and would have ended this process.

    `state` is that of its record, `folder` None where its files could not be written.
    """

    outcome: Outcome
    report: str
    caught: tuple[int, ...]
    state: str
    folder: Path | None


def error_file(text: str | None) -> Path | None:
    """Return where --error-json is to be written. Raises UsageError."""
    if text is None:
        return None
    path = Path(text).expanduser()
    if not path.parent.is_dir():
        raise UsageError(f"--error-json: the folder {path.parent} does not exist; make it, or name a file elsewhere")
    if path.is_dir():
        raise UsageError(f"--error-json: {path} is a folder; name a file")
    return path


def write_all(descriptor: int, data: bytes) -> None:
    """Write the bytes, if anybody reads them."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def control(request: Request, options: Options, limits: Limits, verbosity: Verbosity, caller: Caller) -> Ended:
    """Run the job to its end. The caller holds its folder, and calls `run_at_end` when it does so no more.

    Blocks. The report is shown, but for that of a failure to a program, which raises it.
    """
    spec, node_role = request.spec, request.node_role
    if caller.is_program or _has_no_input():
        spec = replace(spec, stdin_rank=None)
    if node_role is not None:
        os.environ.update(node_role.agent_environment)
    with _early_interrupts("SIGINT" in spec.signals) as early:
        # At once: an agent's start takes as long as the imports here. But not before it is certain that we are node 0.
        opened = start_agents(spec) if node_role is None else {}
        switch_s = sys.getswitchinterval()
        if not caller.is_program:  # which has threads of its own, and perhaps several runs
            sys.setswitchinterval(_SWITCH_S)

        from launcher.controller.controller import Controller
        from launcher.machine.processes import raise_file_limit
        from launcher.output.console import Console
        from launcher.output.logfiles import LogFiles, set_aside
        from launcher.output.report import report
        from launcher.output.writer import OutputThread
        from launcher.runs.session import Session
        from launcher.timeline.recording import Recording

        if not caller.is_program:
            sys.setswitchinterval(switch_s)
        raise_file_limit()
        # With --detach, stdout is for the run's id.
        out = caller.out if caller.detachment is None else caller.err
        console = Console(out=out, err=caller.err, lines=options.lines, as_json=verbosity.as_json)
        folder = spec.log_dir / spec.run_id
        if spec.first_attempt == 0 and (moved := set_aside(folder)) is not None:
            verbosity.tell(f"moved the files of an earlier run {spec.run_id} to {moved}")
        logs = LogFiles(folder, console.say)
        output = OutputThread(console, logs, output_filter=request.output_filter)
        output.start()
        recording = Recording(folder, spec.run_id, say=output.say, failed=output.cannot_write)
        session = Session(
            spec,
            output,
            words=caller.words,
            script=len(options.command),
            as_torchrun=options.as_torchrun,
            is_function=caller.is_program,
            options={name: (getattr(options, name), origin) for name, origin in options.origins},
            folder=folder,
            limits=limits,
            detachment=caller.detachment,
            timeline=recording.timeline,
            say=(lambda _: None) if verbosity.quiet else output.say,
        )

        def show_progress(text: str) -> None:
            output.show_status(text or session.status_line(), gives_way=not text)

        try:
            with contextlib.ExitStack() as stack:
                stack.callback(recording.close)
                listener = None
                if node_role is not None:  # there are commands of this run on other nodes
                    from launcher.cli.run_node import listen_for_nodes  # cryptography is slow to import

                    listener = stack.enter_context(listen_for_nodes(node_role, spec, output.say))
                shows_progress = os.isatty(caller.err) and not verbosity.quiet and not verbosity.as_json
                controller = Controller(
                    spec if listener is None else replace(spec, master_addr=listener.address),
                    output,
                    show_progress=show_progress if shows_progress else lambda _: None,
                    tell_user=output.say,
                    quiet=verbosity.quiet,
                    opened=opened,
                    listener=listener,
                    recording=recording,
                    watch=session.watch,
                    function=caller.function,
                    take=caller.take,
                )
                session.listen(controller)
                known = len(early)
                outcome = controller.run(early)
                if listener is not None:
                    line = report(outcome, folder=None, tail=lambda *_: []).partition("\n")[0]
                    listener.close(outcome.exit_code, line)  # for the other nodes
        except BaseException:
            session.abandon()
            raise
        finally:
            output.close()
        kept = folder if logs.usable else None
        spent = session.spent(outcome)
        text = _report_end(request, verbosity, outcome, output, controller.evidence_file, kept, caller, spent)
        state = session.end(outcome, controller.evidence_file)
        if outcome.preempted:
            outcome = replace(outcome, exit_code=_requeue(outcome, verbosity))
    return Ended(outcome, text, (*controller.caught, *early[known:]), state, kept)


def run_at_end(ended: Ended, options: Options, verbosity: Verbosity, caller: Caller) -> None:
    """Run the command of --on-end, which may start the run again under its name. Blocks."""
    if options.on_end is None:
        return
    from launcher.runs.on_end import IN_ON_END, run_on_end

    is_from_file = dict(options.origins).get("on_end") not in ("command line", "DTRAIN_ON_END")
    if is_from_file and IN_ON_END in os.environ:  # the end of this run would start the next one, without end
        return
    run_on_end(
        options.on_end, ended.outcome, ended.state, ended.folder,
        say=verbosity.say, out=caller.out, err=caller.err,
    )  # fmt: skip


def _has_no_input() -> bool:
    """Whether this process's standard input is /dev/null, or was closed, which is the same by now (main.py)."""
    try:
        return os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev
    except OSError:
        return True


@contextmanager
def _early_interrupts(taken: bool) -> Iterator[list[int]]:
    """Have Ctrl-C noted in the list that is yielded: its exception in the middle of an import could be lost."""
    early: list[int] = []
    if not taken or threading.current_thread() is not threading.main_thread():
        yield early
        return
    before = signal.signal(signal.SIGINT, lambda signum, _: early.append(signum))
    try:
        yield early
    finally:
        signal.signal(signal.SIGINT, before)


def _report_end(
    request: Request,
    verbosity: Verbosity,
    outcome: Outcome,
    output: OutputThread,
    evidence_file: Path | None,
    folder: Path | None,
    caller: Caller,
    spent: tuple[Parts | None, Sequence[Straggler]],
) -> str:
    """Say how the run ended, and return it."""
    from launcher.output.console import takes_colour
    from launcher.output.insight import goodput_line
    from launcher.output.report import report
    from launcher.output.text import count
    from launcher.output.warm import warm_lines

    spec = request.spec
    parts, stragglers = spent
    if verbosity.error_json is not None:
        from launcher.output.error_json import write_error_json

        try:
            write_error_json(
                verbosity.error_json,
                outcome,
                folder=folder,
                evidence_file=evidence_file,
                parts=parts,
                stragglers=stragglers,
            )
        except OSError as error:
            verbosity.say(f"--error-json: {verbosity.error_json} cannot be written: {error.strerror}")
    if verbosity.verbose:
        workers, hosts = count(outcome.world_size, "worker"), count(outcome.hosts, "host")
        ran = f"{workers} on {hosts} for {outcome.duration_s:.1f} s"
        verbosity.say(f"run {spec.run_id}: {ran}")
        if outcome.forked:
            were = f"{count(outcome.forked, 'worker')} {'was' if outcome.forked == 1 else 'were'}"
            verbosity.say(f"{were} forked from processes that had imported their packages")
    if verbosity.verbose or spec.start_method == "fork":
        for reason in outcome.by_exec:
            verbosity.tell(f"workers were started by exec: {reason}")
    ranks = request.output_filter.ranks
    if outcome.error is None and ranks and max(ranks) >= outcome.world_size:
        named = ",".join(map(str, sorted(ranks)))
        verbosity.say(f"--only-rank {named}: there were only ranks 0 to {outcome.world_size - 1}")
    if outcome.error is None and spec.stdin_rank is not None and spec.stdin_rank >= outcome.world_size:
        verbosity.say(f"--stdin {spec.stdin_rank}: there were only ranks 0 to {outcome.world_size - 1}; none read it")
    for line in warm_lines(spec, outcome, verbose=verbosity.verbose):
        verbosity.tell(line)
    if parts is not None and (parts.is_measured or parts.wall_s >= GOODPUT_FROM_S):
        verbosity.tell(goodput_line(parts))
    text = report(outcome, folder=folder, tail=output.tail, evidence_file=evidence_file)
    if caller.is_program and outcome.exit_code != 0:
        return text
    if text and (not verbosity.quiet or outcome.left or outcome.unchecked or outcome.exit_code != 0):
        failed = outcome.error is not None or outcome.cause is not None
        if verbosity.as_json:
            from launcher.output.error_json import as_json
            from launcher.output.json_lines import report_line

            write_all(
                caller.err,
                report_line(
                    text, as_json(outcome, folder, evidence_file, parts=parts, stragglers=stragglers), failed=failed
                ),
            )
            return text
        first, newline, rest = text.partition("\n")
        verbosity.say(f"\x1b[1;31m{first}\x1b[0m{newline}{rest}" if failed and takes_colour(caller.err) else text)
    return text


def _requeue(outcome: Outcome, verbosity: Verbosity) -> int:
    """Have SLURM start the job again, unless it was cancelled; return the exit code."""
    from launcher.hosts.slurm_allocation import is_cancelled, requeue

    if outcome.signum is not None and is_cancelled(os.environ):
        verbosity.tell("the job was cancelled; it is not queued again")
        return 128 + outcome.signum
    verbosity.tell("queueing the job again")
    problem = requeue(os.environ)  # SLURM ends this process for it, perhaps before it has answered
    if problem is not None:
        verbosity.say(problem)
    return outcome.exit_code
