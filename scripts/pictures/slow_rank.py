"""Record a real run of two simulated hosts in which one rank becomes slow and another is killed.

python scripts/pictures/slow_rank.py

Writes beside this file top.svg, what `dtrain top` shows of the slow rank, and plot.png, which `dtrain plot` draws.
Needs a quiet machine, and matplotlib.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image  # which matplotlib needs
from rich.console import Console
from rich.text import Text

from launcher.cli.runs.top import screen_of
from launcher.runs.control import ask
from launcher.runs.registry import choose, entries

ROOT = Path(__file__).parents[2]
WIDTH = 100
COLOURS = 32
LIMIT_S = 120.0  # until a straggler is named
SLOW, KILLED = 2, 1  # ranks
AFTER_S = 8.0  # from the straggler to the kill, and once more to the end
SCRIPT = f"""
import os, time, torch, ddp
world = ddp.init()
model = ddp.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
is_first, began = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", time.monotonic()
while True:
    time.sleep(0.04)
    if is_first and world.rank == {SLOW} and time.monotonic() - began > 10:
        time.sleep(0.05)
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
"""
WHERE = ["--simulate", "--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1"]


def main() -> None:
    """Run it, and write the pictures. Blocks for a minute."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(XDG_STATE_HOME=f"{folder}/state", PYTHONPATH=str(ROOT))
        Path(folder, "train.py").write_text(SCRIPT)
        os.chdir(folder)
        _dtrain("run", "--detach", "--run-id", "demo", *WHERE, "train.py")
        try:
            entry = choose("demo", entries())
            found = _with_straggler(entry)
            time.sleep(AFTER_S)
            screen = screen_of(
                entry, ask(entry, "status", in_full=True) or found, height=30
            )  # now, for it shows the run's age
            pids = {each["rank"]: each["pid"] for each in json.loads(_dtrain("stacks", "demo", "--json"))["ranks"]}
            os.kill(pids[KILLED], signal.SIGKILL)
            time.sleep(2 * AFTER_S)
        finally:
            _dtrain("stop", "demo")
        console = Console(record=True, width=WIDTH, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(Text("$ dtrain top demo", style="bold"))
        console.print(screen)
        console.save_svg(str(ROOT / "scripts/pictures/top.svg"), title=f"rank {SLOW} is slower than the others")
        picture = ROOT / "scripts/pictures/plot.png"
        _dtrain("plot", "demo", "-o", str(picture))
        with Image.open(picture) as image:
            image.convert("RGB").quantize(COLOURS).save(picture, optimize=True)  # a third of the bytes


def _dtrain(*words: str) -> str:
    command = [sys.executable, "-m", "launcher", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _with_straggler(entry: Any) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found = ask(entry, "status", in_full=True)
        if found and any(f"rank {SLOW}" in each["line"] for each in found.get("stragglers", ())):
            return found
        time.sleep(0.5)
    sys.exit(f"rank {SLOW} was not found to be slow")


if __name__ == "__main__":
    main()
