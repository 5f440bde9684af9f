"""Connections to jump hosts, each shared by all the hosts behind it, and closed when the last of them is let go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from launcher.errors import HostError

__all__ = ["ConnectionPool", "PooledConnection"]


class _Connection(Protocol):
    @property
    def alive(self) -> bool: ...

    def close(self) -> None: ...


L = TypeVar("L", bound=_Connection)


@dataclass
class _Shared(Generic[L]):
    users: int = 1
    ready: threading.Event = field(default_factory=threading.Event)
    connection: L | None = None
    error: HostError | None = None


class PooledConnection(Generic[L]):
    """One user's hold of a shared connection."""

    def __init__(self, connection: L, *, release: Callable[[], None], retire: Callable[[], None]) -> None:
        self.connection = connection
        self.retire = retire  # have the connection shared with nobody else from now on
        self._release: Callable[[], None] | None = release

    def close(self) -> None:
        """Let it go. May be called again."""
        release, self._release = self._release, None
        if release is not None:
            release()


class ConnectionPool(Generic[L]):
    """The connections of this process to jump hosts. It owns them; who uses one holds it as a PooledConnection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[Hashable, _Shared[L]] = {}

    def acquire(self, key: Hashable, open_connection: Callable[[], L], deadline: float) -> PooledConnection[L]:
        """Return a hold on the connection known by `key`; the first who asks opens it, and all share its failure.

        A connection that broke is opened anew. Blocks. Raises HostError as `open_connection` does, and TimeoutError.
        """
        with self._lock:
            shared = self._connections.get(key)
            first = shared is None or _broken(shared)
            if shared is None or first:
                shared = self._connections[key] = _Shared()
            else:
                shared.users += 1
        if first:
            self._open(key, shared, open_connection)
        elif not shared.ready.wait(max(0.0, deadline - time.monotonic())):
            self._release(key, shared)
            raise TimeoutError
        if shared.error is not None:
            raise HostError(shared.error.host, shared.error.reason) from shared.error
        assert shared.connection is not None
        return PooledConnection(
            shared.connection, release=lambda: self._release(key, shared), retire=lambda: self._forget(key, shared)
        )

    def _open(self, key: Hashable, shared: _Shared[L], open_connection: Callable[[], L]) -> None:
        try:
            shared.connection = open_connection()
        except HostError as error:
            shared.error = error
        finally:
            if shared.connection is None:
                shared.error = shared.error or HostError("", "the attempt to reach it was given up")
                self._forget(key, shared)
            shared.ready.set()

    def _forget(self, key: Hashable, shared: _Shared[L]) -> None:
        with self._lock:
            if self._connections.get(key) is shared:
                del self._connections[key]

    def _release(self, key: Hashable, shared: _Shared[L]) -> None:
        with self._lock:
            shared.users -= 1
            last = shared.users == 0
            if last and self._connections.get(key) is shared:
                del self._connections[key]
        if last and shared.connection is not None:
            shared.connection.close()


def _broken(shared: _Shared[L]) -> bool:
    return shared.ready.is_set() and (shared.connection is None or not shared.connection.alive)
