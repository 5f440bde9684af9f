"""From the signal to the last process gone: dtrain and torchrun, with workers that obey and workers that do not.

    python scripts/bench/stop.py [--pairs 5]

Two workers, each with a child in a session of its own. dtrain gets --grace-s 1, torchrun --shutdown-timeout 1. Printed
are the seconds from TERM until the launcher has exited, and how many processes of the run were alive then; these are
ended before the next run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

MARK = "STOP_MARK"
GRACE_S = 1
SCRIPT = """
import os, pathlib, signal, subprocess, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path(os.environ["STOP_FOLDER"], os.environ["RANK"]).touch()
time.sleep(600)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each command [%(default)s]")
    args = parser.parse_args()
    print(f"{'workers':10s}{'command':10s}{'seconds':>9s}{'most':>9s}{'left':>6s}")
    for workers in ("obedient", "stubborn"):
        found: dict[str, list[tuple[float, int]]] = {"dtrain": [], "torchrun": []}
        for _ in range(args.pairs):
            for name in found:
                found[name].append(measure(name, workers))
        for name, runs in found.items():
            times = [seconds for seconds, _ in runs]
            left = max(count for _, count in runs)
            print(f"{workers:10s}{name:10s}{statistics.median(times):9.2f}{max(times):9.2f}{left:6d}")


def measure(name: str, workers: str) -> tuple[float, int]:
    """Return the seconds from TERM to the launcher's exit, and how many processes it left."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        dtrain = ["-m", "launcher", "run", "-q", "--nproc-per-node", "2", "--grace-s", str(GRACE_S)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        torchrun += ["--shutdown-timeout", str(GRACE_S)]
        argv = [sys.executable, *(dtrain if name == "dtrain" else torchrun), str(script), workers]
        env = {**os.environ, MARK: mark, "STOP_FOLDER": folder}
        with subprocess.Popen(
            argv, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            while not all(Path(folder, rank).exists() for rank in "01"):
                time.sleep(0.01)
            time.sleep(0.2)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait()
            seconds = time.monotonic() - began
        left = marked(mark)
        for stray in left:
            stray.kill()
    return seconds, len(left)


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


if __name__ == "__main__":
    main()
