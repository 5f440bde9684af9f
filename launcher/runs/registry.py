"""The list of this user's runs: a small file for each, beside the socket on which its controller answers.

They are in one folder of this user, so other users' runs are not listed. An entry outlives its run and reboots: a run
that is neither ended nor alive is lost. Hosts may share the folder.
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
    """The entry of a run. `state` is empty until the run has ended; `exit_code` is the command's."""

    run_id: str
    folder: str  # of its files, absolute
    command: str  # for a person
    host: str
    machine: str  # distinguishes hosts with the same name
    boot: str
    pid_namespace: int
    pid: int
    start: int
    socket: str
    began: float  # seconds since the epoch, like `ended`
    name: str = ""  # of the entry
    detached: bool = False
    state: str = ""
    exit_code: int = 0
    ended: float = 0.0
    # Both are empty until the run has ended, and from versions of dtrain that did not keep them.
    cause: str = ""  # in a few words, if it did not finish
    report: str = ""  # the final report

    @property
    def here(self) -> bool:
        """True if its controller runs or ran on this host, and is visible: not in another container."""
        return self.machine == this_host() and (self.boot != this_boot() or self.pid_namespace == _pid_namespace())

    @property
    def lives(self) -> bool:
        """True if its controller is running, as far as known on this host."""
        return not self.state and self.here and not self.is_gone

    @property
    def is_lost(self) -> bool:
        """True if its controller ended without recording an end."""
        return not self.state and self.is_gone

    @property
    def is_gone(self) -> bool:
        """True if the process of its controller has ended; False if another host has to be asked."""
        if not self.here or self.boot != this_boot():
            return self.here
        process = find(self.pid)
        return process is None or process.start != self.start


def place() -> Path:
    """Return the path of the folder, which may not exist. Raises SocketError if this user has no home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        return (Path(given) if os.path.isabs(given) else Path("~/.local/state").expanduser()) / "dtrain"
    except RuntimeError as error:
        raise SocketError(f"user {os.geteuid()} has no home; set HOME or XDG_STATE_HOME") from error


@contextmanager
def _writable() -> Iterator[SocketFolder]:
    """Open the folder to write in it, and make it. Raises SocketError, also where the body of the `with` fails."""
    path = place()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with SocketFolder.opened(str(path), make=True) as folder:
            if folder is None:
                raise SocketError(f"the folder {path} cannot be made")
            yield folder
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}"
        raise SocketError(f"{what}; set XDG_STATE_HOME to a folder that can be") from error


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


_FIELDS = frozenset(names_of(Entry) or ())


class Registration:
    """The entry of this process. `listening` is its socket."""

    def __init__(self, entry: Entry, listening: socket.socket) -> None:
        self.listening = listening
        self._entry = entry

    def end(self, state: str, exit_code: int, cause: str = "", report: str = "") -> None:
        """Record how the run ended. Raises SocketError."""
        self._entry = replace(
            self._entry, state=state, exit_code=exit_code, ended=time.time(), cause=cause, report=report
        )
        with _writable() as folder:
            _write(folder, self._entry)
            _forget_oldest(folder)

    def close(self) -> None:
        """Remove the socket, which notifies waiting commands that the run has ended."""
        self.listening.close()
        with contextlib.suppress(OSError, SocketError), SocketFolder.opened(str(place())) as folder:
            if folder is not None:
                folder.remove(self._entry.socket)


def registered(run_id: str, run_folder: Path, command: str, *, detached: bool) -> Registration:
    """List this process as the controller of a run. Raises SocketError if the entry cannot be written."""
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
    with _writable() as folder:
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
            if entry.socket in sockets and entry.is_gone:
                with contextlib.suppress(OSError):  # the home may be read-only
                    folder.remove(entry.socket)  # its controller could not
    return found


def choose(word: str, among: Sequence[Entry]) -> Entry:
    """Return the run with this id or unique prefix, or the newest for `last`. Raises RunError."""
    if not among:
        raise RunError("you have no runs; start one with dtrain run")
    if word == "last":
        return among[0]
    fitting = {each.run_id: each for each in reversed(among) if each.run_id.startswith(word)}  # the newest of each id
    if word in fitting:
        return fitting[word]
    if not fitting:
        raise RunError(f"there is no run {word}; see dtrain ps --all")
    if len(fitting) > 1:
        names = ", ".join(sorted(fitting)[:4]) + (" and others" if len(fitting) > 4 else "")
        raise RunError(f"{word} is ambiguous: {names}; write more of the id")
    return next(iter(fitting.values()))


@contextmanager
def connect(entry: Entry, wait_s: float) -> Iterator[socket.socket | None]:
    """Connect to a run's controller; None if it has ended. Raises RunError if it cannot be asked."""
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
    """Return an entry; None if it is gone or, after a full disk, incomplete. Fields of later versions are ignored."""
    try:
        values: Any = json.loads(folder.read(name))
        known = {field: value for field, value in values.items() if field in _FIELDS}
        return decode_dataclass(Entry, {**known, "name": name})
    except (FileNotFoundError, ProtocolError, ValueError, AttributeError):  # AttributeError: it is not an object
        return None


def _forget_oldest(folder: SocketFolder) -> None:
    for name in sorted(folder.files(_PREFIX), reverse=True)[KEPT:]:
        entry = _read(folder, name)
        if entry is None or entry.state or entry.is_lost:
            folder.remove(name)
