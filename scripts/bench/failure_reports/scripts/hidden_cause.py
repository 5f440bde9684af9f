"""The rank that fails first takes a second to end, and those that lost it end before it (pytorch#91278)."""

import atexit
import time

import torch
import torch.distributed as dist
from failing import begin, note
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    rank = begin()
    if rank == 2:
        atexit.register(time.sleep, 1)  # a logger that sends its last lines
    total = torch.ones(1)
    try:
        for step in range(20):
            if (rank, step) == (2, 10):
                note("failed")
                raise ValueError("bad label")
            dist.all_reduce(total)
    finally:
        dist.destroy_process_group()


main()
