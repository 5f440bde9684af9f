"""Memory that processes of one host share: pages without a file, which are freed with the last process that has them.

Made with memfd_create by one process and opened by another of the same user through /proc/PID/fd/N, the path in
`ticket`; whatever kills them, nothing stays in /dev/shm. Used by the parameter server and by central storage instead of
copies through a socket. This module does not synchronize reads and writes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ddp.errors import ArgumentError, ParameterServerError

_NAME = "dtrain"
_LINK = f"/memfd:{_NAME} (deleted)"
_MOST_BYTES = 1 << 46


class SharedSegment:
    """A piece of memory of a fixed size, zeroed when made, as `tensor` (uint8, writable, at the start of a page).

    With `populate`, its pages are allocated at once, else when each is first touched. Raises ParameterServerError if
    the host cannot provide it. A segment that was made stays open to others until it is closed or its process ends; the
    memory itself lives as long as any process has a tensor of it.
    """

    available: bool = sys.platform == "linux" and hasattr(os, "memfd_create")

    tensor: torch.Tensor
    ticket: dict[str, Any]  # JSON, for the process that will `open` it; not secret: other users cannot use it

    def __init__(self, size_bytes: int, *, populate: bool = True) -> None:
        if size_bytes < 1:
            raise ArgumentError(f"a shared segment of {size_bytes} bytes; it must be 1 or more")
        if not self.available:
            raise ParameterServerError("this system has no memory that processes share by descriptor (memfd_create)")
        self._descriptor = -1
        try:
            self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(self._descriptor, 0o600)
            os.ftruncate(self._descriptor, size_bytes)
            _fix_size(self._descriptor)
            self.tensor = _mapped(self._descriptor, size_bytes, populate)
        except OSError as error:
            self.close()
            raise ParameterServerError(f"no shared memory of {size_bytes} bytes: {error}") from error
        self.ticket = {
            **_whereabouts(os.getpid()),
            "pid": os.getpid(),
            "descriptor": self._descriptor,
            "inode": os.fstat(self._descriptor).st_ino,
            "bytes": size_bytes,
        }

    @classmethod
    def open(cls, ticket: Mapping[str, Any], *, populate: bool = True) -> SharedSegment | None:
        """Open the segment of another process of this host; None if it is on another host or in another container,
        belongs to another user, is gone, or does not match the ticket."""
        if not cls.available:
            return None
        try:
            pid, number, size_bytes = (int(ticket[name]) for name in ("pid", "descriptor", "bytes"))
            here = _whereabouts(pid)
            if not 1 <= size_bytes <= _MOST_BYTES or any(ticket.get(name) != value for name, value in here.items()):
                return None
            path = f"/proc/{pid}/fd/{number}"
            if os.readlink(path) != _LINK:  # before opening: opening a fifo or a device may have side effects
                return None
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, KeyError, TypeError, ValueError, OverflowError):
            return None
        try:
            return cls._opened(descriptor, dict(ticket), size_bytes, populate)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    @classmethod
    def _opened(cls, descriptor: int, ticket: dict[str, Any], size_bytes: int, populate: bool) -> SharedSegment | None:
        status = os.fstat(descriptor)
        is_it = stat.S_ISREG(status.st_mode) and (status.st_size, status.st_ino) == (size_bytes, ticket.get("inode"))
        # Again, now that it is open: the pid may have been reused in between.
        is_still = all(ticket[name] == value for name, value in _whereabouts(int(ticket["pid"])).items())
        if not (is_it and is_still and _has_fixed_size(descriptor)):
            return None
        segment = cls.__new__(cls)
        segment._descriptor = -1
        segment.tensor = _mapped(descriptor, size_bytes, populate)
        segment.ticket = ticket
        return segment

    def close(self) -> None:
        """Release the memory, which is freed with its last tensor; no process can open it any more. May be repeated."""
        self.close_descriptor()
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")

    def close_descriptor(self) -> None:
        """Keep the memory, but prevent other processes from opening it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> SharedSegment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _whereabouts(pid: int) -> dict[str, str]:
    """Return what distinguishes a process from all others that ever had its pid, on this host or another one.

    Raises OSError if there is no such process, ValueError if /proc is malformed.
    """
    # The name of the program, in parentheses, may itself contain spaces and parentheses.
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    if len(after_name) < 20:
        raise ValueError(f"/proc/{pid}/stat is cut off")
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        "namespace": os.readlink("/proc/self/ns/pid"),  # in which the pid was counted
        "started": after_name[19],
    }


def _fix_size(descriptor: int) -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def _has_fixed_size(descriptor: int) -> bool:
    """Return whether no process can truncate it, which would kill its readers with SIGBUS."""
    fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fixed == fixed


def _mapped(descriptor: int, size_bytes: int, populate: bool) -> torch.Tensor:
    # Zeroing the pages takes as long here as at the first touch (0.8 s/GB measured), but not within a training step.
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
    memory = mmap.mmap(descriptor, size_bytes, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8)
