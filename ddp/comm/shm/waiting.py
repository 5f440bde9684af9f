"""Waits for other processes through words of shared memory: fence, futex, spinning.

Words are 8 bytes, aligned, written by one process each and as one store (CPython's memoryview copies an item of 8 bytes
by one instruction on x86-64 and on 64-bit ARM).
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable

_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF

available = (
    sys.platform == "linux" and _FUTEX_CALL is not None and sys.byteorder == "little" and hasattr(os, "pidfd_open")
)

_libc = ctypes.CDLL(None)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]

memmove: Callable[[int, int, int], object] = _libc.memmove  # (to, from, bytes), without the interpreter's lock
_libc.memmove.restype = None
_libc.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


def futex_wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` is `value`, until a wake-up, a signal or the timeout."""
    limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _syscall(_FUTEX_CALL, address, _WAIT, value, ctypes.addressof(limit))


def futex_wake(address: int) -> None:
    """Wake all processes that sleep on the word at `address`."""
    _syscall(_FUTEX_CALL, address, _WAKE, _ALL, None)


class Fence:
    """Orders this thread's memory accesses before a call against those after it.

    A lock that is always held is released and acquired again. On x86 both are locked instructions, each a full fence.
    On ARM the release is a store-release and the acquire after it a load-acquire, which the architecture keeps in this
    order ("RCsc"); earlier accesses cannot pass the first, nor later ones the second. (Acquiring first and releasing
    then would let accesses from both sides move in between.)

    Not thread-safe. After an interrupt in the middle the lock is free: it is acquired first.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire

    def __call__(self) -> None:
        self._acquire(False)
        self._release()
        self._acquire()


# Measured: a peer on another core that is nearly ready arrives within this; more delays threads on the same core.
_SPINS = 200
_YIELDS = 6


def spin(is_ready: Callable[[], bool], crowded: bool) -> bool:
    """Spin for some microseconds until `is_ready()`; `crowded`: yield the core to others first."""
    if is_ready():
        return True
    if crowded:
        for _ in range(_YIELDS):
            os.sched_yield()
            if is_ready():
                return True
        return False
    for _ in range(_SPINS):  # noqa: SIM110  # a generator would double what a look costs
        if is_ready():
            return True
    return False
