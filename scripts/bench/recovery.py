"""Recovery beside torchrun: from the KILL of one of the ranks until all are through init_process_group again.

    python scripts/bench/recovery.py [--pairs 7] [--workers 2] [--state-mb 1]
    python scripts/bench/recovery.py --lost-host [--pairs 3]

In turns in one run; the ratio to torchrun is the median over pairs next to each other. torchrun gets
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its second attempt seldom comes up. Workers of `resilient` train
under `ddp.resilient`, and are measured until all have committed their next step; the others only meet.

With `--lost-host`, one of three hosts in network namespaces of their own is powered off and on again (root): from that
to the next commit of the others, beside the heartbeat timeout, and from its return to the first commit with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

LIMIT_S = 120.0
TIMEOUT_S = 2.0  # of heartbeats, with --lost-host
MARK = "RECOVERY_MARK"
SCRIPT = """
import json, os, pathlib, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}"
facts = {"pid": os.getpid(), "time": time.monotonic()}
path = pathlib.Path(os.environ["RECOVERY_FOLDER"], name)
path.with_suffix(path.suffix + ".new").write_text(json.dumps(facts))
os.rename(path.with_suffix(path.suffix + ".new"), path)
time.sleep(600)
"""
RESILIENT = """
import json, os, pathlib, time
import torch
import ddp
world = ddp.init()
side = int((float(os.environ["RECOVERY_STATE_MB"]) * 2**20 / 8) ** 0.5)  # float32, weights and momentum
model = ddp.DistributedDataParallel(torch.nn.Linear(side, side, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
state = ddp.State(model=model, optimizer=optimizer, step=0)

@ddp.resilient
def train(state):
    began = state.step
    while True:
        model(torch.randn(4, side)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.commit()
        if state.step == began + (1 if began else 5):
            facts = {"pid": os.getpid(), "time": time.monotonic()}
            path = pathlib.Path(os.environ["RECOVERY_FOLDER"], f"{int(began > 0)}.{world.rank}")
            path.with_suffix(path.suffix + ".new").write_text(json.dumps(facts))
            os.rename(path.with_suffix(path.suffix + ".new"), path)
        time.sleep(0.02)

train(state)
"""
COMMANDS = ("resilient", "dtrain", "torchrun")


@dataclass(frozen=True)
class Through:
    """A rank that is through init_process_group and a barrier; `time` is on the monotonic clock, one for all here."""

    pid: int
    time: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="runs of each command [%(default)s]")
    parser.add_argument("--workers", type=int, default=2, help="gloo or shm ranks [%(default)s]")
    parser.add_argument("--state-mb", type=float, default=1.0, help="weights and momentum of resilient's [%(default)s]")
    parser.add_argument("--only", choices=COMMANDS, help="measure one of them, without ratios")
    parser.add_argument("--lost-host", action="store_true", help="lose a host instead, and have it back")
    args = parser.parse_args()
    if args.lost_host:
        lose_hosts(args.pairs)
        return
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; {args.workers} workers")
    times: dict[str, list[float]] = {name: [] for name in COMMANDS if args.only in (None, name)}
    os.environ["RECOVERY_STATE_MB"] = str(args.state_mb)
    with tempfile.TemporaryDirectory() as name:
        for pair in range(args.pairs + 1):
            for command, taken in times.items():
                argv = argv_of(command, args.workers, Path(name))
                took_s = recover(argv, args.workers, Path(name, f"{command}{pair}"))
                if pair:  # the first pair warms the file cache
                    taken.append(took_s)
    print(f"{'command':9} {'recovery s':>10} {'least':>7} {'most':>7} {'runs':>5}   ratio")
    for command, taken in times.items():
        ratio = ""
        if command != "torchrun" and args.only is None:
            both = zip(taken, times["torchrun"], strict=True)
            ratio = f"   {statistics.median(a / b for a, b in both):.3f}"
        print(
            f"{command:9} {statistics.median(taken):10.3f} {min(taken):7.3f} {max(taken):7.3f} {len(taken):5}{ratio}",
            flush=True,
        )


def lose_hosts(times: int) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    from testbed.network import NetworkHosts
    from testbed.processes import started_dtrain
    from testbed.training_seen import TrainingSeen

    script = Path(__file__).resolve().parents[2] / "tests" / "ddp_worlds" / "elastic_script.py"
    print(f"{os.cpu_count()} cores, {platform.machine()}; heartbeat timeout {TIMEOUT_S:g} s, a step takes 0.1 s")
    print(f"{'lost host':12} {'next commit s':>14} {'joined again s':>15}")
    with tempfile.TemporaryDirectory() as name, NetworkHosts(Path(name, "lab")) as hosts:
        for number in range(times):
            lost = ("far3", "far1")[number % 2]  # the store is on far1
            options = ["--ssh-config", hosts.ssh_config, "--hosts", "far1,far2,far3", "--nnodes", "1:3"]
            options += ["--nproc-per-node", "1", "--heartbeat-timeout-s", f"{TIMEOUT_S:g}", "--grace-s", "1"]
            with started_dtrain("run", *options, script, "100", "0.1", cwd=Path(name)) as process:
                seen = TrainingSeen(process)
                seen.wait(lambda seen=seen: len(seen.sized(3)) > 30)
                taken = time.monotonic()
                hosts.poweroff(lost)
                seen.wait(lambda seen=seen: len(seen.sized(2)) > 20)
                given = time.monotonic()
                hosts.boot(lost)
                seen.wait(lambda seen=seen, given=given: len(seen.sized(3, after=given)) > 5)
                process.terminate()
                process.wait(LIMIT_S)
            shrunk, grown = seen.sized(2)[0].time - taken, seen.sized(3, after=given)[0].time - given
            print(f"{lost:12} {shrunk:14.2f} {grown:15.2f}", flush=True)
            hosts.reset()


def argv_of(command: str, workers: int, folder: Path) -> list[str]:
    script = folder / f"{command}.py"
    script.write_text(RESILIENT if command == "resilient" else SCRIPT)
    options = ["--nproc-per-node", str(workers), "--max-restarts", "1", str(script)]
    if command == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *options]
    return [sys.executable, "-m", "launcher", "run", "--log-dir", str(folder / "runs"), *options]


def recover(argv: list[str], workers: int, folder: Path) -> float:
    """Run a command, kill rank 1 once all are through, and return how long it took until all were through again."""
    folder.mkdir()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # torchrun's own choice, so that both start the same workers
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "RECOVERY_FOLDER": str(folder),
        MARK: str(folder),
    }
    with running(argv, environment, folder) as process:
        victim = all_through(process, workers, folder, attempt=0)[1]
        time.sleep(0.2)  # so that nobody is still on the way from the barrier to its sleep
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        return max(rank.time for rank in all_through(process, workers, folder, attempt=1)) - killed


def all_through(process: subprocess.Popen[bytes], workers: int, folder: Path, *, attempt: int) -> list[Through]:
    """Wait until every rank of an attempt has written that it is through."""
    paths = [folder / f"{attempt}.{rank}" for rank in range(workers)]
    deadline = time.monotonic() + LIMIT_S
    while not all(path.exists() for path in paths):
        if process.poll() is not None or time.monotonic() > deadline:
            said = (folder / "output").read_text(errors="replace")[-3000:]
            sys.exit(f"attempt {attempt} did not come up (status {process.poll()}):\n{said}")
        time.sleep(0.005)
    return [Through(**json.loads(path.read_text())) for path in paths]


@contextlib.contextmanager
def running(argv: list[str], environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command and end it with TERM, in the end with KILL; see that none of its processes is left."""
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        _, left = psutil.wait_procs(marked(environment[MARK]), timeout=5)
        if left:
            for each in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(left, timeout=10)
            print(f"{' '.join(argv[:4])} ... left {len(left)} processes, killed now", file=sys.stderr)
        process.wait()


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes, this one's descendants or not, that carry the run's mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


if __name__ == "__main__":
    main()
