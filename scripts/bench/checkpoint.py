"""Measure how long a save holds up training, beside a plain copy of the state, and how much of a file a load reads.

    python scripts/bench/checkpoint.py [--mb 400] [--rounds 5] [--folder FOLDER] [--without-launcher]

Two processes hold a model and the state of AdamW, --mb in all. In each round they save in the background, save in the
foreground, and rank 0 makes a plain copy of the state, in random order: a clone of every tensor, or, on CUDA, a copy
to pinned host memory. They run under dtrain, whose agent owns the memory of a save in the background; --without-
launcher is for that of the process itself. The first round is shown alone: it gets the memory. A time is that until
both processes go on. "until durable" includes the wait for the disk. Then both load the file, which is not in the page
cache: what they read by system calls (rchar) and from the disk (read_bytes) of /proc/self/io, over both processes, is
compared with its size. The folder should be on a real disk.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]


def worker(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import ddp

    torch.set_num_threads(1)
    world = ddp.init()
    # A third of the state is weights, two are AdamW's moments.
    width = int((arguments.mb * 1e6 / 3 / 4 / 8) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8))).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width, device=world.device)).sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    folder = Path(arguments.folder)
    checkpoints = {way: ddp.Checkpoint(folder / str(way), keep=1, in_background=way) for way in (True, False)}
    step = 0

    def timed(call: Callable[[], object]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        call()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return (time.perf_counter() - begin) * 1e3

    kept: list[torch.Tensor] = []

    def copy() -> None:
        pins = world.device.type == "cuda"
        for tensor in map(torch.Tensor.detach, tensors) if world.is_main else ():
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if pins else None
            kept.append(tensor.clone() if room is None else room.copy_(tensor, non_blocking=True))

    def save(way: bool) -> None:
        checkpoints[way].save(step, model=model, optimizer=optimizer)

    times: dict[str, list[float]] = {name: [] for name in ("copy", "background", "durable", "foreground")}
    for step in range(1, arguments.rounds + 1):
        for turn in random.Random(step).sample(["copy", "background", "foreground"], 3):
            if turn == "copy":
                times["copy"].append(timed(copy))
                kept.clear()
            elif turn == "foreground":
                times["foreground"].append(timed(lambda: save(False)))
            else:
                times["background"].append(timed(lambda: save(True)))
                times["durable"].append(times["background"][-1] + timed(checkpoints[True].wait))
    path = folder / "True" / f"step-{step:010d}.pt"
    if world.is_main:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    before = io_counters()
    load_ms = timed(lambda: checkpoints[True].load(model=model, optimizer=optimizer))
    read = torch.tensor([after - first for first, after in zip(before, io_counters(), strict=True)])
    dist.all_reduce(read)
    if world.is_main:
        size = path.stat().st_size
        print(f"{size / 1e6:.0f} MB on {world.device}, medians of {arguments.rounds} rounds")
        plain = statistics.median(times["copy"])
        first = ", ".join(
            f"{what} {times[name][0]:.1f} ms" for name, what in (("copy", "copy"), ("background", "save"))
        )
        print(f"  the first: {first}, {times['background'][0] / times['copy'][0]:.2f}")
        for name, what in (
            ("copy", "a plain copy of the state"),
            ("background", "save in the background"),
            ("durable", "  until durable"),
            ("foreground", "save in the foreground"),
        ):
            ratio = statistics.median(a / b for a, b in zip(times[name], times["copy"], strict=True))
            print(f"  {what:28} {statistics.median(times[name]):9.1f} ms {ratio:7.2f}")
        print(f"  {'load':28} {load_ms:9.1f} ms {load_ms / plain:7.2f}")
        rchar, from_disk = (int(count) / size for count in read)
        print(
            f"  read by both processes, of the file's size: by system calls {rchar:.2f}, from the disk {from_disk:.2f}"
        )


def io_counters() -> tuple[int, int]:
    """Bytes that this process has read by system calls, and from disks."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(fields["rchar"]), int(fields["read_bytes"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=400, help="size of the state [%(default)g]")
    parser.add_argument("--rounds", type=int, default=5, help="of all three [%(default)s]")
    parser.add_argument("--folder", help="where to save [a temporary folder]")
    parser.add_argument("--without-launcher", action="store_true", help="start the two processes by themselves")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
        return 0
    from step import run_all, spawn

    folder = Path(tempfile.mkdtemp(prefix="ddp-bench-", dir=arguments.folder))
    try:
        sys.argv += ["--folder", str(folder)]
        if arguments.without_launcher:
            return spawn(2)
        options = ["--nproc-per-node", "2", "-q", "--log-dir", str(folder / "runs")]
        command = [sys.executable, "-m", "launcher", "run", *options, *sys.argv]
        return run_all([(command, {"OMP_NUM_THREADS": "1"})])
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
