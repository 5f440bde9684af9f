"""Trainings that keep a ledger, and ranks that differ."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_worlds.step_loader_cases import Training
from torch import nn

import ddp
from ddp.errors import ArgumentError, DriftError


def lines_of(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def recorded(kind: str, path: str, steps: int, **options: Any) -> None:
    """Train with a ledger; a break ends the loop."""
    ddp.ledger(path)
    Training(kind, **options).run(steps)


def a_rank_that_differs(what: str, path: str) -> None:
    """In step 7, rank 1 changes something after the averages have arrived."""
    ddp.ledger(path)
    training = Training("mlp")
    weight = present_weight(training.net)

    def train() -> None:
        for step in training.loader.epochs(1000):
            for x, y in step:
                nn.functional.cross_entropy(training.model(x), y).backward()
            if training.loader.steps == 7 and dist.get_rank() == 1:
                change(training, what, weight)
            training.optimizer.step()
            training.optimizer.zero_grad()

    with pytest.raises(DriftError) as raised:
        train()
    every = max(line["every"] for line in lines_of(path) if "hashes" in line)
    assert raised.value.ranks == (1,)
    if what == "gradient":  # its optimizer's state differs as well, so its weights do later
        assert raised.value.parameter in dict(training.net.named_parameters())
    else:
        assert raised.value.parameter == "1.weight"
    assert 8 <= raised.value.step <= 8 + every, (raised.value, every)


def present_weight(net: nn.Module) -> nn.Parameter:
    return dict(net.named_parameters())["1.weight"]


def change(training: Training, what: str, weight: nn.Parameter) -> None:
    with torch.no_grad():
        if what == "parameter":
            weight[2, 3] += 1e-6
        elif what == "state":
            training.optimizer.state[weight]["exp_avg"][2, 3] += 1e-3
        else:
            for parameter in training.net.parameters():
                assert parameter.grad is not None
                parameter.grad *= 1.5


def a_gradient_that_one_rank_has_alone(path: str) -> None:
    """With a learning rate of 0 the weights stay equal."""
    ddp.ledger(path)
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    loader = ddp.StepLoader([torch.ones(3)] * 64, global_batch_size=8, micro_batch_size=2, ledger="full", shuffle=False)
    model = ddp.DistributedDataParallel(net)
    if dist.get_rank() == 2:
        received = model.gradient_reducer
        assert received is not None
        policy = received.policy
        delivered = policy.delivered

        def flip(*args: Any, **more: Any) -> None:
            if loader.steps == 4:
                assert net.bias.grad is not None
                net.bias.grad += 1e-3
            delivered(*args, **more)

        policy.delivered = flip

    def train() -> None:
        for step in loader.epochs(2):
            for x in step:
                model(x).mean().backward()
            net.zero_grad()

    with pytest.raises(DriftError, match=r"averaged gradients of step 4 differ: 'bias' on rank 2 of 3"):
        train()


def two_models(path: str) -> None:
    ddp.ledger(path)
    torch.manual_seed(0)
    nets = [nn.Linear(3, 3), nn.Linear(3, 1)]
    loader = ddp.StepLoader([torch.ones(3)] * 16, global_batch_size=8, micro_batch_size=2, ledger="full")
    models = [ddp.DistributedDataParallel(net) for net in nets]
    for step in loader.epochs(1):
        for x in step:
            models[1](models[0](x)).mean().backward()
        for net in nets:
            net.zero_grad()


def what_has_no_line(path: str) -> None:
    """Evaluation, the loader of another training, and steps without any model."""
    ddp.ledger(path)
    training, other = Training("mlp"), Training("mlp", ledger="full")
    for _ in training.loader.evaluation():
        pass
    training.run(2)
    for _ in training.loader.evaluation():
        pass
    other.run(2)
    with pytest.raises(ArgumentError, match="before the training"):
        ddp.ledger(path)
    with pytest.raises(ArgumentError, match="ledger='all'; it must be one of 'sampled', 'full', 'off'"):
        Training("mlp", ledger="all")


def a_full_disk_ends_only_the_ledger() -> None:
    ddp.ledger("/dev/full")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        Training("mlp").run(3)
    expected = "ddp: the ledger cannot be written: [Errno 28] No space left on device. Training goes on without it\n"
    assert said.getvalue() == ("" if dist.get_rank() else expected)


def saved(folder: str, path: str) -> None:
    ddp.ledger(path)
    training, checkpoint = Training("mlp"), ddp.Checkpoint(folder)
    parts: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer, "sampler": training.loader}
    training.run(4)
    checkpoint.save(40, **parts)
    checkpoint.wait()
    training.run(1)


def loaded(folder: str, path: str) -> None:
    ddp.ledger(path)
    training = Training("mlp")
    parts: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer, "sampler": training.loader}
    assert ddp.Checkpoint(folder).load(**parts)
    training.run(1)
