"""The files of a run: `<log-dir>/<run-id>/attempt_<n>/<rank>/{stdout.log,stderr.log,error.json}` and, beside the ranks,
`evidence-<number>.txt`: where every rank was at one time.

Also `run.json`, the manifest (runs/record.py), `report.txt`, and in each attempt `times.log`. `timeline.jsonl` has a
writer of its own (timeline/file.py).

Bytes are kept as they came. A folder that cannot be written or a full disk costs the files, never the run.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from launcher.output.json_file import write_json

STREAM_NAMES = {1: "stdout", 2: "stderr"}


class LogFiles:
    """The files of one run; `complain` is called once, with the reason, when they cannot be written any more."""

    def __init__(self, folder: Path, complain: Callable[[str], None]) -> None:
        self.folder = folder
        self.usable = True
        self._complain = complain
        self._attempt = 0
        self._files: dict[tuple[int, int], BinaryIO] = {}  # of that attempt
        self._times: BinaryIO | None = None
        self._noted: dict[tuple[int, int], int] = {}  # the second of each file's last note

    def evidence_path(self, attempt: int, number: int) -> Path:
        return log_folder(self.folder, attempt) / f"evidence-{number}.txt"

    def begin_attempt(self, attempt: int) -> None:
        """Close the files of the attempt before: over a thousand attempts, open files must not add up."""
        self.close()
        self._attempt = attempt

    def add_worker(self, rank: int) -> None:
        """Open the files of a rank of the attempt that has begun."""

        def open_both() -> None:
            folder = log_folder(self.folder, self._attempt, rank)
            folder.mkdir(parents=True, exist_ok=True)
            for stream, name in STREAM_NAMES.items():
                file = open(folder / f"{name}.log", "ab", buffering=0)  # noqa: SIM115  # closed by close
                self._files[rank, stream] = file

        self._try(open_both)

    def write(self, rank: int, stream: int, data: bytes) -> None:
        file = self._files.get((rank, stream))
        if file is None:
            return
        if self._noted.get((rank, stream)) != (second := int(time.time())):
            self._noted[rank, stream] = second
            self._try(lambda: self._note(second, rank, stream, file.tell()))
        self._try(lambda: _write_all(file, data))

    def _note(self, second: int, rank: int, stream: int, offset: int) -> None:
        """Note where in a file the bytes of a second begin."""
        if self._times is None:
            self._times = open(times_file(self.folder, self._attempt), "ab", buffering=0)  # noqa: SIM115  # as above
        _write_all(self._times, f"{second} {rank} {stream} {offset}\n".encode())

    def write_error(self, rank: int, attempt: int, text: str) -> None:
        self._write_text(log_folder(self.folder, attempt, rank) / "error.json", text)

    def write_evidence(self, attempt: int, number: int, text: str) -> None:
        self._write_text(self.evidence_path(attempt, number), text)

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        self._try(lambda: write_json(self.folder / "run.json", content, mode=0o600))

    def write_report(self, text: str) -> None:
        """Write the run's last screen, unless no worker was started: such a run has no folder."""
        if self.folder.is_dir():
            self._write_text(self.folder / "report.txt", f"{text}\n")

    def _write_text(self, path: Path, text: str) -> None:
        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="backslashreplace")

        self._try(write)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._times is not None:
            self._times.close()
        self._times = None
        self._files.clear()
        self._noted.clear()

    def _try(self, action: Callable[[], object]) -> None:
        if not self.usable:
            return
        try:
            action()
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """Write no more, here and elsewhere in the folder, since a file there cannot be written."""
        if not self.usable:
            return
        self.usable = False
        self.close()
        self._complain(
            f"the log files in {self.folder} cannot be written ({error.strerror}); the run goes on without them. "
            + ("See ulimit -n" if error.errno == errno.EMFILE else "Choose another folder with --log-dir")
        )


def log_folder(folder: Path, attempt: int, rank: int | None = None) -> Path:
    """Return where a run with this folder keeps what belongs to an attempt, or to one rank in it."""
    return folder / f"attempt_{attempt}" / ("" if rank is None else str(rank))


def times_file(folder: Path, attempt: int) -> Path:
    """Return where it is noted when the bytes of an attempt's log files came.

    A line says that a file's bytes from an offset on are of a second or later: SECOND RANK STREAM OFFSET.
    """
    return log_folder(folder, attempt) / "times.log"


def attempts_in(folder: Path) -> list[int]:
    """Return the numbers of the attempts that have a folder in their run's; anything else there is ignored."""
    found = ((re.fullmatch("attempt_([0-9]+)", path.name), path) for path in folder.glob("attempt_*"))
    return [int(match[1]) for match, path in found if match is not None and path.is_dir()]


def set_aside(folder: Path) -> Path | None:
    """Rename the folder of an earlier run of the same name, so that two runs never mix; return its new name."""
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    try:
        folder.rename(aside)
    except OSError:  # not ours to rename: writing will fail as well, and says so
        return None
    return aside


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]
