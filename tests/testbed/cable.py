"""A TCP connection that can be cut, recorded and bent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

DEADLINE_S = 60.0


class Cable:
    """A TCP connection between a client and a server that can be cut, recorded and bent: clients use its `address`."""

    def __init__(self, target: str, bend: Callable[[bytes], bytes] = bytes) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target, self._bend = (host, int(port)), bend
        self.recorded = bytearray()  # what went to the server
        self.is_cut = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Cable:
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        for end in self._ends:
            end.close()

    def cut(self) -> None:
        """Break every connection, and each new one at once until `mend`."""
        self.is_cut = True
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self.is_cut = False

    def _run(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                near, _ = self._listener.accept()
                self._ends.append(near)
                if self.is_cut:
                    near.shutdown(socket.SHUT_RDWR)
                    continue
                far = socket.create_connection(self._target)
                self._ends.append(far)
                self._run(self._forward, near, far, True)
                self._run(self._forward, far, near, False)

    def _forward(self, source: socket.socket, sink: socket.socket, is_to_server: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_to_server:
                    self.recorded += data
                    data = self._bend(data)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
