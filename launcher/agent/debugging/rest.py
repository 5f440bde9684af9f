"""Whether a debugger is open in a rank of the run, on any host: meanwhile no silence of a worker means anything.

The workers learn it from a file (DTRAIN_DEBUGGER_FILE in workers/worker.py), which they read before they give up
waiting for others: ddp/monitoring/debuggers.py.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from launcher.agent.workers.worker import DEBUGGER_FILE

__all__ = ["Rest"]


class Rest:
    """`now`: the clocks rest at the moment."""

    def __init__(self) -> None:
        self.now = False
        self._file: Path | None = None

    def set_folder(self, folder: str) -> None:
        """Set the folder of the workers' files."""
        self._file = Path(folder, DEBUGGER_FILE)

    def update(self, resting: bool) -> None:
        self.now = resting
        if self._file is None:
            return
        news = Path(f"{self._file}.new")
        try:
            news.write_text("open" if resting else repr(time.monotonic()))
            os.replace(news, self._file)  # atomic for the workers
        except OSError as error:  # a full disk: then the time limits of their waits still apply
            print(f"dtrain agent: {self._file}: {error}", file=sys.stderr)
