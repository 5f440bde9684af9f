"""Standard input of a worker that comes from the controller: a pipe, and the data queued for it.

If pdb waits there for a command, the worker's own bootstrap.py shows that by a file.

Owned by attempt.py. A process that replaces a dead one gets a new pipe and reads on: what was not written to that one.
At most CHANNEL_BYTES are queued here, since the controller sends no more than was acknowledged.
"""

from __future__ import annotations

import errno
import os
import selectors
import struct
import termios
from fcntl import ioctl

from launcher.agent.stream_writer import StreamWriter
from launcher.agent.workers.worker import Worker
from launcher.protocol.commands import StartWorker
from launcher.protocol.reports import Asks
from launcher.protocol.two_way import ChannelData, ChannelTaken

LOOK_S = 0.05  # between looks whether a worker with an unfinished line waits for input; then less and less often
RARELY_S = 0.5
_GONE = (errno.EPIPE, errno.ECONNRESET)


class StandardInput:
    """Standard input of one attempt: of its one rank that has input here, if there is one."""

    def __init__(self, selector: selectors.BaseSelector, writer: StreamWriter) -> None:
        self.waits = 0  # heartbeats at which the worker waited for input
        self._rank = -1
        self._channel = 0
        self._selector = selector
        self._writer = writer
        self._unwritten = bytearray()
        self._is_end = False
        self._write_end: int | None = None
        self._watched = False
        self._worker: Worker | None = None
        self._asks = False
        self._pause_s, self._seen_bytes = LOOK_S, 0

    def expect(self, order: StartWorker) -> None:
        """Record the rank of a worker to be started with input: data may come before it runs."""
        if order.input_channel:
            self._rank, self._channel = order.rank, order.input_channel

    def open(self, rank: int) -> int | None:
        """Return the descriptor that the next process of a rank reads from; the caller closes it. Raises OSError."""
        if rank != self._rank:
            return None
        self.close()
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        return read_end

    def begin(self, worker: Worker) -> None:
        """Write queued data to this process, if it has the pipe."""
        if worker.rank == self._rank:
            self._worker = worker
            self._write()

    def add(self, message: ChannelData) -> None:
        """Queue input for the worker; ignore that of another attempt."""
        if message.channel == self._channel:
            self._unwritten += message.data
            self._is_end |= not message.data
            self._note(asks=False)
            if self._worker is not None:  # else its old prompt would count as a new one
                self._worker.end_lines()
            self._write()

    def end(self, worker: Worker) -> None:
        """Release this process, if it is the one that reads."""
        if worker is self._worker:
            self.close()

    def close(self) -> None:
        """Release the process that reads."""
        self._note(asks=False)
        self._worker = None
        self._close_pipe()

    def waiting_rank(self) -> int | None:
        """Return the rank that waits for its input, if one does; call it at each heartbeat."""
        waits = self._is_waited_for
        self.waits += waits
        return self._rank if waits else None

    @property
    def pause_s(self) -> float:
        """Time until `look` may find something."""
        return self._pause_s if self._asks or self._may_ask else float("inf")

    def look(self) -> None:
        """Check whether the process has written a prompt and waits."""
        worker = self._worker
        if worker is None or not (self._asks or self._may_ask):
            return
        is_new, self._seen_bytes = self._seen_bytes != worker.output_bytes, worker.output_bytes
        self._pause_s = LOOK_S if is_new else min(RARELY_S, 1.2 * self._pause_s)
        self._note(asks=self._may_ask and self._is_waited_for, is_news=is_new)

    @property
    def _may_ask(self) -> bool:
        return self._worker is not None and self._write_end is not None and self._worker.has_unfinished_line

    @property
    def _is_waited_for(self) -> bool:
        """Return whether a debugger in the process waits for a command."""
        worker = self._worker
        if worker is None or worker.status is not None or self._write_end is None or self._unread():
            return False
        return worker.files.asks.exists()

    def _note(self, *, asks: bool, is_news: bool = False) -> None:
        """Report whether it asks, if that has changed; and again for a new prompt (`is_news`)."""
        if asks != self._asks or (asks and is_news):
            self._asks = asks
            self._writer.send(Asks(rank=self._rank, waits=asks))

    def _unread(self) -> int:
        """Return how many bytes the process has not read yet."""
        assert self._write_end is not None
        unread: int = struct.unpack("i", ioctl(self._write_end, termios.FIONREAD, b"\0" * 4))[0]
        return unread

    def _write(self) -> None:
        """Write as much as the pipe accepts now. If the process ended or closed it, drop the data: that is no error."""
        if self._write_end is None or self._worker is None:
            return
        taken = 0
        try:
            while self._unwritten:
                written = os.write(self._write_end, self._unwritten)
                del self._unwritten[:written]
                taken += written
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self._close_pipe()
        if taken:
            self._writer.send(ChannelTaken(channel=self._channel, count=taken))
        if self._is_end and not self._unwritten:
            self._close_pipe()
        else:
            self._watch(bool(self._unwritten))

    def _close_pipe(self) -> None:
        self._watch(False)
        if self._write_end is not None:
            os.close(self._write_end)
            self._write_end = None

    def _watch(self, wanted: bool) -> None:
        if wanted != self._watched and self._write_end is not None:
            if wanted:
                self._selector.register(self._write_end, selectors.EVENT_WRITE, self._write)
            else:
                self._selector.unregister(self._write_end)
            self._watched = wanted
