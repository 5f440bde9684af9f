"""What recording where the time of a step goes costs: the calls of one step of DistributedDataParallel.

    python scripts/bench/timeline.py [--buckets 10] [--steps 90000] [--step-ms 20]

One process. It makes the calls alone, without training between them: a forward, a backward with a wait for each
bucket, an optimizer that does nothing. First without a file to record in, then with one, then with the details of each
step, of which there are those of one step in a second otherwise. Time of the processor, per step: median and least of 9
rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from ddp.monitoring import timeline

ROUNDS = 9
RING_BYTES = 16 + 1024 * 72  # as the agent makes it


class Nothing(torch.optim.Optimizer):
    """Steps its parameter by nothing."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1))], {})

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--buckets", type=int, default=10)
    parser.add_argument("--steps", type=int, default=90_000)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the training that it is compared with")
    args = parser.parse_args()
    os.environ.pop("DTRAIN_TIMELINE_FILE", None)
    optimizer = Nothing()
    without = measured(optimizer, args)
    with tempfile.NamedTemporaryFile() as ring:
        ring.write(bytes(RING_BYTES))
        ring.flush()
        os.environ["DTRAIN_TIMELINE_FILE"] = ring.name
        timeline._is_looked_for = False
        show("recorded", measured(optimizer, args), without, args.step_ms)
        timeline._DETAIL_EVERY_S = 0.0
        show("each step in detail", measured(optimizer, args), without, args.step_ms)


def measured(optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> list[float]:
    """Return the microseconds of a step, by round."""
    steps = args.steps // ROUNDS
    each_us = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(steps):
            step(optimizer, args.buckets)
        each_us.append((time.process_time() - began) / steps * 1e6)
    return each_us


def step(optimizer: torch.optim.Optimizer, buckets: int) -> None:
    timeline.forward()
    timeline.backward()
    wait = timeline.wait_begins()
    for bucket in range(buckets):
        timeline.wait_for(bucket)
        timeline.wait_ended(timeline.wait_begins())  # as StallReport does
    timeline.wait_ended(wait)
    timeline.backward_ended()
    timeline.counted()
    optimizer.step()


def show(what: str, with_: list[float], without: list[float], step_ms: float) -> None:
    more = statistics.median(with_) - statistics.median(without)
    print(f"{what}: {more:.1f} us a step (least {min(with_) - min(without):.1f}), {more / step_ms / 10:.3f} %")


if __name__ == "__main__":
    main()
