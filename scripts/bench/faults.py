"""Random faults in a resilient training: what each costs, and whether anything but time is lost.

    python scripts/bench/faults.py [--faults 1000] [--epochs 10] [--seed N]

Each run trains on 2 to 4 ranks, over shared memory or gloo, with gradients of 5 kB or 1.4 MB, batch normalization, an
average of the weights (EMA), a schedule, bfloat16 autocast, accumulated gradients, a worker of a DataLoader,
evaluations and checkpoints. Each epoch but the last has one to three faults: a rank is killed, is stopped (SIGSTOP),
raises, exits, loses the worker of its DataLoader, is only 2 s late, or a signal's handler raises at some line of ddp's.
They come at named places of a step; at some line of a save, also in the thread that writes it; while the ranks recover;
on two ranks at the same moment. All start again where no rank is left that has the state, so one rank of each epoch has
no fault, and the first step of an epoch has none: there the ranks that failed in the epoch before get the state.

A run is not as promised if no rank commits for too long, if it ends with another code than 0, restarts other ranks than
had a fault, or ends with other bits, evaluations or another checkpoint than a run without faults.
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
from collections import Counter
from dataclasses import astuple, dataclass, replace
from itertools import count, pairwise
from pathlib import Path

LIMIT_S = 10.0  # that a fault may cost; more counts as a hang
CROWDED = 2.0  # load for each core, from which on the limit grows with it
STALL_S = 120  # without a step, which ends a run
KINDS = ("kill", "stop", "raise", "exit", "loader", "interrupt", "late")
WIDTHS = (32, 20_000)
PLACES = (
    *("fetched", "forward", "accumulated", "backward", "stepped", "averaged", "committed"),
    *("saving", "saved", "evaluating", "scored", "evaluated"),
)
RECOVERING = "entered"
SCRIPT = """
import hashlib, json, multiprocessing, os, signal, sys, threading, time
from pathlib import Path
import torch, ddp
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

world = ddp.init()
epochs, width, faults = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
print("begins", world.rank, os.getpid(), flush=True)

def died(signum, frame):
    raise RuntimeError("a signal's handler raises")

def act(number, kind):
    Path(f"came{number}").write_text(str(time.monotonic()))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "late":
        time.sleep(2)
    elif kind == "interrupt":  # in the main thread, whichever comes to this
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)

def at_line(number, kind, line, folder):
    left = [line]
    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                act(number, kind)
        return trace
    sys.settrace(trace)
    threading.settrace(trace)

def end_tracing():
    sys.settrace(None)
    threading.settrace(None)

def at(place):
    for number, (rank, where, epoch, step, kind, line, after, beside) in enumerate(faults):
        if (rank, where, epoch) != (world.rank, place, state.epoch) or state.step % per_epoch < step:
            continue
        loaders = multiprocessing.active_children()
        if (after >= 0 and not Path(f"begun{after}").exists()) or (kind == "loader" and not loaders):
            continue
        try:
            Path(f"begun{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        limit = time.monotonic() + 1
        while beside >= 0 and not Path(f"begun{beside}").exists() and time.monotonic() < limit:
            pass
        if kind == "raise":
            act(number, kind)
            raise ValueError("this rank fails")
        if kind == "exit":
            act(number, kind)
            sys.exit(3)
        if kind == "loader":
            act(number, kind)
            os.kill(loaders[0].pid, signal.SIGKILL)
            time.sleep(20)  # the handler of SIGCHLD comes
        elif place == "saving":
            at_line(number, kind, line, os.path.join(os.path.dirname(ddp.__file__), "checkpoint"))
        elif kind == "interrupt":
            at_line(number, kind, line, os.path.dirname(ddp.__file__))
        else:
            act(number, kind)

signal.signal(signal.SIGUSR2, died)
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(480, 12), torch.randint(3, (480,)))
net = nn.Sequential(nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))
model = ddp.DistributedDataParallel(net)
torch.manual_seed(10 + world.rank)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
sampler = ddp.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler, num_workers=1)
per_epoch = len(loader)
checkpoint = ddp.Checkpoint("saved")
state = ddp.State(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, ema=ema)
state.epoch, state.step, state.scores = 0, 0, []
def commit():
    state.commit()
    end_tracing()
    with open("commits", "a") as file:
        file.write(f"{world.rank} {time.monotonic()}\\n")

def score():
    net.eval()
    with torch.no_grad():
        right = (net(data.tensors[0]).argmax(1) == data.tensors[1]).sum()
    net.train()
    at("evaluating")
    dist.all_reduce(right)
    return int(right)

@ddp.resilient
def train(state):
    at("entered")
    net.train()
    for state.epoch in range(state.epoch, epochs):
        sampler.set_epoch(state.epoch)
        for x, y in loader:
            at("fetched")
            half = len(x) // 2
            with torch.autocast("cpu", dtype=torch.bfloat16):
                with model.no_sync():
                    loss = nn.functional.cross_entropy(model(x[:half]), y[:half]) / 2
                    at("forward")
                    loss.backward()
                at("accumulated")
                loss = nn.functional.cross_entropy(model(x[half:]), y[half:]) / 2
            loss.backward()
            at("backward")
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            at("stepped")
            ema.update_parameters(net)
            at("averaged")
            sampler.advance(len(x))
            state.step += 1
            commit()
            at("committed")
            if checkpoint.due(state.step, every=5):
                at("saving")
                checkpoint.save(state.step, model=model, optimizer=optimizer, ema=ema.state_dict())
                at("saved")
        if len(state.scores) == state.epoch:
            state.scores = [*state.scores, score()]
            at("scored")
            commit()
            at("evaluated")
    checkpoint.wait()

def digest(tensors):
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()[:16]

train(state)
everything = [*net.state_dict().values(), *ema.state_dict().values()]
everything += [value for each in optimizer.state.values() for value in each.values()]
newest = max(Path("saved").glob("step-*.pt"))
saved = torch.load(newest, weights_only=True)
print("ends", world.rank, state.step, scheduler.get_last_lr(), digest(everything), newest.name, saved["step"],
      digest([*saved["model"].values(), *saved["values"]["ema"].values()]), "scores", state.scores, flush=True)
"""


@dataclass(frozen=True)
class Fault:
    """On a rank, at a place of an epoch from a step of it on, or at so many lines of ddp's after that.

    `after`: only once that other fault has begun; `beside`: at the same moment as that one; -1 for none.
    """

    rank: int
    place: str
    epoch: int
    step: int
    kind: str
    line: int
    after: int = -1
    beside: int = -1


@dataclass(frozen=True)
class Run:
    """How a run ended. `came` are the faults that came, and when; `named` the ranks that were restarted.

    `commits` are ranks and times; `load` is that of the machine for each core.
    """

    code: int
    came: dict[Fault, float]
    named: list[int]
    ends: dict[int, str]
    processes: int
    commits: list[tuple[int, float]]
    load: float
    text: str

    def costs(self) -> list[tuple[list[Fault], float]]:
        """Return for each fault the seconds until its rank has committed again, with the faults that came until then.

        And the longest time without any commit.
        """
        spans = [
            (at_s, min((time_s for rank, time_s in self.commits if rank == fault.rank and time_s > at_s), default=at_s))
            for fault, at_s in self.came.items()
        ]
        times = sorted(time_s for _, time_s in self.commits)
        spans += [max(pairwise(times), key=lambda pair: pair[1] - pair[0])] if len(times) > 1 else []
        return [
            ([fault for fault, at_s in self.came.items() if began_s <= at_s < ended_s], ended_s - began_s)
            for began_s, ended_s in spans
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=1000, help="as many at least [%(default)s]")
    parser.add_argument("--epochs", type=int, default=10, help="of each run [%(default)s]")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of the first run")
    args = parser.parse_args()
    undisturbed: dict[tuple[int, str, int], Run] = {}
    came: Counter[str] = Counter()
    costs: dict[str, list[float]] = {}
    wrong = 0
    most = 0.0, 0.0
    for number in count():
        numbers = random.Random(args.seed + number)
        world = numbers.randint(2, 4), numbers.choice(["", "gloo"]), numbers.choice(WIDTHS)
        if world not in undisturbed:
            undisturbed[world] = train(*world, args.epochs, [])
            assert undisturbed[world].code == 0, undisturbed[world].text
        faults: list[Fault] = []
        for epoch in range(args.epochs - 1):
            faults += choose(numbers, world[0], epoch, first=len(faults))
        run = train(*world, args.epochs, faults)
        problems = check(run, undisturbed[world])
        wrong += bool(problems)
        if problems:
            print(
                f"seed {args.seed + number}: {world[0]} ranks, {world[1] or 'shm'}, {world[2]} wide: "
                f"{'; '.join(problems)}\n{run.text}"
            )
        came.update(fault.kind for fault in run.came)
        came["in a save"] += sum(fault.place == "saving" for fault in run.came)
        came["while the ranks recover"] += sum(fault.place == RECOVERING for fault in run.came)
        came["at the same moment"] += sum(
            fault.beside in range(at) for at, fault in enumerate(faults) if fault in run.came
        )
        for there, cost_s in run.costs():
            most = max(most, (cost_s / max(1, len(there)), run.load))
            if len(there) == 1:
                costs.setdefault(there[0].kind, []).append(cost_s)
        total = sum(came[kind] for kind in KINDS)
        print(f"seed {args.seed + number}: {total} faults so far", file=sys.stderr, flush=True)
        if total >= args.faults:
            break
    print(f"{'fault':24}{'came':>8}{'costs s':>10}{'at most':>10}")
    for kind, times in came.items():
        cost = costs.get(kind) or [float("nan")]
        print(f"{kind:24}{times:8}{statistics.median(cost):10.2f}{max(cost):10.2f}")
    print(f"at most {most[0]:.1f} s for a fault, with a load of {most[1]:.1f} for each core")
    print(f"{number + 1} runs with {total} faults from seed {args.seed}: {wrong} not as promised")


def choose(numbers: random.Random, ranks: int, epoch: int, *, first: int) -> list[Fault]:
    """Choose the faults of an epoch; `first` is the number of the first of them."""
    failing = numbers.sample(range(ranks), ranks - 1)
    faults = [_fault(numbers, numbers.choice(failing), epoch, numbers.choice(PLACES))]
    how = numbers.choice(["alone", "beside", "recovering", "both"])
    if how in ("beside", "both") and len(failing) > 1:
        other = numbers.choice([rank for rank in failing if rank != faults[0].rank])
        beside = _fault(numbers, other, epoch, faults[0].place, step=faults[0].step)
        faults = [replace(faults[0], beside=first + 1), replace(beside, beside=first)]
    if how in ("recovering", "both"):
        again = _fault(numbers, numbers.choice(failing), epoch, RECOVERING, step=0)
        faults.append(replace(again, after=first))
    return faults


def _fault(numbers: random.Random, rank: int, epoch: int, place: str, *, step: int | None = None) -> Fault:
    # A save takes few lines, and ends with the step.
    kinds = ("kill", "stop", "interrupt", "late") if place == "saving" else KINDS
    step = 0 if place in PLACES[-3:] else numbers.randrange(epoch > 0, 8) if step is None else step
    return Fault(rank, place, epoch, step, numbers.choice(kinds), int(10 ** numbers.uniform(0, 3)))


def train(ranks: int, backend: str, width: int, epochs: int, faults: list[Fault]) -> Run:
    argv = [sys.executable, "-m", "launcher", "run", "--nproc-per-node", str(ranks), "--max-restarts", str(len(faults))]
    argv += ["--hang", "auto", "--stall-timeout-s", str(STALL_S), "train.py", str(epochs), str(width)]
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        # A killed process leaves its folder of multiprocessing, where the name of a socket must be short.
        folder, env = Path(name), {**os.environ, "DTRAIN_BACKEND": backend, "TMPDIR": name}
        (folder / "train.py").write_text(SCRIPT)
        (folder / "commits").touch()
        ended = subprocess.run(
            [*argv, json.dumps([astuple(fault) for fault in faults])],
            cwd=folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        text = ended.stdout
        came = {
            fault: float(path.read_text())
            for number, fault in enumerate(faults)
            if (path := folder / f"came{number}").exists()
        }
        commits = [line.split() for line in (folder / "commits").read_text().splitlines()]
    ends = {int(rank): rest for rank, rest in re.findall(r"ends (\d+) (.*)", text)}
    named = [int(rank) for rank in re.findall(r"dtrain: rank (\d+) on .*; only this worker restarts", text)]
    return Run(
        code=ended.returncode,
        came=came,
        named=named,
        ends=ends,
        processes=len(re.findall(r"begins \d+ \d+", text)),
        commits=[(int(rank), float(time_s)) for rank, time_s in commits],
        load=os.getloadavg()[0] / (os.cpu_count() or 1),
        text=text,
    )


def check(run: Run, undisturbed: Run) -> list[str]:
    """What is not as promised.

    What a handler raises in a destructor is ignored by Python, and then no fault. What the function raises when
    another rank is lost already counts as a consequence: that rank goes on.
    """
    sure = [
        fault.rank
        for fault in run.came
        if fault.kind not in ("interrupt", "late") and (fault.kind != "raise" or fault.beside == fault.after == -1)
    ]
    possible = Counter(fault.rank for fault in run.came if fault.kind != "late")
    problems = []
    if run.code != 0:
        problems.append(f"exit code {run.code}")
    if Counter(sure) - Counter(run.named) or Counter(run.named) - possible:
        problems.append(f"restarted {sorted(run.named)} for faults of {sorted(fault.rank for fault in run.came)}")
    if run.processes != len(undisturbed.ends) + len(run.named):
        problems.append(f"{run.processes} processes began")
    if run.ends != undisturbed.ends:
        problems.append(f"other results: {run.ends} instead of {undisturbed.ends}")
    limit_s = LIMIT_S * max(1.0, run.load / CROWDED)
    for there, cost_s in run.costs():
        if cost_s > limit_s * max(1, len(there)):
            problems.append(f"{cost_s:.1f} s for {there}, with a load of {run.load:.1f} for each core")
    return problems


if __name__ == "__main__":
    main()
