"""What the SSH hosts, the network hosts and the SLURM cluster have in common: they open and close alike."""

import contextlib
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TypeVar

L = TypeVar("L", bound="Lab")


class Lab(ABC):
    """It runs inside the `with` block, and nothing of it after it."""

    parts: ClassVar[Mapping[str, str]] = {}  # programs that it needs, and their packages
    folder: Path
    mark: str  # which its processes carry

    @property
    def temps(self) -> Sequence[Path]:
        """The folders for temporary files of what runs on its hosts, where that is not the test's."""
        return ()

    @property
    def groups(self) -> Sequence[Path]:
        """The control groups (v2) in which agents on its hosts make theirs, where it is not that of the tests."""
        return ()

    @property
    @abstractmethod
    def pids(self) -> frozenset[int]:
        """The processes that make it; all others under them were left behind."""

    @staticmethod
    def why_not() -> str | None:
        """Why this process cannot run one though all parts are there; None if it can."""
        return None

    @abstractmethod
    def _open(self) -> None:
        """Start everything, in `folder`; what was started when it fails is closed."""

    @abstractmethod
    def _closers(self) -> Iterable[Callable[[], object]]:
        """What has to be called to stop everything, the last one first."""

    def close(self) -> None:
        """Stop everything. The files stay: they belong to the owner of the folder."""
        with contextlib.ExitStack() as stack:  # one that will not stop must not keep the others alive
            for closer in self._closers():
                stack.callback(closer)

    def __enter__(self: L) -> L:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def clear_temp(temp: Path, group: Path | None = None) -> None:
    """Remove what a host had that is off now, as its start would: temporary files, and the control groups named so."""
    for path in temp.iterdir():
        shutil.rmtree(path)
        if group is not None:
            _remove_group(group / path.name)


def _remove_group(group: Path) -> None:
    """Remove a control group, if it is there; the kernel is still busy with processes that were just killed."""
    deadline = time.monotonic() + 10.0
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
