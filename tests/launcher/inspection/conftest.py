"""A folder in which the tests type, with a list of runs of its own; all runs end with the test."""

from pathlib import Path

import pytest

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
