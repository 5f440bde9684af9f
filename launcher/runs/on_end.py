"""`--on-end CMD`: the user's command, run here after a run, with the result in variables.

DTRAIN_RUN        the run's id, for dtrain logs, history and rerun. Not DTRAIN_RUN_ID, which is an option: a run that
                  the command starts would get the same id
DTRAIN_STATE      finished, failed, stopped or not started, as in dtrain ps and run.json
DTRAIN_EXIT_CODE  dtrain's exit code
DTRAIN_CAUSE      what failed first, in one line; empty if nothing did
DTRAIN_FOLDER     the run's folder, absolute; empty if its files could not be written
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.job.ending import Outcome, did_not_come
from launcher.job.failures.failure import signal_name, what_happened
from launcher.machine.processes import kill_session
from launcher.output.text import printable
from launcher.runs.secrets import without_secrets

IN_ON_END = "DTRAIN_IN_ON_END"  # set for the command, whose own runs ignore on_end in the config file

LIMIT_S = 60.0  # for the command
_NOT_PASSED_ON = ("DTRAIN_ON_END", "DTRAIN_TOKEN")  # it may start a run, for which it must not run again
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _StoppedError(Exception):
    """The user stopped waiting; `args` is the signal's number."""


def run_on_end(
    command: str, outcome: Outcome, state: str, folder: Path | None, *,
    say: Callable[[str], None], out: int = 1, err: int = 2, limit_s: float = LIMIT_S,
) -> None:  # fmt: skip
    """Run the command with /bin/sh; print a message if it fails, but do nothing else. Blocks, at most `limit_s`.

    It writes to `out` and `err`. Its background processes continue if it ends in time.
    """
    env = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    env |= {
        "DTRAIN_RUN": outcome.run_id,
        "DTRAIN_STATE": state,
        "DTRAIN_EXIT_CODE": str(outcome.exit_code),
        "DTRAIN_CAUSE": _cause(outcome),
        "DTRAIN_FOLDER": "" if folder is None else str(folder.absolute()),
        IN_ON_END: "1",
    }
    try:
        with _stopped_by_signals() as begin_raising:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
            try:
                begin_raising()
                status = process.wait(limit_s)
            except BaseException:
                kill_session(process)
                raise
    except OSError as error:
        say(f"--on-end: /bin/sh cannot be started: {error.strerror}")
    except subprocess.TimeoutExpired:
        say(f"--on-end: the command did not end within {limit_s:g} s and was killed; run longer commands in the")
        say("background: CMD &")
    except _StoppedError as stopped:
        say(f"--on-end: the command was killed, since dtrain received {signal_name(stopped.args[0])}")
    else:
        if status:
            how = f"ended with exit code {status}" if status > 0 else f"was killed by {signal_name(-status)}"
            say(f"--on-end: the command {how}")


def _cause(outcome: Outcome) -> str:
    if outcome.error is not None:
        text = " ".join(str(outcome.error).split())
    elif outcome.cause is not None:
        text = did_not_come(outcome.missing) if outcome.missing else what_happened(outcome.cause)
    else:
        text = "" if outcome.signum is None else f"stopped by {signal_name(outcome.signum)}"
    return printable(" ".join(without_secrets(text.split(" "))))


@contextmanager
def _stopped_by_signals() -> Iterator[Callable[[], None]]:
    """Raise _StoppedError if a signal would end this process, which still has to return an exit code.

    Signals are only recorded until the block calls what it is given: else Popen could lose a process that it started.
    """
    received: list[int] = []
    is_raising = False

    def stop(signum: int, _: object) -> None:
        received.append(signum)
        if is_raising:
            raise _StoppedError(signum)

    def begin_raising() -> None:
        nonlocal is_raising
        is_raising = True
        if received:
            raise _StoppedError(received[0])

    if threading.current_thread() is not threading.main_thread():
        yield begin_raising
        return
    before = {
        signum: signal.signal(signum, stop) for signum in _STOPS if signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        yield begin_raising
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
