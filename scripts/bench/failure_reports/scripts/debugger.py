"""A rank is looked at by a debugger (torchrunx#67, torchtitan#652): at a breakpoint in the script, or without one."""

import sys
import time

import torch
import torch.distributed as dist
from failing import FOLDER, begin, note


def train(rank: int) -> None:
    total = torch.ones(1)
    secret = 4200 + rank
    for step in range(600):
        dist.all_reduce(total)
        total.fill_(1)
        if step == 10:
            note("up")
        if (step, rank, sys.argv[2]) == (20, 1, "breakpoint"):
            note("failed")
            breakpoint()
        stop = torch.tensor([(FOLDER / "stop").exists()], dtype=torch.int32)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            break
        time.sleep(0.05)
    assert secret


train(begin(timeout_s=60))
