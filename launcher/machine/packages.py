"""Installed Python packages, by their files and metadata; nothing is imported, torch least of all."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

TESTED_TORCH = ("2.9.1", "2.11.0", "2.13.0", "2.15.0")  # versions with which the tests passed, ascending


def folder_of(package: str) -> str | None:
    """Return the folder of an importable package, without importing it."""
    import importlib.util

    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else None


def version_of(distribution: str) -> str | None:
    import importlib.metadata  # takes 30 ms, too long for an agent's start

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_command(python: str, *options: str) -> str:
    """Return the command that installs this dtrain for `python`; empty if its source is unknown."""
    source = _source()
    return " ".join([python, "-m pip install", *options, shlex.quote(source)]) if source else ""


@functools.cache
def _source() -> str:
    """Return the source from which pip or uv installed this dtrain, without passwords; empty if that is gone.

    That is in direct_url.json (PEP 610): a path, which the other host must have too, or an address. For an
    installation from an index it is empty: another index may have another dtrain, or none.
    """
    import importlib.metadata
    import json

    wrong = (OSError, ValueError, LookupError, TypeError, AttributeError)  # unreadable, or another format
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, *wrong):
        if text := importlib.metadata.distribution("dtrain").read_text("direct_url.json"):
            return _source_in(json.loads(text))
    return ""


def _source_in(found: Any) -> str:
    """Return a source for pip from the content of a direct_url.json."""
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(found["url"])
    version_control, subdirectory = found.get("vcs_info"), found.get("subdirectory")
    if parts.scheme == "file":
        path = unquote(parts.path)
        if not os.path.exists(path):  # a wheel or a folder of a build that was removed
            return ""
        if not version_control and not subdirectory:
            return path
    user = "git@" if parts.scheme == "ssh" and parts.username == "git" else ""
    netloc = user + parts.netloc.rpartition("@")[2]
    source = parts._replace(netloc=netloc, query="", fragment="").geturl()  # a query may have a token
    if version_control:
        source = f"{version_control['vcs']}+{source}@{version_control['commit_id']}"
    return f"{source}#subdirectory={subdirectory}" if subdirectory else source


def installed(distributions: Collection[str]) -> dict[str, str]:
    """Return the versions of those installed, from the names of metadata folders only, in less than a millisecond."""
    found: dict[str, str] = {}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                package, _, version = name.removesuffix(".dist-info").partition("-")
                if name.endswith(".dist-info") and package in distributions:
                    found.setdefault(package, version)
    return found


def torch_file() -> str:
    """Return the text of torch's version.py; empty without torch."""
    folder = folder_of("torch")
    try:
        return Path(folder, "version.py").read_text(encoding="utf-8", errors="replace") if folder else ""
    except OSError:
        return ""


def torch_build() -> str | None:
    """Return the platform that torch was built for: `cuda` or `hip`; None for neither, or without torch."""
    text = torch_file()
    return next((name for name in ("cuda", "hip") if assigned(text, name)), None)


def assigned(text: str, name: str) -> str | None:
    """Return the string that a line of a Python file assigns to a name."""
    found = re.search(rf"^{name}(?::[^=\n]*)? = '([^'\n]*)'", text, re.MULTILINE)
    return found[1] if found else None


def how_tested(version: str) -> str:
    """Return whether a version of torch was tested, as text."""
    releases = [_release(tested) for tested in TESTED_TORCH]
    release = _release(version)
    if release in releases:
        return "yes"
    place = (
        "newer than any of" if release > releases[-1] else "older than any of" if release < releases[0] else "none of"
    )
    return f"no: {place} {', '.join(TESTED_TORCH)}"


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else ()
