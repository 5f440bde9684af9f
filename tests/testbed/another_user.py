"""Ask a process on a Unix socket as another user, whose file system rights do not keep it out."""

import os
import sys
from pathlib import Path

from testbed.processes import Result, run_program

_ASK = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(60)
connection.connect(sys.argv[1])
try:
    connection.send(sys.argv[2].encode())
    print(connection.recv(1 << 16))
except ConnectionError:
    print(b"")
"""


def ask_as_another_user(path: Path, request: str) -> Result:
    """Send a request to a socket as the user nobody; needs root. What was answered is on stdout."""
    link = Path("/tmp", f"socket-test-{os.getpid()}")
    os.link(path, link)  # as if the folder did not keep others out
    link.chmod(0o777)
    try:
        return run_program(sys.executable, "-c", _ASK, link, request, cwd=Path("/"))
    finally:
        link.unlink()
