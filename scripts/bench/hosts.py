"""How long many SSH hosts take: one worker each that does nothing, beside mpirun and parallel OpenSSH clients.

    python scripts/bench/hosts.py [--hosts 1,2,4,8,16,32] [--repeats 5]
    python scripts/bench/hosts.py --simulate 128,256,512,1000
    python scripts/bench/hosts.py --slurm 2,4,8,16,32

The hosts are real sshd on 127.0.0.2, .3, ... that are started for this run, with keys and files of their own. All of
them share this machine's processors, so the time grows with their number where separate machines would not. The
clients only log in and start Python once on each host: no launcher can be faster than they are. Compare within a row.
"CPU" is the processor time of everything on both ends by that of the clients and theirs, which other load changes less.

With --simulate, this machine is divided between so many hosts: real agents, one worker each, which is /bin/true.
CPU is the processor time of all processes for each host, which other load changes less than the time. Memory is
dtrain's own at its peak (RSS), and what all the processes take together (what is available drops by it).

With --slurm, the nodes of a SLURM cluster that is started for this run (as root), all on this machine: the processor
time is that of dtrain and its sruns, since the rest is on the nodes, which elsewhere are not this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from testbed.processes import wait_until
from testbed.slurm import Node, SlurmCluster
from testbed.sshd import SshHosts

from launcher.machine.processes import adopt_orphans

MEASURED = """
import resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.perf_counter() - began, used.ru_utime + used.ru_stime)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="1,2,4,8,16,32", help="numbers of hosts [%(default)s]")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, in turns [%(default)s]")
    parser.add_argument("--simulate", metavar="HOSTS", help="numbers of simulated hosts, instead")
    parser.add_argument("--slurm", metavar="NODES", help="numbers of nodes of a SLURM cluster, instead")
    args = parser.parse_args()
    if args.slurm:
        slurm([int(word) for word in args.slurm.split(",")], args.repeats)
        return
    if args.simulate:
        simulated([int(word) for word in args.simulate.split(",")])
        return
    counts = [int(word) for word in args.hosts.split(",")]
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; medians of {args.repeats}"
    )
    print(f"{'hosts':>5} {'dtrain s':>9} {'ssh s':>9} {'mpirun s':>9} {'dtrain/ssh':>11} {'CPU':>5}")
    with tempfile.TemporaryDirectory() as name, SshHosts(Path(name, "lab"), count=max(counts)) as lab:
        folder = Path(name)
        (folder / "empty.py").write_text("")
        for count in counts:
            times: dict[str, list[float]] = {"dtrain": [], "ssh": [], "mpirun": []}
            cpu: dict[str, list[float]] = {"dtrain": [], "ssh": []}
            failed = 0
            for _ in range(args.repeats):
                for name, argv in (("dtrain", dtrain(lab, count, folder)), ("ssh", openssh(lab, count, folder))):
                    before = cpu_s(lab)
                    times[name].append(required(argv))
                    wait_until(
                        lambda: not any(lab.sessions(i + 1) for i in range(len(lab.names))), "all sessions ended"
                    )
                    cpu[name].append(cpu_s(lab) - before)
                if shutil.which("mpirun"):
                    wall_s = timed(mpirun(lab, count, folder))[0]
                    times["mpirun"] += [] if wall_s is None else [wall_s]
                    failed += wall_s is None
            row = [f"{statistics.median(t):9.2f}" if t else f"{'-':>9}" for t in times.values()]
            ratio = statistics.median(a / b for a, b in zip(times["dtrain"], times["ssh"], strict=True))
            cpu_ratio = statistics.median(a / b for a, b in zip(cpu["dtrain"], cpu["ssh"], strict=True))
            note = (
                f"  (mpirun failed {failed} times)" if failed else ""
            )  # its daemons crash at times, all on one machine
            print(f"{count:5} {' '.join(row)} {ratio:11.2f} {cpu_ratio:5.2f}{note}", flush=True)


def cpu_s(lab: SshHosts) -> float:
    """Return the processor time so far of what was started here, and of the sessions that have ended on the hosts."""
    there = [psutil.Process(pid).cpu_times() for pid in lab.pids]
    return children_cpu_s() + sum(times.children_user + times.children_system for times in there)


def children_cpu_s() -> float:
    """Return the processor time so far of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def simulated(counts: list[int]) -> None:
    """Print a row for each number of simulated hosts."""
    adopt_orphans()  # so that the processor time of all is known here
    print(f"{'hosts':>5} {'s':>7} {'ms/host':>8} {'CPU ms':>7}", end=" ")
    print(f"{'dtrain MB':>10} {'threads':>8} {'files':>6} {'all MB':>7}")
    for count in counts:
        used_before_s = children_cpu_s()
        with tempfile.TemporaryDirectory() as folder:
            argv = [sys.executable, "-m", "launcher", "run", "--simulate", "--nnodes", str(count)]
            argv += ["--nproc-per-node", "1", "--log-dir", folder, "--start-timeout-s", "600"]
            began, free = time.perf_counter(), psutil.virtual_memory().available
            least, peak, threads, files = free, 0, 0, 0
            with subprocess.Popen([*argv, "--no-python", "/bin/true"], stderr=subprocess.PIPE) as run:
                dtrain_itself = psutil.Process(run.pid)
                while run.poll() is None:
                    with contextlib.suppress(psutil.Error):
                        peak = max(peak, dtrain_itself.memory_info().rss)
                        threads = max(threads, dtrain_itself.num_threads())
                        files = max(files, dtrain_itself.num_fds())
                    least = min(least, psutil.virtual_memory().available)
                    if least < 1 << 30:
                        run.terminate()
                        print(f"{count:5}  ended: less than 1 GB of this machine's memory was left")
                    time.sleep(0.05)
                said = run.stderr.read().decode() if run.stderr else ""
        wall_s = time.perf_counter() - began
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        if run.returncode != 0:
            sys.exit(f"{count} hosts: status {run.returncode}: {said}")
        each_ms = 1000 * (children_cpu_s() - used_before_s) / count
        row = f"{count:5} {wall_s:7.1f} {1000 * wall_s / count:8.1f} {each_ms:7.1f}"
        row += f" {peak / 1e6:10.0f} {threads:8} {files:6}"
        print(f"{row} {(free - least) / 1e6:7.0f}", flush=True)


def slurm(counts: list[int], repeats: int) -> None:
    """Print a row for each number of nodes of a SLURM cluster."""
    print(f"{'nodes':>5} {'s':>8} {'CPU s':>8}")
    for count in counts:
        with tempfile.TemporaryDirectory() as name, SlurmCluster(Path(name, "lab"), [Node()] * count) as cluster:
            folder = Path(name)
            (folder / "empty.py").write_text("")
            run = [sys.executable, "-m", "launcher", "run", "--log-dir", name, str(folder / "empty.py")]
            found: list[tuple[float, float]] = []
            for _ in range(repeats):
                said = cluster.say("salloc", "--quiet", f"-N{count}", sys.executable, "-c", MEASURED, *run)
                wall_s, used_s = map(float, said.splitlines()[-1].split())
                found.append((wall_s, used_s))
        wall_s, used_s = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{count:5} {wall_s:8.2f} {used_s:8.2f}", flush=True)


def timed(argv: list[str]) -> tuple[float | None, str]:
    """Return how long it took, or None with what it said if it failed."""
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    began = time.perf_counter()
    done = subprocess.run(argv, env=env, capture_output=True, check=False)
    wall_s = time.perf_counter() - began
    if done.returncode != 0:
        return None, f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.decode()}"
    return wall_s, ""


def required(argv: list[str]) -> float:
    wall_s, complaint = timed(argv)
    return wall_s if wall_s is not None else sys.exit(complaint)


def dtrain(lab: SshHosts, count: int, folder: Path) -> list[str]:
    options = ["--ssh-config", str(lab.ssh_config), "--hosts", ",".join(lab.names[:count]), "--log-dir", str(folder)]
    return [sys.executable, "-m", "launcher", "run", *options, str(folder / "empty.py")]


def openssh(lab: SshHosts, count: int, folder: Path) -> list[str]:
    """One ssh client for each host, all at once, running the same Python on the same script."""
    clients = " ".join(
        f"ssh -F {lab.ssh_config} {name} {sys.executable} {folder / 'empty.py'} &" for name in lab.names[:count]
    )
    return ["sh", "-c", f"{clients} wait"]


def mpirun(lab: SshHosts, count: int, folder: Path) -> list[str]:
    agent = folder / "rsh"
    agent.write_text(f'#!/bin/sh\nexec ssh -F {lab.ssh_config} "$@"\n')
    agent.chmod(0o700)
    hosts = ",".join(lab.names[:count])
    options = ["--mca", "plm_rsh_agent", str(agent), "--mca", "oob_tcp_if_include", "lo", "--mca", "btl", "self,tcp"]
    return ["mpirun", *options, "-np", str(count), "--host", hosts, sys.executable, str(folder / "empty.py")]


if __name__ == "__main__":
    main()
