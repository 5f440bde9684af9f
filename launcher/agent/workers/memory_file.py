"""Files for workers that this process keeps, in memory where that can be had, and that go with it."""

from __future__ import annotations

import os

__all__ = ["MemoryFile"]


class MemoryFile:
    """A file without a folder, at `path`; where memory has no files, an empty one at the path that was asked for.

    Memory that is named by descriptor goes with this process, whatever ends it. A file in /dev/shm would outlive that,
    or be removed too early: systemd-logind does so when the user logs out (RemoveIPC in logind.conf). Who maps it
    cannot lose it to a full disk, as long as it has `size_bytes` from the beginning.
    """

    def __init__(self, name: str, path: str, size_bytes: int = 0) -> None:
        """Raises OSError."""
        try:
            self.descriptor = os.memfd_create(f"dtrain-{name}", os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        except OSError:  # forbidden there, as by sysctl vm.memfd_noexec: then with the other files of the attempt
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
