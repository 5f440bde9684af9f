"""ddp.Trainer with validation, a progress bar and checkpoints."""

import torch
import trouble
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import ddp


class Watch(ddp.callbacks.Callback):
    def on_step_end(self, step, logs):
        if trouble.comes(step):
            raise ValueError("bad batch")


def dataset(x, y):
    return TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))


def main():
    digits = load_digits()
    x, x_test, y, y_test = train_test_split(digits.data, digits.target, test_size=300, random_state=0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    trainer = ddp.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        callbacks=[ddp.callbacks.ModelCheckpoint("fit"), ddp.callbacks.ProgressBar(), Watch()],
        seed=0,
    )
    history = trainer.fit(dataset(x, y), epochs=6, validation=dataset(x_test, y_test), global_batch_size=32)
    if trainer.strategy.is_main:
        print(f"finished: {len(history['val_loss'])} epochs")


if __name__ == "__main__":
    main()
