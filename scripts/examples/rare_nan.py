"""Forecast a signal, until a loss is NaN in one step on one rank: find out why with `dtrain replay`.

    dtrain run --simulate --nnodes 2 --nproc-per-node 2 --on-nonfinite stop scripts/examples/rare_nan.py
    dtrain replay --pdb

Each sample is a window of a sensor's signal, scaled by its own standard deviation. The error is in the data, and in
what the script does with it.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import ddp

WINDOW = 16


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of the signal, each with the value that follows it."""

    def __init__(self, count: int = 4000) -> None:
        numbers = torch.Generator().manual_seed(1)
        time = torch.arange(count + WINDOW) / 7
        self._signal = torch.sin(time) + 0.1 * torch.randn(count + WINDOW, generator=numbers)
        self._signal[2123 : 2123 + WINDOW + 1] = 0.0  # the sensor was off
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._signal[index : index + WINDOW + 1]
        scaled = (window - window[:-1].mean()) / window[:-1].std()
        return scaled[:-1], scaled[-1:]


def main() -> None:
    ddp.init()
    torch.manual_seed(0)  # before the model is made: a replay without a checkpoint makes the same one
    model = ddp.DistributedDataParallel(nn.Sequential(nn.Linear(WINDOW, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = ddp.StepLoader(Windows(), global_batch_size=64, micro_batch_size=8)
    for step in loader.epochs(2):
        losses = []
        for x, y in step:  # x: (8, WINDOW), y: (8, 1)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            losses.append(loss.item())
        mean = step.mean(losses)
        if step.number % 20 == 0:
            print(f"step {loader.steps:3}  loss {mean:.4f}", flush=True)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
