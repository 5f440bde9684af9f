"""The last rank has one batch less than the others, and waits in the barrier after the loop (pytorch#33148, #38174)."""

import sys

import torch
import torch.distributed as dist
from failing import begin, note
from torch.distributed.elastic.multiprocessing.errors import record

import ddp


@record
def main() -> None:
    rank = begin(timeout_s=5)
    classes = {"ddp": ddp.DistributedDataParallel, "torch": torch.nn.parallel.DistributedDataParallel}
    model = classes[sys.argv[2]](torch.nn.Linear(8, 1))
    try:
        for _ in range(5 if rank == 3 else 6):
            model(torch.randn(4, 8)).sum().backward()
        dist.barrier()
    except RuntimeError:
        note("failed")
        raise


main()
