"""Draw the losses of a training whose ranks come and go, on those of the same training undisturbed: the same line.

python scripts/pictures/same_line.py

Runs scripts/examples/train_steps.py in one process; and on three simulated hosts, of which two are lost and come back,
until it ends, and goes on from its checkpoint in one process. Writes same_line.svg beside this file. Needs matplotlib.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_suffix(".svg")
SCRIPT = [str(ROOT / "scripts/examples/train_steps.py"), "--log-every", "1"]
HOSTS = shlex.split("--simulate --nnodes 1:3 --nproc-per-node 1 --max-restarts 9 --grow --heartbeat-timeout-s 3")
STEPS, RESUMED_AT = 120, 80
LOST = {25: "sim2", 50: "sim1"}  # after this step, this host
OURS, THEIRS, TEXT = "#2f81f7", "#a8a8a8", "#808080"

Losses = dict[int, tuple[float, int]]  # by step: the loss, and the number of ranks


def main() -> None:
    """Run both, compare every loss, and draw. Blocks for some minutes."""
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as folder:
        plain = _losses([sys.executable, *SCRIPT, "--steps", str(STEPS)], alone)
        saving = [*SCRIPT, "--checkpoint-dir", "saved", "--pause-s", "0.1", "--steps"]
        found = _losses([sys.executable, "-m", "launcher", "run", *HOSTS, *saving, str(RESUMED_AT)], folder, LOST)
        found |= _losses([sys.executable, *saving, str(STEPS)], folder)
    if {step: loss for step, (loss, _) in found.items()} != {step: loss for step, (loss, _) in plain.items()}:
        sys.exit("the losses differ")
    _draw(plain, found)


def _losses(argv: list[str], folder: str, lost: dict[int, str] | None = None) -> Losses:
    """Run a training in a folder, in which hosts are lost at some steps; return what it says."""
    found: Losses = {}
    left = dict(lost or {})
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, cwd=folder, env=env, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.search(r"step +(\d+)  loss (\S+)  (\d+) ranks", line):
                found[int(match[1])] = float(match[2]), int(match[3])
                if host := left.pop(int(match[1]), None):
                    _kill_host(process.pid, host)
    if process.returncode:
        sys.exit(f"{argv} ended with {process.returncode}")
    return found


def _kill_host(controller: int, host: str) -> None:
    """Kill the agent of a simulated host, whose guard then ends its workers."""
    for each in psutil.Process(controller).children(recursive=True):
        if each.environ().get("DTRAIN_HOST") == host:
            agents = [parent for parent in each.parents() if "launcher.agent" in parent.cmdline()]
            agents[-3].kill()  # the last one is that of the machine, and then there is the guard
            return
    sys.exit(f"no worker runs on {host}")


def _draw(plain: Losses, found: Losses) -> None:
    style = {"svg.fonttype": "none", "svg.hashsalt": "dtrain", "text.color": TEXT, "axes.edgecolor": TEXT}
    style |= {"axes.labelcolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT, "legend.frameon": False}
    with rc_context({**style, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.subplots()
        steps = sorted(plain)
        axes.plot(steps, [plain[step][0] for step in steps], color=THEIRS, linewidth=7, label="one rank, undisturbed")
        label = "three hosts, of which two are lost and come back; then one rank, from a file"
        axes.plot(steps, [found[step][0] for step in steps], color=OURS, linewidth=1.5, label=label)
        for step, host in LOST.items():
            axes.annotate(f"{host} is lost", (step, found[step][0]), (step, found[step][0] + 0.4), ha="center",
                          arrowprops={"arrowstyle": "->", "color": TEXT})  # fmt: skip
        axes.axvline(RESUMED_AT, color=TEXT, linestyle=":")
        axes.text(RESUMED_AT + 1, axes.get_ylim()[1] * 0.8, "resumed on one rank")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.legend(loc="upper right")
        figure.savefig(PICTURE, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
