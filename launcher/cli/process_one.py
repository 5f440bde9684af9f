"""Process 1 of a container that has no init: passes signals on to dtrain, its child, and reaps orphans.

The kernel ignores signals to a process 1 that does not handle them, and gives it all orphans of the container, which
stay as zombies unless it waits for them. dtrain waits for its own children only.
"""

from __future__ import annotations

import os
import signal

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def fork_if_process_one() -> None:
    """Return in a child if this is process 1, which then waits and exits with the child's exit code."""
    if os.getpid() != 1:
        return
    waited = {*_PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        received = signal.sigwaitinfo(waited)
        if received.si_signo != signal.SIGCHLD:
            if received.si_code <= 0:  # by a process; the child gets what a terminal sends from there
                os.kill(child, received.si_signo)
        elif (exit_code := _reap(child)) is not None:
            os._exit(exit_code)


def _reap(child: int) -> int | None:
    """Collect all that have ended; return the exit code of `child` if it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if pid == 0:
            return None
