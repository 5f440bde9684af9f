"""Imports what it needs when it needs it, and logs by rich."""

import os
import sys

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
DEBUG = "--debug" in sys.argv


def make_log():
    import logging

    from rich.logging import RichHandler

    logging.basicConfig(level="DEBUG" if DEBUG else "INFO", format="%(message)s", handlers=[RichHandler()])
    return logging.getLogger("train")


def main():
    log = make_log()
    rank = int(os.environ.get("RANK", 0))
    log.info("rank %d of %s", rank, os.environ.get("WORLD_SIZE", 1))

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(10, 100), torch.nn.Linear(100, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    import trouble
    from rich.progress import track

    steps = range(400)
    for step in track(steps, description="training", disable=rank != 0):
        if trouble.comes(step):
            raise ValueError("bad batch")
        x = torch.randn(64, 10)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            log.info("step %d loss %.4f", step, loss.item())
    dist.barrier()
    if rank == 0:
        log.info("finished: %d steps", len(steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
