"""Random schedules of lost and joining workers for ddp.StepLoader; called by scripts/bench/steps.py.

Each trains one of the models by a chain of one to three `dtrain run`s, on one to three simulated hosts with one to
three workers each, by shm or gloo. All but the last end at a random step, and the next continues on other ranks, from
the newest checkpoint file, which is up to four steps older. At random steps workers are killed, between the gradients
and the commit or after it, and hosts: the others go on, and with `--grow` the host, which
comes back at once, joins them again.

A schedule is not as promised if a run ends with another code than 0, or with another SHA-256 than one process.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from step_runs.training import MODELS

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("training.py")
LIMIT_S = 600.0  # of a run


@dataclass(frozen=True)
class Part:
    """One `dtrain run` of a schedule: up to `until` steps.

    `faults` are (rank, step, what): see training.py.
    """

    hosts: int
    workers: int  # of each host
    backend: str
    until: int
    faults: tuple[tuple[int, int, str], ...] = ()
    grows: bool = False


@dataclass(frozen=True)
class Ended:
    """How a run ended, and what came in it: kills, lost hosts, worlds that shrank or grew, starts of all."""

    code: int
    results: set[str]
    came: Counter[str]
    text: str


def run_schedules(count: int, seed: int, steps: int) -> int:
    """Run as many schedules, print each, and what came in all of them; return 1 if one is not as promised."""
    undisturbed: dict[str, set[str]] = {}
    came: Counter[str] = Counter()
    wrong, began = 0, time.monotonic()
    for number in range(seed, seed + count):
        numbers = random.Random(number)
        model = MODELS[number % len(MODELS)]
        if model not in undisturbed:
            with tempfile.TemporaryDirectory() as folder:
                undisturbed[model] = run_part(Part(1, 1, "", steps), model, Path(folder)).results
        parts = choose(numbers, steps)
        with tempfile.TemporaryDirectory() as folder:
            ends = [run_part(part, model, Path(folder)) for part in parts]
        of_it = sum((end.came for end in ends), Counter({"restart from files": len(parts) - 1}))
        came += of_it
        is_right = ends[-1].results == undisturbed[model] and not any(end.code for end in ends)
        wrong += not is_right
        worlds = " then ".join(f"{part.hosts}x{part.workers}{' gloo' if part.backend else ''}" for part in parts)
        print(f"seed {number}: {model}, {worlds}; {_said(of_it)}: {'same' if is_right else 'OTHER'}", flush=True)
        if not is_right:
            print(undisturbed[model], *(f"{part}\n{end.text}" for part, end in zip(parts, ends, strict=True)), sep="\n")
    print(f"{count} schedules in {time.monotonic() - began:.0f} s: {_said(came)}; {wrong} not as promised")
    return min(wrong, 1)


def choose(numbers: random.Random, steps: int) -> list[Part]:
    """Draw the runs of a schedule."""
    ends = sorted(numbers.sample(range(2, steps), numbers.randint(0, 2)))
    parts = []
    for begin, until in pairwise([0, *ends, steps]):
        hosts, workers = numbers.randint(1, 3), numbers.randint(1, 3)
        kinds = ["gradients", "commit", *(["host"] if hosts > 1 else [])]
        faults = tuple(
            (numbers.randrange(hosts * workers), numbers.randint(begin + 1, until), numbers.choice(kinds))
            for _ in range(numbers.randint(0, 3))
        )
        parts.append(
            Part(hosts, workers, numbers.choice(["", "gloo"]), until, faults, hosts > 1 and numbers.random() < 0.5)
        )
    return parts


def run_part(part: Part, model: str, folder: Path) -> Ended:
    """Run a part of a schedule in its folder, which has the checkpoints."""
    argv = [sys.executable, "-m", "launcher", "run", "--simulate", "--nnodes", f"1:{part.hosts}"]
    argv += ["--grow"] if part.grows else []
    argv += ["--nproc-per-node", str(part.workers), "--max-restarts", "20", "--heartbeat-timeout-s", "3"]
    argv += [str(SCRIPT), model, str(part.until), json.dumps(part.faults)]
    for each in folder.glob("came*"):  # of the part before
        each.unlink()
    env = {**os.environ, "DTRAIN_BACKEND": part.backend, "PYTHONPATH": str(ROOT)}
    try:
        ended = subprocess.run(
            argv, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S
        )
        code, text = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as error:
        code, text = 124, (error.stdout or b"").decode()
    sizes = [part.hosts * part.workers, *map(int, re.findall(r"goes on with (\d+) worker", text))]
    came = Counter(
        {
            "killed worker or host": len([*folder.glob("came*")]),
            "lost host": len(re.findall(r"host sim\d was lost", text)),
            "shrink": sum(after < before for before, after in pairwise(sizes)),
            "grow": sum(after > before for before, after in pairwise(sizes)),
            "start of all again": len(re.findall(r"attempt [1-9]\d* begins", text)),
        }
    )
    return Ended(code, {*re.findall(r"\] result (.*)$", text, re.MULTILINE)}, came, text)


def _said(came: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in came.items() if number) or "nothing"
