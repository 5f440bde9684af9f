"""The step of a small GPT with more ranks, as `model.explain(hosts=...)` extrapolates it from a run of two ranks here.

    python scripts/bench/scaling.py [--hosts 64] [--gpus 8] [--gbit 100] [--steps 30] [--json]

Two processes on this machine train over gloo. Compute, bytes and the spread of the steps are measured; the network is
what --gbit says, and everything in larger worlds is a model's answer. --json: one object for each number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

SHAPE = {"layers": 4, "width": 256, "heads": 4, "block_size": 64}
SEQUENCES = 2  # of a rank's batch


def worker(arguments: argparse.Namespace) -> None:
    import torch
    from torch.nn import functional as F

    import ddp

    torch.set_num_threads(1)
    world = ddp.init("gloo")
    example = runpy.run_path(str(ROOT / "scripts" / "examples" / "train_gpt.py"))
    model = ddp.DistributedDataParallel(example["GPT"](**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, example["VOCABULARY"], (SEQUENCES, SHAPE["block_size"] + 1))
    for _ in range(arguments.steps):
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if not world.is_main:
        return
    report = model.explain(hosts=arguments.hosts, gpus=arguments.gpus, gbit=arguments.gbit)
    if not arguments.json:
        print(report)
        return
    for step in report.as_dict()["steps"]:
        print(json.dumps({**step, "gbit": arguments.gbit, "ranks_per_host": arguments.gpus}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=64, help="of the largest world [%(default)s]")
    parser.add_argument("--gpus", type=int, default=8, help="ranks a host [%(default)s]")
    parser.add_argument(
        "--gbit", type=float, default=100.0, help="a second that a host's network carries [%(default)s]"
    )
    parser.add_argument("--steps", type=int, default=30, help="to measure [%(default)s]")
    parser.add_argument("--json", action="store_true", help="one object a line instead of the table")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker(arguments)
        return 0
    from step import spawn

    return spawn(2)


if __name__ == "__main__":
    sys.exit(main())
