"""@ddp.resilient with a checkpoint, a scheduler, bf16 autocast, evaluation and an average of the weights (EMA)."""

import argparse

import torch
import torch.nn.functional as F
import trouble
from sklearn.datasets import load_digits
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import ddp

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=2e-3)
args = parser.parse_args()

world = ddp.init()
torch.manual_seed(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
train_data, test_data = torch.utils.data.random_split(data, [1500, 297], generator=torch.Generator().manual_seed(0))
sampler = ddp.DistributedSampler(train_data)
loader = DataLoader(train_data, batch_size=16, sampler=sampler)
test_loader = DataLoader(
    test_data, batch_size=64, sampler=ddp.DistributedSampler(test_data, shuffle=False, even="exact")
)

net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
model = ddp.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
checkpoint = ddp.Checkpoint("checkpoints")
state = ddp.State(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, ema=ema, epoch=0, step=0)


def evaluate():
    right = 0
    with torch.no_grad():
        for x, y in test_loader:
            right += (ema(x).argmax(1) == y).sum().item()
    result = ddp.gather_metrics({"right": right})
    return 100 * result["right"] / len(test_data)


@ddp.resilient
def train(state):
    for state.epoch in range(state.epoch, args.epochs):  # noqa: B020  # as the guide has it
        sampler.set_epoch(state.epoch)
        model.train()
        for x, y in loader:
            if trouble.comes(state.step):
                raise ValueError("bad batch")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ema.update_parameters(net)
            state.step += 1
            state.commit()
        accuracy = evaluate()
        if world.is_main:
            print(f"epoch {state.epoch}  loss {loss.item():.3f}  accuracy {accuracy:.1f} %")
        checkpoint.save(state.step, model=model, optimizer=optimizer, scheduler=scheduler, epoch=state.epoch)


train(state)
checkpoint.wait()
if world.is_main:
    print(f"finished: {state.step} steps")
