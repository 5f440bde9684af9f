"""Writes a ledger and follows a replay's plan as ddp does, without torch: train.py STEPS [FAILS_AT]."""

import hashlib
import json
import os
import pdb
import sys
from pathlib import Path
from types import TracebackType

PLAN = json.loads(os.environ.get("DTRAIN_REPLAY_PLAN", "null"))
SAVED_EACH, KEPT = 4, 2


def write(**line: object) -> None:
    with open(os.environ["DTRAIN_LEDGER_FILE"], "w") as file:
        file.write(json.dumps(line) + "\n")


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def save(step: int, state: str) -> None:
    folder = Path(PLAN["folder"] if PLAN else "checkpoints")
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"step-{step:010}.pt"
    path.write_text(json.dumps([step, state]))
    write(checkpoint=str(path.absolute()), step=step)
    for old in sorted(folder.iterdir())[:-KEPT]:
        old.unlink()


def snapshot(step: int, state: str) -> None:
    folder = os.environ.get("DTRAIN_REPLAYABLE_FOLDER")
    if folder and step % int(os.environ["DTRAIN_REPLAYABLE"]) == 0:
        Path(folder, f"step-{step:010}.pt").write_text(json.dumps([step, state]))


def gradient_of(state: str, step: int, fails_at: int) -> str:
    data = Path("data").read_text() if Path("data").exists() else ""
    if step == fails_at:
        raise ValueError(f"step {step} fails")
    return digest(state, step, data)


def train(steps: int, fails_at: int) -> None:
    step, state = 0, "begin"
    if PLAN and (path := PLAN["state"] or PLAN["checkpoint"]):
        step, state = json.loads(Path(path).read_text())
        print("loaded", path)
    machine = {"torch": "2", "processor": os.environ.get("PROCESSOR", "a"), "threads": 1}
    loader = {"samples": 640, "steps": steps, "global_batch_size": 32, "micro_batches": 4, "seed": 0, "shuffle": True}
    write(ledger=1, machine=machine, loader=loader)
    while step < steps:
        step += 1
        if PLAN and PLAN["pdb"] and PLAN["step"] == step:
            write(stopped=step, micro_batch=PLAN["micro_batch"])
            pdb.set_trace()
        gradient = gradient_of(state, step, fails_at)
        hashes = {"bias": ["0", "0"], "weight": [gradient, digest(state)]}
        write(step=step, shares=[4], loss=step / 2, every=1, hashes=hashes)
        state = digest(state, gradient)
        snapshot(step, state)
        if step % SAVED_EACH == 0:
            save(step, state)
        if PLAN and not PLAN["pdb"] and PLAN["step"] == step:
            sys.exit()


def examine(_kind: object, _error: object, trace: TracebackType | None) -> None:
    pdb.post_mortem(trace)


if __name__ == "__main__" and os.environ["RANK"] == "0":
    if PLAN and PLAN["pdb"] and PLAN["step"] is None:
        sys.excepthook = examine
    train(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else -1)
