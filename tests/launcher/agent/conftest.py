"""What the tests of fork servers and of processes kept warm share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.processes import wait_until

from launcher.agent.warm.kept import stop


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules count as installed."""
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder in which nothing is warm, nor anything at the end."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    for each in (folder / "dtrain-warm", folder):
        if each.exists():
            os.chown(each, os.getuid(), -1)
            each.chmod(0o700)
    stop()
    wait_until(lambda: not [*folder.iterdir()], "nothing is left in the runtime folder")
