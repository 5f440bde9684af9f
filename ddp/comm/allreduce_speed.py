"""A program that measures the bandwidth of an all-reduce over all ranks: run by `dtrain check`, or under any launcher.

    dtrain run --hosts alpha,beta ddp/comm/allreduce_speed.py

Rank 0 prints one line of JSON. Meant to be run by its path: it then imports nothing of ddp.
"""

from __future__ import annotations

import sys

if __package__ in (None, "") and sys.path and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this folder: its modules must not shadow modules that torch imports

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SMALL_BYTES = 1 << 10
MIDDLE_BYTES = 1 << 20  # its time determines the size of the large one
LARGE_BYTES = {"gloo": 16 << 20, "nccl": 64 << 20}
TIMEOUT_S = 60.0
BUDGET_S = 0.3  # for each size
MOST_TIMES = 20

Reduce = Callable[[torch.Tensor], None]  # sums over all ranks in place; blocks
Ones = Callable[[int], torch.Tensor]  # a float32 tensor with this many ones, on the backend's device


def main() -> None:
    """Measure, and print a line on rank 0."""
    parser = argparse.ArgumentParser(description="An all-reduce over all ranks, and its bandwidth.")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--large-bytes", type=int, help="size of the second measurement")
    options = parser.parse_args()
    began = time.monotonic()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = dist.TCPStore(
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ.get("MASTER_PORT", "0")),
        is_master="TORCHELASTIC_USE_AGENT_STORE" not in os.environ and rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    reduce, ones = _join(dist.PrefixStore("dtrain-allreduce/", store), rank, size, options.backend)
    joined_s = time.monotonic() - began
    results = [measure(reduce, ones, store, rank, size, bytes_) for bytes_ in (SMALL_BYTES, MIDDLE_BYTES)]
    if rank == 0:
        largest, room = LARGE_BYTES[options.backend], BUDGET_S / 3 / results[1]["median_s"]
        bytes_ = options.large_bytes or min(largest, MIDDLE_BYTES << max(0, int(math.log2(room)) if room > 1 else 0))
        store.set("dtrain-allreduce/large", str(bytes_))
    if (large := int(store.get("dtrain-allreduce/large"))) != MIDDLE_BYTES:
        results[1] = measure(reduce, ones, store, rank, size, large)
    store.add("dtrain-allreduce/done", 1)
    if rank == 0:
        found = {
            "dtrain_allreduce": 1,
            "backend": options.backend,
            "ranks": size,
            "joined_s": round(joined_s, 3),
            "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
            "sizes": results,
        }
        print(json.dumps(found, separators=(",", ":")), flush=True)  # short: `dtrain check` reads 300 characters
        deadline = time.monotonic() + TIMEOUT_S
        while store.add("dtrain-allreduce/done", 0) < size and time.monotonic() < deadline:
            time.sleep(0.005)  # rank 0 may hold the store
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skip the teardown


def measure(reduce: Reduce, ones: Ones, store: Any, rank: int, size: int, bytes_: int) -> dict[str, float | int | bool]:
    """Return the median time of an all-reduce of `bytes_` bytes, and its bandwidth in MB (10**6 bytes) per second.

    All ranks must call it with the same sizes; blocks. `correct`: the sum of ones was the number of ranks, on this
    rank. Algorithm bandwidth is bytes by time; bus bandwidth is the load of each link, 2 (n - 1) / n of it.
    """
    tensor = ones(bytes_ // 4)
    began = time.monotonic()
    reduce(tensor)
    first_s = time.monotonic() - began
    correct = float(tensor[0].item()) == float(tensor[-1].item()) == size
    key = f"dtrain-allreduce/times-{bytes_}"
    if rank == 0:  # the others must repeat it as often
        store.set(key, str(max(2, min(MOST_TIMES, int(BUDGET_S / max(first_s, 1e-6))))))
    times = int(store.get(key))
    taken = []
    for _ in range(times):
        began = time.monotonic()
        reduce(tensor)
        taken.append(time.monotonic() - began)
    median_s = sorted(taken)[len(taken) // 2]
    algorithm = bytes_ / median_s / 1e6
    return {
        "bytes": bytes_,
        "median_s": float(f"{median_s:.4g}"),
        "correct": correct,
        "algorithm_mb_s": round(algorithm, 1),
        "bus_mb_s": round(algorithm * 2 * (size - 1) / size, 1),
    }


def _join(store: Any, rank: int, size: int, backend: str) -> tuple[Reduce, Ones]:
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))

    def reduce(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return reduce, lambda count: torch.ones(count, device=device)


if __name__ == "__main__":
    main()
