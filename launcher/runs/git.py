"""The state of a run's code: the commit of its working directory, and the uncommitted changes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.frozen import dataclass

MOST_BYTES = 16 << 20  # of a diff
UNTRACKED = 100  # names
ASK_S = 60.0
# git must not leave processes behind, wait for another git, or run a program named by the repository, except its clean
# filters, without which the diff would be wrong.
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.quotepath=false", "--no-pager")
_PLAIN = ("--no-ext-diff", "--no-textconv", "--no-color")


@dataclass(frozen=True)
class GitState:
    """The state. `clean`: no tracked file is changed; `untracked` are files neither tracked nor ignored.

    `diff` is None if it is too large to keep.
    """

    commit: str
    clean: bool
    untracked: tuple[str, ...]
    diff: bytes | None

    def as_json(self, diff_file: str | None) -> Mapping[str, Any]:
        return {
            "commit": self.commit,
            "clean": self.clean,
            "untracked": list(self.untracked[:UNTRACKED]),
            "diff_file": diff_file,
            "diff_too_large": self.diff is None,
        }


class Git:
    """A query of a repository, which another thread may end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def look(self) -> GitState | None:
        """Return the state of the code; None without git, without a commit, or at a timeout. Blocks."""
        commit = self._ask("rev-parse", "--verify", "HEAD")
        status = self._ask("status", "--porcelain=v1", "-z") if commit else None
        if not commit or status is None:
            return None
        names = [name.decode(errors="backslashreplace") for name in status.split(b"\0") if name]
        untracked = tuple(name[3:] for name in names if name.startswith("?? "))
        clean = len(untracked) == len(names)
        diff = b"" if clean else self._ask("diff", "HEAD", "--binary", *_PLAIN)
        if diff is None:
            return None
        return GitState(commit.decode().strip(), clean, untracked, diff if len(diff) <= MOST_BYTES else None)

    def end(self) -> None:
        """End the query, which then returns None."""
        with self._lock:
            self._ended = True
        self._kill()

    def _ask(self, *args: str) -> bytes | None:
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        with self._lock:
            if self._ended:
                return None
            try:
                process = self._process = subprocess.Popen(
                    [*_GIT, *args],
                    cwd=self._folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C must not reach git
                )
            except OSError:  # git is not installed
                return None
        assert process.stdout is not None
        timer = threading.Timer(ASK_S, self._kill)
        timer.daemon = True
        with process:
            with contextlib.suppress(RuntimeError):  # no thread left: `end` still ends it
                timer.start()
            try:
                out = process.stdout.read(MOST_BYTES + 1)
                if len(out) > MOST_BYTES:
                    self._kill()
            finally:
                timer.cancel()
                with self._lock:
                    self._process = None
        return out if process.returncode == 0 or len(out) > MOST_BYTES else None

    def _kill(self) -> None:
        """End git and the filters that it runs."""
        with self._lock:
            if self._process is not None:  # not waited for, so the group's id cannot be reused
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)


def write_diff(path: Path, state: GitState) -> bool:
    """Write the changes beside the manifest, readable only by this user; return whether any were written."""
    if state.clean or state.diff is None:
        return False
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(state.diff)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()  # partly written, on a full disk
        return False
    return True
