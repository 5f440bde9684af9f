"""An all-reduce over all ranks and its bandwidth, as a program: run by `dtrain check`, or under any launcher.

    dtrain run --hosts alpha,beta ddp/comm/allreduce_speed.py

Rank 0 prints one line of JSON. Meant to be run by its path: it then imports nothing of ddp. On a CPU build of torch
not even all of torch is imported, but its extension module, with the very gloo that a training uses: 0.4 s of a
processor instead of 1.7 s, which counts where many ranks share few processors (measured with torch 2.13).
"""

from __future__ import annotations

import sys

if __package__ in (None, "") and sys.path and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # our own folder: torch must not find our modules under its names for others

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import time
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["main", "measure"]

SMALL_BYTES = 1 << 10
MIDDLE_BYTES = 1 << 20  # by whose time it is seen how large the large one may be
LARGE_BYTES = {"gloo": 16 << 20, "nccl": 64 << 20}
TIMEOUT_S = 60.0
BUDGET_S = 0.3  # for each size
MOST_TIMES = 20
# Versions of torch whose extension module was tried by itself; without `import torch` it makes no promises.
LEAN_VERSIONS = ("2.13.",)

Reduce = Callable[[Any], None]  # in place, the sum over all ranks; returns when it is done
Ones = Callable[[int], Any]  # a float32 tensor of so many ones, where the backend wants it


def main() -> None:
    """Measure, and print a line on rank 0."""
    parser = argparse.ArgumentParser(description="An all-reduce over all ranks, and its bandwidth.")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--large-bytes", type=int, help="size of the second measurement")
    options = parser.parse_args()
    began = time.monotonic()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    c10d, ones = _load(options.backend)
    store = c10d.TCPStore(
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ.get("MASTER_PORT", "0")),
        is_master="TORCHELASTIC_USE_AGENT_STORE" not in os.environ and rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    reduce = _join(c10d, c10d.PrefixStore("dtrain-allreduce/", store), rank, size, options.backend)
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
    os._exit(0)  # a teardown has nothing to add


def measure(reduce: Reduce, ones: Ones, store: Any, rank: int, size: int, bytes_: int) -> dict[str, float | int | bool]:
    """Return the median time of an all-reduce of so many bytes, and what it makes of bandwidth in MB (10**6) a second.

    All ranks must call it with the same sizes; blocks. `correct`: the sum of ones was the number of ranks, on this
    rank. Algorithm bandwidth is bytes by time; bus bandwidth what each link carries then, 2 (n - 1) / n of it.
    """
    tensor = ones(bytes_ // 4)
    began = time.monotonic()
    reduce(tensor)
    first_s = time.monotonic() - began
    correct = float(tensor[0].item()) == float(tensor[-1].item()) == size
    key = f"dtrain-allreduce/times-{bytes_}"
    if rank == 0:  # the others must do it as often
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


def _join(c10d: Any, store: Any, rank: int, size: int, backend: str) -> Reduce:
    limit = timedelta(seconds=TIMEOUT_S)
    if backend == "nccl":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = limit
        group = c10d.ProcessGroupNCCL(store, rank, size, options)
    else:
        group = c10d.ProcessGroupGloo(store, rank, size, limit)

    def reduce(tensor: Any) -> None:
        group.allreduce([tensor], c10d.AllreduceOptions()).wait()
        if backend == "nccl":
            import torch

            torch.cuda.synchronize()

    return reduce


def _load(backend: str) -> tuple[Any, Ones]:
    """Return torch's module of process groups, and what makes a tensor."""
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if backend == "gloo" and folder is not None and _lean(folder):
        return _from_extension(folder)
    import torch
    import torch.distributed

    device = torch.device("cpu")
    if backend == "nccl":
        index = 0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return importlib.import_module("torch._C._distributed_c10d"), lambda count: torch.ones(count, device=device)


def _lean(folder: Path) -> bool:
    """Say whether this is a CPU build of a version whose extension was tried by itself."""
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    version = re.search(r"^__version__ = '([^']*)'", text, re.MULTILINE)
    built_for = re.findall(r"^(?:cuda|hip|xpu)(?::[^=\n]*)? = (.*)$", text, re.MULTILINE)
    return version is not None and version[1].startswith(LEAN_VERSIONS) and {*built_for} <= {"None"}


def _from_extension(folder: Path) -> tuple[Any, Ones]:
    import ctypes

    torch, tensors = types.ModuleType("torch"), types.ModuleType("torch._tensor")
    torch.__path__ = [str(folder)]
    # The extension adds its classes to these modules, and takes the class of tensors from the second.
    sys.modules.update({"torch": torch, "torch.distributed": types.ModuleType("torch.distributed")})
    sys.modules.setdefault("numpy", None)  # type: ignore[arg-type]  # it would take a quarter of the time
    ctypes.CDLL(str(folder / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    extension: Any = importlib.import_module("torch._C")
    tensors.Tensor = type("Tensor", (extension.TensorBase,), {})  # type: ignore[attr-defined]
    sys.modules["torch._tensor"] = tensors
    extension._c10d_init()
    with contextlib.suppress(ImportError):  # of what comes after the class of tensors, and is not used
        extension._autograd_init()
    return importlib.import_module("torch._C._distributed_c10d"), extension._VariableFunctions.ones


if __name__ == "__main__":
    main()
