"""Messages from one rank to another: send and recv, by tags.

Each pair of ranks has a channel per direction, a ring of bytes in the sender's segment, with a counter of bytes written
and one of bytes read. A message is a header of 32 bytes and its payload, padded to 32. A send is done when all of it is
in the channel, so that a small one need not wait for its receiver. A thread that waits for messages reads everything
from the channels; messages without a matching recv are kept here, so that tags may come in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from ddp.comm.shm.memory import CHANNEL_BYTES, CHANNEL_HEAD, Peer
from ddp.comm.shm.rounds import DTYPES, Rounds
from ddp.comm.shm.waiting import memmove

_HEAD = 32
_PIECE = 1 << 16  # after this many bytes the other side may process them
_WRITTEN, _READ = 0, 8  # words of a channel's header, each in its own cache line
_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}


class Send:
    def __init__(self, flat: torch.Tensor, rank: int, tag: int) -> None:
        self.flat, self.rank, self.tag = flat, rank, tag
        self.put = -_HEAD  # bytes of the payload that are in the channel


class Receive:
    """A receive; `rank` is -1 for a message of any rank, and `source` is then the sender's rank."""

    def __init__(self, flat: torch.Tensor, rank: int, tag: int) -> None:
        self.flat, self.rank, self.tag = flat, rank, tag
        self.source = -1


class _Arriving:
    """A message that has partly arrived."""

    def __init__(self, tag: int, nbytes: int, dtype: int) -> None:
        self.tag, self.nbytes, self.dtype = tag, nbytes, dtype
        self.got = 0
        self.into: torch.Tensor | None = None
        self.receive: Receive | None = None

    @property
    def is_here(self) -> bool:
        return self.got == _padded(self.nbytes)


class Messages:
    """The messages of a group that this rank sends and receives. One thread at a time may use it.

    `finish(message)` is called when one is done.
    """

    def __init__(self, rounds: Rounds, finish: Callable[[Any], None]) -> None:
        self._rounds, self._finish = rounds, finish
        size = rounds.size
        self._sends: list[deque[Send]] = [deque() for _ in range(size)]
        self._receives: list[Receive] = []
        self._kept: list[list[_Arriving]] = [[] for _ in range(size)]  # in the order of their arrival
        self._arriving: list[_Arriving | None] = [None] * size
        self._out = [_Channel(rounds.own, rank) for rank in range(size)]
        self._in = [_Channel(peer, rounds.rank) for peer in rounds.peers]
        self.pending = 0
        self._moved = [0.0] * size  # time of the last transfer to or from each rank

    def add(self, message: Send | Receive) -> None:
        self.pending += 1
        if isinstance(message, Send):
            self._sends[message.rank].append(message)
        else:
            self._receives.append(message)

    def can_advance(self) -> bool:
        return self.pending > 0 and (
            any(sends and channel.free() >= _HEAD for sends, channel in zip(self._sends, self._out, strict=True))
            or any(channel.available() for channel in self._in)
        )

    def advance(self) -> bool:
        """Transfer what is possible; return whether anything was. Raises Lost for a message that cannot be received."""
        moved = False
        for rank in range(self._rounds.size):
            while self._push(rank):
                moved = True
        for receive in [*self._receives]:
            self._take_kept(receive)
        for rank in range(self._rounds.size):
            while self._pull(rank):
                moved = True
        return moved

    def absent(self) -> list[int]:
        """Return the ranks that block all transfers: not those with data that has arrived and was not read yet."""
        came = {rank for rank, channel in enumerate(self._in) if channel.available()}
        named = {receive.rank for receive in self._receives if receive.rank >= 0} - came
        others = {peer.rank for peer in self._rounds.others}
        if not came and any(receive.rank < 0 for receive in self._receives) and all(map(self._rounds.is_dead, others)):
            named |= others  # while one of them lives, the message may be from that
        return sorted(named | {rank for rank, sends in enumerate(self._sends) if sends})

    def moved(self, message: Send | Receive) -> float:
        """Return the time of the last transfer to or from a message's rank, or from any rank if that may be any."""
        return self._moved[message.rank] if message.rank >= 0 else max(self._moved)

    def _push(self, rank: int) -> bool:
        sends, channel = self._sends[rank], self._out[rank]
        if not sends or channel.free() < _HEAD:
            return False
        self._moved[rank] = monotonic()
        send = sends[0]
        if send.put < 0:
            channel.put_head((send.tag, send.flat.nbytes, _DTYPE[send.flat.dtype]))
            send.put = 0
        whole = _padded(send.flat.nbytes)
        length = min(channel.free(), whole - send.put, _PIECE)
        channel.put(send.flat.data_ptr() + send.put, length, min(length, send.flat.nbytes - send.put))
        send.put += length
        self._rounds.fence()
        channel.show_written()
        self._rounds.ring([rank])
        if send.put == whole:
            sends.popleft()
            self._done(send)
        return True

    def _pull(self, rank: int) -> bool:
        channel = self._in[rank]
        available = channel.available()
        if not available:
            return False
        self._moved[rank] = monotonic()
        self._rounds.fence()  # later data is read after another fence
        message = self._arriving[rank]
        if message is None:
            message = self._arriving[rank] = _Arriving(*channel.get_head())
            available -= _HEAD
            self._match(message, rank)
        assert message.into is not None
        length = min(available, _padded(message.nbytes) - message.got, _PIECE)
        channel.get(message.into.data_ptr() + message.got, length, max(min(length, message.nbytes - message.got), 0))
        message.got += length
        self._rounds.fence()
        channel.show_read()
        self._rounds.ring([rank])
        if message.is_here:
            self._arriving[rank] = None
            if message.receive is not None:
                self._received(message.receive, rank)
            else:  # a recv posted meanwhile gets it before later messages of the same tag
                for receive in [*self._receives]:
                    self._take_kept(receive)
        return True

    def _match(self, message: _Arriving, rank: int) -> None:
        """Match a message with the first receive for it, or keep it."""
        for receive in self._receives:
            if receive.rank in (-1, rank) and receive.tag == message.tag:
                self._check(message, receive, rank)
                self._receives.remove(receive)
                message.receive, message.into, receive.rank = receive, receive.flat, rank
                self._receives.append(receive)  # still incomplete
                receive.tag = -1
                return
        message.into = torch.empty(max(message.nbytes, 1), dtype=torch.uint8, device="cpu")
        self._kept[rank].append(message)

    def _take_kept(self, receive: Receive) -> None:
        ranks = range(self._rounds.size) if receive.rank < 0 else (receive.rank,)
        for rank in ranks:
            for message in self._kept[rank]:
                if message.tag == receive.tag and message.is_here:
                    self._check(message, receive, rank)
                    assert message.into is not None
                    memmove(receive.flat.data_ptr(), message.into.data_ptr(), message.nbytes)
                    self._kept[rank].remove(message)
                    self._received(receive, rank)
                    return

    def _check(self, message: _Arriving, receive: Receive, rank: int) -> None:
        flat = receive.flat
        if (message.nbytes, message.dtype) != (flat.nbytes, _DTYPE[flat.dtype]):
            sent = DTYPES[message.dtype]
            raise self._rounds.error(
                f"rank {rank} sent {message.nbytes // sent.itemsize} elements of {sent} with tag {message.tag}, "
                f"rank {self._rounds.rank} expects {flat.numel()} of {flat.dtype}"
            )

    def _received(self, receive: Receive, rank: int) -> None:
        receive.source = rank
        self._receives.remove(receive)
        self._done(receive)

    def _done(self, message: Send | Receive) -> None:
        self.pending -= 1
        self._finish(message)

    def drop(self) -> None:
        """Drop all messages."""
        for sends in self._sends:
            sends.clear()
        self._receives.clear()
        self.pending = 0


class _Channel:
    """One side's view of a channel."""

    def __init__(self, sender: Peer, to: int) -> None:
        start = sender.channels[to]
        self._words = sender.words[start // 8 : (start + CHANNEL_HEAD) // 8]
        self._address = sender.address + start + CHANNEL_HEAD
        self._head = sender.bytes[start + CHANNEL_HEAD : start + CHANNEL_HEAD + CHANNEL_BYTES].cast("q")
        self._at = 0  # of this side, in bytes since the beginning

    def free(self) -> int:
        return CHANNEL_BYTES - (self._at - self._words[_READ])

    def available(self) -> int:
        return self._words[_WRITTEN] - self._at

    def put_head(self, values: tuple[int, int, int]) -> None:
        at = self._at % CHANNEL_BYTES // 8
        self._head[at], self._head[at + 1], self._head[at + 2] = values
        self._at += _HEAD

    def get_head(self) -> tuple[int, int, int]:
        at = self._at % CHANNEL_BYTES // 8
        self._at += _HEAD
        return self._head[at], self._head[at + 1], self._head[at + 2]

    def put(self, source: int, length: int, valid: int) -> None:
        """Write `length` bytes; those after `valid` are padding."""
        for at, offset, count in self._parts(valid):
            memmove(self._address + at, source + offset, count)
        self._at += length

    def get(self, to: int, length: int, valid: int) -> None:
        for at, offset, count in self._parts(valid):
            memmove(to + offset, self._address + at, count)
        self._at += length

    def _parts(self, count: int) -> list[tuple[int, int, int]]:
        """Return (position in the ring, offset, bytes): two parts if the ring wraps around in between."""
        at = self._at % CHANNEL_BYTES
        first = max(min(count, CHANNEL_BYTES - at), 0)
        return [(at, 0, first), *([(0, first, count - first)] if count > first else [])]

    def show_written(self) -> None:
        self._words[_WRITTEN] = self._at

    def show_read(self) -> None:
        self._words[_READ] = self._at


def _padded(nbytes: int) -> int:
    return -(-nbytes // _HEAD) * _HEAD
