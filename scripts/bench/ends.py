"""How often a training that has finished ends with an error, because its process group is torn down at the exit.

    python scripts/bench/ends.py [--runs 100]

Runs of two ranks on the CPU, each some steps long, that leave the group to the interpreter's end: a function of
ddp.resilient, and torch's own DistributedDataParallel. Printed is how many ended with another code than 0, and how many
not within the time limit, which is a run that hangs.
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_S = 120.0
ROOT = Path(__file__).resolve().parents[2]
COMMON = """
import torch
import ddp
from torch import distributed as dist, nn, optim
"""
SCRIPTS = {
    "ddp.resilient": f"""{COMMON}
ddp.init()
model = ddp.DistributedDataParallel(nn.Linear(16, 16))
optimizer = optim.SGD(model.parameters(), lr=0.1)

@ddp.resilient
def train(state):
    for _ in range(20):
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.commit()

train(ddp.State(model=model, optimizer=optimizer))
""",
    "torch's DDP": f"""{COMMON}
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
optimizer = optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="of each script [%(default)s]")
    args = parser.parse_args()
    for name, script in SCRIPTS.items():
        ends: collections.Counter[str] = collections.Counter()
        for _ in range(args.runs):
            ends[end_of(script)] += 1
        bad = args.runs - ends["0"]
        seen = ", ".join(f"{count} x {end}" for end, count in ends.items() if end != "0")
        print(f"{name}: {bad} of {args.runs} runs did not end with 0{f' ({seen})' if seen else ''}", flush=True)


def end_of(script: str) -> str:
    """Run a script on two ranks; return the exit code, or `hangs`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(script)
        argv = [sys.executable, "-m", "launcher", "run", "-q", "--nproc-per-node", "2", str(path)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        try:
            found = subprocess.run(argv, cwd=folder, env=env, capture_output=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return "hangs"
        return str(found.returncode)


if __name__ == "__main__":
    main()
