"""Record a real run of two simulated hosts in which a worker is killed, as killed_worker.svg beside this file.

python scripts/pictures/killed_worker.py
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_suffix(".svg")
WIDTH = 116
WORDS = (
    "--simulate --nnodes 2 --nproc-per-node 2 --max-restarts 3 scripts/examples/train_gpt.py --resilient --log-every 5"
)
KILLED_AT, RANK = 60, 3  # after this step, this rank
KEPT = re.compile(r"text |parameters|step +(1|5|60|65|150) |saved|^dtrain:")


def main() -> None:
    """Run it, kill the worker, write the picture. Blocks for half a minute."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "scripts").symlink_to(ROOT / "scripts")
        shown = _run(Path(folder))
    console = Console(record=True, width=WIDTH, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text(f"$ dtrain run {WORDS}", style="bold"))
    for line in _shortened(shown):
        console.print(Text.from_ansi(line))
    console.save_svg(str(PICTURE), title="two simulated hosts, two workers each; somebody kills rank 3")


def _run(folder: Path) -> list[str]:
    """Return what the run shows, in colour."""
    argv = [sys.executable, "-m", "launcher", "run", *shlex.split(WORDS)]
    env = {**os.environ, "FORCE_COLOR": "1", "PYTHONPATH": str(ROOT)}
    shown = []
    with subprocess.Popen(
        argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            shown.append(line.rstrip("\n"))
            if re.search(rf"step +{KILLED_AT}\b", line):
                _worker(process.pid).send_signal(signal.SIGKILL)
    if process.returncode != 0 or "only this worker restarts" not in "".join(shown):
        sys.exit("\n".join([*shown, "the run did not go as the picture has it"]))
    return shown


def _worker(controller: int) -> psutil.Process:
    for process in psutil.Process(controller).children(recursive=True):
        try:
            if process.environ().get("RANK") == str(RANK):
                return process
        except psutil.NoSuchProcess:
            continue
    sys.exit(f"rank {RANK} was not found")


def _shortened(lines: list[str]) -> list[str]:
    """Return the lines with dots in the place of those that say the same again."""
    short: list[str] = []
    for line in lines:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
        if KEPT.search(plain):
            short.append(line)
        elif short[-1] != "   ...":
            short.append("   ...")
    return short


if __name__ == "__main__":
    main()
