"""Finds the TCP connections of a process group, so that another thread can break them.

A gloo collective that waits for a rank which is gone, or has given up, cannot be cancelled: `abort` does nothing there
(torch 2.13). When its connections are closed, it raises, on this rank and on those at the other ends.

Other threads of the process may connect elsewhere at the same time, so a new descriptor proves nothing. But each gloo
device has one epoll instance, its loop, which watches its listener and all its connections. Other event loops are
recognized by what they have returned with an event.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WATCHED = re.compile(r"^tfd:\s*(\d+) .* data:\s*([0-9a-f]+) .* ino:([0-9a-f]+)", re.MULTILINE)
_DESCRIPTOR = 0xFFFFFFFF  # the rest may be undefined where a descriptor is stored
_cloning = threading.Lock()


def clone(store: Any) -> Any:
    """Return a client of the same store with its own connection."""
    with _cloning:
        return store.clone()


_broken_at = math.inf


def broken_for_s() -> float:
    """Return the time since the connections of this process's groups were broken, less than 0 if they are intact.

    Waits for collectives must have a limit then: gloo does not tell a buffer that has received a part of a message.
    """
    return time.monotonic() - _broken_at


class Connections:
    """The connections of the groups that a block of code made in this process, and of a client of a store."""

    def __init__(self) -> None:
        self._loops: dict[int, int] = {}  # the inode of gloo's listener -> the epoll descriptor that watches it
        self._to_store: dict[int, int] = {}  # descriptor -> inode

    @contextlib.contextmanager
    def made_here(self) -> Iterator[None]:
        """Record the gloo groups that the block makes. Groups made by other threads meanwhile would be included."""
        global _broken_at
        _broken_at = math.inf
        before = _loops()
        try:
            yield
        finally:
            # A new dict, since another thread may iterate over it.
            self._loops = self._loops | {inode: loop for inode, loop in _loops().items() if inode not in before}

    def clone(self, store: Any, port: int) -> Any:
        """Return a client of the same store, at this port, whose connection is broken with the others."""
        with _cloning:
            before = _sockets()
            made = store.clone()
            new = {fd: inode for fd, inode in _sockets().items() if before.get(fd) != inode}
        self._to_store = self._to_store | {fd: inode for fd, inode in new.items() if _leads_to(fd, port)}
        return made

    def break_all(self) -> None:
        """Shut down all connections in both directions. May be called from any thread, and repeatedly."""
        global _broken_at
        _broken_at = min(_broken_at, time.monotonic())
        for descriptor, inode in self._to_store.items():
            _break(descriptor, inode)
        for listener, loop in self._loops.items():
            watched = _watched_by(loop)
            if listener in watched.values():  # else it was closed, and the descriptor was reused
                for descriptor, inode in watched.items():
                    if inode != listener:  # gloo ends the process if the listener is shut down
                        _break(descriptor, inode)


def _break(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError), _at(descriptor) as found:  # already closed, not connected, or a pipe
        if os.fstat(found.fileno()).st_ino == inode and found.family in (socket.AF_INET, socket.AF_INET6):
            found.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _at(descriptor: int) -> Iterator[socket.socket]:
    """Duplicate a socket's descriptor, so that no other thread closes it. Raises OSError if it is not a socket."""
    own = os.dup(descriptor)
    try:
        found = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with found:
        yield found


def _loops() -> dict[int, int]:
    """Return the epoll descriptors that watch a TCP listener, by the listener's inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        for descriptor, inode in _watched_by(int(name)).items():
            with contextlib.suppress(OSError), _at(descriptor) as watched:
                is_tcp = watched.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and watched.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[inode] = int(name)
    return found


def _watched_by(descriptor: int) -> dict[int, int]:
    """Return the inodes that an epoll descriptor watches, by descriptor; empty if it is not one, or not gloo's.

    gloo has a pointer returned with each event. The loops of Python and libuv have the descriptor returned.
    """
    try:
        if os.readlink(f"/proc/self/fd/{descriptor}") != "anon_inode:[eventpoll]":
            return {}
        text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    except OSError:  # already closed
        return {}
    watched = [(int(number), int(data, 16), int(inode, 16)) for number, data, inode in _WATCHED.findall(text)]
    return {number: inode for number, data, inode in watched if data & _DESCRIPTOR != number}


def _leads_to(descriptor: int, port: int) -> bool:
    with contextlib.suppress(OSError), _at(descriptor) as found:
        return found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername()[1] == port
    return False


def _sockets() -> dict[int, int]:
    """Return the inodes of this process's sockets, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found
