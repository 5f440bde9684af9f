"""Compare training steps on CUDA devices with torch's DistributedDataParallel, in turns in one run.

    python scripts/bench/gpu.py [--parts one,shared,all,compression] [--models gpt,resnet] [--out FOLDER]

Parts: `one` is one rank over NCCL, with the whole machinery of both classes at work (ddp leaves it out in a world of
one, which is the variant "ddp as is"). `shared` is two ranks on the first device over gloo, for NCCL refuses to share
one. `all` is one rank for each device over NCCL, where there are several. `compression` is ddp with each compression,
beside torch's class with its fp16 hook, over NCCL on all devices or over gloo on one.

Models: a GPT of 124 million parameters and a ResNet-50, trained by SGD with momentum. Their parameters are bf16, but
float32 where compression is compared.

A round gives each variant a block of steps, in random order; a block's time is that of the slower rank, from an idle
device to an idle device. The table gives medians over the rounds, and the median of the ratios within rounds to the
faster of torch's variants. "issue" is the time until the host is through with a step, which is far less where nothing
waits for the device. Kernel launches, copies and host synchronisations are counted by torch's profiler, all threads
of rank 0; the peak of memory is rank 0's while the variant is alone on it. What is printed is written to gpu.json too,
with all rounds, and drawn as gpu.png where matplotlib is there.

Each part and model gets an equal share of the time that is left of --budget-s: as many rounds, and after that as long
blocks, as fit in it once the variants have warmed up. A part that fails costs its own figures, and the exit code.

`--tiny --device cpu` tries the script itself where there is no GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from step import Gpt, ratio, spawn  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook  # noqa: E402

import ddp  # noqa: E402

STEP_GOAL = 1.02
_PROFILED_STEPS = 3
_START_S = 120.0  # for a part to start, where little is left of the budget
_FEWEST_ROUNDS = 5  # before blocks become shorter
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "hipLaunchKernel", "hipExtModuleLaunchKernel")
_SYNCHRONISATIONS = {
    f"{api}{what}"
    for api in ("cuda", "hip")
    for what in ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy")
}
_COPIES = ("cudaMemcpyAsync", "hipMemcpyAsync", "hipMemcpyWithStream")


class Bottleneck(nn.Module):
    """A residual block of ResNet-50. x: (batch, inputs, height, width)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


def resnet50(depths: Sequence[int] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    """He et al. 2016, "Deep Residual Learning for Image Recognition", table 1."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for index in range(depth):
            layers.append(Bottleneck(inputs, width, 2 if stage and not index else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


@dataclass(frozen=True)
class Subject:
    """A model to measure and a batch for it, both made on the host."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]


def subjects(*, tiny: bool) -> dict[str, Subject]:
    if tiny:
        return {
            "gpt": Subject("tiny GPT", lambda: Gpt(64, 16, 32, 2), lambda: torch.randint(64, (2, 16))),
            "resnet": Subject("tiny ResNet", lambda: resnet50((1, 1), 10), lambda: torch.randn(2, 3, 32, 32)),
        }
    return {
        "gpt": Subject(
            "GPT, 124M, bf16, 8 x 1024 tokens",
            lambda: Gpt(50304, 1024, 768, 12, heads=12),
            lambda: torch.randint(50304, (8, 1024)),
        ),
        "resnet": Subject("ResNet-50, bf16, 64 images", resnet50, lambda: torch.randn(64, 3, 224, 224)),
    }


Wrap = Callable[[nn.Module, list[int] | None], nn.Module]


def _ours(**options: Any) -> Wrap:
    return lambda module, device_ids: ddp.DistributedDataParallel(module, device_ids, **options)


def _torchs(**options: Any) -> Wrap:
    return lambda module, device_ids: nn.parallel.DistributedDataParallel(module, device_ids, **options)


def _torchs_fp16(module: nn.Module, device_ids: list[int] | None) -> nn.Module:
    model = nn.parallel.DistributedDataParallel(module, device_ids)
    model.register_comm_hook(None, fp16_compress_hook)
    return model


PLAIN: dict[str, Wrap] = {
    "ddp": _ours(),
    "ddp views": _ours(gradient_as_bucket_view=True),
    "torch": _torchs(),
    "torch views": _torchs(gradient_as_bucket_view=True),
    "torch again": _torchs(),
    "alone": lambda module, _: module,
}
COMPRESSED: dict[str, Wrap] = {
    "ddp": _ours(),
    **{f"ddp {name}": _ours(compression=name) for name in ("bf16", "fp16", "int8", "powersgd")},
    "torch": _torchs(),
    "torch fp16": _torchs_fp16,
}


@dataclass(frozen=True)
class Part:
    """Ranks that train together, and what they compare. `is_shared`: they all use the first device."""

    title: str
    ranks: int
    backend: str
    variants: Mapping[str, Wrap]
    is_shared: bool = False
    dtype: torch.dtype = torch.bfloat16


def parts(device: str) -> dict[str, Part]:
    """What this machine can show."""
    count = torch.cuda.device_count() if device == "cuda" else 0
    fast = "nccl" if device == "cuda" else "gloo"
    found = {
        "one": Part("one rank over " + fast, 1, fast, PLAIN | {"ddp as is": _ours()}),
        "shared": Part("two ranks on one device over gloo", 2, "gloo", PLAIN, is_shared=True),
    }
    if count > 1:
        found["all"] = Part(f"{count} devices over nccl", count, "nccl", PLAIN)
        title = f"compression, {count} devices over nccl"
        found["compression"] = Part(title, count, "nccl", COMPRESSED, dtype=torch.float32)
    else:
        title = "compression, two ranks on one device over gloo"
        found["compression"] = Part(title, 2, "gloo", COMPRESSED, is_shared=True, dtype=torch.float32)
    return found


class Trainee:
    """A fresh replica in the wrapper of one variant, and its steps."""

    def __init__(self, name: str, wrap: Wrap, subject: Subject, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        module = subject.build().to(device, dtype)
        batch = subject.batch().to(device)
        batch = batch.to(dtype) if batch.is_floating_point() else batch
        device_ids = None if device.type == "cpu" else [device.index]
        # A world of one has nothing to communicate; here its machinery is what is measured.
        ddp.DistributedDataParallel._least_ranks = 2 if name == "ddp as is" else 1
        self.model, self.batch = wrap(module, device_ids), batch
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def idle(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fitting(pass_s: float, left_s: float, steps: int, rounds: int) -> tuple[int, int]:
    """Return how many steps a block and how many rounds fit into the time, at most these and at least one of each.

    In a pass, of `pass_s`, each variant makes a step; a round is a block for each, and one step before it.

    >>> [fitting(1.0, left_s, 4, 12) for left_s in (1000.0, 30.0, 17.0, 0.0)]
    [(4, 12), (4, 6), (2, 5), (1, 1)]
    """
    passes = max(0, int(left_s / pass_s))
    steps = max(1, min(steps, passes // _FEWEST_ROUNDS - 1))
    return steps, max(1, min(rounds, passes // (steps + 1)))


def measure(
    part: Part, subject: Subject, device: torch.device, *, steps: int, rounds: int, until: float
) -> dict[str, Any]:
    """Measure each variant alone, then all in turns: {variant: {wall_s, issue_s, counts a step, peak_bytes}}.

    Ends at about `until`, by the monotonic clock of rank 0, with at most so many steps a block and rounds.
    """
    names = list(part.variants)
    trainees = (Trainee(name, wrap, subject, device, part.dtype) for name, wrap in part.variants.items())
    alone = {name: measure_alone(trainee, device) for name, trainee in zip(names, trainees, strict=True)}
    every = {name: Trainee(name, wrap, subject, device, part.dtype) for name, wrap in part.variants.items()}
    for trainee in every.values():
        for _ in range(3):
            trainee.step()
    idle(device)
    start = time.monotonic()
    for trainee in every.values():
        trainee.step()
    idle(device)
    now = time.monotonic()
    meeting = device if dist.get_backend() == "nccl" else torch.device("cpu")
    chosen = torch.tensor(fitting(now - start, until - now, steps, rounds), device=meeting)
    dist.broadcast(chosen, 0)
    steps, rounds = chosen.tolist()
    wall_s, issue_s = torch.zeros(2, rounds, len(names), dtype=torch.float64)
    order = random.Random(0)  # the same on every rank
    for index in range(rounds):
        for which in order.sample(range(len(names)), len(names)):
            trainee = every[names[which]]
            trainee.step()  # not timed: brings this replica's memory back into the caches
            idle(device)
            dist.barrier()
            idle(device)  # NCCL's barrier is work on the device
            start = time.perf_counter()
            for _ in range(steps):
                trainee.step()
            issued = time.perf_counter()
            idle(device)
            wall_s[index, which] = (time.perf_counter() - start) / steps
            issue_s[index, which] = (issued - start) / steps
    slowest = torch.stack([wall_s, issue_s]).to(meeting)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    wall_s, issue_s = slowest.cpu()
    return {
        name: {"steps": steps, "wall_s": wall_s[:, at].tolist(), "issue_s": issue_s[:, at].tolist(), **alone[name]}
        for at, name in enumerate(names)
    }


def measure_alone(trainee: Trainee, device: torch.device) -> dict[str, Any]:
    """Count what a step asks of the device, and its peak of memory, while nothing else is there."""
    gc.collect()
    for _ in range(3):
        trainee.step()
    idle(device)
    if device.type == "cpu":
        return {"launches": 0.0, "copies": 0.0, "synchronisations": 0.0, "peak_bytes": 0}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    trainee.step()
    idle(device)
    peak = torch.cuda.max_memory_allocated(device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("steps"):
            for _ in range(_PROFILED_STEPS):
                trainee.step()
        idle(device)  # outside of what is counted
    events = list(profiler.events())
    host = torch.autograd.DeviceType.CPU  # the device has a span of this name as well
    span = next(event.time_range for event in events if event.name == "steps" and event.device_type == host)
    counts = Counter(event.name for event in events if span.start <= event.time_range.start <= span.end)
    found = {
        "launches": sum(count for name, count in counts.items() if name.startswith(_LAUNCHES)),
        "copies": sum(counts[name] for name in _COPIES),
        "synchronisations": sum(counts[name] for name in _SYNCHRONISATIONS),
    }
    return {name: count / _PROFILED_STEPS for name, count in found.items()} | {"peak_bytes": peak}


def fastest_of_torchs(times: Mapping[str, Any]) -> str:
    theirs = [name for name in ("torch", "torch views") if name in times]
    return min(theirs, key=lambda name: statistics.median(times[name]["wall_s"]))


def report(title: str, times: Mapping[str, Any]) -> None:
    best = fastest_of_torchs(times)
    rounds, steps = len(times[best]["wall_s"]), times[best]["steps"]
    print(
        f"\n{title}, {rounds} rounds of {steps} steps\n  {'':13} {'ms a step':>10} {'to ' + best:>14} {'issue ms':>9} "
        f"{'launches':>9} {'copies':>7} {'host syncs':>10} {'peak MB':>9}"
    )
    for name, its in times.items():
        wall, issue = (statistics.median(its[key]) * 1e3 for key in ("wall_s", "issue_s"))
        print(
            f"  {name:13} {wall:10.2f} {ratio(its['wall_s'], times[best]['wall_s']):14.3f} {issue:9.2f} "
            f"{its['launches']:9.1f} {its['copies']:7.1f} {its['synchronisations']:10.1f} "
            f"{its['peak_bytes'] / 1e6:9.1f}",
            flush=True,
        )


def goals(part: str, title: str, times: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """What ddp's default wants to reach here, and whether it did."""
    best = fastest_of_torchs(times)
    to_best = ratio(times["ddp"]["wall_s"], times[best]["wall_s"])
    mine, theirs = times["ddp"], times[best]
    found = [(f"{title}: step {to_best:.3f} of torch's (at most {STEP_GOAL})", to_best <= STEP_GOAL)]
    if part in ("one", "all"):  # gloo copies through the host, whoever asks it
        found.append((f"{title}: {mine['synchronisations']:g} host synchronisations a step (0)",
                      mine["synchronisations"] == 0))  # fmt: skip
    found.append((f"{title}: {mine['launches']:g} launches a step (torch's {theirs['launches']:g})",
                  mine["launches"] <= theirs["launches"]))  # fmt: skip
    return found


def draw(results: Sequence[Mapping[str, Any]], heading: str, path: Path) -> None:
    """Draw the ratio of every variant to the faster of torch's as bars."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(results), 1, figsize=(9, 1 + 2.2 * len(results)), squeeze=False)
    for ax, result in zip(axes[:, 0], results, strict=True):
        times = result["times"]
        best = times[fastest_of_torchs(times)]["wall_s"]
        names = [name for name in times if name != "alone"]
        ratios = [ratio(times[name]["wall_s"], best) for name in names]
        bars = ax.barh(names, ratios, color=["tab:blue" if name.startswith("ddp") else "tab:gray" for name in names])
        ax.bar_label(bars, fmt="%.3f", padding=3)
        ax.axvline(1.0, color="black", linewidth=0.8)
        ax.invert_yaxis()
        ax.margins(x=0.12)
        ax.set_title(result["title"], fontsize=10, loc="left")
    axes[-1, 0].set_xlabel("time of a step, to the faster of torch's")
    figure.suptitle(heading, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def worker(arguments: argparse.Namespace) -> None:
    (name,) = arguments.parts
    part = parts(arguments.device)[name]
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", 0 if part.is_shared else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(part.backend)
    results = []
    for place, model in enumerate(arguments.models):
        now = time.monotonic()
        until = now + (arguments.until - now) / (len(arguments.models) - place)
        subject = subjects(tiny=arguments.tiny)[model]
        times = measure(part, subject, device, steps=arguments.steps, rounds=arguments.rounds, until=until)
        title = f"{subject.title}: {part.title}"
        results.append({"part": name, "model": model, "title": title, "times": times})
        if dist.get_rank() == 0:
            report(title, times)
            arguments.result.write_text(json.dumps(results))  # the next model may need more memory than there is
        gc.collect()
    dist.destroy_process_group()


def words(text: str) -> list[str]:
    return text.split(",")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=words, default=[], help="which of one,shared,all,compression (default all)")
    parser.add_argument("--models", type=words, default=list(subjects(tiny=False)), help="gpt,resnet (default both)")
    parser.add_argument("--steps", type=int, default=4, help="steps in a block, at most (default 4)")
    parser.add_argument("--rounds", type=int, default=12, help="blocks of each variant, at most (default 12)")
    parser.add_argument("--budget-s", type=float, default=240.0, help="seconds for all parts, about (default 240)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="where gpu.json and gpu.png go")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script itself")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # where a worker puts its figures
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # when it ends, by the monotonic clock
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no usable CUDA device here")
    known = parts(arguments.device)
    arguments.parts = arguments.parts or list(known)
    for option, given, there in (("parts", arguments.parts, known), ("models", arguments.models, subjects(tiny=True))):
        if unknown := set(given) - set(there):
            parser.error(f"--{option}: no {', '.join(sorted(unknown))} here; there are {', '.join(there)}")
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.result is not None:
        worker(arguments)
        return 0
    where = torch.cuda.get_device_name(0) if arguments.device == "cuda" else platform.machine()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if arguments.device == "cuda" else "-"
    heading = (
        f"{where} x {max(1, torch.cuda.device_count())}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"NCCL {nccl}"
    )
    print(heading, flush=True)
    results: list[dict[str, Any]] = []
    first_code, end = 0, time.monotonic() + arguments.budget_s
    with tempfile.TemporaryDirectory() as folder:
        for place, name in enumerate(arguments.parts):
            result, now = Path(folder, f"{name}.json"), time.monotonic()
            share_s = max(0.0, end - now) / (len(arguments.parts) - place)
            argv = [*sys.argv, "--parts", name, "--result", str(result), "--until", str(now + share_s)]
            # The last --parts counts. What is not over in twice its share, and what a start takes, hangs.
            code = spawn(parts(arguments.device)[name].ranks, argv, deadline_s=2 * share_s + _START_S)
            if code:
                print(f"part {name} ended with exit code {code}", file=sys.stderr)
                first_code = first_code or code
            if result.exists():
                results += json.loads(result.read_text())
    print()
    for result in results:
        for text, is_met in goals(result["part"], result["title"], result["times"]):
            print(f"{'met    ' if is_met else 'NOT met'} {text}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu.json").write_text(json.dumps({"heading": heading, "results": results}, indent=1))
    try:
        if results:
            draw(results, heading, arguments.out / "gpu.png")
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
    print(f"wrote {arguments.out}/gpu.json")
    return first_code


if __name__ == "__main__":
    sys.exit(main())
