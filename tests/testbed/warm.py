"""A process kept warm from which the runs of many tests fork their workers, so that not each of them imports torch.

A run on this machine finds it by itself if its script begins with `HEADER`, or imports the same before it does anything
else and names torch.optim. A run of another script, or on other hosts, takes two to four seconds of CPU more.
"""

import contextlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from testbed.lab import Lab
from testbed.processes import MARK, run_dtrain

HEADER = "import torch\nimport ddp\ndist, optim = torch.distributed, torch.optim\n"


class WarmProcess(Lab):
    """It is kept in the folder, as the runtime folder of the runs that are to find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._pids: list[int] = []

    @property
    def env(self) -> dict[str, str]:
        """The variables of a run that is to find it."""
        return {"XDG_RUNTIME_DIR": str(self.folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temps[0])}

    @property
    def temps(self) -> Sequence[Path]:
        return [self.folder / "temp"]

    @property
    def pids(self) -> frozenset[int]:
        """That process, and the agent that waits below it for the next run, with its guard and its fork server."""
        return frozenset(below for pid in self._pids for below in _line(pid))

    def _open(self) -> None:
        self.folder.chmod(0o700)
        self.temps[0].mkdir()
        script = self.folder.with_suffix(".py")
        script.write_text(HEADER)
        self._dtrain("--start", "--start-timeout-s", "90", "--keep-warm", "20m", script)
        self._pids = [each["pid"] for host in json.loads(self._dtrain("--json")).values() for each in host["warm"]]

    def _closers(self) -> Iterable[Callable[[], object]]:
        yield lambda: self._dtrain("--stop")

    def _dtrain(self, *words: str | Path) -> str:
        result = run_dtrain("warm", *words, cwd=self.folder.parent, env={**self.env, MARK: self.mark})
        assert result.returncode == 0, result
        return result.stdout


def _line(pid: int) -> Iterator[int]:
    """A process, its only child, the only child of that, and so on."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield pid
        children = psutil.Process(pid).children()
        if len(children) == 1:
            yield from _line(children[0].pid)
