"""Reads the commits of a training from the output of a run, as they come; see programs/elastic.py."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from testbed.processes import Program, started_dtrain

LIMIT_S = 200.0


@dataclass(frozen=True)
class At:
    """A commit of a rank."""

    step: int
    world_size: int
    rank: int
    pid: int
    host: str
    time: float


class TrainingSeen:
    """What the workers of a run have said."""

    def __init__(self, process: Program) -> None:
        self.commits: list[At] = []
        self.stderr = ""  # of a run that has ended
        self._lines: list[str] = []
        self._process = process
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._thread.start()

    def _read(self, stream: Iterator[bytes]) -> None:
        for line in stream:
            text = line.decode()
            with self._changed:
                self._lines.append(text)
                if match := re.search(r"at (\d+) (\d+) (\d+) (\d+) (\S+) (\S+)", text):
                    step, size, rank, pid, host, at = match.groups()
                    self.commits.append(At(int(step), int(size), int(rank), int(pid), host, float(at)))
                self._changed.notify_all()

    def wait(self, until: Callable[[], object]) -> None:
        """Wait until something was said; `until` asks for it."""
        deadline = time.monotonic() + LIMIT_S
        with self._changed:
            while not until():
                assert self._process.poll() is None, self._process.stderr.read().decode()
                self._changed.wait(1.0)
                assert time.monotonic() < deadline, self._lines[-20:]

    def sized(self, size: int, *, after: float = 0.0) -> list[At]:
        """The commits in a world of `size`, later than `after`."""
        return [at for at in self.commits if at.world_size == size and at.time > after]

    def said(self, word: str) -> set[str]:
        """What the ranks said after `word`, each text once."""
        return {match[1] for line in self._lines if (match := re.search(rf"\] {word} (.*)$", line.strip()))}

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def end_well(self) -> str:
        """Wait for the end of the run, which must be a good one; return what dtrain said."""
        status = self._process.wait(LIMIT_S)
        self._thread.join(LIMIT_S)
        stderr = self._process.stderr.read().decode()
        assert status == 0, stderr
        return stderr


@contextlib.contextmanager
def training(*argv: str | Path, cwd: Path, env: Mapping[str, str | None] | None = None) -> Iterator[TrainingSeen]:
    """Watch a training, which goes on without pauses after the block, and must end well."""
    with started_dtrain(*argv, cwd=cwd, env=env) as process:
        yield (seen := TrainingSeen(process))
        (cwd / "quick").touch()
        seen.stderr = seen.end_well()
