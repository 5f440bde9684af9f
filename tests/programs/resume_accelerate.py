"""Trains with accelerate and resumes after the last whole epoch; see test_resume.py.

Words: the folder, and an epoch at whose beginning rank 1 kills itself, once.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    out, dies_at, epochs = Path(sys.argv[1]), int(sys.argv[2]), 4
    accelerator = Accelerator(cpu=True)
    set_seed(3)
    x = torch.randn(48, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = 0
    if (out / "latest").exists():
        first = int((out / "latest").read_text())
        accelerator.load_state(str(out / f"epoch-{first}"))
    print(f"result begins at {first}\n", end="", flush=True)
    for epoch in range(first, epochs):
        if epoch == dies_at and accelerator.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        for rows, targets in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(str(out / f"epoch-{epoch + 1}"))
        accelerator.wait_for_everyone()  # the folder is whole
        if accelerator.is_main_process:
            (out / "latest").write_text(str(epoch + 1))
        accelerator.wait_for_everyone()
    weights = sum(parameter.double().sum() for parameter in accelerator.unwrap_model(model).parameters())
    print(f"result weights {weights.item():.9f}\n", end="", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
