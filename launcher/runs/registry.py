"""The list of this user's runs: a small file for each, beside the socket at which its controller answers.

They are in one folder of the user's own, so that other users' runs are not seen. An entry outlives its run and the
machine's boot: what is neither ended nor alive is lost. Hosts may share the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.decode import decode_dataclass
from launcher.errors import ProtocolError, RunError, SocketError
from launcher.frozen import dataclass, names_of, replace
from launcher.machine.processes import find
from launcher.machine.socket_folder import SocketFolder, prefix_of_boot, this_boot, this_host

LOST = "lost"
KEPT = 1000  # entries
_PREFIX = "run-"


@dataclass(frozen=True)
class Entry:
    """What the list knows of a run. `state` is empty until it has ended; `exit_code` is the command's."""

    run_id: str
    folder: str  # of its files, absolute
    command: str  # for a person
    host: str
    machine: str  # which tells hosts of one name apart
    boot: str
    pid_namespace: int
    pid: int
    start: int
    socket: str
    began: float  # seconds of the clock, as `ended`
    name: str = ""  # of the entry
    detached: bool = False
    state: str = ""
    exit_code: int = 0
    ended: float = 0.0
    cause: str = (
        ""  # in a few words, where it did not finish; empty until it has ended, as is `report`, the last screen
    )
    report: str = ""  # both are also empty of versions of dtrain that kept none

    @property
    def here(self) -> bool:
        """Whether its controller runs or ran on this host, and is seen from here: not in another container."""
        return self.machine == this_host() and (self.boot != this_boot() or self.pid_namespace == _pid_namespace())

    @property
    def lives(self) -> bool:
        """Whether its controller is there, as far as this host can tell."""
        if self.state or not self.here or self.boot != this_boot():
            return False
        process = find(self.pid)
        return process is not None and process.start == self.start

    @property
    def is_lost(self) -> bool:
        """Whether its controller has gone without a word."""
        return not self.state and self.here and not self.lives


def place() -> Path:
    """Return the path of the folder, whether or not it is there. Raises SocketError if this user has no home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        return (Path(given) if os.path.isabs(given) else Path("~/.local/state").expanduser()) / "dtrain"
    except RuntimeError as error:
        raise SocketError(f"user {os.geteuid()} has no home; set HOME or XDG_STATE_HOME") from error


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


_FIELDS = frozenset(names_of(Entry) or ())


class Registration:
    """This process's own entry. `listening` is its socket."""

    def __init__(self, entry: Entry, listening: socket.socket) -> None:
        self.listening = listening
        self._entry = entry

    def end(self, state: str, exit_code: int, cause: str = "", report: str = "") -> None:
        """Note how the run has ended. Raises OSError or SocketError."""
        self._entry = replace(
            self._entry, state=state, exit_code=exit_code, ended=time.time(), cause=cause, report=report
        )
        with SocketFolder.opened(str(place()), make=True) as folder:
            if folder is not None:
                _write(folder, self._entry)
                _forget_oldest(folder)

    def close(self) -> None:
        """Remove the socket: whoever waits at it learns that the run has ended."""
        self.listening.close()
        with contextlib.suppress(OSError, SocketError), SocketFolder.opened(str(place())) as folder:
            if folder is not None:
                folder.remove(self._entry.socket)


def registered(run_id: str, run_folder: Path, command: str, *, detached: bool) -> Registration:
    """List this process as the controller of a run. Raises OSError or SocketError if that cannot be written."""
    us = find(os.getpid())
    assert us is not None
    began = time.time()
    word = os.urandom(4).hex()
    entry = Entry(
        run_id=run_id, folder=str(run_folder), command=command, host=os.uname().nodename, machine=this_host(),
        boot=this_boot(), pid_namespace=_pid_namespace(), pid=us.pid, start=us.start,
        socket=f"{prefix_of_boot()}{word}", began=began,
        name=f"{_PREFIX}{int(began * 1000):014d}-{word}.json", detached=detached,
    )  # fmt: skip
    place().parent.mkdir(parents=True, exist_ok=True)
    with SocketFolder.opened(str(place()), make=True) as folder:
        if folder is None:
            raise SocketError(f"the folder {place()} cannot be made")
        listening = folder.bind(entry.socket)
        try:
            _write(folder, entry)
        except OSError:
            listening.close()
            folder.remove(entry.socket)
            raise
    return Registration(entry, listening)


def entries() -> list[Entry]:
    """Return all runs in the list, the newest first. Raises SocketError."""
    found: list[Entry] = []
    with SocketFolder.opened(str(place())) as folder:
        if folder is None:
            return found
        sockets = set(folder.files(""))
        for name in sorted(folder.files(_PREFIX), reverse=True):
            if (entry := _read(folder, name)) is None:
                continue
            found.append(entry)
            if entry.is_lost and entry.socket in sockets:
                with contextlib.suppress(OSError):  # of a home that cannot be written
                    folder.remove(entry.socket)  # which its controller could not
    return found


def choose(word: str, among: Sequence[Entry]) -> Entry:
    """Return the run with this id, the only one that begins so, or the newest for `last`. Raises RunError."""
    if not among:
        raise RunError("there are no runs of yours; start one with dtrain run")
    if word == "last":
        return among[0]
    fitting = {each.run_id: each for each in reversed(among) if each.run_id.startswith(word)}  # the newest of each id
    if word in fitting:
        return fitting[word]
    if not fitting:
        raise RunError(f"there is no run {word}; see dtrain ps --all")
    if len(fitting) > 1:
        names = ", ".join(sorted(fitting)[:4]) + (" and others" if len(fitting) > 4 else "")
        raise RunError(f"{word} may be {names}; write more of it")
    return next(iter(fitting.values()))


@contextmanager
def connect(entry: Entry, wait_s: float) -> Iterator[socket.socket | None]:
    """Connect to a run's controller; None where there is none any more. Raises RunError where it cannot be asked."""
    if not entry.here and not entry.state:
        raise RunError(f"run {entry.run_id} was started on {entry.host}; type the command there")
    try:
        with SocketFolder.opened(str(place())) as folder:
            connection = None if folder is None or not entry.lives else folder.connect(entry.socket, wait_s)
    except SocketError as error:
        raise RunError(f"run {entry.run_id} (pid {entry.pid}): {error}") from error
    if connection is None:
        yield None
        return
    with connection:
        yield connection


def _write(folder: SocketFolder, entry: Entry) -> None:
    folder.write(entry.name, json.dumps(vars(entry)).encode())


def _read(folder: SocketFolder, name: str) -> Entry | None:
    """Return an entry; None if it is gone or, of a full disk, only half there. Fields of later versions are skipped."""
    try:
        values: Any = json.loads(folder.read(name))
        known = {field: value for field, value in values.items() if field in _FIELDS}
        return decode_dataclass(Entry, {**known, "name": name})
    except (FileNotFoundError, ProtocolError, ValueError, AttributeError):  # the last: it is no object
        return None


def _forget_oldest(folder: SocketFolder) -> None:
    for name in sorted(folder.files(_PREFIX), reverse=True)[KEPT:]:
        entry = _read(folder, name)
        if entry is None or entry.state or entry.is_lost:
            folder.remove(name)
