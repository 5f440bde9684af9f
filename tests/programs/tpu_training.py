"""Trains under the strategy that DTRAIN_STRATEGY names, and compares with one process; see test_tpu.py.

tpu_training.py numbers: loops of a script's own. tpu_training.py fit FOLDER EPOCHS: a Trainer that goes on from FOLDER.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from testbed.one_training import Setting, build, check_mean, check_reduce, data, oracle, train
from testbed.same import assert_same
from torch import nn

import ddp

SETTINGS = [
    Setting("mlp", "sgd", epochs=2),  # batches of 11 over 4 devices, and one of a single sample
    Setting("odd", "adamw", groups=3, epochs=2),
    Setting("norm", "sgd", batch=12, epochs=2),
]


def numbers() -> None:
    strategy: Any = ddp.strategy()
    check_mean(strategy)
    check_reduce(strategy)
    for setting in SETTINGS:
        model, optimizer, losses = train(strategy, setting)
        expected, its_optimizer, its_losses = oracle(setting, 1)
        assert_same(losses, its_losses, "losses")
        # torch_xla's BatchNorm keeps the biased variance there.
        ours, theirs = (
            {name: value for name, value in each.state_dict().items() if not name.endswith("running_var")}
            for each in (model, expected)
        )
        assert_same(ours, theirs, setting.model)
        assert_same(optimizer.state_dict(), its_optimizer.state_dict(), "optimizer")
        error = max((value.cpu() - theirs[name]).abs().sum().item() for name, value in ours.items())
        print(f"result {setting.model} {strategy.devices} devices, error {error:.0e}", flush=True)
    x = data().tensors[0][:8]
    assert strategy.shard(x).device.type == "xla"
    share = strategy.shard(x)
    assert torch.equal(share.cpu(), x)
    print("result sharding", sharding_of(share), flush=True)


def sharding_of(tensor: torch.Tensor) -> str:
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def fit(folder: Path, epochs: int) -> None:
    strategy = ddp.strategy()
    setting = Setting("mlp", "adamw", epochs=epochs, decay=1.0)
    model, optimizer = build(setting, seed=3)
    count = CountsSteps()
    trainer = ddp.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        strategy=strategy,
        metrics=["accuracy"],
        callbacks=[ddp.callbacks.ModelCheckpoint(folder), count],
        max_grad_norm=1e9,
    )
    history = trainer.fit(data(), epochs=epochs, validation=data(), global_batch_size=11)
    expected, its_optimizer, _ = oracle(setting, 1)
    assert_same(dict(model.state_dict()), dict(expected.state_dict()), "model")
    assert_same(trainer.optimizer.state_dict()["state"], its_optimizer.state_dict()["state"], "optimizer")
    x, y = data().tensors
    assert_same(history["val_accuracy"][-1], (expected(x).argmax(1) == y).double().mean().item(), "accuracy")
    assert_same(trainer.predict(data(), global_batch_size=11), expected(x).detach(), "predictions")
    trainer.save(folder / "weights")
    assert_same(torch.load(folder / "weights", weights_only=True), dict(expected.state_dict()), "saved weights")
    if strategy.is_main:
        print(f"result {strategy.name} made {count.steps} steps, epoch {trainer.epoch}", flush=True)


class CountsSteps(ddp.callbacks.Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, step: int, logs: dict[str, float]) -> None:
        self.steps += 1


if __name__ == "__main__":
    if sys.argv[1] == "numbers":
        numbers()
    else:
        fit(Path(sys.argv[2]), int(sys.argv[3]))
