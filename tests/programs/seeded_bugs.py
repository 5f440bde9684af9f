"""Trainings that fail in one step, on one rank: `seeded_bugs.py NAME`, of those in test_replay_bugs.py.

The step depends on data, random numbers or the state of the training, so only the same step fails again.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import ddp

SAMPLES, CLASSES, TOKENS, LENGTH = 160, 4, 32, 6
GLOBAL, MICRO = 16, 2  # a step is 8 micro-batches
EPOCHS = 3
SAVED_EVERY = 8

RARE = 77  # the sample that is not like the others


class Data(torch.utils.data.Dataset[Any]):
    """Sentences of LENGTH tokens with a class."""

    def __init__(self, bug: str) -> None:
        self._bug = bug

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        numbers = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, TOKENS, (LENGTH,), generator=numbers)
        label = int(tokens.sum()) % CLASSES
        if self._bug == "augmentation_draws_too_often":
            draws = 1
            while random.random() < 0.12:
                draws += 1
            if draws == 3:
                raise ValueError(f"drew {draws} times")
        if self._bug == "crop_beyond_the_edge":
            room = LENGTH - int(np.random.geometric(0.5))
            tokens = tokens.roll(int(np.random.randint(0, room)))
        if self._bug == "wrong_labels_on_one_host" and os.environ.get("LABELS_OF", os.environ["DTRAIN_HOST"]) == "sim1":
            label = 9 if index == RARE else label
        if index != RARE:
            return tokens, label
        if self._bug == "sample_cannot_be_read":
            raise OSError(f"sample {index} is damaged")
        if self._bug == "token_beyond_the_table":
            tokens[0] = TOKENS
        if self._bug == "batch_cannot_be_collated":
            tokens = tokens[:3]
        return tokens, label


def collated(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = {len(tokens) for tokens, _ in samples}
    if len(lengths) > 1:
        raise ValueError(f"{len(samples)} samples of {' and '.join(map(str, sorted(lengths)))} tokens")
    return torch.stack([tokens for tokens, _ in samples]), torch.tensor([label for _, label in samples])


class Net(nn.Module):
    """A classifier of sentences, with the faults of the forward pass."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self._bug = bug
        self.embedding = nn.Embedding(TOKENS, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.6)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        bug, total = self._bug, int(tokens.sum())
        rare = total % 97 == 5 and step > 6
        vectors = self.embedding(tokens)
        hidden = vectors.mean(1)
        if bug == "norm_of_one_value" and rare:
            hidden = hidden[:1]
        hidden = torch.relu(self.norm(hidden))
        dropped = self.drop(hidden)
        if bug == "dropout_of_a_late_step" and step > 12 and not (dropped[0] != 0).any():
            raise ValueError("all dropped")
        if bug == "shape_of_one_sample" and rare:
            dropped = dropped.reshape(-1, 4)
        if bug == "changed_in_place" and rare:
            kept = torch.exp(dropped)
            dropped = kept * 2
            kept += 1
        if bug == "overflow_in_half_precision" and rare:
            dropped = (dropped.half() * 60000 * 60000).float()
        if bug == "square_root_at_zero" and rare:
            dropped = dropped * torch.sqrt((vectors - vectors).abs().sum())
        if bug == "nan_of_one_sample" and rare:
            dropped = dropped * torch.tensor(float("nan"))
        if bug == "recursion_without_end" and rare:
            return self.forward(tokens, step)
        output: torch.Tensor = self.out(dropped)
        return output


def _check(bug: str, loss: torch.Tensor, y: torch.Tensor, output: torch.Tensor, step: int) -> torch.Tensor:
    """Make the faults of the loop that depend on a micro-batch; return the loss."""
    value = loss.item()
    if bug == "loss_jumps":
        assert value < 2.5, f"the loss is {value}"
    if bug == "metric_of_no_sample" and step > 10:
        right = output.argmax(1) == y
        float(value / int(right.sum()))
    if bug == "logarithm_of_zero" and step > 9:
        right = (output.argmax(1) == y).float()
        if not right.any():
            loss = loss - torch.log(output.softmax(1)[:, 0] * right).mean()
    if bug == "name_that_is_never_set":
        if value < 2.2:
            shown = value
        loss = loss + 0 * shown
    if bug == "class_without_a_name" and step > 5:
        {0: "a", 1: "b", 2: "c"}[int(output.argmax(1)[0])]
    return loss


def main(bug: str) -> None:
    world = ddp.init()
    torch.manual_seed(0)
    net = Net(bug)
    loader = ddp.StepLoader(
        Data(bug), global_batch_size=GLOBAL, micro_batch_size=MICRO, seed=1, collate_fn=collated, ledger="full"
    )
    model = ddp.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    rate: Callable[[int], float] = lambda step: 1 / (21 - step) if bug == "schedule_ends_early" else 1.0  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    checkpoint = ddp.Checkpoint("saved")
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": loader}
    checkpoint.load(**parts)
    for step in loader.epochs(EPOCHS):
        losses = []
        for x, y in step:
            output = model(x, loader.steps)
            loss = _check(bug, nn.functional.cross_entropy(output, y), y, output, loader.steps)
            loss.backward()
            losses.append(loss.detach())
        step.mean(losses)
        if bug == "gradients_explode":
            norm = float(
                torch.nn.utils.get_total_norm([each.grad for each in net.parameters() if each.grad is not None])
            )
            if norm > 2.6:
                raise RuntimeError(f"the norm of the gradients is {norm:.2f}")
        if bug == "weights_beyond_a_limit":
            math.exp(1e4 * (float(net.out.weight.detach().abs().max()) - 0.35))
        if world.rank == 1 and loader.steps == 19:
            with torch.no_grad():
                if bug == "parameter_changed_by_hand":
                    net.out.weight[0, 0] += 1e-4
                if bug == "optimizer_changed_by_hand":
                    optimizer.state[net.out.weight]["exp_avg"] *= 1.5
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if checkpoint.due(loader.steps, every=SAVED_EVERY):
            checkpoint.save(loader.steps, **parts)
    checkpoint.wait()


if __name__ == "__main__":
    main(sys.argv[1])
