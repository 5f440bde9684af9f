"""What a detached run costs the machine that it was started from: its controller's memory, CPU time and longest stop.

    python scripts/bench/login_node.py [--hosts 2] [--ranks 4] [--steps-per-s 50] [--for-s 120]

The run is a real one, on simulated hosts, whose agents are not counted: on others they are elsewhere. Its ranks only
record steps, as ddp does (the format is in ddp/monitoring/timeline.py), so that the machine is not busy with them.
Memory is what is the controller's own (USS) and what is resident (RSS); CPU time is that of its process.

The longest stop is that of a loop beside the thinning of a full timeline.jsonl, in the same process: how much later
than after 1 ms it goes on; and, to compare with, without thinning for as long.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from launcher.timeline.file import LIMIT_BYTES, THINNED, TIMELINE, TimelineFile

START_S = 10.0  # of the run, that is not measured
LOOP_S = 0.001
PHASES_S = [0.0012, 0.0061, 0.0072, 0.0034, 0.0011, 0.001]
RANK = """
import mmap, os, struct, sys, time
record = struct.Struct("<q8d")
def mapped(name):
    with open(os.environ[name], "r+b") as file:
        return mmap.mmap(file.fileno(), 0)
counters = memoryview(mapped("DTRAIN_PROGRESS_FILE")).cast("Q")
ring = mapped("DTRAIN_TIMELINE_FILE")
header, records = memoryview(ring)[:16].cast("Q"), (len(ring) - 16) // record.size
header[0] = os.getpid()
def put(kind, *values):
    number = header[1]
    record.pack_into(ring, 16 + number % records * record.size, 4 * number + kind, *values)
    header[1] = number + 1
pause_s, until, step = float(sys.argv[1]), time.monotonic() + float(sys.argv[2]), 0
next_s = began = detailed = time.monotonic()
while next_s < until:
    next_s += pause_s
    time.sleep(max(0.0, next_s - time.monotonic()))
    step, now = step + 1, time.monotonic()
    put(0, step, now, *(share * (now - began) for share in (0.06, 0.3, 0.36, 0.17, 0.06, 0.05)))
    if now > detailed + 0.9:
        detailed = now
        for phase in (1, 2, 3, 4, 3, 4, 3, 4, 5):
            put(2, phase, -1, step, began, now, 0, 0, 0)
    counters[0], began = step, now
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4, help="of each host")
    parser.add_argument("--steps-per-s", type=float, default=50.0)
    parser.add_argument("--for-s", type=float, default=120.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        of_a_run(Path(folder), args)
        of_thinning(Path(folder))


def of_a_run(folder: Path, args: argparse.Namespace) -> None:
    (folder / "rank.py").write_text(RANK)
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(Path(__file__).parents[2])}

    def dtrain(*words: str) -> str:
        command = [sys.executable, "-m", "launcher", *words]
        return subprocess.run(
            command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    where = ["--simulate", "--nnodes", str(args.hosts), "--nproc-per-node", str(args.ranks)]
    script = ["rank.py", str(1 / args.steps_per_s), str(START_S + args.for_s + 60.0)]
    dtrain("run", "--detach", "--run-id", "bench", *where, *script)
    try:
        controller = psutil.Process(json.loads(dtrain("ps", "--json"))[0]["pid"])
        time.sleep(START_S)
        before, began = controller.cpu_times(), time.monotonic()
        time.sleep(args.for_s)
        now, memory = controller.cpu_times(), controller.memory_full_info()
        share = (now.user + now.system - before.user - before.system) / (time.monotonic() - began)
        ranks = args.hosts * args.ranks
        print(
            f"{ranks} ranks at {args.steps_per_s:g} steps/s for {args.for_s:g} s: {100 * share:.2f} % of a core, ",
            end="",
        )
        print(f"own memory {memory.uss / 1e6:.1f} MB, resident {memory.rss / 1e6:.1f} MB")
    finally:
        dtrain("stop", "--kill", "bench")


def of_thinning(folder: Path) -> None:
    file = TimelineFile(folder, "bench", print)
    file.begin()
    step, path = 0, folder / TIMELINE
    while not path.exists() or path.stat().st_size < 0.98 * LIMIT_BYTES:
        step += 1
        for rank in range(100):
            file.add("steps", 0, rank, step, 50, float(step), PHASES_S)
        time.sleep(LOOP_S)
    full = path.stat().st_ino
    while path.stat().st_size <= LIMIT_BYTES and path.stat().st_ino == full:
        file.add("steps", 0, 0, step, 50, float(step), PHASES_S)
        time.sleep(LOOP_S / 10)
    began, cpu = time.monotonic(), time.process_time()
    with_ = longest_stop_s(lambda: path.stat().st_ino == full or path.stat().st_size > THINNED * LIMIT_BYTES)
    took_s = time.monotonic() - began
    print(f"thinning {LIMIT_BYTES >> 20} MiB: {took_s:.1f} s, {time.process_time() - cpu:.1f} s of CPU time", end="")
    without = longest_stop_s(lambda: time.monotonic() < began + 2 * took_s)
    print(f", longest stop {1e3 * with_:.1f} ms; without it {1e3 * without:.1f} ms")
    file.close()


def longest_stop_s(goes_on: Callable[[], bool]) -> float:
    longest_s = 0.0
    while goes_on():
        began = time.monotonic()
        time.sleep(LOOP_S)
        longest_s = max(longest_s, time.monotonic() - began - LOOP_S)
    return longest_s


if __name__ == "__main__":
    main()
