"""Trainer on a device: labels are counted in host memory, so that no step waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from testbed.sync_debug import waiting_is_an_error
from torch import nn
from torch.utils.data import TensorDataset

import ddp
from ddp.callbacks import Callback
from ddp.training.trainer import Trainer

pytestmark = pytest.mark.gpu


class RaisesWhereItWaits(Callback):
    """From the second step on, whatever waits for the device is an error."""

    def __init__(self, checked: ExitStack) -> None:
        self.steps = 0
        self._checked = checked  # a step that fails does not end

    def on_step_begin(self, step: int) -> None:
        if step:
            self._checked.enter_context(waiting_is_an_error())

    def on_step_end(self, step: int, logs: dict[str, float]) -> None:
        self._checked.close()
        self.steps += 1


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("weights", [None, [1.0, 5.0, 0.2]])
def test_a_step_does_not_wait_for_the_device(weights: list[float] | None) -> None:
    loss = nn.CrossEntropyLoss(None if weights is None else torch.tensor(weights))
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))
    labels = torch.arange(40) % 3
    labels[::4] = -100
    with ExitStack() as checked:
        seen = RaisesWhereItWaits(checked)
        trainer = Trainer(
            net, torch.optim.SGD(net.parameters(), 0.1), loss, strategy=ddp.strategy(), callbacks=[seen], log_every=1000
        )
        assert next(net.parameters()).is_cuda
        trainer.fit(TensorDataset(torch.randn(40, 6), labels), epochs=1, global_batch_size=8)
    assert seen.steps == 5
