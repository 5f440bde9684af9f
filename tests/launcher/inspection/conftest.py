"""A folder in which the tests type, with a list of runs of its own; all runs end with the test."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.processes import run_dtrain

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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "script.py").write_text(SCRIPT)
    yield tmp_path
    for run in json.loads(run_dtrain("ps", "--json").stdout):
        run_dtrain("stop", "--kill", run["run_id"])
