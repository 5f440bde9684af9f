"""The guard: the agent's parent, which outlives it and ends what it leaves.

It is the same program as the agent, forked before anything else. As a subreaper it becomes the parent of every process
of the run on this host when the agent dies, whatever killed it.
"""

from __future__ import annotations

import os
import signal
import time

from launcher import processes, scratch

__all__ = ["MARK", "guard", "reap"]

MARK = "DTRAIN_AGENT"  # in the environment of every process of the run on this host, with a value of the agent's own


def guard(agent: int, mark: str) -> int:
    """Wait for the agent, then end whatever of the run is still there; return the agent's exit status."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # the controller must see the agent's end, not wait for ours
        os.dup2(nothing, stream)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(agent, signal.SIGTERM))
    status = None
    while status is None:
        pid, wait_status = os.waitpid(-1, 0)
        if pid == agent:
            status = os.waitstatus_to_exitcode(wait_status)
    if status == 0:
        return 0
    sweep = processes.Sweep(lambda: processes.related(ancestor=os.getpid(), mark=f"{MARK}={mark}"), grace_s=0)
    while not sweep.step():
        time.sleep(sweep.pause_s)
        reap()
    scratch.remove_folder(mark)
    return status if status > 0 else 128 - status


def reap() -> dict[int, int]:
    """Collect every child that has ended: pid -> wait status."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status
