"""One rank raises while the others wait for it in an all-reduce (pytorch#17113, #76287)."""

import torch
import torch.distributed as dist
from failing import begin, note
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    rank = begin()
    total = torch.ones(1)
    for step in range(20):
        if (rank, step) == (2, 10):
            note("failed")
            raise ValueError("bad batch")
        dist.all_reduce(total)


main()
