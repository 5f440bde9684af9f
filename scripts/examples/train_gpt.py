"""Train a small character-level GPT on the text of Python's standard library, on one process or on many.

    python scripts/examples/train_gpt.py
    dtrain run --simulate --nnodes 2 --nproc-per-node 2 scripts/examples/train_gpt.py

Both give the same losses, as do torchrun and mpirun: a step is `--batch-size` blocks of text, however many
workers share it. What makes the script distributed is `ddp.init()`, the wrapped model and the sampler.

Killed and started again with the same `--checkpoint-dir`, on as many workers or on fewer or more, it goes on from
the newest whole checkpoint to the losses that it would have had. A launcher that may restart it gets that without
the option: every run has its own folder then, named by its run id. With `--resilient`, `dtrain run --max-restarts N`
replaces a killed worker alone, and the others go on with it from their newest step.

B is the batch of one worker, T the length of a block, C the width of the model, V the size of the vocabulary.
"""

import argparse
import hashlib
import itertools
import math
import os
import platform
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import ddp

VOCABULARY = 96  # a newline, then the printable ASCII characters in order
BASE_BATCH = 32  # blocks in the batch that --lr is meant for


def main() -> None:
    args = parse_args()
    world = ddp.init()
    if args.batch_size % world.world_size:
        sys.exit(f"--batch-size {args.batch_size} does not divide by the {world.world_size} workers")

    text = read_stdlib(args.text_kb * 1000)
    digest = hashlib.sha256(text).hexdigest()[:12]
    version = platform.python_version()
    say(world, f"text {digest}: {len(text):,} characters from the standard library of Python {version}")
    training, validation = split(text, args)
    torch.manual_seed(args.seed)
    shape = {"block_size": args.block_size, "layers": args.layers, "heads": args.heads, "width": args.width}
    gpt = GPT(**shape).to(world.device)
    say(
        world,
        f"{sum(p.numel() for p in gpt.parameters()):,} parameters, {world.world_size} workers on "
        f"{world.device.type}, {args.batch_size // world.world_size} blocks each",
    )

    train(gpt, digest, training, validation, args, world)
    if world.is_main:
        save({"shape": shape, "model": gpt.state_dict()}, args.out)
        print(f"saved {args.out}; a sample:\n{sample(gpt, 'def ', args, world.device).rstrip()}", flush=True)


def train(
    gpt: "GPT", digest: str, training: "Blocks", validation: "Blocks", args: argparse.Namespace, world: ddp.World
) -> None:
    """Run the steps that are left. A printed loss is the mean over all workers and the steps since the last one."""
    model = ddp.DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    sampler = ddp.DistributedSampler(training, shuffle=True, seed=args.seed, drop_last=True)
    checkpoint = ddp.Checkpoint(args.checkpoint_dir) if args.checkpoint_dir else None
    # The last step that was done, that whose loss was printed, and the sum of the mean losses of the steps in between.
    state = ddp.State(
        model=model, optimizer=optimizer, sampler=sampler, step=0, printed=0, total=torch.zeros((), device=world.device)
    )
    if checkpoint and (restored := checkpoint.load(model=model, optimizer=optimizer, sampler=sampler)):
        state.step, state.printed = restored.step, restored.values["printed"]
        state.total = restored.values["total"].to(world.device)
        say(world, f"resuming after step {state.step}, from {restored.path}")

    def steps(state: ddp.State) -> None:
        require_same_text(digest, world)
        began_at, began = state.step, time.perf_counter()
        batches = endless(training, sampler, args, world)
        for step, (x, y) in zip(range(state.step + 1, args.steps + 1), batches, strict=False):  # x, y: (B, T)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            loss = cross_entropy(model(x), y).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            state.total = state.total + sum_over_workers(loss.detach().clone(), world) / world.world_size
            optimizer.step()
            optimizer.zero_grad()
            sampler.advance(len(x))
            state.step = step
            state.commit()

            last = step == args.steps
            if step % args.log_every == 0 or step == 1 or last:
                mean = state.total.item() / (step - state.printed)
                speed = (step - began_at) * args.batch_size * args.block_size / (time.perf_counter() - began)
                say(world, f"step {step:4d}  loss {mean:.4f}  {speed:,.0f} tokens/s")
                state.total, state.printed = torch.zeros_like(state.total), step
                began_at, began = step, time.perf_counter()
            if step % args.eval_every == 0 or last:
                paused = time.perf_counter()
                say(world, f"step {step:4d}  validation loss {evaluate(gpt, validation, args, world):.4f}")
                began += time.perf_counter() - paused
            if checkpoint and (checkpoint.due(step, every=args.checkpoint_every) or (args.checkpoint_every and last)):
                values = {"printed": state.printed, "total": state.total}
                checkpoint.save(step, model=model, optimizer=optimizer, sampler=sampler, **values)

    (ddp.resilient(steps) if args.resilient else steps)(state)
    if checkpoint:
        checkpoint.wait()


class GPT(nn.Module):
    """GPT-2's decoder without biases, and without dropout: losses must not depend on who draws a number."""

    def __init__(self, block_size: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(heads, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # The deeper the model, the less each layer adds to the residual stream, as in GPT-2.
                adds = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Characters (B, T) to the logits of the next ones (B, T, V)."""
        places = torch.arange(x.shape[1], device=x.device)  # (T,)
        h = self.characters(x) + self.positions(places)  # (B, T, C)
        return self.head(self.norm(self.blocks(h)))


class Block(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(heads, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, h: Tensor) -> Tensor:  # (B, T, C) to (B, T, C)
        h = h + self.attention(self.norm1(h))
        return h + self.mlp(self.norm2(h))


class Attention(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:  # (B, T, C) to (B, T, C)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, C / heads)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into blocks: item i is T characters and the T that follow each of them."""

    def __init__(self, text: Tensor, block_size: int) -> None:
        self.text, self.size = text, block_size  # (characters,)

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.size

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start, end = i * self.size, (i + 1) * self.size
        return self.text[start:end].long(), self.text[start + 1 : end + 1].long()


def read_stdlib(limit_bytes: int) -> bytes:
    """The top-level modules of the standard library in order of name, as ASCII, up to a limit."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        if len(text) >= limit_bytes:
            break
        text += path.read_text(encoding="utf-8", errors="replace").encode("ascii", errors="replace")
    if not text:
        sys.exit(f"no *.py in {folder}: this Python comes without the source of its standard library")
    return bytes(text[:limit_bytes])


def require_same_text(digest: str, world: ddp.World) -> None:
    """Refuse to train on texts that differ, as they do on hosts with different versions of Python."""
    if world.world_size == 1:
        return
    mine = (digest, f"{socket.gethostname()}, Python {platform.python_version()} in {sys.prefix}")
    found = [mine] * world.world_size
    dist.all_gather_object(found, mine)
    for rank, (theirs, where) in enumerate(found):
        if theirs != found[0][0]:
            sys.exit(
                f"rank {rank} has text {theirs} ({where}), rank 0 has {found[0][0]} ({found[0][1]}): "
                "run the same version of Python on all hosts"
            )


def split(text: bytes, args: argparse.Namespace) -> tuple[Blocks, Blocks]:
    """Cut the last `--eval-blocks` blocks off for validation; the rest, a batch at least, is for training."""
    data = encode(text)
    start = len(data) - args.eval_blocks * args.block_size - 1
    if start <= args.batch_size * args.block_size:
        sys.exit(f"{len(data):,} characters are too few for a batch and for the validation: raise --text-kb")
    return Blocks(data[:start], args.block_size), Blocks(data[start:], args.block_size)


def encode(text: bytes) -> Tensor:
    """ASCII to numbers (characters,): printable ones count from 1, every control character is a newline."""
    return (torch.tensor(list(text), dtype=torch.int16) - 31).clamp(0, VOCABULARY - 1)


def decode(characters: Tensor) -> str:
    return "".join(chr(number + 31) if number else "\n" for number in characters.tolist())


def endless(
    training: Blocks, sampler: ddp.DistributedSampler, args: argparse.Namespace, world: ddp.World
) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's batches (B, T) for ever, each epoch in another order, from where the sampler stands.

    Worker r of W reads entries r, r + W, r + 2 W, ... of that order, B of them a step. So W workers together
    read in a step what one worker with a batch of W B reads.
    """
    batches = DataLoader(training, args.batch_size // world.world_size, sampler=sampler, drop_last=True)
    for epoch in itertools.count(sampler.epoch):
        sampler.set_epoch(epoch)
        for x, y in batches:
            yield x.to(world.device), y.to(world.device)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear scaling and gradual warm-up (Goyal et al. 2017, arXiv:1706.02677), then a cosine to a tenth.

    The rate follows the global batch: it grows with the world when every worker keeps its batch, and stays
    when a larger world shares one. The ramp begins near zero, not at `--lr` as theirs: Adam always wants one.
    """
    peak = args.lr * args.batch_size / BASE_BATCH
    if step <= args.warmup_steps:
        return peak * step / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The loss of each block (B,) from logits (B, T, V) and the characters that really follow (B, T)."""
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)


@torch.no_grad()
def evaluate(gpt: GPT, validation: Blocks, args: argparse.Namespace, world: ddp.World) -> float:
    """The mean loss over all blocks of `validation`, each counted once. Every worker must call it."""
    sampler = ddp.DistributedSampler(validation, shuffle=False)
    total, place = torch.zeros((), device=world.device), world.rank
    for x, y in DataLoader(validation, args.batch_size // world.world_size, sampler=sampler):
        losses = cross_entropy(gpt(x.to(world.device)), y.to(world.device))  # (B,)
        places = place + world.world_size * torch.arange(len(losses), device=world.device)
        total += losses[places < len(validation)].sum()  # beyond it the sampler repeats the first blocks
        place += world.world_size * len(losses)
    return sum_over_workers(total, world).item() / len(validation)


def sum_over_workers(value: Tensor, world: ddp.World) -> Tensor:
    if world.world_size > 1:
        dist.all_reduce(value)
    return value


@torch.no_grad()
def sample(gpt: GPT, prompt: str, args: argparse.Namespace, device: torch.device) -> str:
    """Let the model continue the prompt, character by character."""
    torch.manual_seed(args.seed)
    x = encode(prompt.encode()).long().to(device)[None]  # (1, T)
    for _ in range(args.sample_length):
        logits = gpt(x[:, -args.block_size :])[:, -1]  # (1, V)
        x = torch.cat([x, torch.multinomial((logits / 0.8).softmax(-1), 1)], 1)
    return decode(x[0])


def save(checkpoint: dict[str, object], path: Path) -> None:
    """Write a checkpoint that is there as a whole or not at all, whenever the run is stopped.

    `GPT(**checkpoint["shape"])` is the module that `checkpoint["model"]` fits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(checkpoint, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def say(world: ddp.World, line: str) -> None:
    if world.is_main:
        print(line, flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=positive, default=150)
    parser.add_argument("--batch-size", type=positive, default=32, help="blocks a step, of all workers together")
    parser.add_argument("--block-size", type=positive, default=64, help="characters in a block")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=64, help="a multiple of --heads")
    parser.add_argument("--lr", type=float, default=4e-3, help=f"learning rate at a batch of {BASE_BATCH}")
    parser.add_argument("--warmup-steps", type=positive, default=20)
    parser.add_argument("--log-every", type=positive, default=25)
    parser.add_argument("--eval-every", type=positive, default=50)
    parser.add_argument("--eval-blocks", type=positive, default=200)
    parser.add_argument("--text-kb", type=positive, default=1000, help="how much of the library to read")
    parser.add_argument("--resilient", action="store_true", help="replace a failed worker alone")
    parser.add_argument("--sample-length", type=positive, default=200)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--out", type=Path, default=Path("runs/gpt.pt"), help="the trained model, written by rank 0")
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        default=default_checkpoint_dir(),
        help="where to save and go on from; default: a folder of this run if its launcher may restart it, else none",
    )
    parser.add_argument(
        "--checkpoint-every", type=natural, default=10, help="steps between checkpoints; 0: after SIGUSR1 only"
    )
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"--width {args.width} is no multiple of --heads {args.heads}")
    return args


def default_checkpoint_dir() -> Path | None:
    """A folder that only the restarts of this run share, so that no other run goes on from its checkpoints."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # "none" is what torchrun calls all runs without an id
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" or os.environ.get("DTRAIN_ELASTIC") == "1"
    if run_id == "none" or not may_restart:
        return None
    return Path("runs/gpt-checkpoints") / run_id


def natural(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


if __name__ == "__main__":
    main()
