"""The memory segments of a group's ranks, mapped by each other, and the check that this works.

Every rank makes one segment without a file and opens those of all others, by tickets that rank 0 collects through the
store and passes on to the ranks of the same machine; it also decides, for all, which ranks share memory. A token in the
segment and in the ticket proves that both see the same memory.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import PrefixStore

from ddp.comm.shared_memory import SharedSegment
from ddp.comm.shm import waiting
from ddp.comm.shm.agreement import agree
from ddp.errors import ParameterServerError, RendezvousError
from ddp.monitoring.stall_text import ranks_text

# Offsets in a segment, in bytes. Each word that a rank writes and others read has its own cache line; DONE goes with
# STATE, and is written only where a rank fails.
_TOKEN, POSTED, BELL, STATE, DONE, TEXT, HEADS = 0, 64, 128, 192, 200, 256, 1024
TEXT_BYTES = HEADS - TEXT
HEAD_BYTES = 64
_SLOTS = 4096
SLOT_BYTES = 4 << 20  # of each of two
_CHANNELS = _SLOTS + 2 * SLOT_BYTES
CHANNEL_HEAD = 4096
CHANNEL_BYTES = 1 << 18
_WHAT = "memory that other processes can open"


def segment_bytes(size: int) -> int:
    return _CHANNELS + size * (CHANNEL_HEAD + CHANNEL_BYTES)


class Peer:
    """A rank's segment, possibly its own, as mapped in this process: words, and addresses of slots and channels."""

    def __init__(self, segment: SharedSegment, rank: int, size: int) -> None:
        self.rank = rank
        self.pid = int(segment.ticket["pid"])
        self._memory = segment.tensor  # keeps it mapped
        self.address = segment.tensor.data_ptr()
        array: Any = segment.tensor.numpy()  # has a buffer; Python 3.11 has no type for that
        self.bytes = memoryview(array)
        self.words = self.bytes.cast("Q")
        self.bell = self.bytes[BELL : BELL + 4].cast("I")
        self.bell_address = self.address + BELL
        self.slots = (self.address + _SLOTS, self.address + _SLOTS + SLOT_BYTES)
        self.channels = [_CHANNELS + to * (CHANNEL_HEAD + CHANNEL_BYTES) for to in range(size)]
        self._typed: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def slot(self, parity: int, dtype: torch.dtype) -> torch.Tensor:
        """Return one of the two slots as a flat tensor."""
        found = self._typed.get((dtype, parity))
        if found is None:
            start = _SLOTS + parity * SLOT_BYTES
            found = self._typed[dtype, parity] = self._memory[start : start + SLOT_BYTES].view(dtype)
        return found


def open_all(store: Any, rank: int, size: int, timeout_s: float) -> tuple[list[Peer], list[int]]:
    """Map the segments of all ranks; return them in order, and process descriptors (pidfds) to see whether each runs.

    All ranks must call it; a single rank needs no others, nor a descriptor. Raises RendezvousError on all if some
    cannot share memory, and after `timeout_s`.
    """
    if size == 1:
        own, _ = _own_segment(segment_bytes(1))
        if own is None:
            raise RendezvousError(f"this process cannot make {_WHAT}; use gloo")
        own.close_descriptor()
        return [Peer(own, 0, 1)], []
    segments, pidfds, hosts = _meet(store, rank, size, timeout_s)
    try:
        check_able(hosts, size)
        if len(hosts) > 1:
            apart = " | ".join(map(ranks_text, hosts))
            raise RendezvousError(
                f"the backend shm is for ranks that share memory, but these do not: {apart} (on other hosts, "
                "other containers, or of other users); use gloo, or a group of shm for each host"
            )
    except RendezvousError:
        _close(pidfds)
        raise
    return [Peer(segments[each], each, size) for each in range(size)], [pidfds[each] for each in range(size)]


def check_able(hosts: Sequence[Sequence[int]], size: int) -> None:
    """Raise RendezvousError if ranks are in none of the hosts of `sharing`."""
    unable = sorted({*range(size)}.difference(*hosts))
    if unable:
        raise RendezvousError(
            f"the backend shm needs memory of every rank, but {ranks_text(unable)} cannot make {_WHAT} (no "
            "memfd_create or pidfd_open here, or a limit of ulimit -v or -f); use gloo"
        )


def sharing(store: Any, rank: int, size: int, timeout_s: float) -> list[tuple[int, ...]]:
    """Return the ranks that share memory, host by host: `ddp.comm.shm.sharing`."""
    _, pidfds, hosts = _meet(store, rank, size, timeout_s)
    _close(pidfds)
    return hosts


def _close(pidfds: dict[int, int]) -> None:
    for pidfd in pidfds.values():
        os.close(pidfd)


def _meet(
    store: Any, rank: int, size: int, timeout_s: float
) -> tuple[dict[int, SharedSegment], dict[int, int], list[tuple[int, ...]]]:
    """Make a segment for a group, open those of the others; return the opened ones, and the hosts that all agree on."""
    own, token = _own_segment(segment_bytes(size))
    segments: dict[int, SharedSegment] = {}
    pidfds: dict[int, int] = {}
    try:
        ticket = None if own is None else {**own.ticket, "token": token.hex()}
        tickets = agree(PrefixStore("tickets", store), rank, size, ticket, _by_machine, timeout_s)
        for each, theirs in tickets:
            opened = _opened(own if each == rank else None, theirs)
            if opened is not None:
                segments[each], pidfds[each] = opened
        seen = PrefixStore("seen", store)
        hosts = agree(seen, rank, size, sorted(segments), lambda found: [_hosts(found)] * size, timeout_s)
    except BaseException:
        _close(pidfds)
        raise
    finally:
        if own is not None:
            own.close_descriptor()
    return segments, pidfds, [tuple(host) for host in hosts]


def _by_machine(tickets: Sequence[dict[str, Any] | None]) -> list[list[tuple[int, dict[str, Any]]]]:
    """Return for each rank the tickets, with ranks, that it could open: those with its boot id and pid namespace."""
    machines: dict[Any, list[tuple[int, dict[str, Any]]]] = {}
    places = [ticket and (ticket["boot"], ticket["namespace"]) for ticket in tickets]
    for rank, (ticket, place) in enumerate(zip(tickets, places, strict=True)):
        if ticket is not None:
            machines.setdefault(place, []).append((rank, ticket))
    return [machines[place] if place else [] for place in places]


def _own_segment(size_bytes: int) -> tuple[SharedSegment | None, bytes]:
    token = secrets.token_bytes(16)
    if not waiting.available:
        return None, token
    try:
        own = SharedSegment(size_bytes, populate=False)
    except ParameterServerError:
        return None, token
    own.tensor[_TOKEN : _TOKEN + 16] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
    return own, token


def _opened(own: SharedSegment | None, ticket: dict[str, Any]) -> tuple[SharedSegment, int] | None:
    """Open a rank's segment, with a descriptor of its process; None if this process cannot."""
    try:
        pidfd = os.pidfd_open(int(ticket["pid"]))  # first: `open` then checks that the process is still that one
    except (OSError, KeyError, TypeError, ValueError):
        return None
    segment = own or SharedSegment.open(ticket, populate=False)
    if segment is not None and segment.tensor[_TOKEN : _TOKEN + 16].numpy().tobytes().hex() == ticket["token"]:
        return segment, pidfd
    os.close(pidfd)
    return None


def _hosts(seen: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Group ranks that all have opened each other; those that could not open their own are in no group."""
    hosts: list[list[int]] = []
    for rank in (each for each in range(len(seen)) if each in seen[each]):
        for host in hosts:
            if all(rank in seen[other] and other in seen[rank] for other in host):
                host.append(rank)
                break
        else:
            hosts.append([rank])
    return [tuple(host) for host in hosts]
