"""Trains with Lightning's Trainer and its own strategy; see test_libraries.py."""

import os
import warnings

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def main() -> None:
    lightning.seed_everything(3, verbose=False)
    x = torch.randn(50, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, loader)
    weights = sum(parameter.double().sum() for parameter in model.parameters())
    environment = type(trainer.strategy.cluster_environment).__name__
    print(
        f"result {environment} world {trainer.world_size} loss {trainer.callback_metrics['loss']:.9f}\n",
        end="",
        flush=True,
    )
    print(f"result weights {weights.item():.9f}\n", end="", flush=True)


if __name__ == "__main__":
    main()
