"""All ranks meet, add a number up and end; where they cannot, the launcher has given them wrong addresses."""

import torch
import torch.distributed as dist
from failing import begin, note
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    note("started")
    begin(timeout_s=20)
    total = torch.ones(1)
    dist.all_reduce(total)
    note("joined", str(int(total)))
    dist.destroy_process_group()


main()
