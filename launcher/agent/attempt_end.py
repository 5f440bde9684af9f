"""Ends an attempt on this host: signal its workers, kill them after the grace period, sweep."""

from __future__ import annotations

import math
import os
import signal
import time
from functools import partial

from launcher.agent.attempt import Attempt
from launcher.agent.cleanup.run_tag import RunTag
from launcher.agent.kept_copy import KeptCopy
from launcher.agent.rendezvous import StoreProcess
from launcher.agent.workers.warm_start import ForkServer
from launcher.machine.processes import Sweep

# A failed worker gets half of the grace period, FAILED_S at most, to write its error and run its exit handlers, which
# SIGTERM would cut short. The other half is for its handling of that signal.
FAILED_S = 10.0
KILL_WAIT_S = 5.0  # a process that survives SIGKILL for so long (state D, or another user's) is left


class AttemptEnd:
    """From the first signal until no process of the attempt is left here, or no more can be ended.

    Call `step` whenever something happened, and after `pause_s`. It never blocks.
    """

    def __init__(
        self,
        attempt: Attempt | None,
        run_tag: RunTag,
        store_process: StoreProcess,
        fork_server: ForkServer,
        kept_copy: KeptCopy,
        *,
        signum: int,
        kill_at: float,
    ) -> None:
        # No attempt follows: end the store's process as well, and the fork server unless it stays.
        self.final = False
        self._attempt = attempt
        self._run_tag = run_tag
        self._store_process = store_process
        self._fork_server = fork_server
        self._kept_copy = kept_copy
        now = time.monotonic()
        self._stop_failed_at = now + min(FAILED_S, max(0.0, kill_at - now) / 2)
        self._kill_at = kill_at
        self._killed_at: float | None = None
        self._sweep: Sweep | None = None
        self._done = False
        if attempt is not None:
            attempt.signal(signum, stop=True)

    @property
    def swept(self) -> int:
        """Number of processes that outlived their workers and were ended."""
        return 0 if self._sweep is None else self._sweep.ended

    @property
    def left(self) -> list[str]:
        return [] if self._sweep is None else [process.describe() for process in self._sweep.left]

    def hurry(self, signum: int, kill_at: float) -> None:
        """Shorten the time left, if this deadline or signal is more urgent."""
        self._kill_at = min(self._kill_at, kill_at)
        if self._sweep is not None and signum == signal.SIGKILL:
            self._sweep.hurry()

    def pause_s(self, now: float) -> float:
        if self._done:
            return 3600.0  # waits only for the controller to read, which wakes us
        if self._sweep is not None:
            return self._sweep.pause_s
        due = self._kill_at if self._killed_at is None else self._killed_at + KILL_WAIT_S
        return max(0.0, min(due, self._stop_failed_at) - now)

    def step(self, now: float) -> bool:
        """Do what is due; return whether the attempt has ended."""
        if self._done:
            return True
        running = [] if self._attempt is None else self._attempt.running
        if now >= self._stop_failed_at:
            self._stop_failed_at = math.inf
            if self._attempt is not None and self._killed_at is None:
                self._attempt.stop_failed()
        if now >= self._kill_at and self._killed_at is None:
            self._killed_at = now
            for worker in running:
                worker.signal(signal.SIGKILL, stop=True)
        if self._sweep is None and (not running or now >= (self._killed_at or now) + KILL_WAIT_S):
            self._begin_sweep(now, stuck=bool(running))
        self._done = self._sweep is not None and self._sweep.step()
        return self._done

    def _begin_sweep(self, now: float, *, stuck: bool) -> None:
        killed = [None if self._attempt is None else self._attempt.rendezvous.close_store(keep_process=not self.final)]
        if self.final:
            killed.append(self._store_process.kill())
            killed += self._fork_server.kill_late() if self._fork_server.stays else self._fork_server.kill()
        servers = (server.pid for server in self._fork_server.processes)
        kept = [self._store_process.pid, *servers, self._kept_copy.pid]
        spare = [pid for pid in (os.getppid(), *killed, *kept) if pid is not None]
        self._sweep = Sweep(
            partial(self._run_tag.members, ancestor=os.getpid(), spare=spare),
            grace_s=max(0.0, self._kill_at - now),
            kill_wait_s=1.0 if stuck else KILL_WAIT_S,
            adopted=not any(kept),
            kill_all=self._run_tag.kill_group,
        )
