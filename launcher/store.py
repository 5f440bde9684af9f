"""The rendezvous store: torch's own TCPStore server, in a process of its own on the first host.

Started by the agent (rendezvous.py) with the bound and listening socket as an inherited descriptor, so the
port was taken before any worker started and early clients wait in the socket's queue while torch is imported here.
Serves until its standard input ends or the agent kills it.
"""

from __future__ import annotations

import os
import socket
import sys


def main() -> None:
    descriptor = int(sys.argv[1])
    from torch._C._distributed_c10d import TCPStore

    listening = socket.socket(fileno=os.dup(descriptor))
    address, port = listening.getsockname()[:2]
    listening.close()
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    os.read(0, 1)
    del store
    os._exit(0)  # torch's teardown has nothing to add


if __name__ == "__main__":
    main()
