"""Rounds of all ranks of a group: each fills its slot, increments its counter, and waits for the others' counters.

There are two slots, used in turn. A rank that fills one for round k + 2 has seen all counters at k + 1, and a rank
sets its counter to k + 1 only after reading its data of round k: no rank reads a slot that is being filled again.

Each round has a header: its rank's operation, dtype and number of elements. If the headers differ, the ranks called
different operations: all of them see it in the first round, before anything is written to a tensor.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch

from ddp.comm.shm.memory import DONE, HEAD_BYTES, HEADS, POSTED, STATE, TEXT, TEXT_BYTES, Peer
from ddp.comm.shm.waiting import Fence, futex_wait, futex_wake, spin
from ddp.errors import CollectiveError
from ddp.monitoring.stall_text import ranks_text

_OPEN, _FAILED, _CLOSED = 0, 1, 2
_POSTED, _STATE, _DONE, _HEADS = POSTED // 8, STATE // 8, DONE // 8, HEADS // 8
_KEPT_PARTS = 64  # cached views of slots: every training step uses the same ones
_SLICE_S = 0.05  # how long a rank sleeps before it looks whether the others still run

KINDS = (
    "barrier", "all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
    "monitored_barrier", "connecting gloo", "sum_rows",
)  # fmt: skip
REDUCTIONS = ("none", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
)
_KIND = {name: number for number, name in enumerate(KINDS)}
_REDUCTION = {name: number for number, name in enumerate(REDUCTIONS)}
_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}


class Lost(CollectiveError):
    """A collective of `shm` failed on this rank; the group is unusable from now on."""


def refused(what: str, rank: int, broken: BaseException | None) -> Lost:
    """Return the error for a call on `rank` after the group is `broken`."""
    return Lost(f"{what} is refused on rank {rank}, since the group has failed: {broken}", rank=rank, what=what)


def not_done(what: str, rank: int, timeout_s: float | None) -> CollectiveError:
    """Return the error for a wait with its own timeout."""
    return CollectiveError(
        f"{what} on rank {rank} was not done within {timeout_s:g} s; it goes on", rank=rank, what=what
    )


@lru_cache(maxsize=256)
def header(kind: str, dtype: torch.dtype, numel: int, reduction: str = "none", root: int = -1) -> tuple[int, int]:
    """Return the part of a call that must agree between ranks, as two words."""
    return _KIND[kind] | _REDUCTION[reduction] << 8 | _DTYPE[dtype] << 16 | (root + 1) << 32, numel


def describe(words: Sequence[int]) -> str:
    kind, numel = words
    name, reduction, dtype, root = KINDS[kind & 255], REDUCTIONS[kind >> 8 & 255], kind >> 16 & 65535, kind >> 32
    details = [] if name.endswith("barrier") else [f"{numel} elements of {DTYPES[dtype]}".replace("torch.", "")]
    details += [reduction] if reduction != "none" else []
    details += [f"root {root - 1}"] if root else []
    return f"{name}({', '.join(details)})"


class Rounds:
    """The counters of a group. One thread at a time may use it.

    `what` is the operation that runs, for messages.
    """

    def __init__(self, peers: Sequence[Peer], rank: int, pidfds: Sequence[int]) -> None:
        self.peers, self.rank, self.size = peers, rank, len(peers)
        self.own = peers[rank]
        self.others = [peer for peer in peers if peer.rank != rank]
        self.what = "barrier"
        self.round = 0
        self._done = 0  # the last round that had no error on this rank
        self.parity = 0
        self.fence = Fence()
        self._pidfds = pidfds
        self._crowded = len(peers) > len(os.sched_getaffinity(0))
        self._counters = [peer.words for peer in self.others]
        self._bells = [(peer.bell, peer.bell_address) for peer in self.others]
        self._words = (0, 0)
        self._parts: dict[tuple[torch.dtype, int, int, int], list[torch.Tensor]] = {}

    # In a round.

    def begin(self, words: tuple[int, int]) -> int:
        """Start a round with this header; return its slot's index. Then fill it, `post`, and yield."""
        self.round += 1
        self.parity = parity = self.round & 1
        self._words = words
        at = _HEADS + parity * (HEAD_BYTES // 8)
        own = self.own.words
        own[at], own[at + 1] = words
        return parity

    def post(self) -> None:
        """Publish this rank's data to the others."""
        self.fence()
        self.own.words[_POSTED] = self.round
        self.ring()

    def ring(self, ranks: Iterable[int] | None = None) -> None:
        """Wake sleeping ranks, to look at the data written before."""
        self.fence()
        for bell, address in self._bells if ranks is None else [self._bell(rank) for rank in ranks]:
            if bell[0]:
                bell[0] = 0
                futex_wake(address)

    def _bell(self, rank: int) -> tuple[memoryview, int]:
        return self.peers[rank].bell, self.peers[rank].bell_address

    def all_posted(self) -> bool:
        """Return whether all ranks are in this round, or further."""
        this = self.round
        for words in self._counters:  # noqa: SIM110  # a generator costs more than all else here
            if words[_POSTED] < this:
                return False
        return True

    def check(self) -> None:
        """Raise Lost if not all ranks started this round with the same header, or one failed in it.

        Call it when all have posted. A rank that failed after this round has its data, and fails the next one.
        """
        self.fence()
        first, second = self._words
        at = _HEADS + self.parity * (HEAD_BYTES // 8)
        for words in self._counters:
            if words[at] != first or words[at + 1] != second:
                raise self._mismatch(at)
            if words[_STATE] == _FAILED and words[_DONE] < self.round:  # it no longer waits for this rank
                raise self.error("; ".join(filter(None, (self._why_gone(peer.rank) for peer in self.others))))
        self._done = self.round

    def parts(self, dtype: torch.dtype, start: int, count: int) -> list[torch.Tensor]:
        """Return `count` elements from `start` on of the slots of all ranks, in this round."""
        key = (dtype, start, count, self.parity)
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) >= _KEPT_PARTS:
                self._parts.clear()
            found = [peer.slot(self.parity, dtype)[start : start + count] for peer in self.peers]
            self._parts[key] = found
        return found

    def _mismatch(self, at: int) -> Lost:
        calls: dict[tuple[int, int], list[int]] = {}
        for peer in self.peers:
            calls.setdefault((peer.words[at], peer.words[at + 1]), []).append(peer.rank)
        each = "; ".join(f"{ranks_text(ranks)}: {describe(words)}" for words, ranks in calls.items())
        return self.error(f"the ranks called different things: {each}")

    # Waiting.

    def absent(self) -> list[int]:
        """Return the ranks that this round waits for."""
        return [peer.rank for peer in self.others if peer.words[_POSTED] < self.round]

    def spin(self) -> bool:
        """Spin for a moment; return whether all have posted."""
        return spin(self.all_posted, self._crowded)

    def sleep(self, is_ready: Callable[[], bool]) -> bool:
        """Spin, then sleep until `is_ready()`, a wake-up or the end of a slice; return whether it was short."""
        if spin(is_ready, self._crowded):
            return True
        bell, address = self.own.bell, self.own.bell_address
        began = time.monotonic()
        bell[0] = 1
        try:
            self.fence()
            if is_ready():
                return True
            futex_wait(address, 1, _SLICE_S)
        finally:
            bell[0] = 0
        return time.monotonic() - began < _SLICE_S * 0.9 and not any(words[_STATE] for words in self._counters)

    def wake_driver(self) -> None:
        """Wake this process's other thread from `sleep`."""
        self.own.bell[0] = 0
        futex_wake(self.own.bell_address)

    def look_for_lost(self, absent: Callable[[], Sequence[int]], late_after_s: float | None) -> None:
        """Raise Lost if one of the ranks `absent()` is gone or, with `late_after_s`, late."""
        gone = {rank: why for rank in absent() if (why := self._why_gone(rank))}
        if not gone and late_after_s is None:
            return
        self.fence()
        still = absent()  # a rank's last words may have been in time
        if reasons := [why for rank, why in gone.items() if rank in still]:
            raise self.error("; ".join(reasons))
        if still and late_after_s is not None:
            raise self.error(f"{ranks_text(still)} did not come within {late_after_s:g} s")

    def _why_gone(self, rank: int) -> str:
        peer = self.peers[rank]
        state = peer.words[_STATE]
        if state == _FAILED:
            self.fence()
            said = bytes(peer.bytes[TEXT : TEXT + TEXT_BYTES]).split(b"\0", 1)[0].decode("utf-8", "replace")
            return f"{said} (said rank {rank})" if "(said rank" not in said else said
        if self.is_dead(rank):
            return f"rank {rank} (pid {peer.pid}) has ended"
        return f"rank {rank} (pid {peer.pid}) has destroyed the group" if state == _CLOSED else ""

    def is_dead(self, rank: int) -> bool:
        poll = select.poll()
        poll.register(self._pidfds[rank], select.POLLIN)
        return bool(poll.poll(0))

    def error(self, why: str) -> Lost:
        return Lost(f"{self.what} failed on rank {self.rank}: {why}", rank=self.rank, what=self.what)

    # The end.

    def tell_failure(self, text: str) -> None:
        """Make the others fail too, with the first cause."""
        if self.own.words[_STATE] != _OPEN:
            return
        said = text.encode("utf-8")[: TEXT_BYTES - 1].decode("utf-8", "ignore").encode("utf-8")
        self.own.bytes[TEXT : TEXT + len(said) + 1] = said + b"\0"
        self.own.words[_DONE] = self._done
        self.fence()
        self.own.words[_STATE] = _FAILED
        self.ring()

    def close(self, *, in_child: bool = False) -> None:
        """Notify the others that this rank has left; not in a forked child."""
        if not in_child:
            if self.own.words[_STATE] == _OPEN:
                self.fence()
                self.own.words[_STATE] = _CLOSED
            self.ring()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds = ()
