"""A folder in which the tests type, with a list of runs of its own; and a run that several tests ask."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.processes import run_dtrain, wait_until

# Counts, and says how far it is at `tick`; rank 0 ends it for all once there is a file `go`. Imports nothing heavy.
SCRIPT = """
import os, pathlib, time

def count():
    n = 0
    while not pathlib.Path("go").exists():
        n += 1
        time.sleep(0.02)
        tick(n)
    return n

def tick(n):
    pathlib.Path("tick" + os.environ["RANK"]).write_text(str(n))

print("up", flush=True)
count()
"""


@pytest.fixture(autouse=True)
def folder(own_runs: Path) -> Path:
    (own_runs / "script.py").write_text(SCRIPT)
    return own_runs


@pytest.fixture(scope="module")
def _counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("counting")
    (folder / "script.py").write_text(SCRIPT)
    env = {"XDG_STATE_HOME": str(folder / "state")}
    argv = ("run", "--detach", "--run-id", "r", "--simulate", "--nnodes", "2", "--nproc-per-node", "1", "script.py")
    result = run_dtrain(*argv, cwd=folder, env=env)
    assert result.returncode == 0, result
    wait_until(lambda: len([*folder.glob("tick*")]) == 2, "the ranks are there")
    yield folder
    (folder / "go").touch()
    assert run_dtrain("wait", "r", cwd=folder, env=env).returncode == 0, "it has gone on all the time"


@pytest.fixture
def counting(_counting: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run `r` of two ranks on two simulated hosts, for tests that leave it as it is."""
    monkeypatch.chdir(_counting)
    monkeypatch.setenv("XDG_STATE_HOME", str(_counting / "state"))
    return _counting
