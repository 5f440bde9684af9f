"""The agent reads its workers' pipes, but not while too much is unsent."""

import os
import selectors
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

from launcher.agent.stream_writer import StreamWriter
from launcher.agent.workers.output_pipes import OutputPipes
from launcher.agent.workers.worker import Worker


def test_who_begins_or_ends_while_reading_pauses_is_read_as_the_others() -> None:
    """A replaced worker ends after its successor has begun, and what is sent in between may pause or resume it."""
    with selectors.DefaultSelector() as selector, closing(_Unread()) as unread:
        writer = StreamWriter(unread.write_end, selector, lambda hold: pipes.hold(hold))
        pipes = OutputPipes(selector, writer)

        def watched() -> set[int]:
            return {key.fd for key in selector.get_map().values()} - {unread.write_end}

        old, new = _worker(0), _worker(0)
        (old_out,), (new_out,) = old.pipes, new.pipes
        pipes.begin(old)
        assert watched() == {old_out}
        writer.put(bytes(3 << 20))
        assert (writer.holding, watched()) == (True, set())
        pipes.begin(new)
        assert watched() == set()
        unread.read_all(writer)
        assert (writer.holding, watched()) == (False, {old_out, new_out})
        writer.put(bytes(3 << 20))
        pipes.end(old)
        unread.read_all(writer)
        assert (writer.holding, watched()) == (False, {new_out})
        pipes.end(new)
        assert watched() == set()
        for descriptor in (old_out, new_out):
            os.close(descriptor)


class _Unread:
    """A pipe that is read when the test says so."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        for end in (self._read_end, self.write_end):
            os.set_blocking(end, False)

    def read_all(self, writer: StreamWriter) -> None:
        while writer:
            os.read(self._read_end, 1 << 20)
            writer.write()

    def close(self) -> None:
        for end in (self._read_end, self.write_end):
            os.close(end)


def _worker(rank: int) -> Worker:
    """A worker that has written nothing and keeps its standard output open."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    parts: dict[str, Any] = {"rank": rank, "pipes": {read_end: 1}, "write_end": write_end}
    return cast(Worker, SimpleNamespace(**parts))
