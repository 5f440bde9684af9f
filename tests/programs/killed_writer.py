"""Kills processes that save in a loop at random moments: killed_writer.py FOLDER KILLS SEED IN_BACKGROUND."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from testbed.checkpoints import listed
from torch import nn

import ddp

_WEIGHTS = 3000


def kill_writers(folder: Path, kills: int, seed: int, in_background: bool) -> dict[str, int]:
    """Fork a process that saves in a loop, kill it at a random moment, check what it left; `kills` times."""
    rng = random.Random(seed)
    in_the_middle = newest = 0
    checkpoint = ddp.Checkpoint(folder, keep=2)
    for _ in range(kills):
        done_read, done_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(done_read)
            _save_for_ever(folder, done_write, in_background)
        os.close(done_write)
        first = os.read(done_read, 8)  # it has saved once: from now on any moment is a moment of saving
        time.sleep(rng.uniform(0, 0.012))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reported = first
        while more := os.read(done_read, 8192):
            reported = more[-8:]
        os.close(done_read)
        durable = int.from_bytes(reported, "little")

        in_the_middle += any(name.endswith(".tmp") for name in os.listdir(folder))
        weights = nn.Linear(_WEIGHTS, 1)
        restored = checkpoint.load(model=weights)
        assert restored.step >= max(durable, newest), "a checkpoint that was durable is gone"
        newest = restored.step
        assert restored.values == {"number": newest}
        assert all(bool((value == newest).all()) for value in weights.state_dict().values())
    checkpoint.save(newest + 1)
    checkpoint.wait()
    left = sorted(listed(folder))
    assert len(left) == 2, left
    return {"in_the_middle": in_the_middle, "newest": newest}


def _save_for_ever(folder: Path, done: int, in_background: bool) -> None:
    try:
        model = nn.Linear(_WEIGHTS, 1)
        checkpoint = ddp.Checkpoint(folder, keep=2, in_background=in_background)
        restored = checkpoint.load(model=model)
        begun = step = restored.step if restored else 0
        while True:
            step += 1
            for value in model.state_dict().values():
                value.fill_(step)
            checkpoint.save(step, model=model, number=step)
            durable = step - 1 if in_background else step
            if durable > begun:
                os.write(done, durable.to_bytes(8, "little"))
    finally:
        os._exit(1)


if __name__ == "__main__":
    print(json.dumps(kill_writers(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")))
