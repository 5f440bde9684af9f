"""A folder with Unix sockets of this user's processes, and small files: private, and checked before each use.

A socket's name begins with the host and boot of its process, and ends with a unique part. So a name is never used
again, and can be removed if it is of this boot and no process listens on it, or of an earlier boot of this host. Hosts
may share the folder: names of other hosts are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from launcher.errors import SocketError

# pid, uid, gid; the agent's keeper.py and in_worker.py import nothing of the launcher, and have their own.
_PEER = struct.Struct("3i")
_BACKLOG = 64


def prefix_of_boot() -> str:
    """Return the prefix of the names of this boot's sockets."""
    return f"{this_host()}-{this_boot()}-"


@cache
def this_host() -> str:
    """Return an identifier of this host: machines cloned from one image differ in their names only."""
    try:
        with open("/etc/machine-id", "rb") as file:
            machine = file.read()
    except OSError:  # in a container
        machine = b""
    return f"{zlib.crc32(machine + os.fsencode(os.uname().nodename)):08x}"


@cache
def this_boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return f"{zlib.crc32(file.read()):08x}"


def is_ours_alone(found: os.stat_result) -> bool:
    """Return whether it is a folder of this user that no other user can access."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of the process at the other end of a Unix socket."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


class SocketFolder:
    """The folder, open: later changes to its path have no effect."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    @contextmanager
    def opened(cls, path: str, *, make: bool = False) -> Iterator[SocketFolder | None]:
        """Open it in a `with`; None if it does not exist.

        Raises OSError if it cannot be made, and SocketError if other users may have access to it.
        """
        if make:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.mkdir(path, 0o700)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            raise SocketError(f"{path} is no folder of yours alone ({error.strerror}); remove it") from error
        try:
            found = os.fstat(descriptor)
            if not is_ours_alone(found):
                owner = f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}"
                raise SocketError(f"{path} is no folder of yours alone ({owner}); remove it")
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of this host's sockets with this prefix, the newest first; remove those of earlier boots."""
        found = []
        of_this_boot = prefix_of_boot()
        for name in os.listdir(self._descriptor):
            if name.lstrip(".").startswith(f"{this_host()}-") and of_this_boot not in name:
                self.remove(name)
            elif name.startswith(prefix or of_this_boot):
                with contextlib.suppress(FileNotFoundError):
                    found.append((os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mtime_ns, name))
        return [name for _, name in sorted(found, reverse=True)]

    def connect(self, name: str, wait_s: float) -> socket.socket | None:
        """Connect to the process of a socket; if there is none any more, remove the name and return None.

        Raises SocketError if it is another user's, or does not accept a connection.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(wait_s)
            connection.connect(f"/proc/self/fd/{self._descriptor}/{name}")
            if (uid := peer(connection)[1]) != os.geteuid():
                raise SocketError(f"{self.path}/{name} is user {uid}'s")
        except (ConnectionRefusedError, FileNotFoundError):
            connection.close()
            self.remove(name)
            return None
        except OSError as error:
            connection.close()
            raise SocketError("the process does not answer") from error
        except SocketError:
            connection.close()
            raise
        return connection

    def bind(self, name: str) -> socket.socket:
        """Return a listening socket with that name. Raises OSError, also if another process just removed the folder."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            hidden = f".{name}"  # until it listens: else another process would assume that its owner has ended
            listening.bind(f"/proc/self/fd/{self._descriptor}/{hidden}")
            try:
                listening.listen(_BACKLOG)
                os.rename(hidden, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            except OSError:
                self.remove(hidden)
                raise
        except OSError:
            listening.close()
            raise
        return listening

    def files(self, prefix: str) -> list[str]:
        """Return the names of files with this prefix."""
        return [name for name in os.listdir(self._descriptor) if name.startswith(prefix)]

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises OSError."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=self._descriptor), "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Replace a file atomically: a reader sees either all of it or the previous one. Raises OSError."""
        hidden = f".{name}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(hidden, flags, 0o600, dir_fd=self._descriptor), "wb") as file:
                file.write(data)
            os.rename(hidden, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(hidden, dir_fd=self._descriptor)
            raise

    def remove(self, name: str) -> None:
        """Remove a socket's name, and the folder once it is empty."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)
        try:
            os.rmdir(self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
