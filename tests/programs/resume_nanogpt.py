"""A script in nanoGPT's form: `out_dir`, `init_from`, and ckpt.pt, which rank 0 writes; see test_resume.py.

Words: the folder, and a step at which rank 1 kills itself, once.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

out_dir, dies_at = sys.argv[1], int(sys.argv[2])
eval_interval, max_iters = 4, 10
init_from = "scratch"
# What dtrain's restarts need:
if os.path.exists(os.path.join(out_dir, "ckpt.pt")):
    init_from = "resume"

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
iter_num = 0
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location="cpu")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
print(f"result begins at {iter_num}\n", end="", flush=True)
model = DistributedDataParallel(model)
raw_model = model.module
while iter_num < max_iters:
    if iter_num == dies_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * iter_num + rank))
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    iter_num += 1
    if iter_num % eval_interval == 0 and rank == 0:
        os.makedirs(out_dir, exist_ok=True)
        checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
weights = sum(parameter.double().sum() for parameter in model.parameters())
print(f"result weights {weights.item():.9f}\n", end="", flush=True)
dist.destroy_process_group()
