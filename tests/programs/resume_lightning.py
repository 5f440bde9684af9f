"""Trains with Lightning's Trainer and resumes after the last whole epoch; see test_resume.py.

Words: the folder, and an epoch at whose beginning rank 1 kills itself, once.
"""

import os
import signal
import sys
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


class Model(lightning.LightningModule):
    def __init__(self, dies_at: int) -> None:
        super().__init__()
        self.dies_at = dies_at
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def on_train_start(self) -> None:
        print(f"result begins at {self.current_epoch}\n", end="", flush=True)

    def on_train_epoch_start(self) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if self.current_epoch == self.dies_at and self.global_rank == 1 and is_first:
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def main() -> None:
    out, dies_at = sys.argv[1], int(sys.argv[2])
    lightning.seed_everything(3, verbose=False)
    x = torch.randn(48, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=4,
        callbacks=[ModelCheckpoint(dirpath=out, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(dies_at)
    trainer.fit(model, loader, ckpt_path="last")
    weights = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"result weights {weights.item():.9f}\n", end="", flush=True)


if __name__ == "__main__":
    main()
