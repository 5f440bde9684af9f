"""When a debugger was last open in a rank of this run: nobody who waits meanwhile for that rank waits too long.

The launcher says so in a file: DTRAIN_DEBUGGER_FILE, see launcher/agent/workers/worker.py. It is read only where a wait
would be given up. What torch itself bounds goes on: the timeout of a group holds for each collective from its begin.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic

__all__ = ["debugged_until"]

_VARIABLE = "DTRAIN_DEBUGGER_FILE"


def debugged_until() -> float:
    """Return the monotonic time at which a debugger was last open, now if one is; minus infinity if none ever was."""
    path = os.environ.get(_VARIABLE)
    try:
        said = Path(path).read_text() if path else ""
        return monotonic() if said == "open" else float(said)
    except (OSError, ValueError):  # there is none
        return float("-inf")
