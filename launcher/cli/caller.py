"""The caller of a run, and the messages it gets: `dtrain run` in a terminal, or a Python program."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.frozen import dataclass

if TYPE_CHECKING:
    from launcher.protocol.reports import Exited, Returned
    from launcher.runs.detach import Detachment


@dataclass(frozen=True)
class Verbosity:
    """The messages that dtrain prints, their form, the function that prints them, and the file of --error-json."""

    quiet: bool
    verbose: bool
    as_json: bool
    say: Callable[[str], None]
    error_json: Path | None

    def inform(self, text: str) -> None:
        """Print a message that is neither an error nor the report."""
        if not self.quiet:
            self.say(text)


@dataclass(frozen=True)
class Caller:
    """The caller of a run: the arguments that its record keeps, and the descriptors that it writes to.

    For a Python program, `function` holds the frames with the function that workers call; `take` receives its results.
    For a replay, which has made the run's folder, `read_ledger` gets what workers write to their ledgers, and returns
    lines to print.
    """

    argv: list[str]
    out: int = 1
    err: int = 2
    detachment: Detachment | None = None
    function: Sequence[bytes] = ()
    take: Callable[[str, Returned | Exited], None] | None = None
    read_ledger: Callable[[int, bytes], Sequence[str]] | None = None

    @property
    def is_program(self) -> bool:
        return self.take is not None


def error_file(text: str | None) -> Path | None:
    """Return the file of --error-json. Raises UsageError."""
    if text is None:
        return None
    path = Path(text).expanduser()
    if not path.parent.is_dir():
        raise UsageError(f"--error-json: the folder {path.parent} does not exist; make it, or name a file elsewhere")
    if path.is_dir():
        raise UsageError(f"--error-json: {path} is a folder; name a file")
    return path


def write_all(descriptor: int, data: bytes) -> None:
    """Write the bytes; ignore a closed descriptor."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
