"""The folder with the sockets of processes kept warm, and their names.

After host and boot, a name gives the interpreter, the part of a simulated machine and the script of the process; see
machine/socket_folder.py.
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
    """Return the prefix of the names of sockets for a key (transport/connect.py), with this interpreter."""
    return f"{prefix_of_boot()}{zlib.crc32(os.fsencode(sys.executable)):08x}-{key}-"


def open_folder(*, make: bool = False) -> AbstractContextManager[SocketFolder | None]:
    """Open the folder in a `with`; see SocketFolder.opened."""
    return SocketFolder.opened(_place(), make=make)


def _place() -> str:
    """Return the path of the folder, even if it does not exist."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        found = os.lstat(runtime)
        if os.path.isabs(runtime) and is_ours_alone(found):
            return f"{runtime}/dtrain-warm"
    except OSError:
        pass
    return FALLBACK.format(os.geteuid())
