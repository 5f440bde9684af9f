"""Steps of optimizers are counted for each model; models come and go, also during a step."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp.data_parallel.step_watch import StepWatch


class Owner:
    """A model's owner in a circle, which only the garbage collector ends."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.itself, self.steps = self, 0
        self.watch = StepWatch([parameter], self.count)

    def count(self, optimizer: Any) -> bool:
        self.steps += 1
        return True


def test_a_watch_may_end_during_a_step() -> None:
    def collect(*_: Any) -> None:
        gc.collect()

    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter])
    handles = [register(collect) for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)]
    try:
        stays = Owner(parameter)
        gc.disable()  # until the step
        Owner(parameter)
        optimizer.step()
        assert (stays.steps, stays.watch.steps) == (1, 1)
    finally:
        gc.enable()
        for handle in handles:
            handle.remove()


def test_watches_leave_no_hooks_behind() -> None:
    from torch.optim import optimizer

    parameter = torch.zeros(1, requires_grad=True)
    StepWatch([parameter], lambda _: True)
    before = len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    for _ in range(3):
        Owner(parameter)
    after = len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    assert before == after
