"""Reads which worker of which attempt ran on which host from the output of a run.

Its script prints `here ATTEMPT RANK WORLD_SIZE GROUP_RANK HOST`.
"""

import re
import threading
from collections.abc import Iterator

from testbed.processes import Program


class AttemptsSeen:
    """What the workers of each attempt have said, read as it comes."""

    def __init__(self, process: Program) -> None:
        self.lines: list[tuple[int, int, int, int, str]] = []
        self.said = ""  # by dtrain, once the run has ended, if the test keeps it here
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._thread.start()

    def _read(self, stream: Iterator[bytes]) -> None:
        for line in stream:
            if match := re.search(rb"here (\d+) (\d+) (\d+) (\d+) (\S+)", line):
                attempt, rank, world, node, host = match.groups()
                with self._changed:
                    self.lines.append((int(attempt), int(rank), int(world), int(node), host.decode()))
                    self._changed.notify_all()

    def attempt(self, number: int, workers: int, timeout: float = 90) -> dict[int, str]:
        """Wait until so many workers of an attempt have spoken; return their hosts by rank."""

        def found() -> dict[int, str]:
            return {rank: host for attempt, rank, _, _, host in self.lines if attempt == number}

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= workers, timeout), (number, self.lines)
            worlds = {world for attempt, _, world, _, _ in self.lines if attempt == number}
            assert worlds == {workers}
            return found()
