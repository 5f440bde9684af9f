"""The TCP connections of a process group, so that another thread can break them.

A collective of gloo that waits for a rank which is gone, or which has given up, cannot be told to end: `abort` does
nothing there (torch 2.13). Where its connections end, it raises, on this rank and on those at their other ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

__all__ = ["Connections"]

_DESCRIPTORS = "/proc/self/fd"


class Connections:
    """Those that a block of code has made in this process."""

    def __init__(self) -> None:
        self._made: dict[int, int] = {}  # descriptor -> inode

    @contextlib.contextmanager
    def made_here(self) -> Iterator[None]:
        """Take note of the sockets that are there after the block and were not before."""
        before = _sockets()
        try:
            yield
        finally:
            # Anew, since another thread may look through it.
            self._made = self._made | {fd: inode for fd, inode in _sockets().items() if before.get(fd) != inode}

    def break_all(self) -> None:
        """Shut them down, both ways. May be called from any thread, and again."""
        for descriptor, inode in self._made.items():
            with contextlib.suppress(OSError):  # closed meanwhile, or not connected
                own = os.dup(descriptor)  # nobody else closes this one
                with socket.socket(fileno=own) as found:
                    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
                    # gloo ends the process when its listener is shut down.
                    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if os.fstat(own).st_ino == inode and is_tcp and not listens:
                        found.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """The inodes of this process's sockets, by descriptor."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # that of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found
