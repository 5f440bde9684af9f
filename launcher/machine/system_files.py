"""Reads files of the kernel in /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

SYSFS = Path("/sys")


def read_text(file: str | os.PathLike[str]) -> str:
    """Return the text without surrounding space; empty if the file does not exist or cannot be read."""
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read().strip()
    except OSError:  # a device cgroup refuses devices of other containers; an unknown speed is EINVAL
        return ""
