"""Random faults in a resilient training: what each costs, and whether anything but time is lost.

    python scripts/bench/faults.py [--runs 50] [--seed N]

Each run trains on 2 to 4 ranks, over shared memory or gloo, with batch normalization, an average of the weights (EMA),
a schedule, bfloat16 autocast, accumulated gradients, a worker of a DataLoader and checkpoints. It has one to three
faults: a rank is killed, raises, exits, loses the worker of its DataLoader, or a signal's handler raises at some line
of ddp's. They come at named places of a step, and while the ranks recover. One rank of each run has none, since all
start again where no rank is left that has the state. A run is not as promised if it takes long, ends with another code
than 0, restarts other ranks than had a fault, or ends with other bits than one without faults.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 10.0  # that a fault may cost; more counts as a hang
KINDS = ("kill", "raise", "exit", "loader", "interrupt")
PLACES = ("fetched", "forward", "accumulated", "backward", "stepped", "averaged", "committed", "saved", "evaluated")
RECOVERING = "entered"
SCRIPT = """
import hashlib, json, multiprocessing, os, signal, sys, time
from pathlib import Path
import torch, ddp
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

world = ddp.init()
faults = json.loads(sys.argv[1])
ddp_files = os.path.dirname(ddp.__file__)
print("begins", world.rank, os.getpid(), flush=True)

def interrupt(number, after):
    seen = [0]
    def died(signum, frame):
        Path(f"came{number}").touch()
        raise RuntimeError("a signal's handler raises")
    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(ddp_files):
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == after:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR2)
        return trace
    signal.signal(signal.SIGUSR2, died)
    sys.settrace(trace)

def at(place, step):
    for number, (rank, where, when, kind, line) in enumerate(faults):
        if (rank, where) != (world.rank, place) or step < when or (where == "entered" and not Path("fault0").exists()):
            continue
        loaders = multiprocessing.active_children()
        if kind == "loader" and not loaders:
            continue
        try:
            Path(f"fault{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        if kind == "interrupt":
            interrupt(number, line)
            continue
        Path(f"came{number}").touch()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "raise":
            raise ValueError("this rank fails")
        elif kind == "exit":
            sys.exit(3)
        else:
            os.kill(loaders[0].pid, signal.SIGKILL)
            time.sleep(20)  # the handler of SIGCHLD comes

torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(480, 12), torch.randint(3, (480,)))
net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
model = ddp.DistributedDataParallel(net)
torch.manual_seed(10 + world.rank)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
sampler = ddp.DistributedSampler(data)
checkpoint = ddp.Checkpoint("saved")
state = ddp.State(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, ema=ema, epoch=0, step=0)

@ddp.resilient
def train(state):
    at("entered", state.step)
    for state.epoch in range(state.epoch, 2):
        sampler.set_epoch(state.epoch)
        for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler, num_workers=1):
            at("fetched", state.step)
            half = len(x) // 2
            with torch.autocast("cpu", dtype=torch.bfloat16):
                with model.no_sync():
                    loss = nn.functional.cross_entropy(model(x[:half]), y[:half]) / 2
                    at("forward", state.step)
                    loss.backward()
                at("accumulated", state.step)
                loss = nn.functional.cross_entropy(model(x[half:]), y[half:]) / 2
            loss.backward()
            at("backward", state.step)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            at("stepped", state.step)
            ema.update_parameters(net)
            at("averaged", state.step)
            sampler.advance(len(x))
            state.step += 1
            state.commit()
            sys.settrace(None)
            at("committed", state.step)
            if checkpoint.due(state.step, every=7):
                checkpoint.save(state.step, model=model, optimizer=optimizer, ema=ema.state_dict())
                at("saved", state.step)
            if state.step % 9 == 0:
                with torch.no_grad():
                    net.eval()(data.tensors[0])
                net.train()
                at("evaluated", state.step)
    checkpoint.wait()

train(state)
everything = [*net.state_dict().values(), *ema.state_dict().values()]
everything += [value for each in optimizer.state.values() for value in each.values()]
digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in everything)).hexdigest()
print("ends", world.rank, os.getpid(), state.step, scheduler.get_last_lr(), digest, flush=True)
"""


@dataclass(frozen=True)
class Run:
    """How a run ended. `came` are the numbers of the faults that came, `named` the ranks that were restarted."""

    code: int
    wall_s: float
    came: list[int]
    named: list[int]
    ends: dict[int, str]
    processes: int
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    args = parser.parse_args()
    print(f"seed {args.seed}")
    numbers = random.Random(args.seed)
    undisturbed: dict[tuple[int, str], Run] = {}
    came: Counter[str] = Counter()
    costs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    wrong = 0
    for number in range(args.runs):
        world = numbers.randint(2, 4), numbers.choice(["", "gloo"])
        if world not in undisturbed:
            undisturbed[world] = train(*world, [])
            assert undisturbed[world].code == 0, undisturbed[world].text
        failing = numbers.sample(range(world[0]), world[0] - 1)
        faults = [fault(numbers, failing, is_first=not at) for at in range(numbers.choice([1, 1, 2, 3]))]
        run = train(*world, faults)
        problems = check(run, undisturbed[world], faults)
        wrong += bool(problems)
        if problems:
            print(f"run {number}: {world[0]} ranks, {world[1] or 'shm'}, {faults}: {'; '.join(problems)}\n{run.text}")
        for at in run.came:
            came[str(faults[at][3])] += 1
        if len(run.came) == 1:
            costs[str(faults[run.came[0]][3])].append(run.wall_s - undisturbed[world].wall_s)
    print(f"{'fault':12}{'came':>8}{'costs s':>10}{'at most':>10}")
    for kind in KINDS:
        cost = costs[kind] or [float("nan")]
        print(f"{kind:12}{came[kind]:8}{statistics.median(cost):10.2f}{max(cost):10.2f}")
    print(f"{args.runs} runs with {came.total()} faults: {wrong} not as promised")


def fault(numbers: random.Random, ranks: list[int], *, is_first: bool) -> tuple[int, str, int, str, int]:
    """A rank, a place, from which step on, a kind, and at which line of ddp's after that."""
    place = RECOVERING if not is_first and numbers.random() < 0.5 else numbers.choice(PLACES)
    step = 0 if place == RECOVERING else numbers.randrange(20)
    return numbers.choice(ranks), place, step, numbers.choice(KINDS), numbers.randrange(1, 1500)


def train(ranks: int, backend: str, faults: list[tuple[int, str, int, str, int]]) -> Run:
    argv = [sys.executable, "-m", "launcher", "run", "--nproc-per-node", str(ranks), "--max-restarts", "9", "train.py"]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        # A killed process leaves its folder of multiprocessing, where the name of a socket must be short.
        env = {**os.environ, "DTRAIN_BACKEND": backend, "TMPDIR": folder}
        Path(folder, "train.py").write_text(SCRIPT)
        began = time.monotonic()
        try:
            ended = subprocess.run(
                [*argv, json.dumps(faults)],
                cwd=folder,
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=120,
            )
            code, text = ended.returncode, ended.stdout
        except subprocess.TimeoutExpired as error:
            code, text = 124, (error.stdout or b"").decode(errors="replace")
        wall_s = time.monotonic() - began
        came = [number for number in range(len(faults)) if Path(folder, f"came{number}").exists()]
    ends = {int(rank): rest for rank, rest in re.findall(r"ends (\d+) \d+ (.*)", text)}
    named = [int(rank) for rank in re.findall(r"dtrain: rank (\d+) on .*; only this worker restarts", text)]
    return Run(code, wall_s, came, named, ends, len(re.findall(r"begins \d+ \d+", text)), text)


def check(run: Run, undisturbed: Run, faults: list[tuple[int, str, int, str, int]]) -> list[str]:
    """What is not as promised. What a handler raises in a destructor is ignored by Python, and then no fault."""
    sure = [faults[at][0] for at in run.came if faults[at][3] != "interrupt"]
    possible = Counter(faults[at][0] for at in run.came)
    problems = []
    if run.code != 0:
        problems.append(f"exit code {run.code}")
    if Counter(sure) - Counter(run.named) or Counter(run.named) - possible:
        problems.append(f"restarted {run.named} for faults of {[faults[at][0] for at in run.came]}")
    if run.processes != len(undisturbed.ends) + len(run.named):
        problems.append(f"{run.processes} processes began")
    if run.ends != undisturbed.ends:
        problems.append("other bits")
    if run.wall_s > undisturbed.wall_s + LIMIT_S * max(1, len(run.came)):
        problems.append(f"took {run.wall_s:.1f} s instead of {undisturbed.wall_s:.1f}")
    return problems


if __name__ == "__main__":
    main()
