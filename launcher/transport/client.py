"""Clients: programs that connect to a host, such as srun and ssh. The pipes of one process are the byte stream.

srun.py and ssh/client.py say which program, and explain why it failed.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from launcher.errors import HostError, StreamError
from launcher.transport.local import LocalStream, start_process


class ClientStream(LocalStream):
    """A client and its pipes; when it is given up, its agent's input is closed."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None, *, finished: Callable[[ClientStream], None]
    ) -> None:
        self._client = start_process(command, env)
        super().__init__(self._client)
        self._finished = finished

    def answers(self, deadline: float) -> bool:
        """Wait until there is something to read, or the end; return whether it came before the deadline."""
        return bool(self._poll(deadline))

    @property
    def has_ended(self) -> bool:
        """Return whether its output is at the end."""
        events = self._poll(0.0)
        return bool(events) and not events & select.POLLIN

    def _poll(self, deadline: float) -> int:
        poll = select.poll()  # select() is limited to descriptors below 1024
        poll.register(self._stdout, select.POLLIN)
        return next((events for _, events in poll.poll(max(0.0, 1000 * (deadline - time.monotonic())))), 0)

    def give_up(self) -> str:
        """End it before anything was read from it; return its stderr."""
        _, stderr = self.finish(0.0)
        self._stdin.close()
        self._stdout.close()
        return stderr

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        found = super().finish(wait_s)
        self._finished(self)
        return found


S = TypeVar("S", bound=ClientStream)
_START_S = 5.0  # for a process to start


class Clients:
    """The clients of one run. Any thread may call it."""

    def __init__(self) -> None:
        self._is_closed = False
        self._running: set[ClientStream] = set()
        self._starting = 0  # clients that are not in `_running` yet
        self._changed = threading.Condition()  # for both

    def open(
        self,
        host: str,
        make: Callable[[Callable[[ClientStream], None]], S],
        deadline: float,
        *,
        first: bytes,
        what: str,
    ) -> S:
        """Start a client, write the `first` bytes, and wait until it writes something or ends.

        `make` starts it with the function to call once it is finished; `what` is its name. Blocks until `deadline`
        (monotonic) at most. Raises HostError.
        """
        with self._changed:
            if self._is_closed:
                raise HostError(host, "the run has ended")
            self._starting += 1
        try:
            stream = make(self._running.discard)
            self._running.add(stream)
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify_all()
        if first:
            with contextlib.suppress(StreamError):  # it has ended, which is noticed next
                stream.write(first)
        if not stream.answers(deadline):
            stderr = stream.give_up()
            raise HostError(host, f"{what} did not start an agent there in time{': ' + stderr if stderr else ''}")
        return stream

    def close(self) -> None:
        """Kill every client that is not finished: of hosts that never answered, and of links that were given up.

        For the end of the run. A client whose host is gone would stay for minutes, even after this process.
        """
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._starting, _START_S)
        left = self._running.copy()
        for stream in left:
            stream.kill()  # all of them before waiting
        for stream in left:
            stream.finish(0.0)
