"""What torchrun promises its workers, checked and written to seen.RANK.ATTEMPT.json; see test_torchrun_scripts.py."""

import argparse
import json
import os
import sys
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path

PROMISED = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", "--local_rank", type=int)
    parser.add_argument("what", choices=["show", "sum", "record", "once", "spawn"])
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    seen: dict[str, object] = {name: os.environ.get(name) for name in PROMISED}
    seen |= {"argv": sys.argv[1:], "name": __name__, "local_rank": args.local_rank}
    assert int(os.environ["MASTER_PORT"]) > 0
    assert os.environ["MASTER_ADDR"]
    assert os.environ["TORCHELASTIC_RUN_ID"]
    if args.what == "sum":
        seen["sum"] = sum_of_ranks(args.words[0])
    elif args.what == "spawn":
        seen["spawned"] = spawn()
    say(seen)
    if args.what == "record":
        fail()
    if args.what == "once" and (seen["RANK"], seen["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        while not Path("seen.0.0.json").exists():  # the other would be ended before it says anything
            time.sleep(0.01)
        sys.exit(3)


def say(seen: dict[str, object]) -> None:
    path = Path(f"seen.{seen['RANK']}.{seen['TORCHELASTIC_RESTART_COUNT']}.json")
    path.with_suffix(".part").write_text(json.dumps(seen, indent=1))
    path.with_suffix(".part").rename(path)


def sum_of_ranks(method: str) -> float:
    """Form a group as its documentation has it, and add ranks up."""
    import torch
    import torch.distributed as dist

    assert dist.is_torchelastic_launched()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if method == "tcp":
        at = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        dist.init_process_group("gloo", init_method=at, rank=rank, world_size=world_size)
    else:
        dist.init_process_group("gloo", init_method="env://" if method == "env" else None)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return total.item()


def spawn() -> list[int]:
    """Start processes of its own, as programs of torch.multiprocessing do."""
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    torch.multiprocessing.spawn(_put, args=(queue,), nprocs=2)
    return sorted(queue.get() for _ in range(2))


def _put(index: int, queue: "SimpleQueue[int]") -> None:
    queue.put(index)


def fail() -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def work() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("recorded by the second")
        time.sleep(60)

    work()


if __name__ == "__main__":
    main()
