"""Ports for those who have to name one before anything listens there."""

import contextlib
import socket
import time
from collections.abc import Collection


def free_port(addresses: Collection[str] = ("127.0.0.1",)) -> int:
    """Return a port that is free on all the addresses.

    It is below the range that the kernel hands out, so that no connection takes it until it is used.
    """
    first = 22000 + time.monotonic_ns() % 8000  # another test run beside this one looks elsewhere first
    for port in range(first, first + 1000):
        with contextlib.ExitStack() as stack:
            try:
                for address in addresses:
                    stack.enter_context(socket.socket()).bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {first} to {first + 999} is free on all of {', '.join(addresses)}")
