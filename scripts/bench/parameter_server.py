"""Measure parameter servers: pushing and pulling 100 MB, small steps, and what one slow worker costs the others.

    python scripts/bench/parameter_server.py [--parts wire,scale,slow] [--workers 1,2,4] [--servers 1,2] [--rounds 15]

All processes of a run are on this machine and started by `dtrain run`.

wire: a step of a model of 100 MB without any compute, synchronous: workers push gradients, servers average and make a
step of SGD, workers pull values. In turns with it, within the same run and between the same workers: gloo's all-reduce
of 100 MB, the same with a step of SGD after it, a copy of 100 MB in each worker, and a step of the synchronous
parameter server of torch's tutorials (torch.distributed.rpc: one server, which averages, steps and returns the model).
`share` is the part of the copy's bandwidth that pushing and pulling reach: two copies of 100 MB a worker would be 1.

scale: steps a second of a small model with little compute, in turns with ddp.DistributedDataParallel around the same.

slow: four workers that sleep for 50 ms a step, or 200 ms in one of them; the other three's steps a second, over a fixed
time. With a finite staleness they wait too, once its slack is used up: so one that lasts that long, and one that does
not. The runs with and without the slow worker follow each other.

Tables have medians over the rounds, and the median of the ratios within rounds. A time is that of the slowest worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import rpc  # noqa: E402

import ddp  # noqa: E402

_DEADLINE_S = 600.0
_TENSORS, _SIDE = 25, 1000  # 25 of 4 MB
_MODEL_BYTES = 4 * _TENSORS * _SIDE * _SIDE
_STEP_S, _SLOW_STEP_S = 0.05, 0.2

Row = dict[str, list[float]]  # by variant, seconds a step in each round


# ---- in the workers ----


def large_model() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.zeros(_SIDE, _SIDE)) for _ in range(_TENSORS)])


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-6)


def join_workers(folder: Path, strategy: Any) -> None:
    """Make a process group of the workers alone, for what is measured beside the servers."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'group'}", rank=strategy.replica, world_size=strategy.replicas
    )


def in_turns(variants: Mapping[str, Callable[[], object]], *, steps: int, rounds: int) -> Row:
    """Time blocks of `steps` steps of each variant in turns; every worker must call it."""
    wall_s = torch.zeros(rounds, len(variants), dtype=torch.float64)
    for step in variants.values():
        step()
        step()
    for index in range(rounds):
        for which, step in enumerate(variants.values()):
            step()  # not timed: brings this variant's memory back into the caches
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                step()
            wall_s[index, which] = (time.perf_counter() - began) / steps
            dist.barrier()
    dist.all_reduce(wall_s, dist.ReduceOp.MAX)
    return {name: wall_s[:, which].tolist() for which, name in enumerate(variants)}


def wire(arguments: argparse.Namespace) -> object:
    strategy = ddp.strategy("parameter_server", shared_memory=not arguments.network)
    model = large_model()
    model, optimizer = strategy.prepare(model, sgd(model))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    join_workers(arguments.folder, strategy)
    here = large_model()
    own_step = sgd(here)
    for parameter in here.parameters():
        parameter.grad = torch.zeros_like(parameter)
    flat, other = torch.zeros(2, _MODEL_BYTES // 4).add_(0.0)

    def all_reduce_and_step() -> None:
        dist.all_reduce(flat)
        own_step.step()

    variants: dict[str, Callable[[], object]] = {"ps": optimizer.step, "copy": lambda: other.copy_(flat)}
    if strategy.replicas > 1:
        variants |= {"gloo": lambda: dist.all_reduce(flat), "gloo+step": all_reduce_and_step}
    with rpc_step(arguments, strategy.replica, strategy.replicas) as through_rpc:
        if through_rpc is not None:
            variants["rpc"] = through_rpc
        return in_turns(variants, steps=arguments.steps, rounds=arguments.rounds)


def scale(arguments: argparse.Namespace) -> object:
    strategy = ddp.strategy("parameter_server", mode=arguments.mode)
    model = small_model()
    model, optimizer = strategy.prepare(model, sgd(model))
    join_workers(arguments.folder, strategy)
    reduced = ddp.DistributedDataParallel(small_model())
    batch = torch.randn(16, 64)

    def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return step

    variants = {"ps": stepper(model, optimizer), "all_reduce": stepper(reduced, sgd(reduced))}
    return in_turns(variants, steps=20 * arguments.steps, rounds=arguments.rounds)


def slow(arguments: argparse.Namespace) -> object:
    strategy: Any = ddp.strategy("parameter_server", mode=arguments.mode, staleness=arguments.staleness)
    model = small_model()
    model, optimizer = strategy.prepare(model, sgd(model))
    join_workers(arguments.folder, strategy)
    step_s = _SLOW_STEP_S if arguments.has_slow and strategy.replica == strategy.replicas - 1 else _STEP_S
    batch = torch.randn(16, 64)
    steps = 0
    dist.barrier()
    began = time.perf_counter()
    while True:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        time.sleep(step_s)
        optimizer.step()
        if time.perf_counter() - began > arguments.seconds:
            break
        steps += 1
    strategy.close()  # before the others are waited for, who may wait for this one
    counts = torch.zeros(strategy.replicas, dtype=torch.float64)
    counts[strategy.replica] = steps / arguments.seconds
    dist.all_reduce(counts)
    return counts.tolist()


# ---- torch's parameter server ----


class RpcServer:
    """The synchronous server of the tutorial on batch RPC processing, with gradients that come in one call."""

    only: RpcServer

    def __init__(self, workers: int) -> None:
        self.lock = threading.Lock()
        self.workers = workers
        self.model = large_model()
        self.optimizer = sgd(self.model)
        self.came = 0
        self.future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def update(self, gradients: Sequence[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                if self.came:
                    parameter.grad.add_(gradient)  # type: ignore[union-attr]  # the first has set it
                else:
                    parameter.grad = gradient
            self.came += 1
            future = self.future
            if self.came == self.workers:
                for parameter in self.model.parameters():
                    parameter.grad.div_(self.workers)  # type: ignore[union-attr]
                self.optimizer.step()
                self.came, self.future = 0, torch.futures.Future()
                future.set_result([parameter.detach() for parameter in self.model.parameters()])
            return future


@rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch's
def update_by_rpc(gradients: Sequence[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
    return RpcServer.only.update(gradients)


def join_rpc(folder: Path, name: str, rank: int, processes: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder / 'rpc'}", rpc_timeout=60.0)
    rpc.init_rpc(name, rank=rank, world_size=processes, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def serve_rpc(arguments: argparse.Namespace) -> None:
    RpcServer.only = RpcServer(arguments.workers)
    join_rpc(arguments.folder, "server", arguments.workers, arguments.workers + 1)
    rpc.shutdown()


@contextlib.contextmanager
def rpc_step(arguments: argparse.Namespace, replica: int, replicas: int) -> Iterator[Callable[[], None] | None]:
    """Give a function that makes one step by torch.distributed.rpc, or None."""
    if not arguments.rpc:
        yield None
        return
    model = large_model()
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    join_rpc(arguments.folder, f"worker{replica}", replica, replicas + 1)

    @torch.no_grad()
    def step() -> None:
        values = rpc.rpc_sync("server", update_by_rpc, args=(gradients,))
        torch._foreach_copy_(list(model.parameters()), values)

    yield step
    rpc.shutdown()


# ---- the runs ----


def run(part: str, *, workers: int, servers: int, rpc: bool = False, **options: Any) -> Any:
    """Make a run of this script under dtrain and return what its first worker has measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        roles = ["--nproc-per-node", str(workers), "--ps", str(servers), *(["--role", "rpc:1"] if rpc else [])]
        own = ["--run", part, "--folder", name, "--workers", str(workers), *(["--rpc"] if rpc else [])]
        for option, value in options.items():
            own += [] if value is False else [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
        argv = [sys.executable, "-m", "launcher", "run", *roles, "--log-dir", str(folder / "runs"), __file__, *own]
        try:
            done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            sys.exit(f"{' '.join(argv)} has not ended within {_DEADLINE_S:g} s")
        if done.returncode != 0:
            sys.exit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return json.loads((folder / "result.json").read_text())


def ratio(left: list[float], right: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(left, right, strict=True))


def wire_table(arguments: argparse.Namespace) -> None:
    print(
        f"\nwire: ms a step of {_MODEL_BYTES / 1e6:.0f} MB\n{'workers':>7} {'servers':>7} {'by':>8} {'ps':>8} "
        f"{'gloo':>8} {'ps/gloo':>8} {'gloo+step':>10} {'ps/that':>8} {'rpc':>8} {'ps/rpc':>7} {'copy':>7} "
        f"{'share':>6} {'GB/s':>6}"
    )
    for workers in arguments.numbers_of_workers:
        for servers in arguments.numbers_of_servers:
            for by in arguments.by.split(","):
                row: Row = run(
                    "wire",
                    workers=workers,
                    servers=servers,
                    network=by == "network",
                    rpc=by == "memory" and servers == 1,
                    steps=arguments.steps,
                    rounds=arguments.rounds,
                )
                print(wire_line(row, workers=workers, servers=servers, by=by), flush=True)


def wire_line(row: Row, *, workers: int, servers: int, by: str) -> str:
    def ms(name: str, width: int) -> str:
        return f"{statistics.median(row[name]) * 1e3:{width}.1f}" if name in row else f"{'-':>{width}}"

    def against(name: str, width: int) -> str:
        return f"{ratio(row['ps'], row[name]):{width}.2f}" if name in row else f"{'-':>{width}}"

    share = 2 * ratio(row["copy"], row["ps"])
    rate = 2 * _MODEL_BYTES * workers / statistics.median(row["ps"]) / 1e9
    return (
        f"{workers:7} {servers:7} {by:>8} {ms('ps', 8)} {ms('gloo', 8)} {against('gloo', 8)} {ms('gloo+step', 10)} "
        f"{against('gloo+step', 8)} {ms('rpc', 8)} {against('rpc', 7)} {ms('copy', 7)} {share:6.2f} {rate:6.1f}"
    )


def scale_table(arguments: argparse.Namespace) -> None:
    print(
        f"\nscale: steps a second of each worker, model of 10 thousand numbers\n{'workers':>7} {'servers':>7} "
        f"{'sync':>7} {'to all-reduce':>14} {'async':>7} {'to all-reduce':>14} {'all-reduce':>11}"
    )
    for workers in (*arguments.numbers_of_workers, 8):
        for servers in arguments.numbers_of_servers:
            rows: list[Row] = [
                run(
                    "scale", workers=workers, servers=servers, mode=mode, steps=arguments.steps, rounds=arguments.rounds
                )
                for mode in ("sync", "async")
            ]
            cells = [
                f"{1 / statistics.median(row['ps']):7.0f} {ratio(row['all_reduce'], row['ps']):14.2f}" for row in rows
            ]
            reduced = 1 / statistics.median([each for row in rows for each in row["all_reduce"]])
            print(f"{workers:7} {servers:7} {' '.join(cells)} {reduced:11.0f}", flush=True)


def slow_table(arguments: argparse.Namespace) -> None:
    enough = int(arguments.seconds / _STEP_S)
    print(
        f"\nslow: steps a second of the three others, over {arguments.seconds:g} s\n"
        f"{'mode':>7} {'staleness':>9} {'none slow':>10} {'one slow':>9} {'kept':>6} {'the slow one':>13}"
    )
    for mode, staleness in (("sync", 0), ("bounded", 2), ("bounded", enough), ("async", 0)):
        without, with_slow = (
            run("slow", workers=4, servers=1, mode=mode, staleness=staleness, seconds=arguments.seconds, has_slow=slow)
            for slow in (False, True)
        )
        before, after = (statistics.mean(rates[:-1]) for rates in (without, with_slow))
        shown = staleness if mode == "bounded" else "-"
        print(
            f"{mode:>7} {shown:>9} {before:10.1f} {after:9.1f} {after / before:6.0%} {with_slow[-1]:13.1f}", flush=True
        )


TABLES = {"wire": wire_table, "scale": scale_table, "slow": slow_table}
RUNS = {"wire": wire, "scale": scale, "slow": slow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(TABLES), help="what to measure [%(default)s]")
    parser.add_argument("--workers", default="1,2,4", help="numbers of workers; scale has 8, too [%(default)s]")
    parser.add_argument("--servers", default="1,2", help="numbers of servers [%(default)s]")
    parser.add_argument("--by", default="memory,network", help="ways that part wire goes [%(default)s]")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of one block of each variant [%(default)s]")
    parser.add_argument(
        "--steps", type=int, default=2, help="steps in a block; scale has 20 times as many [%(default)s]"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a run of part slow is [%(default)s]")
    for option in ("--run", "--folder", "--mode"):  # from here on: for the processes of a run
        parser.add_argument(option, help=argparse.SUPPRESS)
    parser.add_argument("--staleness", type=int, default=0, help=argparse.SUPPRESS)
    for option in ("--network", "--rpc", "--has-slow"):
        parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        work(arguments)
        return
    arguments.numbers_of_workers, arguments.numbers_of_servers = (
        [int(word) for word in text.split(",")] for text in (arguments.workers, arguments.servers)
    )
    parts = arguments.parts.split(",")
    if unknown := (set(parts) - set(TABLES)) | (set(arguments.by.split(",")) - {"memory", "network"}):
        parser.error(f"no {', '.join(sorted(unknown))}; --parts are {', '.join(TABLES)}; --by is memory, network")
    print(f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}; {arguments.rounds} rounds")
    for part in parts:
        TABLES[part](arguments)


def work(arguments: argparse.Namespace) -> None:
    """Be one process of a run."""
    arguments.folder, arguments.workers = Path(arguments.folder), int(arguments.workers)
    if os.environ.get("ROLE_NAME") == "rpc":
        serve_rpc(arguments)
        return
    result = RUNS[arguments.run](arguments)
    if os.environ["RANK"] == "0":
        (arguments.folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
