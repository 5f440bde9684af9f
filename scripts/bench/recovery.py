"""Recovery beside torchrun: from the KILL of one of the ranks until all are through init_process_group again.

    python scripts/bench/recovery.py [--pairs 7] [--workers 2] [--state-mb 1] [--imports tqdm,transformers] [--json]
    python scripts/bench/recovery.py --late sklearn --begin "import time; T0 = time.time()" --wait-s 10
    python scripts/bench/recovery.py --kills 100 [--workers 2] [--seed 1]
    python scripts/bench/recovery.py --lost-host [--pairs 3]
    python scripts/bench/recovery.py --only torchft --torchft PYTHON

In turns in one run; the ratio to torchrun is the median over pairs next to each other. torchrun gets
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its second attempt seldom comes up. Workers of `resilient` train
under `ddp.resilient`, and are measured until all have committed their next step; the others only meet. With
--imports, all scripts begin with these imports, for an environment as people have it (.venv-full). With --late they
import these modules once they have joined their group, and each rank makes a step of an optimizer; --begin is a
statement before all imports. --wait-s is the time before the kill: dtrain learns which imports come late within it.

With --torchft, the interpreter of an environment that has torchft, that one trains beside them in the way of its own
example: a lighthouse, and a torchrun for each replica. It is measured until the replaced worker has made a step with
all others.

With --kills, train_gpt.py runs twice: undisturbed, and with so many workers killed at random moments, one after the
other, each as soon as all have made 1 to 20 steps since the one before. A recovery is from the KILL to the next step
that rank 0 prints, for which all ranks are needed; a step is lost if it is printed twice. The weights of both
runs are compared bit by bit.

With `--lost-host`, one of three hosts in network namespaces of their own is powered off and on again (root): from that
to the next commit of the others, beside the heartbeat timeout, and from its return to the first commit with it.

--json: one object a line instead of the first table, for plots.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import signal
import socket
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
TORCHFT = """
import json, os, pathlib, time
from datetime import timedelta
import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
replica, replicas = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
side = int((float(os.environ["RECOVERY_STATE_MB"]) * 2**20 / 8) ** 0.5)
net = torch.nn.Linear(side, side, bias=False)
def state_dict():
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
def load_state_dict(state):
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load_state_dict,
    state_dict=state_dict, replica_id=f"replica_{replica}", timeout=timedelta(seconds=30),
)
model = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9))
attempt, together = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), 0
while True:
    before = manager.current_step()
    optimizer.zero_grad()
    model(torch.randn(4, side)).square().mean().backward()
    optimizer.step()
    together += manager.num_participants() == replicas and manager.current_step() > before
    if together == (1 if attempt else 5):
        facts = {"pid": os.getpid(), "time": time.monotonic()}
        path = pathlib.Path(os.environ["RECOVERY_FOLDER"], f"{attempt}.{replica}")
        path.with_suffix(path.suffix + ".new").write_text(json.dumps(facts))
        os.rename(path.with_suffix(path.suffix + ".new"), path)
    time.sleep(0.02)
"""
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
# Before what runs in it; what stands above, its imports, has to stay there for the warm start.
SAY_PID = """
path = Path(os.environ["RECOVERY_FOLDER"], "pid." + os.environ["RANK"])
path.with_name(path.name + ".new").write_text(str(os.getpid()))
os.rename(path.with_name(path.name + ".new"), path)
"""
COMMANDS = ("resilient", "dtrain", "torchrun")


STEP = """
import torch
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.ones(1)
torch.optim.SGD([parameter], lr=0.1).step()
"""


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
    parser.add_argument("--kills", type=int, help="kill so many workers of one run of train_gpt.py instead")
    parser.add_argument("--seed", type=int, default=1, help="of the kills [%(default)s]")
    parser.add_argument("--torchft", metavar="PYTHON", help="measure torchft as well, which this interpreter has")
    parser.add_argument("--only", choices=(*COMMANDS, "torchft"), help="measure one of them, without ratios")
    parser.add_argument("--lost-host", action="store_true", help="lose a host instead, and have it back")
    parser.add_argument("--imports", metavar="MODULES", default="", help="what the scripts import first, by commas")
    parser.add_argument("--late", metavar="MODULES", default="", help="what they import in their group, by commas")
    parser.add_argument("--begin", metavar="STATEMENT", default="", help="what they begin with")
    parser.add_argument("--wait-s", type=float, default=0.2, help="before the kill [%(default)s]")
    parser.add_argument("--json", action="store_true", help="one object a line instead of the table")
    args = parser.parse_args()
    if args.lost_host:
        lose_hosts(args.pairs)
        return
    if not args.json:
        print(
            f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; {args.workers} workers"
        )
    if args.kills:
        sys.exit(compare_with_kills(args.kills, args.workers, random.Random(args.seed)))
    commands = (*COMMANDS, "torchft") if args.torchft else COMMANDS
    times: dict[str, list[float]] = {name: [] for name in commands if args.only in (None, name)}
    imports, late = (
        "".join(f"import {module}\n" for module in modules.split(",") if module)
        for modules in (args.imports, args.late)
    )
    begin = f"{args.begin}\n{imports}"
    os.environ["RECOVERY_TORCHFT"] = args.torchft or ""
    os.environ["RECOVERY_STATE_MB"] = str(args.state_mb)
    with tempfile.TemporaryDirectory() as name:
        for pair in range(args.pairs + 1):
            for command, taken in times.items():
                argv = argv_of(command, args.workers, Path(name), begin, late)
                took_s = recover(argv, args.workers, Path(name, f"{command}{pair}"), args.wait_s)
                if pair:  # the first pair warms the file cache
                    taken.append(took_s)
    if not args.json:
        print(f"{'command':9} {'recovery s':>10} {'least':>7} {'most':>7} {'runs':>5}   ratio")
    for command, taken in times.items():
        facts = {"median_s": statistics.median(taken), "least_s": min(taken), "most_s": max(taken)}
        ratio = ""
        if command != "torchrun" and args.only is None:
            both = zip(taken, times["torchrun"], strict=True)
            facts["ratio"] = statistics.median(a / b for a, b in both)
            ratio = f"   {facts['ratio']:.3f}"
        if args.json:
            print(json.dumps({"command": command, **{key: round(value, 3) for key, value in facts.items()}}))
            continue
        print(
            f"{command:9} {facts['median_s']:10.3f} {min(taken):7.3f} {max(taken):7.3f} {len(taken):5}{ratio}",
            flush=True,
        )


def compare_with_kills(kills: int, workers: int, chance: random.Random) -> int:
    """Print what the kills cost, and whether the results are equal; return 1 if they are not."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        runs = [train_gpt(Path(name, str(count)), count, kills, workers, chance) for count in (0, kills)]
        ours, theirs = (torch.load(Path(name, str(count), "gpt.pt"))["model"] for count in (kills, 0))
        are_equal = all(torch.equal(ours[key], theirs[key]) for key in theirs)
    found = runs[1]
    print(
        f"{'kills':>5} {'recovery s':>10} {'most':>7} {'alone':>6} {'steps lost':>10} {'steps':>6} {'equal bits':>10}"
    )
    print(
        f"{len(found.recoveries_s):5} {statistics.median(found.recoveries_s):10.3f} {max(found.recoveries_s):7.3f} "
        f"{found.alone:6} {found.lost:10} {len(found.losses):6} {'yes' if are_equal else 'NO':>10}"
    )
    return 0 if are_equal else 1


@dataclass(frozen=True)
class Trained:
    """A run of train_gpt.py: its printed losses by step, and what kills cost. `alone`: how often one was replaced."""

    losses: dict[int, str]
    recoveries_s: list[float]
    lost: int
    alone: int


def train_gpt(folder: Path, kills: int, most_kills: int, workers: int, chance: random.Random) -> Trained:
    folder.mkdir()
    begin = 'if __name__ == "__main__":'
    (folder / "gpt.py").write_text(EXAMPLE.read_text(encoding="utf-8").replace(begin, SAY_PID + begin))
    size = "--layers 1 --width 32 --heads 2 --block-size 32 --text-kb 40 --eval-blocks 25 --warmup-steps 5"
    steps = f"--batch-size {4 * workers} --steps {25 * most_kills} --log-every 1 --eval-every {25 * most_kills}"
    where = ["--out", str(folder / "gpt.pt"), "--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", "50"]
    options = ["--nproc-per-node", str(workers), "--max-restarts", str(kills), "--log-dir", str(folder / "runs")]
    script = [str(folder / "gpt.py"), *size.split(), *steps.split(), "--resilient", *where]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RECOVERY_FOLDER": str(folder), MARK: str(folder)}
    losses: dict[int, str] = {}
    recoveries_s: list[float] = []
    lost = 0
    killed_at, left, killed, victim = 0.0, chance.randrange(5, 20), 0, folder / "pid.0"
    with running([sys.executable, "-m", "launcher", "run", *options, *script], environment, folder) as process:
        for line in follow(folder / "output", process):
            if (match := re.search(r"step +(\d+)  loss (\S+)", line)) is None:
                continue
            lost += int(match[1]) in losses
            losses[int(match[1])] = match[2]
            if killed:
                if int(victim.read_text()) == killed:
                    continue  # printed before the others noticed
                recoveries_s.append(time.monotonic() - killed_at)
                killed, left = 0, chance.randrange(1, 21)
            left -= 1
            if left == 0 and len(recoveries_s) < kills:
                time.sleep(chance.random() * 0.02)
                victim = folder / f"pid.{chance.randrange(workers)}"
                killed, killed_at = int(victim.read_text()), time.monotonic()
                os.kill(killed, signal.SIGKILL)
    said = (folder / "output").read_text(errors="replace")
    if process.returncode != 0 or len(recoveries_s) != kills:
        sys.exit(f"{len(recoveries_s)} of {kills} kills, exit code {process.returncode}:\n{said[-3000:]}")
    return Trained(losses, recoveries_s, lost, said.count("only this worker restarts"))


def follow(path: Path, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """The lines that a process writes to a file, until it ends."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = ""
        deadline = time.monotonic() + LIMIT_S
        while True:
            has_ended = process.poll() is not None
            text += (more := file.read())
            if more:
                deadline = time.monotonic() + LIMIT_S
            *lines, text = text.split("\n")
            yield from lines
            if has_ended or time.monotonic() > deadline:
                return
            if not more:
                time.sleep(0.002)


def lose_hosts(times: int) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    from testbed.network import NetworkHosts
    from testbed.processes import started_dtrain
    from testbed.training_seen import TrainingSeen

    script = Path(__file__).resolve().parents[2] / "tests" / "programs" / "elastic.py"
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


def argv_of(command: str, workers: int, folder: Path, begin: str, late: str) -> list[str]:
    script = folder / f"{command}_script.py"
    text = {"resilient": RESILIENT, "torchft": TORCHFT}.get(command, SCRIPT)
    if late:
        joined = "world = ddp.init()\n" if command == "resilient" else 'dist.init_process_group("gloo")\n'
        text = text.replace(joined, joined + late + ("" if command == "resilient" else STEP))
    script.write_text(begin + text)
    if command == "torchft":
        return torchft_argv(Path(os.environ["RECOVERY_TORCHFT"]), workers, script)
    options = ["--nproc-per-node", str(workers), "--max-restarts", "1", str(script)]
    if command == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *options]
    return [sys.executable, "-m", "launcher", "run", "--log-dir", str(folder / "runs"), *options]


def torchft_argv(python: Path, replicas: int, script: Path) -> list[str]:
    """A shell that starts torchft's lighthouse and a torchrun for each replica, and ends with them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lighthouse = f"{python.parent / 'torchft_lighthouse'} --bind [::]:{port} --min_replicas 1 --join_timeout_ms 10000"
    torchrun = f"{python} -m torch.distributed.run --nproc-per-node 1 --max-restarts 1 --rdzv-backend c10d"
    start = [
        f"REPLICA_GROUP_ID={replica} {torchrun} --rdzv-endpoint localhost:0 {script} &" for replica in range(replicas)
    ]
    export = "unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE\n"  # its manager would wait without end for a store
    export += f"export TORCHFT_LIGHTHOUSE=http://localhost:{port} NUM_REPLICA_GROUPS={replicas}"
    return ["bash", "-c", "\n".join(["trap 'trap - TERM; kill 0' TERM", export, f"{lighthouse} &", *start, "wait"])]


def recover(argv: list[str], workers: int, folder: Path, wait_s: float) -> float:
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
        time.sleep(wait_s)  # at least so long that no one is still on the way from the barrier to its sleep
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        again = [1] if argv[0] == "bash" else None  # torchft's survivors are not started again
        return max(rank.time for rank in all_through(process, workers, folder, attempt=1, only=again)) - killed


def all_through(
    process: subprocess.Popen[bytes], workers: int, folder: Path, *, attempt: int, only: list[int] | None = None
) -> list[Through]:
    """Wait until every rank of an attempt, or of `only` these, has written that it is through."""
    paths = [folder / f"{attempt}.{rank}" for rank in only or range(workers)]
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
