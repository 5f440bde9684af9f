"""Watch the memory, threads and descriptors of a run's own processes while its workers write many short lines.

    python scripts/bench/soak.py [--seconds 300] [--lines-per-second 4000] [--workers 2] [--samples 20]

One row a sample: resident memory in MB, threads and open descriptors of dtrain, of its agent and of its guard. What
grows from the middle of the time to its end is said below; growth at the start is caches and the allocator.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0  # for the workers to be up
STOP_S = 30.0
BATCHES = 20  # a second
KINDS = ("dtrain", "agent", "guard")
WORKER = f"""
import os, sys, time
rank, lines, number = int(os.environ["RANK"]), int(sys.argv[1]), 0
due = time.monotonic()
while True:
    for _ in range(lines):
        os.write(1, b"rank %d step %d loss 0.12345\\n" % (rank, number))
        number += 1
    due = max(due + 1 / {BATCHES}, time.monotonic())
    time.sleep(max(0.0, due - time.monotonic()))
"""


@dataclass(frozen=True)
class Sample:
    """What one process has at one time."""

    memory_mb: float
    threads: int
    descriptors: int

    def __str__(self) -> str:
        return f"{self.memory_mb:9.2f} {self.threads:4} {self.descriptors:4}"


def find(root: psutil.Process) -> dict[str, psutil.Process]:
    """Return the run's own processes by what they are, as far as they are there."""
    found = {"dtrain": root}
    for kind, parent in (("guard", "dtrain"), ("agent", "guard")):  # the agent is a fork of its guard
        for child in found[parent].children() if parent in found else []:
            if "launcher.agent" in child.cmdline():
                found[kind] = child
    return found


def take(process: psutil.Process) -> Sample:
    return Sample(process.memory_info().rss / 2**20, process.num_threads(), process.num_fds())


def await_processes(run: subprocess.Popen[bytes]) -> dict[str, psutil.Process]:
    """Wait until the workers write. Raises TimeoutError."""
    assert run.stdout is not None
    timer = threading.Timer(START_S, run.kill)
    timer.start()
    began = bool(run.stdout.readline())
    timer.cancel()
    found = find(psutil.Process(run.pid)) if began else {}
    if set(found) != set(KINDS):
        raise TimeoutError(f"the run did not start; there are {sorted(found)}")
    return found


def watch(run: subprocess.Popen[bytes], arguments: argparse.Namespace) -> list[dict[str, Sample]]:
    """Print a row every so often, and return them."""
    processes = await_processes(run)
    lines = 0

    def drain() -> None:
        nonlocal lines
        assert run.stdout is not None
        while data := run.stdout.read1(1 << 16):  # type: ignore[attr-defined]  # a BufferedReader
            lines += data.count(b"\n")

    threading.Thread(target=drain, daemon=True).start()
    print(f"{'s':>6} {'lines/s':>8}" + "".join(f" {kind + ' MB':>10} {'thr':>4} {'fds':>4}" for kind in KINDS))
    rows = []
    began, before, counted = time.monotonic(), time.monotonic(), 0
    for number in range(1, arguments.samples + 1):
        time.sleep(max(0.0, began + arguments.seconds * number / arguments.samples - time.monotonic()))
        now, seen = time.monotonic(), lines
        rows.append({kind: take(process) for kind, process in processes.items()})
        rate = (seen - counted) / (now - before)
        print(f"{now - began:6.0f} {rate:8.0f}" + "".join(f"  {rows[-1][kind]}" for kind in KINDS), flush=True)
        before, counted = now, seen
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="[%(default)s]")
    parser.add_argument("--lines-per-second", type=int, default=4000, help="of all workers together [%(default)s]")
    parser.add_argument("--workers", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--samples", type=int, default=20, help="rows of the table [%(default)s]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "worker.py"
        script.write_text(WORKER)
        each = max(1, arguments.lines_per_second // arguments.workers // BATCHES)
        run = subprocess.Popen(
            [
                sys.executable,
                *("-m", "launcher", "run", "--nproc-per-node", str(arguments.workers)),
                *("--log-dir", f"{folder}/runs", str(script), str(each)),
            ],
            cwd=folder,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
            stdout=subprocess.PIPE,
        )
        try:
            rows = watch(run, arguments)
        finally:
            run.send_signal(signal.SIGTERM)
            try:
                run.wait(STOP_S)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
    middle, end = rows[len(rows) // 2], rows[-1]
    for kind in KINDS:
        print(f"{kind}: {end[kind].memory_mb - middle[kind].memory_mb:+.2f} MB in the second half")
    return 0


if __name__ == "__main__":
    sys.exit(main())
