"""A loop with accelerate: accumulation, gathered metrics, its own tqdm."""

import torch
import trouble
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed, tqdm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__)


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(5)
    x = torch.randn(3200, 16)
    y = (x.sum(1) > 0).long()
    train = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    test = DataLoader(TensorDataset(x[:320], y[:320]), batch_size=32)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    step = 0
    for epoch in range(2):
        model.train()
        for inputs, targets in tqdm(train, desc=f"epoch {epoch}"):
            if trouble.comes(step):
                raise ValueError("bad batch")
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
        model.eval()
        right = []
        for inputs, targets in test:
            with torch.no_grad():
                found, wanted = accelerator.gather_for_metrics((model(inputs).argmax(1), targets))
            right.append((found == wanted).float())
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(right).mean():.3f}")
    accelerator.save_state("state")
    accelerator.print(f"finished: {step} steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()
