"""What `dtrain run --sync` costs, beside a run whose hosts have everything, and beside tar over ssh.

    python scripts/bench/sync.py [--files 1000] [--mb 20] [--hosts 2] [--repeats 5]
    python scripts/bench/sync.py --environment [--repeats 2]

The hosts are real sshd on 127.0.0.2, .3, ..., each in a mount namespace of its own where the project, this Python's
packages and the home folder are empty (as root); theirs is a Python without packages, since what this one loads at its
start may take longer than all else. They share this machine's processors with dtrain. A row is what a run takes longer
than the same run on hosts that have everything already; `tar` is `tar | ssh tar` to all hosts at once, of the same
files. All in turns. Files are text, two thirds of which zlib can take away, as with source code. `cpu s` is the time of
processors on both sides, which depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from testbed.processes import wait_until
from testbed.sshd import BareHosts, SshHosts

ROWS = ("first", "again", "one line", "tar")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000, help="files of the project [%(default)s]")
    parser.add_argument("--mb", type=int, default=20, help="their size together [%(default)s]")
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts [%(default)s]")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, in turns [%(default)s]")
    parser.add_argument("--environment", action="store_true", help="send this Python's packages as well")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; {args.hosts} hosts")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bare = BareHosts(folder / "bare", count=args.hosts)
        full = SshHosts(folder / "full", count=args.hosts)
        with bare, full:
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installation has compiled files
            os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
            project = bare.here / "project"
            make_project(project, args.files, args.mb << 20)
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "python")], check=True)
            measure(bare, full, project, args.repeats, environment=args.environment)


def measure(bare: BareHosts, full: SshHosts, project: Path, repeats: int, *, environment: bool) -> None:
    python = Path(os.environ["XDG_CACHE_HOME"]).parent / "python" / "bin" / "python"
    sync = ["--sync", "both" if environment else "code", "--python", str(python)]
    found: dict[str, list[tuple[float, float]]] = {row: [] for row in ("without", *ROWS)}
    for turn in range(repeats):
        bare.reset()
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
        if not turn:
            run(full, project, [])  # what is compiled once
        found["without"].append(run(full, project, []))
        found["first"].append(run(bare, project, sync))
        found["again"].append(run(bare, project, sync))
        found["without"].append(run(full, project, []))
        found["again"].append(run(bare, project, sync))
        (project / "module0.py").write_text(f"# {turn}\n")
        found["one line"].append(run(bare, project, sync))
        found["tar"].append(tar(bare, project, environment=environment))
    print(f"{'':10} {'s':>7} {'more':>7} {'of tar':>7} {'cpu s':>7} {'more':>7} {'of tar':>7}")
    medians = {row: [statistics.median(each) for each in zip(*costs, strict=True)] for row, costs in found.items()}
    for row, costs in medians.items():
        more = (
            costs if row == "tar" else [ours - without for ours, without in zip(costs, medians["without"], strict=True)]
        )
        cells = zip(costs, more, medians["tar"], strict=True)
        print(f"{row:10} " + " ".join(f"{s:7.2f} {more_s:7.3f} {more_s / tar_s:7.2f}" for s, more_s, tar_s in cells))


def make_project(project: Path, files: int, size: int) -> None:
    source = random.Random(7)
    project.mkdir(parents=True)
    (project / "train.py").write_text("print('hello')\n")
    names = [f"name_{n}" for n in range(500)]
    for number in range(files):
        lines, left = [], size // files
        while left > 0:
            lines.append(f"{source.choice(names)} = {source.choice(names)}({source.random():.6f})\n")
            left -= len(lines[-1])
        (project / f"module{number}.py").write_text("".join(lines))
    for words in (("init", "-q"), ("add", "-A")):
        subprocess.run(["git", "-C", str(project), *words], check=True)


def run(lab: SshHosts, project: Path, options: list[str]) -> tuple[float, float]:
    log_dir = str(Path(os.environ["XDG_CACHE_HOME"]).parent / "runs")
    hosts = ["--hosts", ",".join(lab.names), "--ssh-config", str(lab.ssh_config), "--log-dir", log_dir]
    argv = [sys.executable, "-m", "launcher", "run", *options, *hosts, "--start-timeout-s", "600", "train.py"]
    return timed(lab, lambda: subprocess.run(argv, cwd=project, capture_output=True, text=True))


def tar(lab: BareHosts, project: Path, *, environment: bool) -> tuple[float, float]:
    """Pack the same files once for each host, all at once, with ssh's own settings."""
    packages = [path for path in sys.path if path.endswith("site-packages")] if environment else []
    folders = " ".join([str(project), *packages])
    pipes = " ".join(
        f"tar -C / --exclude .git -cf - {folders} 2>/dev/null |"
        f" ssh -F {lab.ssh_config} {name} 'mkdir -p ~/tar && tar -C ~/tar -xf -' & pids=\"$pids $!\";"
        for name in lab.names
    )
    script = f"{pipes} for pid in $pids; do wait $pid || exit 1; done"
    return timed(lab, lambda: subprocess.run(["sh", "-c", script], capture_output=True, text=True))


def timed(lab: SshHosts, call: Callable[[], subprocess.CompletedProcess[str]]) -> tuple[float, float]:
    """Return how long a call takes, and the time of processors that it takes here and on the hosts."""
    before_s = cpu_s(lab)
    began = time.perf_counter()
    done = call()
    wall_s = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{done.args} ended with {done.returncode}: {done.stderr}")
    return wall_s, cpu_s(lab) - before_s


def cpu_s(lab: SshHosts) -> float:
    """Return the time of processors of all programs that have ended, here and on the hosts, once none runs there."""
    wait_until(lambda: not any(map(lab.sessions, range(1, len(lab.names) + 1))), "all sessions have ended")
    here = resource.getrusage(resource.RUSAGE_CHILDREN)
    there = [psutil.Process(pid).cpu_times() for pid in lab.pids]
    return here.ru_utime + here.ru_stime + sum(each.children_user + each.children_system for each in there)


if __name__ == "__main__":
    main()
