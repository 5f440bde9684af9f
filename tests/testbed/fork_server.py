"""A fork server without an agent: which workers could be forked from it, and why not."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.agent.cleanup.run_tag import RunTag
from launcher.agent.workers.warm_start import ForkServer, Warmth
from launcher.protocol.commands import Prepare


def prepare_for(folder: Path, target: str = "script.py", *, through: str = "script", **more: Any) -> Prepare:
    """Return the order to prepare this script, or this module (`through`), of a folder."""
    names = ["RANK", "LOCAL_RANK"]
    return Prepare("run", str(folder), None, None, {}, 1.0, 1.0, [], 0, 1, [], through, target, names=names, **more)


@contextlib.contextmanager
def loaded(prepare: Prepare) -> Iterator[ForkServer]:
    """Yield a fork server that has made its imports, or given up; it is gone at the end."""
    selector = selectors.DefaultSelector()
    server = ForkServer(RunTag.new(), selector, Warmth())
    server.prepare(prepare, 1)
    pid = server.pid
    try:
        while server.is_loading:
            for chosen, _ in selector.select(60):
                chosen.data()
        yield server
    finally:
        server.kill()
        if pid is not None:
            os.waitpid(pid, 0)
