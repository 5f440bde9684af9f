"""End this process if a collective on a device exceeds the timeout of its group, as torch's watchdog would.

The watchdog ends no process if TORCH_NCCL_ASYNC_ERROR_HANDLING is 0, but records the progress of each group in torch's
flight recorder. A thread reads it, also for collectives that `ddp` did not start; point-to-point messages are not
counted there. Written from torch's sources; it has not run on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp.monitoring.debuggers import debugged_until
from ddp.monitoring.user_code import line_of_frame
from ddp.torch_internals import device_recorder, timeouts_on_devices

_LATER_S = 10.0  # after the timeout: until then, a rank that waits for its device may raise an error instead
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class _Overdue:
    """A collective, its number in its group, and for how long it has been running."""

    what: str
    group: str
    number: int
    timeout_s: float
    since_s: float


class _Watch:
    """Progress of the groups of this process, by their numbers in the recorder."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # progress of a group, and since when
        self._gone: set[str] = set()

    def stuck(self, status: Mapping[str, Mapping[str, str]], now: float, least_s: float) -> dict[str, int]:
        """Return the groups without progress for `least_s`, with the number of their finished collectives."""
        found = {}
        for group, numbers in status.items():
            over, begun = int(numbers["last_completed_collective"]), int(numbers["last_enqueued_collective"])
            if over >= begun or group in self._gone:
                self._seen.pop(group, None)
                continue
            if group not in self._seen or self._seen[group][0] != over:
                self._seen[group] = over, now
            if now - self._seen[group][1] >= least_s:
                found[group] = max(over, 0)  # -1: none yet
        return found

    def overdue(
        self, entries: Sequence[Mapping[str, Any]], stuck: Mapping[str, int], living: Collection[str], now_s: float
    ) -> _Overdue | None:
        """Return the collective in which a living group has been stuck for longer than its timeout.

        The recorder keeps groups that are gone, whose collectives never end. A later group may have the same name.
        """
        newest: dict[str, int] = {}
        for entry in entries:
            name = entry["process_group"][0]
            newest[name] = max(newest.get(name, -1), entry["pg_id"])
        self._gone |= stuck.keys() - {str(number) for name, number in newest.items() if name in living}
        for entry in entries:
            group, number = str(entry["pg_id"]), entry["collective_seq_id"]
            since_s, timeout_s = now_s - entry["time_created_ns"] / 1e9, entry["timeout_ms"] / 1e3
            is_it = group in stuck and number == stuck[group] + 1 and not entry["is_p2p"] and not entry["retired"]
            if is_it and group not in self._gone and since_s > timeout_s + _LATER_S:
                name, described = entry["process_group"]
                return _Overdue(entry["profiling_name"], described or name, number, timeout_s, since_s)
        return None


def start(rank: int, is_ended: Callable[[], bool]) -> None:
    """Watch until this process ends. `is_ended` returns whether the collectives on devices were ended already."""
    thread = threading.current_thread()
    threading.Thread(target=_watch, args=(rank, is_ended, thread.ident), name="ddp-device-watch", daemon=True).start()


def _watch(rank: int, is_ended: Callable[[], bool], trainer: int | None) -> None:
    record = device_recorder()
    assert record is not None
    watch = _Watch()
    while True:
        living = timeouts_on_devices()
        least_s = min(living.values(), default=_LONGEST_PAUSE_S)
        time.sleep(max(0.1, min(_LONGEST_PAUSE_S, least_s / 10)))
        # Without entries: these query CUDA events, which invalidates the capture of a graph by another thread.
        stuck = watch.stuck(json.loads(record(False, True)).get("pg_status", {}), time.monotonic(), least_s)
        if not stuck or not living or is_ended() or time.monotonic() - debugged_until() < least_s:
            continue
        found = watch.overdue(json.loads(record(True, True)).get("entries", []), stuck, living, time.time())
        if found is not None:
            where = line_of_frame(sys._current_frames().get(trainer or 0))
            what = f"{found.what}, collective {found.number} of group {found.group!r}"
            print(
                f"ddp: rank {rank} has waited {found.since_s:.1f} s for {what}, longer than its timeout of "
                f"{found.timeout_s:g} s, and is at {where}: some rank has not joined it. This process ends, as with "
                "torch's watchdog",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
