"""Reads what the kernel says in files of /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

SYSFS = Path("/sys")


def read_text(file: str | os.PathLike[str]) -> str:
    """Return the text without space around it; empty where the file is not there, or not for this process to read."""
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read().strip()
    except OSError:  # a device cgroup refuses to read what is not for this container; a speed that is unknown is EINVAL
        return ""
