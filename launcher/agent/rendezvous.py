"""The rendezvous of one attempt's workers: its store, and the ports that other launchers' variables name.

Owned by the attempt. Failures are reported as StoreFailed.
"""

from __future__ import annotations

import selectors
import socket
import time

from launcher.agent.store import RendezvousStore, StoreProcess
from launcher.agent.stream_writer import StreamWriter
from launcher.errors import DtrainError
from launcher.protocol.commands import OpenStore, ReservePorts
from launcher.protocol.reports import PortsReserved, StoreFailed, StoreOpened


class Rendezvous:
    """Holds the store, if this host has it, until `close_store`; and reserved ports until workers start."""

    def __init__(
        self, attempt: int, selector: selectors.BaseSelector, writer: StreamWriter, store_process: StoreProcess
    ) -> None:
        self._attempt = attempt
        self._selector = selector
        self._writer = writer
        self._store_process = store_process
        self._store: RendezvousStore | None = None
        self._reserved: list[socket.socket] = []

    @property
    def is_used(self) -> bool:
        """Return whether a client has connected to the store."""
        return self._store is not None and self._store.listening is None

    def open_store(self, message: OpenStore, address: str) -> None:
        self.close_store(keep_process=True)  # an earlier order may have been overtaken
        try:
            self._store = RendezvousStore(
                address, message.port, self._store_process, self._selector, exact=message.exact, failed=self._failed
            )
        except DtrainError as error:
            self._failed(str(error))
            return
        self._writer.send(StoreOpened(attempt=self._attempt, address=self._store.address, port=self._store.port))

    def serve(self) -> None:
        """Start the store's process now, not at the first connection."""
        if self._store is not None:
            self._store.serve()

    def store_ended(self, last_words: str) -> None:
        """Record that the store's process was reaped."""
        if self.is_used:
            self._failed(f"the store's process ended: {last_words}")

    def close_store(self, *, keep_process: bool) -> int | None:
        """Release the store's port; return the pid of its process if that must still be reaped."""
        store, self._store = self._store, None
        return None if store is None else store.close(keep_process=keep_process)

    def reserve_ports(self, message: ReservePorts, address: str) -> None:
        """Bind the requested number of free ports, and hold them until `release_ports`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            for _ in range(message.count):
                self._reserved.append(socket.socket(family, socket.SOCK_STREAM))
                self._reserved[-1].bind((address, 0))
        except OSError as error:
            self._failed(f"cannot find free ports on {address}: {error.strerror}")
            return
        ports = [reserved.getsockname()[1] for reserved in self._reserved]
        self._writer.send(PortsReserved(attempt=self._attempt, address=address, ports=ports))

    def release_ports(self) -> None:
        """Let workers bind the ports."""
        while self._reserved:
            self._reserved.pop().close()

    def _failed(self, reason: str) -> None:
        self._writer.send(StoreFailed(attempt=self._attempt, reason=reason, time=time.monotonic()))
