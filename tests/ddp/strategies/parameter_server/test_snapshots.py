"""Servers write snapshots; a run that is started again goes on from them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import pytest
import torch.distributed as dist
from testbed import fits
from testbed.fits import trainer
from testbed.one_training import EPOCHS, Setting, batches, build, data, oracle, train
from testbed.same import assert_same
from testbed.servers import in_roles, start
from testbed.worlds import world
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import ddp
from ddp import callbacks as cb
from ddp.strategies.parameter_server.strategy import ParameterServer


@world(4)
def test_a_second_run_goes_on_from_the_snapshots(tmp_path: Path) -> None:
    """A second run ends as one that was never broken off; with another model, it is refused."""
    options = {"snapshots": tmp_path, "snapshot_every": 2}
    for epochs in (1, EPOCHS):
        setting = Setting("odd", "adamw", groups=2, decay=1.0, epochs=epochs, options=options)

        def body(setting: Setting = setting) -> None:
            strategy = start(setting)
            model, optimizer, _ = train(strategy, setting)
            expected, its_optimizer, _ = oracle(setting, strategy.replicas)
            assert strategy.step == setting.epochs * len(batches(setting, 0))
            assert_same(dict(model.state_dict()), dict(expected.state_dict()), "model")
            assert_same(optimizer.state_dict(), its_optimizer.state_dict(), "optimizer")
            strategy.close()

        in_roles(2, 2, body)

    def other() -> None:
        setting = Setting("mlp", "adamw", options=options)
        strategy = start(setting, timeout_s=3.0)
        message = "of another model" if strategy.role == "ps" else "has not come within 3 s"
        with pytest.raises(ddp.errors.ParameterServerError, match=message):
            strategy.prepare(*build(setting))
        if strategy.role == "ps":
            raise SystemExit(0)

    in_roles(2, 2, other)


@world(3)
@pytest.mark.parametrize(("accumulate", "steps", "by"), [(1, None, "epoch"), (2, None, "step"), (1, 3, "epoch")])
def test_a_fit_that_goes_on_from_snapshots_counts_and_saves_on(
    tmp_path: Path, accumulate: int, steps: int | None, by: Literal["epoch", "step"]
) -> None:
    """Schedules go on, also torch's, batches are not repeated, and new checkpoints are those that are kept."""

    class Steps(cb.Callback):
        def __init__(self) -> None:
            self.begun: list[int] = []

        def on_step_begin(self, step: int) -> None:
            self.begun.append(step)

        def on_step_end(self, step: int, logs: dict[str, float]) -> None:
            assert 0.5 < logs["loss"] < 2  # of this replica's share

    of_epoch = steps or -(-4 // accumulate)
    for epochs in (2, 3):
        options = {"snapshots": tmp_path / "snapshots", "snapshot_every": 1, "timeout_s": 20.0}

        def body(options: dict[str, Any] = options, epochs: int = epochs) -> None:
            strategy = ParameterServer(**options)
            seen, checkpoints = Steps(), cb.ModelCheckpoint(tmp_path / "saved", keep=2)
            schedule = cb.LearningRateScheduler(scheduler=functools.partial(StepLR, step_size=1, gamma=0.1), by=by)
            fit = trainer([seen, schedule, checkpoints], strategy=strategy, accumulate=accumulate)
            history = fit.fit(fits.data(), epochs=epochs, global_batch_size=fits.BATCH, steps_per_epoch=steps)
            assert seen.begun == [*range(0 if epochs == 2 else 2 * of_epoch, epochs * of_epoch)]
            stepped = range(epochs) if by == "epoch" else [of_epoch * epoch - 1 for epoch in range(1, epochs + 1)]
            assert history["learning_rate"] == pytest.approx(
                [0.1 * 0.1**number for number in stepped][history.epoch[0] :]
            )
            strategy.close()

        in_roles(2, 1, body)
    if dist.get_rank() == 0:
        names = sorted(path.name for path in (tmp_path / "saved").glob("step-*.pt"))
        assert names == [f"step-{step * of_epoch:010}.pt" for step in (2, 3)]


@world(3)
def test_servers_begin_with_snapshots_of_one_and_the_same_step(tmp_path: Path) -> None:
    """Both servers begin with one and the same step, also when the newest file of one of them is damaged."""
    setting = Setting("odd", "sgd", decay=1.0, epochs=1, options={"snapshots": tmp_path, "snapshot_every": 2})

    def body() -> int:
        strategy = start(setting)
        model, optimizer = strategy.prepare(*build(setting))
        joined = strategy.step
        x, y = data().tensors
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        strategy.close()
        return joined

    assert in_roles(1, 2, body) in (0, None)
    if dist.get_rank() == 0:
        newest = max((tmp_path / "server-1").glob("*"), key=lambda path: path.name)
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
    dist.barrier()
    joined = in_roles(1, 2, body)
    assert joined in (2, None), "the step before, of which both have a snapshot"
