"""Where the sockets of the processes that are kept warm are, and their names.

After host and boot, a name says which interpreter, which part of a simulated machine and which script the process is
for; see machine/socket_folder.py.
"""

from __future__ import annotations

import os
import sys
import zlib
from contextlib import AbstractContextManager

from launcher.machine.socket_folder import SocketFolder, is_ours_alone, prefix_of_boot

NAME_BYTES = 4  # at random, in hexadecimal digits at the end of a name
FALLBACK = "/tmp/dtrain-warm-{}"


def prefix_of(key: str) -> str:
    """Return how the names begin of the sockets for a key (transport/connect.py), with this interpreter."""
    return f"{prefix_of_boot()}{zlib.crc32(os.fsencode(sys.executable)):08x}-{key}-"


def open_folder(*, make: bool = False) -> AbstractContextManager[SocketFolder | None]:
    """Open the folder for a while; see SocketFolder.opened."""
    return SocketFolder.opened(_place(), make=make)


def _place() -> str:
    """Return the path of the folder, whether or not it is there."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        found = os.lstat(runtime)
        if os.path.isabs(runtime) and is_ours_alone(found):
            return f"{runtime}/dtrain-warm"
    except OSError:
        pass
    return FALLBACK.format(os.geteuid())
