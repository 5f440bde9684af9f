"""Watch the memory, threads and descriptors of a run's own processes over a long time.

    python scripts/bench/soak.py [--seconds 300] [--lines-per-second 4000] [--workers 2] [--samples 20]
    python scripts/bench/soak.py --kill-every-s 4 [--steps 30000] [--workers 3] [--backend gloo]

By default its workers write many short lines. With `--kill-every-s` they train under `@ddp.resilient`, with batch
normalization, an average of the weights (EMA) and a bar of tqdm's, and dtrain kills one of them every so often. The
same training without kills runs before it; both have to end with the same bits.

One row a sample: resident memory in MB, threads and open descriptors of dtrain, of its agent and of its guard. What
grows from the middle of the time to its end is said below; growth at the start is caches and the allocator.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0  # for the workers to be up
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

TRAINING = """
import hashlib, sys
import torch, ddp
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

world = ddp.init()
torch.manual_seed(1)
samples = 8000 * world.world_size  # an epoch of 1000 steps
data = torch.utils.data.TensorDataset(torch.randn(samples, 12), torch.randint(3, (samples,)))
net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
model = ddp.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), 0.001)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
sampler = ddp.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
state = ddp.State(model=model, optimizer=optimizer, sampler=sampler, ema=ema, epoch=0, step=0)

@ddp.resilient
def train(state):
    for state.epoch in range(state.epoch, int(sys.argv[1]) // 1000):
        sampler.set_epoch(state.epoch)
        for x, y in tqdm(loader, disable=not world.is_main, mininterval=1):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(net)
            state.step += 1
            state.commit()

print("begins", flush=True)
train(state)
everything = [*net.state_dict().values(), *ema.state_dict().values()]
digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in everything)).hexdigest()
print("ends", world.rank, state.step, digest, flush=True)
"""


@dataclass(frozen=True)
class Sample:
    """What one process has at one time."""

    memory_mb: float
    threads: int
    descriptors: int

    def __str__(self) -> str:
        return f"{self.memory_mb:9.2f} {self.threads:4} {self.descriptors:4}"


Samples = dict[str, Sample]  # by KINDS


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


def watch(run: subprocess.Popen[bytes], *, pause_s: float, seconds: float = math.inf) -> tuple[list[Samples], str]:
    """Print a row every so often, for some time or until the run has ended; return them, and the run's output."""
    processes = await_processes(run)
    output: list[bytes] = []

    def drain() -> None:
        assert run.stdout is not None
        while data := run.stdout.read1(1 << 16):  # type: ignore[attr-defined]  # a BufferedReader
            output.append(data)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    print(f"{'s':>6} {'lines/s':>8}" + "".join(f" {kind + ' MB':>10} {'thr':>4} {'fds':>4}" for kind in KINDS))
    rows: list[Samples] = []
    began, before, counted = time.monotonic(), time.monotonic(), 0
    while (left_s := min(began + (len(rows) + 1) * pause_s, began + seconds) - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(left_s)
            break
        now, seen = time.monotonic(), sum(data.count(b"\n") for data in output[counted:])
        rows.append({kind: take(process) for kind, process in processes.items()})
        rate = seen / (now - before)
        print(f"{now - began:6.0f} {rate:8.0f}" + "".join(f"  {rows[-1][kind]}" for kind in KINDS), flush=True)
        before, counted = now, len(output)
    if run.poll() is not None:
        reader.join()
    return rows, b"".join(output).decode(errors="replace")


@contextlib.contextmanager
def started(script: str, argument: int, *options: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a script under dtrain, in a folder of its own. It has ended when the block is over."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "worker.py"
        path.write_text(script)
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        run = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "launcher",
                "run",
                *options,
                "--log-dir",
                f"{folder}/runs",
                str(path),
                str(argument),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            yield run
        finally:
            run.send_signal(signal.SIGTERM)
            try:
                run.wait(STOP_S)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()


def train(arguments: argparse.Namespace, *options: str) -> tuple[list[Samples], str, float]:
    """Train to the end; return the rows, the output and the seconds from the first line on."""
    options = ("--nproc-per-node", str(arguments.workers), *options)
    with started(TRAINING, arguments.steps, *options, env={"DTRAIN_BACKEND": arguments.backend}) as run:
        began = time.monotonic()
        rows, text = watch(run, pause_s=arguments.seconds / arguments.samples)
        if run.returncode != 0:
            raise RuntimeError(f"exit code {run.returncode}:\n{text[-10000:]}")
        return rows, text, time.monotonic() - began


def compare_killed(arguments: argparse.Namespace) -> list[Samples]:
    """Train without kills, and with them; print what differs, and return the rows of the latter."""
    shared = {*os.listdir("/dev/shm")}
    _, undisturbed, well_s = train(arguments)
    rows, killed, killed_s = train(arguments, "--chaos", f"kill worker every {arguments.kill_every_s:g}s")
    # A rank that is killed after its last line lets all start again: each attempt prints its ends.
    ends = [{*re.findall(r"ends (\d+ \d+ \w+)", text)} for text in (undisturbed, killed)]
    print(
        f"{len(re.findall('--chaos: kill rank', killed))} kills, {killed.count('only this worker restarts')} single "
        f"restarts, {len(re.findall('attempt .* begins', killed))} of all; "
        f"{'equal' if ends[0] == ends[1] and len(ends[0]) == arguments.workers else 'OTHER'} bits on all ranks; "
        f"{killed_s:.0f} s, {killed_s / well_s:.2f} of the time without kills ({well_s:.0f} s)"
    )
    left = re.findall("[0-9]+ process(?:es)? left", killed)
    print(f"{', '.join(left)}; in /dev/shm: {len({*os.listdir('/dev/shm')} - shared)} files")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="[%(default)s]")
    parser.add_argument("--lines-per-second", type=int, default=4000, help="of all workers together [%(default)s]")
    parser.add_argument("--workers", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--samples", type=int, default=20, help="rows of the table, in --seconds [%(default)s]")
    parser.add_argument("--kill-every-s", type=float, help="train instead, and kill a worker so often")
    parser.add_argument("--steps", type=int, default=30000, help="of that training, in thousands [%(default)s]")
    parser.add_argument("--backend", default="", help="of that training [ddp's choice]")
    arguments = parser.parse_args()
    if arguments.kill_every_s:
        rows = compare_killed(arguments)
    else:
        each = max(1, arguments.lines_per_second // arguments.workers // BATCHES)
        with started(WORKER, each, "--nproc-per-node", str(arguments.workers), env={}) as run:
            pause_s = arguments.seconds / arguments.samples
            rows, _ = watch(run, pause_s=pause_s, seconds=arguments.seconds)
    middle, end = rows[len(rows) // 2], rows[-1]
    for kind in KINDS:
        print(
            f"{kind}: {end[kind].memory_mb - middle[kind].memory_mb:+.2f} MB, "
            f"{end[kind].threads - middle[kind].threads:+} threads, "
            f"{end[kind].descriptors - middle[kind].descriptors:+} descriptors in the second half"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
