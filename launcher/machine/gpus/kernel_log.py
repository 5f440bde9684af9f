"""Errors of GPUs and NVSwitches in the kernel's log: the Xid and SXid lines of NVIDIA's driver."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

KMSG = "/dev/kmsg"
_MOST = 100_000  # records that are read
_RECORD = re.compile(
    rb"(\d+),\d+,(\d+),[^;]*;(?:NVRM: (Xid)|nvidia-nvswitch\d+: (SXid)) \((?:PCI:)?([\w:.]+)\): (\d+), ([^\n]*)"
)
_PROCESS = re.compile(r"pid='?(\d+|<unknown>)'?, name=([^,]*), ")


def device_error(record: bytes) -> str:
    """Return what a record of /dev/kmsg says of an error: `Xid 79 of 0000:3b:00: ...`; empty if it is another record.

    Only the kernel's own records count, not those of users who write to the log.
    """
    found = _RECORD.match(record)
    if found is None or int(found[1]) >= 8:
        return ""
    text = found[7].decode("utf-8", "replace").strip().rstrip(".")
    process = _PROCESS.match(text)
    text = _PROCESS.sub("", text)
    named = f" (pid {process[1]}, {process[2]})" if process and process[1].isdigit() else ""
    return f"{(found[3] or found[4]).decode()} {found[6].decode()} of {found[5].decode()}: {text}{named}"


def logged_errors() -> tuple[tuple[float, str], ...]:
    """Return the errors in the log, each with its age in seconds; none if this user may not read it."""
    try:
        log = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        return tuple(errors_in(log))
    finally:
        os.close(log)


def errors_in(log: int) -> Iterator[tuple[float, str]]:
    """Yield what `logged_errors` returns, from an open log that does not block."""
    now = time.monotonic()
    for _ in range(_MOST):
        try:
            record = os.read(log, 8192)
        except BlockingIOError:  # the end
            return
        except OSError:  # overwritten before it was read, or too long
            continue
        if text := device_error(record):
            yield max(0.0, now - int(record.split(b",", 3)[2]) / 1e6), text
