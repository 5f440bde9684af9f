"""The guard: the agent's parent, which outlives it and ends the processes that it leaves.

It is the same program as the agent, forked before anything else. As a subreaper it becomes the parent of every process
of the run on this host when the agent dies, whatever killed it. It also ends an agent that hangs or was stopped, once
the controller no longer needs it: the lease has run out, or the controller's end of the stream is closed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import time
from functools import partial
from typing import Any, NoReturn

from launcher.agent.cleanup.lease import Limits
from launcher.agent.cleanup.run_tag import RunTag, mark_unless_nested
from launcher.machine import processes

BLIND_S = 5.0  # the agent should notice within this time that the controller is gone
LOOK_S = 1.0
_ENDED = select.POLLHUP | select.POLLERR | select.POLLRDHUP


def main_forked(descriptor: int) -> NoReturn:
    """Run the guard of an agent that was forked from a process kept warm. Its orders are in an open file."""
    processes.adopt_orphans()
    orders = read_orders(descriptor)
    mark_unless_nested()
    os._exit(guard(orders["agent"], RunTag.new(orders["run_tag"]), Limits.shared(orders["limits"])))


def read_orders(descriptor: int) -> dict[str, Any]:
    """Read the orders that a process kept warm (workers/keeper.py) wrote for one that it forked; close the file."""
    with os.fdopen(descriptor, encoding="ascii") as file:
        file.seek(0)
        orders: dict[str, Any] = json.load(file)
    return orders


def guard(agent: int, run_tag: RunTag, limits: Limits) -> int:
    """Wait for the agent, then end every process of the run that is left; return the agent's exit status."""
    controller = os.dup(0)  # only to see when it is closed
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # the controller must see the end of the agent, not of the guard
        os.dup2(nothing, stream)
    watch = _Watch(agent, limits, controller)
    status = watch.wait()
    signal.signal(signal.SIGTERM, lambda *_: None)  # there is no agent to pass it on to
    os.close(controller)
    if status == 0:
        return 0
    sweep = processes.Sweep(partial(run_tag.members, ancestor=os.getpid()), kill_all=run_tag.kill_group)
    while not sweep.step():
        time.sleep(sweep.pause_s)
        reap()
    reap()
    run_tag.remove()
    if watch.why:
        with contextlib.suppress(OSError):  # the reader may be gone
            os.write(2, f"the guard ended this host's agent, which had not acted in time ({watch.why})\n".encode())
    return status if status > 0 else 128 - status


def reap() -> dict[int, int]:
    """Reap every child that has ended; return wait statuses by pid."""
    wait_statuses: dict[int, int] = {}
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return wait_statuses
        if pid == 0:
            return wait_statuses
        wait_statuses[pid] = wait_status


def _state(process: processes.Process | None) -> str:
    if process is None:
        return "just ended"
    return "stopped by a signal" if process.state == "T" else f"state {process.state}"


class _Watch:
    """Waits for the agent to end, and kills it if it is overdue. Sleeps unless a lease must be watched."""

    def __init__(self, agent: int, limits: Limits, controller: int) -> None:
        self._agent = agent
        self._limits = limits
        self._controller = controller
        self._closed_at: float | None = None
        self.why = ""  # the agent's state when it was killed here
        self._wake, wake_write = os.pipe()
        for descriptor in (self._wake, wake_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: os.kill(agent, signal.SIGTERM))

    def wait(self) -> int:
        """Return the agent's exit status, or minus the signal that ended it, also of an agent killed here."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._controller, select.POLLRDHUP)
        while (status := reap().get(self._agent)) is None:
            if self._must_go():
                process = processes.find(self._agent)
                self.why = _state(process)
                os.kill(self._agent, signal.SIGKILL)
                return -signal.SIGKILL
            for descriptor, events in poll.poll(self._pause_ms()):
                if descriptor == self._wake:
                    os.read(self._wake, 1 << 12)
                elif events & _ENDED:
                    self._closed_at = time.monotonic()
                    poll.unregister(self._controller)
        return os.waitstatus_to_exitcode(status)

    def _must_go(self) -> bool:
        """Return whether the agent is overdue, also after a moment: both may have been stopped together."""
        if not self._overdue():
            return False
        time.sleep(min(0.2, 0.5 * self._limits.late_s) if self._closed_at is None else 0.2)
        return self._overdue()

    def _overdue(self) -> bool:
        now = time.monotonic()
        if 0 < self._limits.lease_end < now - self._limits.late_s:
            return True
        if self._closed_at is None:
            return False
        process = processes.find(self._agent)
        if process is not None and process.state == "T":
            return True
        return now > (self._limits.ending_by or self._closed_at + BLIND_S)

    def _pause_ms(self) -> int | None:
        """Return how long to sleep; None: until something happens."""
        end = self._limits.lease_end
        if self._closed_at is None and end == 0:
            return None
        late = end + self._limits.late_s - time.monotonic()
        if end == 0 or not math.isfinite(late):
            late = LOOK_S
        return int(1000 * min(LOOK_S, max(0.01, late)))
