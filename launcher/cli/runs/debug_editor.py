"""`dtrain debug --debugpy`: a loopback port of this machine through which an editor reaches the rank's debugpy.

It accepts only this user's processes, and one editor: debugpy supports one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable

from launcher.errors import RunError

PIECE_BYTES = 64 << 10
LOOK_S = 0.2  # interval of checks that the rank is alive, until an editor connects


def forward(
    next_bytes: Callable[[float | None], bytes],
    send: Callable[[bytes], None],
    leave: Callable[[], None],
    port: int,
    say: Callable[[str], None],
) -> None:
    """Let an editor connect, and relay between it and the rank. Blocks; calls `leave` once the editor disconnects.

    `next_bytes` waits for bytes of the rank, at most the given time (queue.Empty); their end is an exception. Raises
    RunError if the port is not free.
    """
    try:
        listening = socket.create_server(("127.0.0.1", port), backlog=1)
    except OSError as error:
        raise RunError(f"--port {port}: {error.strerror}") from error
    with listening:
        listening.settimeout(LOOK_S)
        number = listening.getsockname()[1]
        say(f"debugpy waits for an editor at 127.0.0.1:{number}. VS Code: launch.json with")
        say(f'{{"type": "debugpy", "request": "attach", "connect": {{"host": "127.0.0.1", "port": {number}}}}}')
        early: list[bytes] = []
        editor = _accept(listening, next_bytes, early)
    with editor:
        threading.Thread(target=_read_editor, args=(editor, send, leave), daemon=True).start()
        with contextlib.suppress(OSError):  # the editor disconnected
            for data in early:
                editor.sendall(data)
            while True:
                editor.sendall(next_bytes(None))


def _accept(listening: socket.socket, next_bytes: Callable[[float | None], bytes], early: list[bytes]) -> socket.socket:
    while True:
        with contextlib.suppress(queue.Empty):
            early.append(next_bytes(0))
        try:
            editor, _ = listening.accept()
        except TimeoutError:
            continue
        if _uid_of_peer(editor) == os.geteuid():
            editor.settimeout(None)
            return editor
        editor.close()


def _uid_of_peer(connection: socket.socket) -> int | None:
    """Return the owner of the other end of a loopback connection; None if the kernel does not list it."""
    ours, theirs = (f":{end[1]:04X}" for end in (connection.getsockname(), connection.getpeername()))
    with open("/proc/net/tcp", encoding="ascii") as file:
        for line in list(file)[1:]:
            fields = line.split()
            if fields[1].endswith(theirs) and fields[2].endswith(ours):
                return int(fields[7])
    return None


def _read_editor(editor: socket.socket, send: Callable[[bytes], None], leave: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        while data := editor.recv(PIECE_BYTES):
            send(data)
    leave()
