"""`--detach`: the controller goes on in a session of its own, and the command that was typed returns.

Until all workers have started, both are one run in the foreground: its words reach the terminal, its signals the
controller, and if it ends, its exit code is the command's.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

_LOGIND_S = 2.0  # for its answer
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Detachment:
    """The controller's side: `leave` lets the command that was typed return."""

    def __init__(self, run_id_to: int) -> None:
        self._run_id_to: int | None = run_id_to

    def leave(self, run_id: str, output: int) -> None:
        """Write to `output` from now on instead of the terminal, and say that the run has started."""
        if self._run_id_to is None:
            return
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        with contextlib.suppress(BrokenPipeError):  # the command that was typed was killed
            os.write(self._run_id_to, f"{run_id}\n".encode())
        os.close(self._run_id_to)
        self._run_id_to = None


def detached(run: Callable[[Detachment], int], announce: Callable[[str], None]) -> int:
    """Call `run` in a process of its own; `announce` the id that it leaves with. Return the exit code, of either.

    Must be called while there is one thread.
    """
    reading, writing = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # one that comes now would end this side alone
    try:
        pid = os.fork()
        if pid == 0:
            os.setsid()
        else:  # the process is there, or not waited for yet: its id is no other's
            for signum in _PASSED_ON:
                if signal.getsignal(signum) != signal.SIG_IGN:
                    signal.signal(signum, lambda signum, _: os.kill(pid, signum))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if pid == 0:
        os.close(reading)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        return run(Detachment(writing))
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        run_id = pipe.readline().strip()
    if run_id:
        announce(run_id)
        return 0
    _, status = os.waitpid(pid, 0)
    exit_code = os.waitstatus_to_exitcode(status)
    return exit_code if exit_code >= 0 else 128 - exit_code


def ends_with_login() -> bool:
    """Return whether systemd-logind ends this process when its login ends. Without its answer it may."""
    if not re.search(r"/session-[^/\n]+\.scope", Path("/proc/self/cgroup").read_text(errors="surrogateescape")):
        return False
    import subprocess

    argv = ["loginctl", "show-session", "--property=KillUserProcesses"]
    try:
        said = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LOGIND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return said.stdout.strip() != b"KillUserProcesses=no"
