"""The files of a run: `<log-dir>/<run-id>/attempt_<n>/<rank>/{stdout.log,stderr.log,error.json}` and, beside the ranks,
`evidence-<number>.txt`: where every rank was at one time. A rank that writes a ledger has `ledger.jsonl` too.

Also `run.json`, the manifest (runs/record.py), `report.txt`, and in each attempt `times.log`. `timeline.jsonl` has its
own writer (timeline/file.py).

Bytes are written unchanged. If the folder cannot be written or the disk is full, the run continues without the files.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from launcher.output.whole_file import write_json, write_whole
from launcher.protocol.message import LEDGER

STREAM_NAMES = {1: "stdout", 2: "stderr"}
LEDGER_FILE = "ledger.jsonl"


class LogFiles:
    """The files of one run; `complain` is called once, with the reason, when they can no longer be written."""

    def __init__(self, folder: Path, complain: Callable[[str], None]) -> None:
        self.folder = folder
        self.usable = True
        self._complain = complain
        self._attempt = 0
        self._files: dict[tuple[int, int], BinaryIO] = {}  # of the current attempt
        self._times: BinaryIO | None = None
        self._noted: dict[tuple[int, int], int] = {}  # second of each file's last entry in times.log

    def evidence_path(self, attempt: int, number: int) -> Path:
        return log_folder(self.folder, attempt) / f"evidence-{number}.txt"

    def make_folder(self, name: str) -> None:
        self._try(lambda: (self.folder / name).mkdir(parents=True, exist_ok=True))

    def begin_attempt(self, attempt: int) -> None:
        """Close the previous attempt's files: open files must not accumulate over a thousand attempts."""
        self.close()
        self._attempt = attempt

    def add_worker(self, rank: int) -> None:
        """Open the files of a rank of the current attempt."""

        def open_both() -> None:
            folder = log_folder(self.folder, self._attempt, rank)
            folder.mkdir(parents=True, exist_ok=True)
            for stream, name in STREAM_NAMES.items():
                self._open(rank, stream, folder / f"{name}.log")

        self._try(open_both)

    def _open(self, rank: int, stream: int, path: Path) -> None:
        self._files[rank, stream] = open(path, "ab", buffering=0)  # noqa: SIM115  # closed by close

    def replace_worker(self, rank: int) -> None:
        """End the line that a dead process of this rank may have begun in its ledger."""
        if (rank, LEDGER) in self._files:
            self.write_ledger(rank, b"\n")

    def write_ledger(self, rank: int, data: bytes) -> None:
        if self.usable and (rank, LEDGER) not in self._files:
            self._try(lambda: self._open(rank, LEDGER, log_folder(self.folder, self._attempt, rank) / LEDGER_FILE))
        if (file := self._files.get((rank, LEDGER))) is not None:
            self._try(lambda: _write_all(file, data))

    def write(self, rank: int, stream: int, data: bytes) -> None:
        file = self._files.get((rank, stream))
        if file is None:
            return
        if self._noted.get((rank, stream)) != (second := int(time.time())):
            self._noted[rank, stream] = second
            self._try(lambda: self._note(second, rank, stream, file.tell()))
        self._try(lambda: _write_all(file, data))

    def _note(self, second: int, rank: int, stream: int, offset: int) -> None:
        """Record the offset in a file at which the bytes of a second start."""
        if self._times is None:
            self._times = open(times_file(self.folder, self._attempt), "ab", buffering=0)  # noqa: SIM115  # as above
        _write_all(self._times, f"{second} {rank} {stream} {offset}\n".encode())

    def write_error(self, rank: int, attempt: int, text: str) -> None:
        self._write_text(log_folder(self.folder, attempt, rank) / "error.json", text)

    def write_evidence(self, attempt: int, number: int, text: str) -> None:
        self._write_text(self.evidence_path(attempt, number), text)

    def write_manifest(self, content: Mapping[str, Any]) -> None:
        self._try(lambda: write_json(self.folder / "run.json", content, mode=0o600), again=True)

    def write_report(self, text: str) -> None:
        """Write the run's final report, unless no worker was started: such a run has no folder."""
        if self.folder.is_dir():
            self._write_text(self.folder / "report.txt", f"{text}\n", again=True)

    def _write_text(self, path: Path, text: str, *, again: bool = False) -> None:
        self._try(lambda: write_whole(path, text.encode("utf-8", "backslashreplace")), again=again)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._times is not None:
            self._times.close()
        self._times = None
        self._files.clear()
        self._noted.clear()

    def _try(self, action: Callable[[], object], *, again: bool = False) -> None:
        """Write something; with `again`, also after a failure: the disk may have room again."""
        if not self.usable and not again:
            return
        try:
            action()
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """Stop writing to the folder, since a file there cannot be written."""
        if not self.usable:
            return
        self.usable = False
        self.close()
        self._complain(
            f"the log files in {self.folder} cannot be written ({error.strerror}); the run continues without them. "
            + ("See ulimit -n" if error.errno == errno.EMFILE else "Choose another folder with --log-dir")
        )


def log_folder(folder: Path, attempt: int, rank: int | None = None) -> Path:
    """Return the folder of an attempt, or of one rank in it, in a run's folder."""
    return folder / f"attempt_{attempt}" / ("" if rank is None else str(rank))


def times_file(folder: Path, attempt: int) -> Path:
    """Return the file that records when the bytes of an attempt's log files were written.

    A line, SECOND RANK STREAM OFFSET, says that the bytes from this offset on were written in this second or later.
    """
    return log_folder(folder, attempt) / "times.log"


def attempts_in(folder: Path) -> list[int]:
    """Return the numbers of the attempts in a run's folder; anything else there is ignored."""
    found = ((re.fullmatch("attempt_([0-9]+)", path.name), path) for path in folder.glob("attempt_*"))
    return [int(match[1]) for match, path in found if match is not None and path.is_dir()]


def set_aside(folder: Path) -> Path | None:
    """Rename the folder of an earlier run with the same name, so that two runs never mix; return the new name."""
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    try:
        folder.rename(aside)
    except OSError:  # no permission: writing fails as well, and reports it
        return None
    return aside


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]
