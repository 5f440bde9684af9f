"""Controls one run in this process, from the request to the outcome, and opens its output.

Called by run.py for the command line, and by functions/launch.py for a function of the user.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from launcher.cli.caller import Caller, Verbosity
from launcher.cli.options import Options
from launcher.cli.request import Request
from launcher.cli.run_end import Ended, Ending, requeue
from launcher.frozen import replace
from launcher.runs.housekeeping import Limits
from launcher.transport.connect import start_agents

if TYPE_CHECKING:
    from launcher.job.events import Event
    from launcher.output.console import Console
    from launcher.placement.job_spec import JobSpec

_SWITCH_S = 0.0005  # threads that connect wait this long at each step while this one imports


def control(request: Request, options: Options, limits: Limits, verbosity: Verbosity, caller: Caller) -> Ended:
    """Run the job to its end. The caller holds its folder, and calls `run_at_end` after releasing it.

    Blocks. Shows the report, except that of a failure in a Python program, which raises it.
    """
    spec, node_role = request.spec, request.node_role
    if caller.is_program or _has_no_input():
        spec = replace(spec, stdin_rank=None)
    if node_role is not None:
        os.environ.update(node_role.agent_environment)
    with _Signals(spec.signals) as signals:
        # Early: starting an agent takes as long as the imports here. But not until we are known to be node 0.
        opened = start_agents(spec) if node_role is None else {}
        switch_s = sys.getswitchinterval()
        if not caller.is_program:  # a program has its own threads, and perhaps several runs
            sys.setswitchinterval(_SWITCH_S)

        from launcher.controller.controller import Controller
        from launcher.machine.processes import raise_file_limit
        from launcher.output.console import Console
        from launcher.output.logfiles import LogFiles, set_aside
        from launcher.output.report import report
        from launcher.output.writer import OutputThread
        from launcher.runs.session import Session
        from launcher.timeline.recording import Recording

        if spec.replayable is not None:
            from launcher.placement.job_spec import REPLAYABLE
            from launcher.runs.ledger import keep_snapshots

        if not caller.is_program:
            sys.setswitchinterval(switch_s)
        raise_file_limit()
        # With --detach, stdout is for the run's id.
        out = caller.out if caller.detachment is None else caller.err
        is_typed_at = spec.stdin_rank is not None and os.isatty(0)
        console = Console(
            out=out, err=caller.err, lines=options.lines, as_json=verbosity.as_json, is_typed_at=is_typed_at
        )
        folder = spec.log_dir / spec.run_id
        if spec.first_attempt == 0 and caller.read_ledger is None and (moved := set_aside(folder)) is not None:
            verbosity.inform(f"moved the files of an earlier run {spec.run_id} to {moved}")
        logs = LogFiles(folder, console.say)
        if spec.replayable is not None:
            logs.make_folder(REPLAYABLE)
        output = OutputThread(console, logs, output_filter=request.output_filter, read_ledger=caller.read_ledger)
        output.start()
        recording = Recording(folder, spec.run_id, say=output.say, failed=output.cannot_write)
        say: Callable[[str], None] = (lambda _: None) if verbosity.quiet else output.say
        session = Session(
            spec,
            output,
            argv=caller.argv,
            script=len(options.command),
            as_torchrun=options.as_torchrun,
            is_function=caller.is_program,
            options={name: (getattr(options, name), origin) for name, origin in options.origins},
            folder=folder,
            limits=limits,
            detachment=caller.detachment,
            timeline=recording.timeline,
            say=say,
        )

        def show_progress(text: str) -> None:
            output.show_status(text or session.status_line(), gives_way=not text)

        try:
            with contextlib.ExitStack() as stack:
                stack.callback(recording.close)
                listener = None
                if node_role is not None:  # this run has commands on other nodes
                    from launcher.cli.run_node import listen_for_nodes  # cryptography is slow to import

                    listener = stack.enter_context(listen_for_nodes(node_role, spec, output.say))
                shows_progress = os.isatty(caller.err) and not verbosity.quiet and not verbosity.as_json
                controller = Controller(
                    spec if listener is None else replace(spec, master_addr=listener.address),
                    output,
                    show_progress=show_progress if shows_progress else lambda _: None,
                    notify_user=output.say,
                    quiet=verbosity.quiet,
                    opened=opened,
                    listener=listener,
                    recording=recording,
                    watch=session.watch,
                    answer=session.control.carry_out,
                    function=caller.function,
                    take=caller.take,
                )
                session.control.start(controller.put)
                if spec.sync:
                    _follow_sending(spec, controller.put, say, show_progress if shows_progress else None)
                signals.console = console
                known = len(signals.received)
                outcome = controller.run(signals.received)
                if controller.caught:  # perhaps after the last event
                    output.hurry()
                if listener is not None:
                    line = report(outcome, folder=None, tail=lambda *_: []).partition("\n")[0]
                    listener.close(outcome.exit_code, line)  # for the other nodes
        except BaseException:
            session.abandon()
            raise
        finally:
            output.close()
        kept = folder if logs.usable else None
        if spec.fetch and kept is not None:
            from launcher.transport.fetching import fetch_files

            given_up = lambda: len(signals.received) > known  # noqa: E731
            fetch_files(spec, controller.hosts, kept, say=verbosity.inform, given_up=given_up)
        if spec.replayable is not None and (line := keep_snapshots(folder, failed=outcome.exit_code != 0)):
            verbosity.inform(line)
        ending = Ending(request, verbosity, caller, outcome, kept, controller.evidence_file, *session.spent(outcome))
        text = ending.report(output)
        kept_report = ending.kept_report(output)
        state = session.end(outcome, controller.evidence_file, kept_report, complain=verbosity.say)
        if outcome.preempted:
            outcome = replace(outcome, exit_code=requeue(outcome, verbosity))
    return Ended(outcome, text, (*controller.caught, *signals.received[known:]), state, kept)


def _follow_sending(
    spec: JobSpec, put: Callable[[Event], None], say: Callable[[str], None], show: Callable[[str], None] | None
) -> None:
    """Show how far the sending of files is, and have the job wait for it."""
    from launcher.job.events import Sending
    from launcher.transport.synced import outgoing_of

    outgoing_of(spec).progress.tell(say=say, show=show or (lambda _: None), wait=lambda seconds: put(Sending(seconds)))


def _has_no_input() -> bool:
    """Return whether standard input is /dev/null, or was closed, which main.py replaced by it."""
    try:
        return os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev
    except OSError:
        return True


class _Signals:
    """Records stop signals before the loop and after it; an exception in the middle of an import could be lost.

    After the loop, the first one ends the wait for a blocked terminal, and the next one has its usual effect. `console`
    is set just before the loop, which has handlers of its own.
    """

    def __init__(self, taken: Collection[str]) -> None:
        self.received: list[int] = []
        self.console: Console | None = None
        self._taken = taken
        self._before: dict[int, Any] = {}
        self._hurries = False

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signum.name in self._taken and signal.getsignal(signum) != signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, _: object) -> None:
        if self._hurries:
            signal.signal(signum, self._before[signum])
            signal.raise_signal(signum)
        self.received.append(signum)
        if self.console is not None:
            self._hurries = self.console.impatient = True  # no lock: the interrupted code may hold the output's
