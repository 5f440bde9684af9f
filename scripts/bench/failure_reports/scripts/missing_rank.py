"""One rank does not come to a collective; the group's timeout is 5 s (nccl#1260, accelerate#3861)."""

import time

import torch
import torch.distributed as dist
from failing import begin, note
from torch.distributed.elastic.multiprocessing.errors import record


def load_shard() -> None:
    time.sleep(600)


@record
def main() -> None:
    rank = begin(timeout_s=5)
    total = torch.ones(1)
    for step in range(20):
        if (rank, step) == (3, 10):
            note("stuck")
            load_shard()
        try:
            dist.all_reduce(total)
        except RuntimeError:
            note("failed")
            raise


main()
