"""Start-up beside torchrun: wall time, CPU seconds and memory of whole commands, in turns in one run.

    python scripts/bench/startup.py [--pairs 7] [--workers 2]

Two scripts: one that does nothing, one that does init_process_group("gloo") and a barrier. Ratios are medians over
pairs of runs next to each other. CPU seconds are those of the command and all that it started and waited for. Memory is
the largest sum of the proportional share (PSS) of all its processes, sampled in a run of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

SCRIPTS = {
    "does nothing": "",
    "init_process_group + barrier": (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"
    ),
}


@dataclass(frozen=True)
class Run:
    wall_s: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="runs of each command [%(default)s]")
    parser.add_argument("--workers", type=int, default=2, help="workers of each run [%(default)s]")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; {args.workers} workers")
    print(f"{'script':30} {'command':9} {'wall s':>7} {'CPU s':>7} {'peak MB':>8} {'agent MB':>9}   ratio (wall, CPU)")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in SCRIPTS.items():
            script = Path(folder, "script.py")
            script.write_text(text)
            compare(name, script, args.pairs, args.workers, Path(folder))


def compare(name: str, script: Path, pairs: int, workers: int, folder: Path) -> None:
    count = str(workers)
    ours = [sys.executable, "-m", "launcher", "run", "--log-dir", str(folder / "runs"), "--nproc-per-node", count]
    theirs = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count]
    commands = {"dtrain": [*ours, str(script)], "torchrun": [*theirs, str(script)]}
    runs: dict[str, list[Run]] = {command: [] for command in commands}
    for pair in range(pairs + 1):
        for command, argv in commands.items():
            run = measure(argv)
            if pair:  # the first pair warms the file cache
                runs[command].append(run)
    for command, argv in commands.items():
        wall_s = statistics.median(run.wall_s for run in runs[command])
        cpu_s = statistics.median(run.cpu_s for run in runs[command])
        peak_mb, agent_mb = memory(argv)
        agent = f"{agent_mb:9.1f}" if command == "dtrain" else f"{'':9}"
        ratio = ""
        if command == "dtrain":
            both = list(zip(runs["dtrain"], runs["torchrun"], strict=True))
            wall = statistics.median(a.wall_s / b.wall_s for a, b in both)
            cpu = statistics.median(a.cpu_s / b.cpu_s for a, b in both)
            ratio = f"   {wall:.3f}, {cpu:.3f}"
        print(f"{name:30} {command:9} {wall_s:7.3f} {cpu_s:7.3f} {peak_mb:8.1f} {agent}{ratio}", flush=True)


def measure(argv: list[str]) -> Run:
    """Run a command to its end, which must be a good one."""
    began = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{' '.join(argv)} ended with {process.returncode}")
    return Run(wall_s, usage.ru_utime + usage.ru_stime)


def memory(argv: list[str]) -> tuple[float, float]:
    """Return the peak of the sum over all processes, and of the agents alone, in MB."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    peak = agent_peak = 0
    while process.poll() is None:
        total = 0
        for each in tree(process.pid):
            try:
                full = each.memory_full_info()
                total += full.pss
                if "launcher.agent" in each.cmdline():
                    agent_peak = max(agent_peak, full.rss)
            except psutil.Error:
                continue
        peak = max(peak, total)
        time.sleep(0.01)
    return peak / 1e6, agent_peak / 1e6


def tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun's own choice, so that both start the same workers


if __name__ == "__main__":
    main()
