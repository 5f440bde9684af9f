"""Lightning's Trainer with its strategy ddp, its progress bar and a log in a CSV file."""

import os

import lightning as L
import torch
import trouble
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch, index):
        if trouble.comes(self.global_step):
            raise ValueError("bad batch")
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(7)
    x = torch.randn(1600, 32)
    y = x[:, :4].argmax(1)
    train = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    held_out = DataLoader(TensorDataset(x[:200], y[:200]), batch_size=50)
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        logger=CSVLogger("logs"),
        log_every_n_steps=10,
    )
    trainer.fit(Classifier(), train, held_out)
    if trainer.is_global_zero:
        print(f"finished: {trainer.global_step} steps")


if __name__ == "__main__":
    main()
