"""Output of one attempt's workers: reads their pipes and passes it on to the controller, as fast as that reads."""

from __future__ import annotations

import os
import selectors
from functools import partial

from launcher.agent.stream_writer import StreamWriter
from launcher.agent.workers.worker import Worker
from launcher.protocol.reports import Output

READ_BYTES = 1 << 16
PIPE_READS = 32  # more than a pipe holds (at most 1 MiB)


class OutputPipes:
    """Reads the pipes of workers, from `begin` until `end`, unless `writer` has too much unsent."""

    def __init__(self, selector: selectors.BaseSelector, writer: StreamWriter) -> None:
        self.read_bytes = 0  # from all workers
        self._selector = selector
        self._writer = writer
        self._workers: list[Worker] = []  # whose pipes are watched while nothing holds

    def begin(self, worker: Worker) -> None:
        """Read a worker's output from now on; if the writer holds, from `hold(False)` on."""
        self._workers.append(worker)
        if not self._writer.holding:
            self._watch(worker)

    def hold(self, hold: bool) -> None:
        """Pause or resume reading."""
        for worker in self._workers:
            if hold:
                self._unwatch(worker)
            else:
                self._watch(worker)

    def drain(self, worker: Worker) -> None:
        """Pass on a worker's output up to now."""
        for descriptor in list(worker.pipes):
            for _ in range(PIPE_READS):  # bounded: a child of the worker may write for ever
                if self._writer.holding or not self._read(worker, descriptor):
                    break

    def end(self, worker: Worker) -> None:
        """Pass on a worker's output up to now, and read no more."""
        self.drain(worker)
        self._workers.remove(worker)
        if not self._writer.holding:
            self._unwatch(worker)

    def _watch(self, worker: Worker) -> None:
        for descriptor in worker.pipes:
            self._selector.register(descriptor, selectors.EVENT_READ, partial(self._read, worker, descriptor))

    def _unwatch(self, worker: Worker) -> None:
        for descriptor in worker.pipes:
            self._selector.unregister(descriptor)

    def _read(self, worker: Worker, descriptor: int) -> bool:
        """Pass on output of a worker; return whether there may be more now."""
        if self._writer.holding or descriptor not in worker.pipes:  # changed after the selector reported it
            return False
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(descriptor)
            del worker.pipes[descriptor]
            os.close(descriptor)
            return False
        self.read_bytes += len(data)
        worker.wrote(worker.pipes[descriptor], data)
        self._writer.send(Output(rank=worker.rank, stream=worker.pipes[descriptor], data=data))
        return True
