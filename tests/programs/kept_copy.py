"""A training that saves, for test_kept_copy.py: its argument says what befalls it in attempt 0, or what it looks at."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any

import torch

import ddp

dist = torch.distributed
world = ddp.init()  # what is imported after a call is no matter of testbed.warm
from ddp.checkpoint import copies, kept_copy  # noqa: E402

what = sys.argv[1]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

torch.manual_seed(5)
model = ddp.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 7)))
optimizer = torch.optim.AdamW(model.parameters())
checkpoint = ddp.Checkpoint("saved")


def digest() -> str:
    state = [*model.parameters(), *(each for of in optimizer.state.values() for each in of.values())]
    return " ".join(tensor.double().sum().item().hex() for tensor in state)


def train() -> None:
    model(torch.ones(4, 200)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(step: int) -> None:
    train()
    checkpoint.save(step, model=model, optimizer=optimizer, best=0.5)
    print(f"saved {step} {digest()}", flush=True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if what == "file removed" and attempt:
    if world.is_main:
        os.rename("saved", "moved")
        pathlib.Path("saved").touch()  # no folder: nothing can be read, or written
    dist.barrier()
restored = checkpoint.load(model=model, optimizer=optimizer)
where = "" if restored is None else restored.path.name
print(f"loaded {restored and restored.step} {digest()} {where} {restored and restored.values}", flush=True)
if what == "file removed" and attempt:
    dist.barrier()
    if world.is_main:
        os.unlink("saved")
    dist.barrier()
elif what == "second process":
    save(1)
    checkpoint.wait()
    if world.is_main:
        other = "import ddp, torch; from ddp.checkpoint.copies import CopyMemory; print(CopyMemory.of_host())"
        print("other", subprocess.check_output([sys.executable, "-c", other], text=True).strip(), flush=True)
elif what == "no memory":
    copies._available_bytes = lambda: 1 << 10
    save(1)
    save(2)
    checkpoint.wait()
    print("note", kept_copy.find(), flush=True)
if attempt == 0 and what in ("one killed", "all killed", "file removed"):
    save(3)
    checkpoint.wait()
    kept_copy.write_file = lambda *_: threading.Event().wait()  # this process never writes it
    save(4)
    dist.barrier()
    if what != "one killed" or world.is_main:
        die()
    threading.Event().wait()
elif attempt == 0 and what == "killed in a copy":
    save(3)
    checkpoint.wait()

    class Sink(copies._Sink):
        def write(self, data: Any) -> int:
            if self._memory is not None and self.length > 100_000:
                die()
            return super().write(data)

    copies._Sink = Sink  # type: ignore[misc]  # replaced in this process
    save(4)
elif attempt:
    save(9)
