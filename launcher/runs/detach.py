"""`--detach`: the controller continues in its own session, and the command that was typed returns.

Until all workers have started, both act as one run in the foreground: messages reach the terminal, signals the
controller, and if the run ends, its exit code is the command's.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable

_LOGIND_S = 2.0  # for its answer
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Detachment:
    """The controller's side: `leave` makes the typed command return."""

    def __init__(self, run_id_to: int) -> None:
        self._run_id_to: int | None = run_id_to

    def leave(self, run_id: str, output: int) -> None:
        """Switch from the terminal to `output`, and report that the run has started."""
        if self._run_id_to is None:
            return
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        with contextlib.suppress(BrokenPipeError):  # the typed command was killed
            os.write(self._run_id_to, f"{run_id}\n".encode())
        os.close(self._run_id_to)
        self._run_id_to = None


def detached(run: Callable[[Detachment], int], announce: Callable[[str], None]) -> int:
    """Call `run` in another process; `announce` the run's id once it has started. Return the exit code of either.

    Must be called while the process has a single thread.
    """
    reading, writing = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # a signal now would end only this process
    try:
        pid = os.fork()
        if pid == 0:
            os.setsid()
        else:  # the child was not waited for yet, so its pid cannot be reused
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


def logout_notice(groups: str) -> list[str]:
    """Return the lines that say how to keep a process at logout; none if systemd-logind does not end it.

    `groups` are its control groups, as in /proc/PID/cgroup. If logind does not answer, it ends the process.
    """
    if manager := re.search(r"/user@(\d+)\.service", groups):  # a terminal of a desktop, or systemd-run --user
        if _logind_says("Linger=yes", "show-user", manager[1]):
            return []
        return ["logind ends this run after your last logout. To keep it, type: loginctl enable-linger"]
    if not re.search(r"/session-[^/\n]+\.scope", groups) or _logind_says("KillUserProcesses=no", "show-session"):
        return []
    return [
        "logind ends this run when you log out (KillUserProcesses). To keep it, type once: loginctl",
        "enable-linger; then start runs with: systemd-run --user --scope dtrain run --detach ...",
    ]


def _logind_says(setting: str, *words: str) -> bool:
    import subprocess

    argv = ["loginctl", *words, f"--property={setting.partition('=')[0]}"]
    try:
        shown = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LOGIND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return shown.stdout.strip() == setting.encode()
