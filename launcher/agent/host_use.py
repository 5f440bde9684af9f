"""Measures memory of this host's workers, how long they waited for a processor, and how busy their GPUs are.

Measured every LOOK_S, for displays of the run.

The driver of a broken GPU may not answer for minutes, but the agent must not block: a thread asks it.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Collection, Mapping

from launcher.agent.workers.worker import Worker
from launcher.machine.processes import descendants
from launcher.protocol.reports import HostUse

LOOK_S = 3.0  # between two measurements
OLD_S = 15.0  # an answer of the driver as old as this is not shown
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class HostUseWatch:
    """Measures the workers of one attempt."""

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt
        self._looks_at = 0.0
        self._gpus: _GpuWatch | None = None

    def look(self, workers: Collection[Worker], gpus: Mapping[int, str], now: float) -> HostUse | None:
        """Return the present use, or None if it is not due; `gpus` are the ids of NVIDIA GPUs by rank."""
        if now < self._looks_at:
            return None
        self._looks_at = now + LOOK_S
        if gpus and self._gpus is None:
            self._gpus = _GpuWatch({*gpus.values()})
        from launcher.machine.oom import memory_in_use  # later than the agent's start

        busy = {} if self._gpus is None else self._gpus.newest(now)
        used, limit = memory_in_use()
        return HostUse(
            attempt=self._attempt,
            memory_bytes=used,
            memory_limit_bytes=limit,
            resident_bytes={str(worker.rank): _resident_bytes(worker.pid) for worker in workers},
            gpus={str(rank): busy[name] for rank, name in gpus.items() if name in busy},
            pids={str(worker.rank): worker.own_pid for worker in workers},
            waited_s={
                str(worker.rank): seconds for worker in workers if (seconds := _waited_s(worker.own_pid)) is not None
            },
        )

    def ask_gpus(self) -> None:
        """Have the driver asked now for what is wrong with the GPUs."""
        if self._gpus is not None:
            self._gpus.ask()

    @property
    def gpus_answered(self) -> bool:
        """Return whether the driver has answered since, or is not asked at all."""
        return self._gpus is None or self._gpus.answered

    def gpu_troubles(self, gpus: Mapping[int, str]) -> list[str]:
        """Return a line for each GPU with which something is wrong that was not at the start."""
        if self._gpus is None:
            return []
        found = ((rank, name, self._gpus.troubles(name)) for rank, name in sorted(gpus.items()))
        return [f"GPU {name} of rank {rank}: {', '.join(troubles)}" for rank, name, troubles in found if troubles]

    def close(self) -> None:
        if self._gpus is not None:
            self._gpus.close()


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children; pages shared with the parent count once."""
    resident, _ = _memory(pid)
    for child in descendants(pid):
        all_of_it, shared = _memory(child)
        resident += all_of_it - shared
    return resident


def _memory(pid: int) -> tuple[int, int]:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):  # ended meanwhile
        return 0, 0
    return resident * _PAGE_BYTES, shared * _PAGE_BYTES


def _waited_s(pid: int) -> float | None:
    """Return how long the first thread of a process was runnable but had no processor; None if unknown."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # ended meanwhile, or the kernel does not count it
        return None


class _GpuWatch:
    """Asks NVML in a thread that is never waited for."""

    def __init__(self, gpus: Collection[str]) -> None:
        self._gpus = gpus
        self._newest: tuple[float, dict[str, list[int]]] = 0.0, {}
        self._at_first: dict[str, dict[str, int]] | None = None  # what was wrong then
        self._troubles: dict[str, dict[str, int]] = {}
        self._asked_at, self._answers_from = 0.0, 0.0  # when it was asked, and the newest answer began
        self._is_closed = False
        self._wakes = threading.Event()
        with contextlib.suppress(RuntimeError):  # no more threads
            threading.Thread(target=self._work, name="gpus", daemon=True).start()

    def newest(self, now: float) -> dict[str, list[int]]:
        at, found = self._newest
        return found if now - at < OLD_S else {}

    def ask(self) -> None:
        self._asked_at = time.monotonic()
        self._wakes.set()

    @property
    def answered(self) -> bool:
        return self._answers_from >= self._asked_at

    def troubles(self, name: str) -> list[str]:
        before = (self._at_first or {}).get(name, {})
        counts = self._troubles.get(name, {}).items()
        return [
            what if what.startswith("slowed") else f"{count - before.get(what, 0)} {what}"
            for what, count in counts
            if count > before.get(what, 0)
        ]

    def close(self) -> None:
        self._is_closed = True
        self._wakes.set()

    def _work(self) -> None:
        from launcher.machine.gpus.nvidia import troubles, usage

        while not self._is_closed:
            self._wakes.clear()
            began = time.monotonic()
            found = usage(self._gpus)
            self._newest = time.monotonic(), found
            self._troubles = troubles(self._gpus)
            if self._at_first is None:
                self._at_first = self._troubles
            self._answers_from = began
            if not found:  # there is no GPU to ask about
                self._answers_from = math.inf
                return
            self._wakes.wait(LOOK_S)
