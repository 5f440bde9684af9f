"""Whether systemd-logind may end a process that is kept warm while a later run uses it.

What a login started is in the control group of its session. With KillUserProcesses, logind ends all of that group when
the login ends, whoever uses it by then; once the login has ended, it leaves alone what is still there.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["ends_with_login", "why_it_may_end"]

_SESSION = re.compile(r"/session-([^/\n]+)\.scope")
_SESSIONS = Path("/run/systemd/sessions")
_ANSWER_S = 2.0


def why_it_may_end(theirs: str, *, ours: str | None = None, sessions: Path = _SESSIONS) -> str:
    """Return why logind may end a process before a run that uses it; empty if it does not.

    `theirs` is /proc/PID/cgroup of the process, `ours` that of the run, by default of this process. Asks logind only if
    the process is of another login that has not ended.
    """
    if (session := _SESSION.search(theirs)) is None:
        return ""
    if ours is None:
        ours = Path("/proc/self/cgroup").read_text(errors="surrogateescape")
    if (own := _SESSION.search(ours)) is not None and own[1] == session[1]:
        return ""
    if not _goes_on(sessions / session[1]) or not _ends_processes():
        return ""
    return f"logind ends it with the login that left it, session {session[1]} (KillUserProcesses)"


def ends_with_login() -> bool:
    """Whether logind ends this process when its login ends."""
    ours = Path("/proc/self/cgroup").read_text(errors="surrogateescape")
    return _SESSION.search(ours) is not None and _ends_processes()


def _goes_on(session: Path) -> bool:
    """Say whether a login has not ended, by what logind notes for sd_session_get_state()."""
    try:
        return "STATE=closing" not in session.read_text(errors="replace").splitlines()
    except OSError:  # it is not there any more
        return False


def _ends_processes() -> bool:
    """Ask logind whether it ends what a login leaves; without an answer it may."""
    import subprocess

    argv = ["loginctl", "show-session", "--property=KillUserProcesses"]
    try:
        said = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return said.stdout.strip() != b"KillUserProcesses=no"
