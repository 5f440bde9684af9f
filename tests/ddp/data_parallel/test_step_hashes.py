"""How many steps hash a whole model, by a clock of the test."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

from ddp.comm.combine import Shares
from ddp.data.ledger import record
from ddp.data.micro_batch import MicroBatch
from ddp.data_parallel import step_hashes
from ddp.data_parallel.buckets.bucket_plan import Member
from ddp.data_parallel.step_hashes import StepHashes

STEP_S, HASH_S = 0.0041, 25e-6  # 2 % of a step are 3 hashes


class Clock:
    """A clock that hashes advance: the first one of a process takes longer."""

    now_s, hash_s = 0.0, HASH_S

    def __init__(self) -> None:
        self._next_s = 100 * HASH_S

    def __call__(self) -> float:
        return self.now_s

    def hash(self, tensor: torch.Tensor | None) -> int:
        self.now_s += self._next_s
        self._next_s = self.hash_s
        return 0


@pytest.mark.parametrize(
    ("lines_s", "parts"),
    [([0.0], 10), ([0.0, 0.0, 1.0], 10), ([1.0], 40)],
    ids=["usual", "one slow line", "lines take more than the share"],
)
def test_parts_of_a_model(monkeypatch: pytest.MonkeyPatch, lines_s: list[float], parts: int) -> None:
    clock = Clock()
    monkeypatch.setattr(step_hashes, "perf_counter", clock)
    monkeypatch.setattr(step_hashes, "_hash", clock.hash)
    monkeypatch.setattr(record, "lines_s", deque(lines_s, maxlen=64))
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(16)]
    hashes = StepHashes(0, [Member(index, f"{index}", each) for index, each in enumerate(parameters)])
    for step in range(1, 10):
        clock.now_s += STEP_S
        hashes.start(MicroBatch(0, 1.0, 1.0, Shares.of(1, 1), 0, step=step))
        *_, every = hashes.status()
    assert every == parts  # 16 gradients and 16 parameters


def test_parts_follow_what_hashes_take_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(step_hashes, "perf_counter", clock)
    monkeypatch.setattr(step_hashes, "_hash", clock.hash)
    monkeypatch.setattr(record, "lines_s", deque([0.0], maxlen=64))
    members = [Member(index, f"{index}", nn.Parameter(torch.zeros(4))) for index in range(16)]
    hashes = StepHashes(0, members)
    seen = []
    for step in range(1, 130):
        clock.now_s += STEP_S
        hashes.start(MicroBatch(0, 1.0, 1.0, Shares.of(1, 1), 0, step=step))
        clock.hash_s = 2 * HASH_S
        *_, every = hashes.status()
        hashes._every, hashes._from = every, step + 1  # as `check` does with the sum
        hashes.delivered()
        seen.append(every)
    assert (seen[0], seen[20], seen[-1]) == (16, 10, 19)  # the last step lasts as long as its hashes do, too
