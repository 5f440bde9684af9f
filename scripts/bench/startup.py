"""Start-up beside torchrun: wall time, CPU seconds and memory of whole commands, in turns in one run.

    python scripts/bench/startup.py [--pairs 7] [--workers 2] [--imports tqdm,transformers] [--json]

Two scripts: one that does nothing, one that does init_process_group("gloo") and a barrier; that one also as a second
run on what `--keep-warm` has left. Ratios are medians over pairs of runs next to each other. CPU seconds are those of
the command and all that it started and waited for, so of a warm run those of dtrain alone. Memory is the largest sum of
the proportional share (PSS) of all its processes, sampled in a run of its own. --imports: both scripts begin with these
imports, for an environment as people have it (.venv-full).
--json: one object a line instead of the table, for plots.py, and no warm runs.
"""

from __future__ import annotations

import argparse
import json
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
    parser.add_argument("--imports", metavar="MODULES", default="", help="what the scripts import first, by commas")
    parser.add_argument("--json", action="store_true", help="one object a line instead of the table")
    args = parser.parse_args()
    if not args.json:
        print(
            f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; {args.workers} workers"
        )
        print(
            f"{'script':30} {'command':12} {'wall s':>7} {'CPU s':>7} {'peak MB':>8} {'agent MB':>9}   ratio wall, CPU"
        )
    imports = "".join(f"import {name}\n" for name in args.imports.split(",") if name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder  # where what is kept warm is found
        for name, text in SCRIPTS.items():
            script = Path(folder, "script.py")
            script.write_text(imports + text)
            compare(name, script, args, Path(folder), warm=bool(text) and not args.json)


def compare(name: str, script: Path, args: argparse.Namespace, folder: Path, *, warm: bool) -> None:
    count = str(args.workers)
    ours = [sys.executable, "-m", "launcher", "run", "--log-dir", str(folder / "runs"), "--nproc-per-node", count]
    theirs = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count]
    commands = {"torchrun": [*theirs, str(script)], "dtrain": [*ours, str(script)]}
    if warm:
        commands["second, warm"] = [*ours, "--keep-warm", "10m", str(script)]
    runs: dict[str, list[Run]] = {command: [] for command in commands}
    try:
        for pair in range(args.pairs + 1):
            for command, argv in commands.items():
                # The first of dtrain's must not find what is warm.
                run = measure(argv, **({"XDG_RUNTIME_DIR": ""} if command == "dtrain" else {}))
                if pair:  # the first pair warms the file cache
                    runs[command].append(run)
    finally:
        stop = [sys.executable, "-m", "launcher", "warm", "--stop"]
        subprocess.run(stop, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    for command, argv in commands.items():
        wall_s = statistics.median(run.wall_s for run in runs[command])
        cpu_s = statistics.median(run.cpu_s for run in runs[command])
        facts = {"script": name, "workers": args.workers, "command": command, "wall_s": wall_s, "cpu_s": cpu_s}
        memory_mb = agent = ""
        if command in ("dtrain", "torchrun"):
            peak_mb, agent_mb = memory(argv)
            memory_mb, agent = f"{peak_mb:.1f}", f"{agent_mb:.1f}" if command == "dtrain" else ""
            facts["memory_mb"] = peak_mb
        ratio = ""
        if command != "torchrun":
            both = list(zip(runs[command], runs["torchrun"], strict=True))
            wall = statistics.median(a.wall_s / b.wall_s for a, b in both)
            cpu = statistics.median(a.cpu_s / b.cpu_s for a, b in both)
            facts |= {"wall_ratio": wall, "cpu_ratio": cpu}
            ratio = f"   {wall:.3f}, {cpu:.3f}"
        if args.json:
            print(
                json.dumps(
                    {key: round(value, 3) if isinstance(value, float) else value for key, value in facts.items()}
                )
            )
            continue
        print(f"{name:30} {command:12} {wall_s:7.3f} {cpu_s:7.3f} {memory_mb:>8} {agent:>9}{ratio}", flush=True)


def measure(argv: list[str], **also: str) -> Run:
    """Run a command to its end, which must be a good one; `also` are variables."""
    env = {**environment(), **also}
    began = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
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
