"""Train a small GPT on sums like 27+58=85, with gradient accumulation: the same losses, to the bit, on any ranks.

    python scripts/examples/train_steps.py
    dtrain run --simulate --nnodes 1:3 --nproc-per-node 1 --max-restarts 9 --grow scripts/examples/train_steps.py

A step of the optimizer is 8 micro-batches, whichever ranks compute them. Under dtrain, workers and hosts may fail and
come back meanwhile. With `--checkpoint-dir`, a later run goes on where this one ended, on as many ranks as it has.

B is the number of texts in a micro-batch, T their length, C the width of the model, V the number of characters.
"""

import argparse
import itertools
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ddp

CHARACTERS = "\n0123456789+="
LENGTH = 9  # of a text: 27+58=85, and a newline


def main() -> None:
    args = parse_args()
    world = ddp.init()
    torch.set_num_threads(1)  # the bits are those of a number of threads
    torch.manual_seed(args.seed)
    model = ddp.DistributedDataParallel(GPT(layers=2, heads=4, width=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    loader = ddp.StepLoader(sums(), global_batch_size=64, micro_batch_size=8, seed=args.seed, drop_last=True)
    checkpoint = ddp.Checkpoint(args.checkpoint_dir) if args.checkpoint_dir else None
    state = ddp.State(model=model, optimizer=optimizer, sampler=loader, step=0)
    if checkpoint and (restored := checkpoint.load(model=model, optimizer=optimizer, sampler=loader)):
        state.step = restored.step

    @ddp.resilient
    def train(state: ddp.State) -> None:
        while state.step < args.steps:
            for step in itertools.islice(loader.epochs(loader.epoch + 1), args.steps - state.step):
                losses = []
                for x, y in step:  # x, y: (B, T)
                    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                    loss.backward()
                    losses.append(loss.item())
                mean = step.mean(losses)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                state.commit()
                if world.is_main and state.step % args.log_every == 0:
                    print(f"step {state.step:4d}  loss {mean!r}  {world.world_size} ranks", flush=True)
                if checkpoint and checkpoint.due(state.step, every=10):
                    checkpoint.save(state.step, model=model, optimizer=optimizer, sampler=loader)
                time.sleep(args.pause_s)

    train(state)
    if checkpoint:
        checkpoint.wait()


class GPT(nn.Module):
    """A decoder with dropout; the output layer has the weights of the embedding."""

    def __init__(self, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.places = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS), bias=False)
        nn.init.normal_(self.characters.weight, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, x: Tensor) -> Tensor:
        """Characters (B, T) to the logits of the next ones (B, T, V)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.characters(x) + self.places.weight[: x.shape[1]]  # (B, T, C)
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return self.head(self.norm(hidden))


def sums() -> TensorDataset:
    """All sums of two numbers below 100, as characters (texts, T) and the ones that follow (texts, T)."""
    texts = [f"{a}+{b}={a + b}".ljust(LENGTH, "\n") for a in range(100) for b in range(100)]
    numbers = torch.tensor([[CHARACTERS.index(each) for each in text] for text in texts])
    return TensorDataset(numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="from the start of the training [%(default)s]")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint-dir", help="where to save, and to go on from")
    parser.add_argument("--pause-s", type=float, default=0.0, help="sleep after each step, to watch failures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
