"""Waits for several endpoints at once, and for other threads that want the wait to end."""

from __future__ import annotations

import contextlib
import math
import socket as sockets
from collections.abc import Sequence
from typing import Any

import zmq

from ddp.strategies.parameter_server.endpoint import Endpoint

__all__ = ["Poller", "Wakeup"]


class Wakeup:
    """Ends another thread's `Poller.wait`: `set` may be called from any thread and never blocks."""

    def __init__(self) -> None:
        self._reader, self._writer = sockets.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def set(self) -> None:
        """Make the present or the next wait return; after close(), do nothing."""
        with contextlib.suppress(OSError):  # BlockingIOError: it is full, so the other will wake anyway
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Take back every `set` so far; for the thread that waits."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._reader.fileno()

    def close(self) -> None:
        """Close both ends; a `set` that comes later does nothing."""
        self._reader.close()
        self._writer.close()


class Poller:
    """Waits for several endpoints and wake-ups at once, in the thread that owns them."""

    def __init__(self, *sources: Endpoint | Wakeup) -> None:
        self._poller = zmq.Poller()
        self._sources: dict[Any, Endpoint | Wakeup] = {}
        for source in sources:
            self.add(source)

    def add(self, source: Endpoint | Wakeup) -> None:
        """Wait for this one too."""
        for socket in _polled(source):
            self._poller.register(socket, zmq.POLLIN)
            self._sources[socket] = source

    def remove(self, source: Endpoint | Wakeup) -> None:
        """Wait no longer for this one; before it is closed."""
        for socket in _polled(source):
            self._poller.unregister(socket)
            del self._sources[socket]

    def wait(self, timeout_s: float) -> list[Endpoint | Wakeup]:
        """Return those with something to do, at latest after `timeout_s`: an endpoint's `receive()` is to be called
        until it gives None (which it may at once), a wake-up is cleared already."""
        ready = dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))
        found = list(dict.fromkeys(self._sources[socket] for socket in ready))
        for source in found:
            if isinstance(source, Wakeup):
                source.clear()
        return found


def _polled(source: Endpoint | Wakeup) -> Sequence[Any]:
    return [source.fileno()] if isinstance(source, Wakeup) else source.sockets
