"""ddp with tqdm, in a script without functions."""

import torch
import torch.nn.functional as F
import trouble
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm, trange

import ddp

world = ddp.init()
torch.manual_seed(0)
digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
sampler = ddp.DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(world.device)
model = ddp.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

step = 0
for epoch in trange(8, desc="epochs", disable=not world.is_main):
    sampler.set_epoch(epoch)
    right = 0
    for x, y in tqdm(loader, leave=False, disable=not world.is_main):
        if trouble.comes(step):
            raise ValueError("bad batch")
        output = model(x.to(world.device))
        loss = F.cross_entropy(output, y.to(world.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += (output.argmax(1) == y).sum().item()
        step += 1
    result = ddp.gather_metrics({"right": right})
    if world.is_main:
        tqdm.write(f"epoch {epoch}: {100 * result['right'] / len(dataset):.1f} % right")
if world.is_main:
    print(f"finished: {step} steps")
