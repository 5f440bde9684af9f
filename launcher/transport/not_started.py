"""Says why no agent, or examiner, has greeted on a stream."""

from __future__ import annotations

import os
import re
import signal

from launcher.machine.packages import install_command
from launcher.transport.setup import why_setup_failed

_SCARCE = ("Resource temporarily unavailable", "Too many open files", "can't start new thread")
_PYTHONHOME = re.compile(r"PYTHONHOME = '([^']+)'")  # in Python's message


def why_not_started(python: str, status: int | None, words: str, noise: bytes) -> str:
    """Return why a stream ended before a greeting, from the result of `finish`, and what came instead."""
    if why := why_setup_failed(words):
        return why
    if status in (126, 127) and (not words or os.path.basename(python) in words):
        return f"there is no Python at {python}; name the one that has dtrain with --python, or see --sync"
    if "No module named launcher.check" in words:
        return f"{python} there has an older dtrain, without `dtrain check`"
    if (home := _PYTHONHOME.search(words)) is not None or "No module named 'encodings'" in words:
        named = f" to {home[1]}" if home is not None else ""
        return f"{python} there cannot find its own library: PYTHONHOME may be set{named} there; unset it"
    if "No module named" in words:
        fix = install_command(python)
        return f"{python} there has no dtrain; send it with --sync, or " + (
            f"install it: {fix}" if fix else "install this version"
        )
    said = [
        line.strip() for line in [*noise.decode("utf-8", "replace").splitlines(), *words.splitlines()] if line.strip()
    ]
    if status is None:
        return f"the connection closed before the agent had started{': ' + said[-1] if said else ''}"
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return f"the agent was killed before it had started{': ' + said[-1] if said else ''}"
    reason = f"the agent did not start (status {status}): {(said or ['it said nothing'])[-1]}"
    if any(text in reason for text in _SCARCE):
        reason += "; this user's limits there are too low, see ulimit -n and ulimit -u"
    elif status in (126, 127):
        reason += "; is what --agent-prefix names installed there?"
    elif "Traceback" not in words:
        reason += "; does its shell end first, or a start-up file of it such as .bashrc?"
    return reason
