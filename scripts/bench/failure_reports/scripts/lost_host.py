"""A host is lost while all train (pytorch#114097). Each rank notes the first steps of each attempt."""

import os
import time

import torch
import torch.distributed as dist
from failing import begin, note
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    begin()
    total = torch.ones(1)
    for step in range(60):
        dist.all_reduce(total)
        if step == 1:
            note("step", os.environ["SSH_CONNECTION"].split()[2])
        time.sleep(0.1)


main()
