"""Files for workers that this process keeps, in memory if possible, and that vanish with it."""

from __future__ import annotations

import os


class MemoryFile:
    """A file without a folder, at `path`; if memory files are not available, an empty file at the given path.

    Memory that is named by a descriptor is freed when this process ends, however that happens. A file in /dev/shm would
    outlive it, or be removed too early: systemd-logind does so when the user logs out (RemoveIPC in logind.conf). With
    `size_bytes` allocated from the beginning, a process that maps it cannot fail because of a full disk.
    """

    def __init__(self, name: str, path: str, size_bytes: int = 0, *, in_memory: bool = True) -> None:
        """Raises OSError. A worker in a pid namespace of its own finds no memory file: `in_memory` is False then."""
        try:
            if not in_memory:
                raise PermissionError
            self.descriptor = os.memfd_create(f"dtrain-{name}", os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        except OSError:  # forbidden, for example by sysctl vm.memfd_noexec: put it with the other files
            self.path = path
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(self.descriptor, 0o600)
            if size_bytes:
                os.posix_fallocate(self.descriptor, 0, size_bytes)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.descriptor)
