"""Lists, extends and stops the processes kept warm on this host, from outside; binds the socket of a new one."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from launcher.agent.warm.folder import NAME_BYTES, open_folder
from launcher.agent.warm.handover import ANSWER_S, ask
from launcher.errors import SocketError, WarmError

_TRIES = 3  # the last process in the folder may remove it meanwhile

T = TypeVar("T")


def describe() -> list[dict[str, Any]]:
    """Return the description of each; leave out one that does not answer. Raises SocketError, as all here."""
    return _of_all("", lambda connection: ask(connection, "describe"))


def stop(prefix: str = "", *, before: str = "") -> list[int]:
    """Stop those with this prefix, or only those that were there before the one named `before`.

    Return for each the number of runs that use it; it ends with them.
    """
    return _of_all(prefix, lambda connection: int(ask(connection, "stop")["runs"]), before=before)


def extend(name: str, keep_s: float) -> bool:
    """Keep one for `keep_s` from now on; return whether it agreed."""
    return any(_of_all(name, lambda connection: bool(ask(connection, "extend", keep_s=keep_s)["kept"])))


@contextmanager
def new_socket(prefix: str) -> Iterator[tuple[str, socket.socket]]:
    """Listen under a new name in a `with`, and yield its path; remove it on failure. Raises OSError too."""
    name = f"{prefix}{os.urandom(NAME_BYTES).hex()}"
    for _ in range(_TRIES):
        with open_folder(make=True) as folder:
            if folder is None:
                continue
            try:
                listening = folder.bind(name)
            except FileNotFoundError:
                continue
            try:
                with listening:
                    yield f"{folder.path}/{name}", listening
            except BaseException:
                folder.remove(name)
                raise
            return
    raise WarmError("the folder was removed again and again")


def _of_all(prefix: str, do: Callable[[socket.socket], T], *, before: str = "") -> list[T]:
    found: list[T] = []
    with open_folder() as folder:
        if folder is None:
            return found
        names = folder.names(prefix)  # the newest first
        for name in names[names.index(before) + 1 :] if before in names else names:
            try:
                connection = folder.connect(name, ANSWER_S)
                if connection is not None:
                    with connection:
                        found.append(do(connection))
            except (OSError, SocketError):
                continue
    return found
