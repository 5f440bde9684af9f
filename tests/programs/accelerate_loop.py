"""Trains with accelerate: a loop as its documentation has it; see test_libraries.py."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    x = torch.randn(50, 4)  # an odd number of batches
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for rows, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(rows), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(
            f"result epoch {epoch} loss {accelerator.reduce(loss.detach(), 'mean').item():.9f}\n", end="", flush=True
        )
    found = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()
    weights = sum(parameter.double().sum() for parameter in accelerator.unwrap_model(model).parameters())
    accelerator.print(
        f"result processes {accelerator.num_processes} {found} {accelerator.distributed_type}\n", end="", flush=True
    )
    print(f"result weights {weights.item():.9f}\n", end="", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
