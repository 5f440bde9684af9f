"""The last time that a debugger was open in a rank of this run, so that waits for that rank do not time out.

The launcher writes it to a file: DTRAIN_DEBUGGER_FILE, see launcher/agent/workers/worker.py. It is only read before a
wait would be given up. torch's own limits still apply: the timeout of a group counts from the start of each collective.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic

_VARIABLE = "DTRAIN_DEBUGGER_FILE"


def debugged_until() -> float:
    """Return the monotonic time at which a debugger was last open, now if one is; minus infinity if none ever was."""
    path = os.environ.get(_VARIABLE)
    try:
        said = Path(path).read_text() if path else ""
        return monotonic() if said == "open" else float(said)
    except (OSError, ValueError):  # there is no file
        return float("-inf")
