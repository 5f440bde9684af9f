"""Programs that users write, as the ranks of a test world run them beside one process that has the whole batch.

Each function runs on every rank and asserts there. A `Program` is a module, a loss and what happens around them; the
oracle adds up the losses of all ranks' shards, divided by their number, on every rank for itself.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ddp_worlds.data_parallel_cases import (
    F64,
    Mlp,
    Normed,
    assert_close,
    assert_replicas_equal,
    batch,
    build,
    loss_of,
    shard,
)
from testbed.present import present
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.utils import clip_grad_norm_, parametrizations
from torch.utils.checkpoint import checkpoint

import ddp
import ddp.comm.channel
import ddp.data_parallel.buckets.bucket_plan
from ddp.comm.objects import control_group, gather_values
from ddp.comm.sums import small_sum
from ddp.data_parallel import wrapper
from ddp.horovod import DistributedOptimizer
from ddp.horovod import optimizer as horovod_optimizer
from ddp.torch_internals import timeout_of

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor, int, int], torch.Tensor]  # (model, x, y, rank, step)


class Way(NamedTuple):
    """How gradients are bucketed, kept and reset."""

    bucket_cap_mb: float | None = None
    views: bool = False
    set_to_none: bool = True
    large_bytes: int = 32 << 10

    def wrap(self, module: nn.Module, **settings: Any) -> ddp.DistributedDataParallel:
        ddp.data_parallel.buckets.bucket_plan._LARGE_BYTES = self.large_bytes
        return ddp.DistributedDataParallel(
            module, bucket_cap_mb=self.bucket_cap_mb, gradient_as_bucket_view=self.views, **settings
        )


WAYS = (
    Way(),
    Way(views=True, set_to_none=False, large_bytes=1),
    Way(1e-4, set_to_none=False, large_bytes=100),
    Way(1e-6, views=True),
)


def _mean_square(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    return model(x).sub(y[:, :1]).square().mean()


def _nothing(*_: object) -> None:
    pass


def _momentum(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _plain(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


@dataclass(frozen=True)
class Program:
    """`before` and `after` run around the gradients of a step, with the bare module; `around` with what is called."""

    make: Callable[[], nn.Module] = Mlp
    loss: Loss = _mean_square
    before: Callable[[nn.Module, int], None] = _nothing
    after: Callable[[nn.Module, int], None] = _nothing
    backward: Callable[[torch.Tensor, nn.Module], None] = field(default=lambda loss, model: loss.backward())
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = _momentum
    resets: bool = True  # whether gradients are reset before a step
    parts: int = 1  # micro-batches of a step, all but the last under no_sync
    steps: int = 5


def _made(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(F64)


def _follow(name: str, program: Program, way: Way) -> None:
    """Train replica and oracle side by side, comparing parameters and gradients after every step."""
    world, rank = dist.get_world_size(), dist.get_rank()
    oracle, replica = _made(program.make), _made(program.make)
    with torch.no_grad():
        for parameter in replica.parameters():
            parameter.logical_not_() if rank else None  # equal only after the broadcast
    model = way.wrap(replica)
    optimizers = [program.optimizer(m.parameters()) for m in (oracle, model)]
    for step in range(program.steps):
        for optimizer in optimizers:
            if program.resets:
                optimizer.zero_grad(set_to_none=way.set_to_none)
        for module in (oracle, replica):
            program.before(module, step)
        for part in range(program.parts):
            x, y = batch(step * 10 + part, 2 * world)
            for other in range(world):
                loss = program.loss(oracle, x.chunk(world)[other], y.chunk(world)[other], other, step)
                program.backward(loss / world, oracle)
            with contextlib.nullcontext() if part == program.parts - 1 else model.no_sync():
                loss = program.loss(model, shard(x), shard(y), rank, step)
            program.backward(loss, replica)
        for module in (oracle, replica):
            program.after(module, step)
        assert_close(_dense(replica), _dense(oracle), f"{name}, {way}, step {step}")
        for optimizer in optimizers:
            optimizer.step()
    assert_close(_dense(replica), _dense(oracle), f"{name}, {way}, at the end")
    assert_replicas_equal(_dense(replica))


def _dense(module: nn.Module) -> nn.Module:
    """The module, or where it has sparse gradients a copy that has them dense, for comparing."""
    if all(p.grad is None or p.grad.layout is torch.strided for p in module.parameters()):
        return module
    dense = nn.Module()
    for name, parameter in module.named_parameters():
        copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        copied.grad = None if parameter.grad is None else parameter.grad.to_dense()
        dense.register_parameter(name.replace(".", "_"), copied)
    return dense


def names_of_programs() -> list[str]:
    return sorted(PROGRAMS)


def follow(names: list[str]) -> None:
    """Run each program in one of the ways: in another at each world size."""
    for number, name in enumerate(names):
        _follow(name, PROGRAMS[name], WAYS[(number + dist.get_world_size()) % len(WAYS)])


# Kinds of parameters


class Strided(nn.Module):
    """Parameters that are slices of larger tensors, scalars, empty, and integers that only sit there."""

    def __init__(self) -> None:
        super().__init__()
        self.sliced = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.expanded_copy = nn.Parameter(torch.randn(4, 1).expand(4, 3).clone())
        self.permuted = nn.Parameter(torch.randn(3, 2, 4).permute(2, 0, 1))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0))
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ self.sliced).tanh() * self.scalar + self.empty.sum()
        return hidden @ self.expanded_copy + (hidden @ self.permuted.flatten(1))[:, :3] * self.table[2]


class Recurrent(nn.Module):
    """A two-layer LSTM over packed sequences, and a weight that is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 4, num_layers=2, batch_first=True)
        self.head = parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([3 - row % 2 for row in range(len(x))])
        packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 3, 2), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1])


class Reused(nn.Module):
    """One layer used twice, one weight under two names, one in two roles."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.twice = nn.Linear(3, 3)
        self.last = nn.Linear(6, 3)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.twice(self.twice(self.first(x)).tanh()) @ self.first.weight)


def _freeze_in_turn(module: nn.Module, step: int) -> None:
    """The first weight is frozen at first and the others in turn, the second bias from the third step on."""
    for at, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(at % 5 != step % 5 and not (at == 3 and step >= 2))


class HalfFrozen(Mlp):
    """Two layers are frozen when it is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)


def _unfreeze(module: nn.Module, step: int) -> None:
    """One parameter at a time, one of which this step's loss does not use."""
    layers = module.layers
    layers[2].weight.requires_grad_(step >= 1)
    layers[0].weight.requires_grad_(step >= 2)
    layers[0].bias.requires_grad_(step >= 4)


# Kinds of graphs


@dataclass
class Prediction:
    mean: torch.Tensor
    spread: torch.Tensor | None
    more: dict[str, Any]


class Answers(nn.Module):
    """Takes keywords only; what it returns is said by `form`."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(6, 3), nn.Linear(6, 3)
        self.kept: torch.Tensor | None = None

    def forward(self, *, x: torch.Tensor, form: str) -> Any:
        mean, spread = self.mean(x), self.spread(x)
        self.kept = mean + spread
        if form == "dict":
            return {"mean": mean, "spread": spread, "text": "a"}
        if form == "tuple":
            return [(mean, None), 3, spread]
        if form == "dataclass":
            return Prediction(mean, None, {"spread": [spread]})
        if form == "view":
            both = torch.cat([mean, spread])
            return both[: len(mean)], both
        return None


def _reads_answers(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """A step uses both outputs, or one of them, or none."""
    form = ("dict", "dataclass", "tuple", "none", "view")[step % 5]
    out = model(x=x, form=form)
    if form == "dict":
        return (out["mean"] - y).square().mean()  # the other goes unused
    if form == "dataclass":
        return (out.mean * out.more["spread"][0] - y).square().mean()
    if form == "tuple":
        return (out[2] - y).square().mean()
    if form == "view":
        out[0].mul_(2)  # changes what the other was, too
        return (out[1][: len(y)] * out[1][len(y) :] - y).square().mean()
    return (getattr(model, "module", model).kept - y).square().mean()


def _two_forwards(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    with torch.no_grad():
        teacher = model(x * 2)
    first, second = model(x), model(x + 1)
    model.eval()
    model(x)  # sees no backward
    model.train()
    return (first * second - y).square().mean() + (second - teacher).square().mean()


def _two_forwards_in_training(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    return (model(x) * model(x * 2 + 1)).square().mean()


def _forward_without_backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    if step % 2:
        model(x)
    return loss_of(model, x, y)


def _one_rank_evaluates(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    if rank == step % dist.get_world_size():
        with torch.no_grad():
            model(x)
        model.eval()
        model(x).sum()
        with torch.inference_mode():
            model(x)
        model.train()
    return loss_of(model, x, y)


def _twice_backward(loss: torch.Tensor, model: nn.Module) -> None:
    loss.backward(retain_graph=True)
    (loss * 3).backward()


def _through_inputs_named(loss: torch.Tensor, model: nn.Module) -> None:
    loss.backward(inputs=[p for at, p in enumerate(model.parameters()) if at != 2])


def _autograd_backward(loss: torch.Tensor, model: nn.Module) -> None:
    torch.autograd.backward([loss, loss * 2], [torch.ones_like(loss), None])


class Routed(nn.Module):
    """Uses its layers in an order, and skips some, as `route` says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        for at in route:
            x = self.layers[at](x).tanh()
        return x[:, :3]


def _other_order_on_each_rank(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    route = [(rank + step + at) % 5 for at in range(5)]
    return (model(x, route[::-1] if rank % 2 else route) - y).square().mean()


def _other_layers_on_each_rank(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int
) -> torch.Tensor:
    return (model(x, [(rank + step) % 4, (2 * rank) % 4] * (1 + rank % 2)) - y).square().mean()


class Conditional(nn.Module):
    """A data-dependent loop, whose number of turns differs between rows and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.head, self.rare = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x[0, 0].abs() * 3)):
            x = self.turn(x).tanh()
        out = self.head(x)
        return self.rare(out) if x.sum() > 0 else out


# Activation checkpoints


class Recomputed(nn.Module):
    """`shared` is in two checkpoints, `alone` in one, inside another, `never` in none."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.shared, self.alone, self.outer = nn.Linear(6, 6), Mlp(), nn.Linear(3, 3)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=self.use_reentrant).tanh()
        return checkpoint(self._nested, x, use_reentrant=self.use_reentrant)

    def _nested(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(checkpoint(self.alone, x, use_reentrant=self.use_reentrant))


def _wrapper_checkpointed(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    return (checkpoint(model, x, use_reentrant=False) - y).square().mean()


def _wrapper_checkpointed_reentrant(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int
) -> torch.Tensor:
    return (checkpoint(model, x.clone().requires_grad_(), use_reentrant=True) - y).square().mean()


# Sparse gradients


class Words(nn.Module):
    """Embeddings with sparse gradients, of which some rank uses no row in some step."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3, sparse=True)
        self.bags = nn.EmbeddingBag(5, 3, sparse=True, mode="sum")
        self.unannounced = nn.Parameter(torch.randn(6, 3))
        self.never = nn.Embedding(3, 3, sparse=True)
        self.out = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        index = (x * 10).long().abs() % 5  # (rows, 6)
        total = self.out(x[:, :3])
        if (rank + step) % 3 != 2:
            rows = 0 if (rank + step) % 3 == 1 else 6
            total = total + self.words(index[:, :rows]).sum(1) * (1 + rank)
        if step != 1:
            total = total + self.bags(index)
        if rank == step % 2:
            total = total + nn.functional.embedding(index, self.unannounced, sparse=True).sum(1)
        if step == 3 and rank == 0:  # dense here, sparse elsewhere
            total = total + self.words.weight.sum(0)
        return total


def _reads_words(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    return (model(x, rank, step) - y).square().mean()


class OnlyWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words((x * 10).long().abs() % 7).sum(1).tanh()


# What users do to gradients


def _replace_gradients(module: nn.Module, step: int) -> None:
    """Each parameter's gradient is replaced, changed in place, dropped or kept, in turn."""
    for at, parameter in enumerate(module.parameters()):
        if parameter.grad is not None:
            match (at + step) % 4:
                case 0:
                    parameter.grad = parameter.grad.clone() * 0.5
                case 1:
                    parameter.grad.mul_(0.25)
                case 2:
                    parameter.grad = None


class Hooked(Mlp):
    """Hooks of the user on tensors and modules, which change gradients linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight.register_hook(lambda grad: grad * 2)
        self.layers[2].register_full_backward_hook(lambda module, ins, outs: (ins[0] * 3,))
        self.layers[4].register_full_backward_pre_hook(lambda module, outs: (outs[0] * 0.5,))
        self.layers[4].bias.register_hook(lambda grad: grad.zero_())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        out.register_hook(lambda grad: grad * 1.5)
        return out


PROGRAMS = {
    "strided": Program(Strided),
    "recurrent": Program(Recurrent),
    "reused": Program(Reused),
    "frozen in turn": Program(before=_freeze_in_turn, parts=2),
    "unfrozen": Program(HalfFrozen, before=_unfreeze, steps=7),
    "unfrozen, accumulating": Program(HalfFrozen, before=_unfreeze, parts=3, steps=7),
    "answers": Program(Answers, _reads_answers),
    "answers, accumulating": Program(Answers, _reads_answers, parts=2),
    "two forwards": Program(loss=_two_forwards),
    "forward without backward": Program(loss=_forward_without_backward),
    "one rank evaluates": Program(loss=_one_rank_evaluates),
    "two backwards": Program(backward=_twice_backward),
    "backward to some": Program(backward=_through_inputs_named),
    "backward of two": Program(backward=_autograd_backward),
    "other order": Program(Routed, _other_order_on_each_rank),
    "other layers": Program(Routed, _other_layers_on_each_rank, parts=2),
    "conditional": Program(Conditional),
    "recomputed": Program(lambda: Recomputed(False)),
    "recomputed, reentrant": Program(lambda: Recomputed(True)),
    "recomputed, accumulating": Program(lambda: Recomputed(True), parts=2),
    "wrapper recomputed": Program(loss=_wrapper_checkpointed),
    "wrapper recomputed, reentrant": Program(loss=_wrapper_checkpointed_reentrant),
    "words": Program(Words, _reads_words, optimizer=_plain),
    "words by SparseAdam": Program(OnlyWords, optimizer=lambda parameters: torch.optim.SparseAdam(list(parameters))),
    "replaced": Program(after=_replace_gradients, resets=False),
    "replaced, accumulating": Program(after=_replace_gradients, resets=False, parts=2),
    "hooked": Program(Hooked),
    "normed": Program(Normed),
    "normed, two forwards": Program(Normed, loss=_two_forwards_in_training),
    "words, accumulating": Program(Words, _reads_words, optimizer=_plain, parts=2),
}


# Losses that are not means over equal shards


def _uneven(step: int) -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
    """A batch and each rank's part of it: of other sizes in every step, and of no rows for some rank."""
    sizes = [(rank + step) % 3 * 2 + (rank == 0) for rank in range(dist.get_world_size())]
    x, y = batch(step, sum(sizes))
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return x, y, [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def sums_and_shares_with_their_factor() -> None:
    """A sum over the batch is `world * sum of mine`; a mean over unequal shares `world * mine / all * mean of mine`."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for is_sum in (True, False):
        for way in WAYS[:2] if is_sum else WAYS[2:]:
            oracle = build("mlp")
            model = way.wrap(build("mlp"))
            for step in range(5):
                x, y, parts = _uneven(step)
                for module in (oracle, model):
                    module.zero_grad(set_to_none=way.set_to_none)
                (oracle(x) - y).square().sum().div(1 if is_sum else 3 * len(x)).backward()
                mine = parts[rank]
                factor = world if is_sum else world / (3 * len(x))
                ((model(x[mine]) - y[mine]).square().sum() * factor).backward()
                assert_close(model.module, oracle, f"sum {is_sum}, {way}, step {step}")


def weighted_means_are_exact() -> None:
    """Weights are rows, divided by 7; the loss of a rank without rows is not finite, and its weight 0."""
    rank = dist.get_rank()
    for parts in (1, 3):
        for way in WAYS[2:] if parts == 1 else WAYS[:2]:
            oracle = build("mlp")
            model = way.wrap(build("mlp"))
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (oracle, model)]
            for step in range(5):
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=way.set_to_none)
                everything = [_uneven(parts * step + part) for part in range(parts)]
                x = torch.cat([batch[0] for batch in everything])
                y = torch.cat([batch[1] for batch in everything])
                loss_of(oracle, x, y).backward()
                for part, (inputs, targets, slices) in enumerate(everything):
                    mine = slices[rank]
                    weight = torch.tensor(len(inputs[mine]) / 7, dtype=F64)
                    with contextlib.nullcontext() if part == parts - 1 else model.no_sync():
                        loss = loss_of(model, inputs[mine], targets[mine])
                    model.backward(loss, weight=weight if step % 2 else float(weight))
                assert_close(model.module, oracle, f"{way}, {parts} parts, step {step}")
                for optimizer in optimizers:
                    optimizer.step()
            assert_replicas_equal(model)


def weights_that_do_not_fit_are_errors() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    model = ddp.DistributedDataParallel(build("mlp"))
    x, y = batch(0, 2 * world)

    def is_usable() -> None:
        oracle = build("mlp")
        model.zero_grad()
        model.backward(loss_of(model, shard(x), shard(y)), weight=2)
        loss_of(oracle, x, y).backward()
        assert_close(model.module, oracle)

    is_usable()
    model.zero_grad(set_to_none=False)
    with pytest.raises(ddp.errors.BackwardError, match="add up to 0"):
        model.backward(loss_of(model, shard(x), shard(y)), weight=0)
    is_usable()
    with pytest.raises(ddp.errors.ArgumentError, match="weight"):
        model.backward(loss_of(model, shard(x), shard(y)), weight=-1)
    is_usable()
    if world == 1:
        return
    with pytest.raises(ddp.errors.BackwardError, match="rank 1 gave no weight"):
        model.backward(loss_of(model, shard(x), shard(y)), weight=None if rank == 1 else 2)
    is_usable()


def a_weight_that_is_no_number_on_one_rank_ends_the_step_everywhere() -> None:
    """The others must not wait for a rank whose `backward` refuses its weight."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = ddp.DistributedDataParallel(build("mlp"))
    x, y = batch(0, 2 * world)
    model.backward(loss_of(model, shard(x), shard(y)), weight=1)
    expected = ddp.errors.ArgumentError if rank == 1 else ddp.errors.DdpError
    with pytest.raises(expected):
        model.backward(loss_of(model, shard(x), shard(y)), weight=float("nan") if rank == 1 else 1)
    oracle = build("mlp")
    model.backward(loss_of(model, shard(x), shard(y)), weight=2)
    loss_of(oracle, x, y).backward()
    assert_close(model.module, oracle)


# What changes after wrapping


def unfreezing_on_one_rank_is_an_error() -> None:
    """It names the parameter and the ranks on every rank; unfrozen everywhere, the next step is exact."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for way in WAYS:
        replica, oracle = _made(HalfFrozen), _made(HalfFrozen)
        model = way.wrap(replica)
        for step in range(4):
            x, y = batch(step, 2 * world)
            for module in (oracle, replica):
                module.zero_grad(set_to_none=way.set_to_none)
                module.layers[2].weight.requires_grad_(step >= 2)
            if step == 1:
                replica.layers[2].weight.requires_grad_(rank == 1)
                with pytest.raises(ddp.errors.BackwardError) as caught:
                    loss_of(model, shard(x), shard(y)).backward()
                assert caught.value.parameter == "layers.2.weight"
                assert "on rank 1, but not on rank 0, 2" in str(caught.value)
                assert all(p.grad is None for p in replica.parameters())
                continue
            loss_of(model, shard(x), shard(y)).backward()
            loss_of(oracle, x, y).backward()
            assert_close(replica, oracle, f"{way}, step {step}")


def everything_frozen_later() -> None:
    """As alone: there is nothing to differentiate. Thawed again, the next step is exact."""
    world = dist.get_world_size()
    for way in WAYS[1::2]:
        replica, oracle = build("mlp"), build("mlp")
        model = way.wrap(replica)
        for step in range(4):
            x, y = batch(step, 2 * world)
            for module in (oracle, model):
                module.zero_grad(set_to_none=way.set_to_none)
                module.requires_grad_(step != 1)
            if step == 1:
                with pytest.raises(RuntimeError, match="does not require grad"):
                    loss_of(model, shard(x), shard(y)).backward()
                inputs = shard(x).clone().requires_grad_()
                loss_of(model, inputs, shard(y)).backward()  # an attack on a frozen model, say
                assert inputs.grad is not None
                continue
            loss_of(model, shard(x), shard(y)).backward()
            loss_of(oracle, x, y).backward()
            assert_close(replica, oracle, f"{way}, step {step}")


def replaced_parameters_are_errors() -> None:
    """Parameters that no one reduces: the error names one; wrapped again, training goes on."""
    world = dist.get_world_size()
    x, y = batch(0, 2 * world)
    for change in ("assign", "added"):
        replica = build("mlp")
        model = ddp.DistributedDataParallel(replica)
        loss_of(model, shard(x), shard(y)).backward()
        if change == "assign":
            replica.load_state_dict(build("mlp", seed=1).state_dict(), assign=True)
        else:
            replica.layers.append(nn.Linear(3, 3).to(F64))
        with pytest.raises(ddp.errors.BackwardError, match=r"layers.*wrap the module"):
            loss_of(model, shard(x), shard(y)).backward()
        oracle = copy.deepcopy(replica)
        model = ddp.DistributedDataParallel(replica)
        for module in (oracle, replica):
            module.zero_grad()
        loss_of(model, shard(x), shard(y)).backward()
        with torch.no_grad():
            for mine, theirs in zip(oracle.parameters(), replica.parameters(), strict=True):
                mine.copy_(theirs)
        loss_of(oracle, x, y).backward()
        assert_close(replica, oracle, change)


# no_sync


def no_sync_counts_where_the_forward_is() -> None:
    """Around backward alone it has no effect, whatever the world; around forward alone it accumulates."""
    world = dist.get_world_size()
    for weight in (None, 3.0):
        for way in WAYS[:2] if weight is None else WAYS[2:]:
            replica, oracle = build("mlp"), build("mlp")
            model = way.wrap(replica)
            for step in range(5):
                x, y = batch(step, 2 * world)
                first, second = batch(step + 50, 2 * world)
                for module in (oracle, replica):
                    module.zero_grad(set_to_none=way.set_to_none)
                (loss_of(oracle, x, y) + loss_of(oracle, first, second)).div(1 if weight is None else 2).backward()
                with model.no_sync():
                    loss = loss_of(model, shard(x), shard(y))
                model.backward(loss, weight=weight)
                loss = loss_of(model, shard(first), shard(second))
                with contextlib.suppress(KeyError), model.no_sync(), model.no_sync():
                    model.backward(loss, weight=weight)
                    raise KeyError
                assert_close(replica, oracle, f"{way}, weight {weight}, step {step}")


# Second derivatives


def penalties_on_the_averaged_gradient() -> None:
    """backward(create_graph=True), then backward through the gradients that it left, as Hessian methods do."""
    world = dist.get_world_size()
    warnings.filterwarnings("ignore", message=".*create_graph=True will create a reference cycle")
    for keeps in (False, True):
        for way in WAYS[:2] if keeps else WAYS[2:]:
            replica, oracle = build("mlp"), build("mlp")
            replica.never, oracle.never = nn.Parameter(torch.ones(3, dtype=F64)), nn.Parameter(torch.ones(3, dtype=F64))
            model = way.wrap(replica)
            for step in range(5):
                x, y = batch(step, 2 * world)
                for module, loss in (
                    (oracle, loss_of(oracle, x, y)),
                    (replica, loss_of(model, shard(x), shard(y))),
                ):
                    module.zero_grad()
                    loss.backward(create_graph=True)
                    gradients = [p.grad for p in module.parameters() if p.grad is not None]
                    if not keeps:
                        module.zero_grad()
                    penalty = sum((grad.square().sum() * (1 + grad.sum()) for grad in gradients), torch.zeros(()))
                    penalty.backward()
                assert replica.never.grad is None
                _detach_gradients(oracle)
                _detach_gradients(replica)
                assert_close(replica, oracle, f"{way}, keeps {keeps}, step {step}")
                for module in (oracle, replica):
                    with torch.no_grad():
                        for parameter in module.parameters():
                            if parameter.grad is not None:
                                parameter.sub_(0.05 * parameter.grad)


def _detach_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach()


# Hooks of the user


def post_accumulate_hooks_see_this_ranks_gradient(is_after: bool) -> None:
    """Whether registered before or after wrapping: what they do to `.grad` is what is averaged, as in torch."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ways = (WAYS[0], WAYS[1], WAYS[3], Way(1e-3)) if is_after else WAYS[2:]
    for way, replaces in ((way, replaces) for way in ways for replaces in (False, True)):
        replica, oracle = build("mlp"), build("mlp")
        seen: dict[str, torch.Tensor] = {}

        def register(module: nn.Module, seen: dict[str, torch.Tensor] = seen, replaces: bool = replaces) -> None:
            for name, parameter in module.named_parameters():

                def hook(
                    parameter: torch.Tensor, name: str = name, seen: Any = seen, replaces: bool = replaces
                ) -> None:
                    seen[name] = parameter.grad.clone()
                    if replaces:
                        parameter.grad = parameter.grad.clamp(-0.01, 0.01)
                    else:
                        parameter.grad.clamp_(-0.01, 0.01)

                parameter.register_post_accumulate_grad_hook(hook)

        if not is_after:
            register(replica)
        model = way.wrap(replica)
        if is_after:
            register(replica)
        for step in range(5):
            x, y = batch(step, 2 * world)
            replica.zero_grad(set_to_none=way.set_to_none)
            loss_of(model, shard(x), shard(y)).backward()
            expected = [torch.zeros_like(p) for p in oracle.parameters()]
            for other in range(world):
                oracle.zero_grad()
                loss_of(oracle, x.chunk(world)[other], y.chunk(world)[other]).backward()
                for total, (name, parameter) in zip(expected, oracle.named_parameters(), strict=True):
                    total += parameter.grad.clamp(-0.01, 0.01) / world
                    if other == rank:
                        torch.testing.assert_close(seen[name], parameter.grad, rtol=1e-12, atol=1e-13)
            for total, (name, parameter) in zip(expected, replica.named_parameters(), strict=True):
                torch.testing.assert_close(
                    parameter.grad, total, rtol=1e-12, atol=1e-13, msg=lambda m, at=f"{way} {step} {name}": f"{at}: {m}"
                )


# Mixed precision


def half_precision_is_rounded_once() -> None:
    """Of two ranks, the average is that of both gradients, each halved, to the bit; in float64 to 1e-12."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 5).to(F64)
            self.b = nn.Linear(5, 5)
            self.c = nn.Linear(5, 3).to(torch.bfloat16)
            self.d = nn.Parameter(torch.ones(3, dtype=torch.float16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x).float()).bfloat16()).float() * self.d.float()

    rank = dist.get_rank()
    for way in WAYS:
        replica = Mixed()
        model = way.wrap(replica)
        oracles = [copy.deepcopy(replica) for _ in range(2)]
        for step in range(5):
            x, _ = batch(step, 8)
            model.zero_grad(set_to_none=way.set_to_none)
            model(shard(x)).mean().backward()
            for other, oracle in enumerate(oracles):
                oracle.zero_grad()
                oracle(x.chunk(2)[other]).mean().backward()
            pairs = zip(*(oracle.parameters() for oracle in oracles), strict=True)
            for (name, parameter), (one, two) in zip(replica.named_parameters(), pairs, strict=True):
                assert parameter.grad.dtype is parameter.dtype
                assert torch.equal(present(parameter.grad), one.grad / 2 + two.grad / 2), (
                    f"{way}, step {step}, {name}, {rank}"
                )


def scaler_skips_on_all_ranks_together() -> None:
    """A step whose gradients are not finite on one rank: all skip it, and scale the same."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for way in WAYS[::2]:
        oracle, replica = build("mlp").float(), build("mlp").float()
        model = way.wrap(replica)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (oracle, model)]
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
        for step in range(6):
            before = copy.deepcopy(replica.state_dict())
            x, y = (tensor.float() for tensor in batch(step, 2 * world))
            if step in (2, 3):
                x[0 if step == 2 else -1] = float("inf")  # on the first rank, then the last
            for module, optimizer, scaler, inputs, targets in zip(
                (oracle, model), optimizers, scalers, (x, shard(x)), (y, shard(y)), strict=True
            ):
                optimizer.zero_grad(set_to_none=way.set_to_none)
                scaler.scale(loss_of(module, inputs, targets)).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale(), f"{way}, step {step}, rank {rank}"
            if step in (2, 3):
                assert all(torch.equal(before[name], value) for name, value in replica.state_dict().items())
            for one, two in zip(replica.parameters(), oracle.parameters(), strict=True):
                torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
        assert_replicas_equal(model)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def clipping_is_the_same_everywhere() -> None:
    world = dist.get_world_size()
    for way in WAYS[1::2]:
        oracle, replica = build("odd"), build("odd")
        model = way.wrap(replica)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (oracle, model)]
        for step in range(5):
            x, y = batch(step, 2 * world)
            norms = []
            for module, optimizer, mine in zip((oracle, model), optimizers, (whole, shard), strict=True):
                optimizer.zero_grad(set_to_none=way.set_to_none)
                loss_of(module, mine(x), mine(y)).backward()
                norms.append(clip_grad_norm_(module.parameters(), 0.1, foreach=bool(step % 2)))
                torch.nn.utils.clip_grad_value_(module.parameters(), 0.01)
            torch.testing.assert_close(norms[1], norms[0], rtol=1e-12, atol=0)
            every = [torch.empty_like(norms[1]) for _ in range(world)]
            dist.all_gather(every, norms[1])
            assert len(set(map(float, every))) == 1
            assert_close(replica, oracle, f"{way}, step {step}")
            for optimizer in optimizers:
                optimizer.step()


# Buffers


def buffers_after_two_forwards_are_rank_zeros() -> None:
    """In training mode each forward begins with rank 0's buffers and leaves this rank's own behind."""
    world = dist.get_world_size()
    model = ddp.DistributedDataParallel(Normed().to(F64))
    rank_zero = Normed().to(F64)
    rank_zero.load_state_dict(model.module.state_dict())
    for step in range(5):
        x, _ = batch(step, 4 * world)
        (model(shard(x)).sum() + model(shard(x) * 2).sum()).backward()
        mine = x.chunk(world)[0]
        rank_zero(mine)
        rank_zero(mine * 2)
        if step == 3:
            model.module.flag = torch.tensor([False, True])  # reassigned
            model.module.norm.running_mean = model.module.norm.running_mean.clone()
    model.eval()
    with torch.no_grad():
        model(x)
    for name, buffer in rank_zero.named_buffers():
        ours = dict(model.module.named_buffers())[name]
        if name == "flag":
            assert ours.tolist() == [False, True]
        else:
            torch.testing.assert_close(ours, buffer, rtol=1e-12, atol=0)
    assert int(model.module.norm.num_batches_tracked) == 10


# Groups, several models, threads, garbage


def two_groups_train_side_by_side() -> None:
    """Four ranks: the even ones train one model, the odd ones another, all of them a third."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    for way in WAYS[1:2]:
        own, shared = build("mlp", seed=rank % 2), build("odd")
        oracles = build("mlp", seed=rank % 2), build("odd")
        models = way.wrap(own, process_group=group), way.wrap(shared)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (*models, *oracles)]
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=way.set_to_none)
            x, y = batch(step, 8)
            part = slice(rank // 2 * 4, rank // 2 * 4 + 4)  # of the group's ranks, the first has the first half
            loss_of(models[0], x[part], y[part]).backward()
            loss_of(oracles[0], x, y).backward()
            loss_of(models[1], shard(x), shard(y)).backward()
            loss_of(oracles[1], x, y).backward()
            assert_close(own, oracles[0], f"{way}, step {step}")
            assert_close(shared, oracles[1], f"{way}, step {step}")
            for optimizer in optimizers:
                optimizer.step()


class Rows(nn.Module):
    """From noise (rows, 3) to what the other model reads (rows, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 6)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.layer(noise).tanh()


def _adversaries_step(generate: nn.Module, judge: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    """The judge learns from both, then the generator through the judge, which is frozen for that in some steps."""
    fake = generate(y)
    judge.zero_grad()
    generate.zero_grad()
    (judge(x).square().mean() - judge(fake.detach()).square().mean()).backward()
    judge.requires_grad_(step % 2 == 0)
    loss = judge(fake).square().mean()
    loss.backward()
    judge.requires_grad_(True)


def adversaries() -> None:
    """Two wrapped models, one of which learns through the other."""
    world = dist.get_world_size()
    for way in WAYS[1::2]:
        replicas, oracles = (_made(Rows), build("mlp")), (_made(Rows), build("mlp"))
        models = [way.wrap(module) for module in replicas]
        optimizers = [
            torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.05) for one, two in (replicas, oracles)
        ]
        for step in range(5):
            x, y = batch(step, 2 * world)
            _adversaries_step(*oracles, x, y, step)
            _adversaries_step(models[0], models[1], shard(x), shard(y), step)
            for replica, oracle in zip(replicas, oracles, strict=True):
                assert_close(replica, oracle, f"{way}, step {step}")
            for optimizer in optimizers:
                optimizer.step()


def two_threads_with_a_model_each() -> None:
    groups = [dist.new_group() for _ in range(2)]
    failures: list[BaseException] = []

    def work(at: int) -> None:
        try:
            oracle, replica = copied[at]
            model = WAYS[at].wrap(replica, process_group=groups[at])
            for step in range(20):
                x, y = batch(step + 100 * at, 2 * dist.get_world_size())
                for module in (oracle, replica):
                    module.zero_grad()
                with model.no_sync():
                    loss_of(model, shard(x), shard(y)).backward()
                (loss_of(model, shard(x), shard(y)) * 2).backward()
                (loss_of(oracle, x, y) * 3).backward()
                assert_close(replica, oracle, f"thread {at}, step {step}")
        except BaseException as error:
            failures.append(error)

    copied = [(build("mlp", seed=at), build("mlp", seed=at)) for at in range(2)]
    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)


def _on_device_only() -> dist.ProcessGroup:
    """A group that knows only the memory of a device, as NCCL's do."""
    return dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=7), backend="cuda:gloo")


def a_control_group_has_the_timeout_of_its_group() -> None:
    group = _on_device_only()
    made = control_group(group, torch.device("cuda"))
    assert made is not group
    assert timeout_of(made, torch.device("cpu")) == timedelta(seconds=7)
    assert gather_values(dist.get_rank(), group=made) == list(range(dist.get_world_size()))


def control_groups_are_shared_and_end_with_their_group() -> None:
    """Also where the ranks have made other numbers of groups, and for wrapping that fails on every rank or on one."""
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    group = _on_device_only()
    sockets = _sockets()
    made = control_group(group, torch.device("cuda"))
    once = _sockets()
    assert once > sockets

    def refuse(*_: object) -> None:
        raise RuntimeError("refused")

    def wrap() -> ddp.DistributedDataParallel:
        return ddp.DistributedDataParallel(build("mlp"))

    parameters = nn.Linear(3, 3 + dist.get_rank()).parameters()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ddp.comm.channel, "control_group", partial(_control_of, weakref.ref(group)))
        patched.setattr(small_sum, "_LEAST_RANKS", 2)  # the step status takes the way of many ranks
        with pytest.raises(ddp.errors.LayoutMismatchError):
            ddp.DistributedDataParallel(nn.Linear(3, 3 + dist.get_rank()))
        with pytest.raises(ddp.errors.LayoutMismatchError):
            DistributedOptimizer(torch.optim.SGD(parameters, 0.1))
        with pytest.MonkeyPatch.context() as patched_once:
            for module, attempt in ((wrapper, wrap), (horovod_optimizer, _distribute)):
                patched_once.setattr(module, "describe", refuse)
                with pytest.raises(RuntimeError, match=r"^refused$|^Gloo connectFullMesh"):  # who was refused has left
                    attempt()
        models = [wrap(), wrap()]
        assert all(model._reducer.channel.control is made for model in models)
        for step in range(3):
            follows_whole_batch(models[step % 2], step)
    _wait_until_at_most(once)
    ended = weakref.ref(made)
    dist.destroy_process_group(group)
    del made, group, models
    gc.collect()
    assert ended() is None
    _wait_until_at_most(sockets)


def _control_of(group: Callable[[], dist.ProcessGroup | None], *_: object) -> dist.ProcessGroup:
    found = group()
    assert found is not None
    return control_group(found, torch.device("cuda"))


def follows_whole_batch(model: ddp.DistributedDataParallel, step: int) -> None:
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    model.zero_grad()
    x, y = batch(step, 2 * dist.get_world_size())
    loss_of(model, shard(x), shard(y)).backward()
    loss_of(alone, x, y).backward()
    assert_close(model.module, alone, f"step {step}")


def _wait_until_at_most(sockets: int) -> None:
    deadline = time.monotonic() + 60
    while _sockets() > sockets:  # gloo closes them behind
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _sockets() -> int:
    count = 0
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(entry.path).startswith("socket:")
    return count


def _distribute() -> None:
    DistributedOptimizer(torch.optim.SGD(build("mlp").parameters(), 0.1))


def a_default_device_does_not_move_what_ranks_tell_each_other() -> None:
    """A context for it, since torch leaves a default device in backward(), but not where a rank reduces alone."""
    x, y = batch(0, 4)
    model = ddp.DistributedDataParallel(build("mlp"))
    alone = build("mlp")
    loss_of(alone, x, y).backward()
    with torch.device("meta"), model.join():  # on this device nothing has a value
        model.backward(loss_of(model, x, y), weight=float(dist.get_rank() == 0))
        assert gather_values([1.5, x[:1]])[-1][0] == 1.5
    assert_close(model, alone, "default device")


def nothing_is_left_of_a_wrapper() -> None:
    """After every kind of step: no hook on any parameter, no thread, and no object but the module."""
    world = dist.get_world_size()
    x, y = batch(0, 2 * world)
    before = len(_threads())
    for kind in ("plain", "views", "unfrozen", "compressed", "checksum", "words", "failed", "no_sync", "forward only"):
        replica = _made({"unfrozen": HalfFrozen, "words": Words}.get(kind, Mlp))
        model = ddp.DistributedDataParallel(
            replica,
            gradient_as_bucket_view=kind == "views",
            compression="bf16" if kind == "compressed" else None,
            weight_checksum=kind == "checksum",
        )
        alive = [weakref.ref(model), weakref.ref(model._reducer), weakref.ref(model._reducer.sums)]
        if kind == "words":
            _reads_words(model, shard(x), shard(y), dist.get_rank(), 0).backward()
        elif kind == "forward only":
            out = model(shard(x))
            del out
        else:
            loss_of(model, shard(x), shard(y)).backward()
            replica.requires_grad_()
            loss = loss_of(model, shard(x), shard(y))
            if kind == "failed":
                loss.register_hook(_refuse)
                with pytest.raises(ValueError, match="refused"):
                    loss.backward()
            else:
                loss.backward()
            del loss
        if kind == "no_sync":
            with model.no_sync():
                loss_of(model, shard(x), shard(y)).backward()
        del model
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3, kind
        assert all(not p._post_accumulate_grad_hooks for p in replica.parameters()), kind
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in replica.modules()), kind
        if kind != "words":
            expected = build("mlp")
            replica.zero_grad()
            loss_of(expected, x, y).backward()
            loss_of(replica, x, y).backward()  # local, and no warning
    deadline = time.monotonic() + 60
    while len(_threads()) > before + 1 and time.monotonic() < deadline:  # all wrappers share one
        time.sleep(0.01)
    assert len(_threads()) <= before + 1, _threads()


def _threads() -> list[str]:
    """Those that run, without those of groups."""
    return [thread.name for thread in threading.enumerate() if thread.name != "shm"]


def _refuse(_: torch.Tensor) -> None:
    raise ValueError("refused")


# Uneven inputs


def _inputs_of(rank: int, parts: int = 1) -> int:
    """How many batches a rank has: the last rank the fewest."""
    return parts * (3 + dist.get_world_size() - rank)


def _assert_joined_equal(model: nn.Module, oracle: nn.Module, what: str) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{what} {n}: {m}")
    every = [[torch.empty_like(p) for _ in range(dist.get_world_size())] for p in model.parameters()]
    for copies, parameter in zip(every, model.parameters(), strict=True):
        dist.all_gather(copies, parameter.detach().contiguous())
        assert all(torch.equal(other, copies[0]) for other in copies)


def uneven_inputs_are_exact(with_zero: bool) -> None:
    """Both divisors, with accumulation, parameters that some ranks never use, and gradients that are sparse."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for way, by_all, parts, kind in (
        (WAYS[1], False, 1, "mlp"),
        (WAYS[2], False, 2, "mlp"),
        (WAYS[3], True, 2, "mlp"),
        (WAYS[0], True, 1, "normed"),
        (WAYS[2], True, 1, "routed"),
        (WAYS[1], False, 1, "words"),
    ):
        if with_zero and (
            kind in ("words", "routed") or parts > 1
        ):  # it steps with dense gradients, in every iteration
            continue
        make, loss = {
            "mlp": (Mlp, _mean_square),
            "normed": (Normed, _mean_square),
            "routed": (Routed, _other_layers_on_each_rank),
            "words": (Words, _reads_words),
        }[kind]
        oracle, replica = _made(make), _made(make)
        model = way.wrap(replica)
        trained = torch.optim.SGD(oracle.parameters(), lr=0.05)
        optimizer = _zero(model) if with_zero else torch.optim.SGD(model.parameters(), lr=0.05)
        joinables: list[Any] = [model, optimizer] if with_zero else [model]
        for epoch in range(2 if kind in ("mlp", "words") and parts == 1 else 1):
            with Join(joinables, divide_by_initial_world_size=by_all):
                for step in range(_inputs_of(rank, parts)):
                    x, y = batch(epoch * 100 + step, 2 * world)
                    is_last = step % parts == parts - 1
                    with contextlib.nullcontext() if is_last else model.no_sync():
                        loss(model, shard(x), shard(y), rank, step).backward()
                    if is_last:
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=way.set_to_none)
            for step in range(_inputs_of(0, parts)):
                active = [other for other in range(world) if step < _inputs_of(other, parts)]
                x, y = batch(epoch * 100 + step, 2 * world)
                for other in active:
                    mine = loss(oracle, x.chunk(world)[other], y.chunk(world)[other], other, step)
                    (mine / (world if by_all else len(active))).backward()
                if step % parts == parts - 1:
                    trained.step()
                    trained.zero_grad(set_to_none=True)
            _assert_joined_equal(replica, oracle, f"{way}, divided by all {by_all}, {parts} parts, {kind}")
        optimizer.zero_grad()
        trained.zero_grad()
        x, y = batch(999, 2 * world)
        if kind == "mlp":  # and without join, as ever
            loss(oracle, x, y, 0, 0).backward()
            loss(model, shard(x), shard(y), 0, 0).backward()
            assert_close(replica, oracle, "after join")


def _zero(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)


def uneven_weighted_and_hooked_inputs() -> None:
    """Inside join: `weight=`, where joined ranks weigh nothing, and a communication hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    world, rank = dist.get_world_size(), dist.get_rank()
    for is_weighted in (True, False):
        oracle, replica = build("mlp"), build("mlp")
        model = ddp.DistributedDataParallel(replica)
        if not is_weighted:
            model.register_comm_hook(None, allreduce_hook)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (oracle, model)]
        with model.join():
            for step in range(_inputs_of(rank)):
                x, y, parts = _uneven(step) if is_weighted else (*batch(step, 2 * world), [])
                mine = parts[rank] if is_weighted else slice(2 * rank, 2 * rank + 2)
                loss = loss_of(model, x[mine], y[mine])
                model.backward(loss, weight=len(x[mine]) if is_weighted else None)
                optimizers[1].step()
                optimizers[1].zero_grad()
        for step in range(_inputs_of(0)):
            active = [other for other in range(world) if step < _inputs_of(other)]
            x, y, parts = _uneven(step) if is_weighted else (*batch(step, 2 * world), [])
            if is_weighted:
                rows = torch.cat([torch.arange(len(x))[parts[other]] for other in active])
                loss_of(oracle, x[rows], y[rows]).backward()
            else:
                rows = torch.arange(2 * len(active))
                (loss_of(oracle, x[rows], y[rows]) * len(active) / world).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        _assert_joined_equal(replica, oracle, f"weighted {is_weighted}")


def join_may_throw_at_the_first_end() -> None:
    """With throw_on_early_termination, all ranks raise at the same step; afterwards the model still works."""
    world, rank = dist.get_world_size(), dist.get_rank()
    replica = build("mlp")
    model = ddp.DistributedDataParallel(replica)
    steps = 0

    def train() -> None:
        nonlocal steps
        with model.join(throw_on_early_termination=True):
            for step in range(_inputs_of(rank)):
                x, y = batch(step, 2 * world)
                loss_of(model, shard(x), shard(y)).backward()
                steps += 1

    with pytest.raises(RuntimeError, match="exhausted"):
        train()
    assert steps == _inputs_of(world - 1) == 4
    x, y = batch(0, 2 * world)
    with model.join(enable=False):
        for module in (replica, oracle := copy.deepcopy(replica)):
            module.zero_grad()
        loss_of(model, shard(x), shard(y)).backward()
        loss_of(oracle, x, y).backward()
        assert_close(replica, oracle)


# What would be silently different


def a_rank_without_gradients_is_missed() -> None:
    """It has frozen everything and catches autograd's error; no rank may take its next pass for this one."""
    world, rank = dist.get_world_size(), dist.get_rank()
    oracle, replica = build("mlp"), build("mlp")
    model = ddp.DistributedDataParallel(replica)
    for step in range(5):
        x, y = batch(step, 2 * world)
        for module in (oracle, replica):
            module.zero_grad()
        if step == 1:
            if rank == 1:
                replica.requires_grad_(False)
                with pytest.raises(RuntimeError, match="does not require grad"):
                    loss_of(model, shard(x), shard(y)).backward()
                replica.requires_grad_(True)
            with pytest.raises(ddp.errors.BackwardError, match="rank 1 made 1 training forward"):
                loss_of(model, shard(x), shard(y)).backward()
            continue
        loss_of(model, shard(x), shard(y)).backward()
        loss_of(oracle, x, y).backward()
        assert_close(replica, oracle, f"step {step}")


def models_in_another_order_are_an_error() -> None:
    """Two models of one layout, which one rank runs in the other order: their gradients must not be mixed."""
    world, rank = dist.get_world_size(), dist.get_rank()
    replicas, oracles = (build("mlp"), build("mlp")), (build("mlp"), build("mlp"))
    models = [ddp.DistributedDataParallel(replica) for replica in replicas]
    for step in range(5):
        x, y = batch(step, 2 * world)
        for module in (*replicas, *oracles):
            module.zero_grad()
        for at in (0, 1) if step != 1 or rank else (1, 0):
            loss = loss_of(models[at], shard(x) * (1 + at), shard(y))
            if step == 1:
                with pytest.raises(ddp.errors.BackwardError, match="model"):
                    loss.backward()
            else:
                loss.backward()
                loss_of(oracles[at], x * (1 + at), y).backward()
                assert_close(replicas[at], oracles[at], f"step {step}")


def a_wrapper_that_is_gone_says_so() -> None:
    """Deleted between forward and backward, it reduces nothing."""
    loss = ddp.DistributedDataParallel(build("mlp"))(batch(0, 2)[0]).sum()
    gc.collect()
    with pytest.raises((UserWarning, ddp.errors.DdpError), match=r"deleted|gone"):
        loss.backward()


def gradients_that_a_hook_takes_are_an_error(is_after: bool) -> None:
    """An optimizer that steps in a hook would step on this rank's gradients."""
    replica = build("mlp")

    def register() -> None:
        for parameter in replica.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)

    if not is_after:
        register()
    model = ddp.DistributedDataParallel(replica)
    if is_after:
        register()
    for step in range(2):
        x, y = batch(step, 2 * dist.get_world_size())
        with pytest.raises(ddp.errors.BackwardError, match="optimizer") as caught:
            loss_of(model, shard(x), shard(y)).backward()
        assert caught.value.parameter in dict(replica.named_parameters())


class Repeated(nn.Module):
    """A layer in a given number of reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head, self.times = nn.Linear(6, 6), nn.Linear(6, 3), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for _ in range(self.times):
            x = checkpoint(self.shared, x, use_reentrant=True).tanh()
        return self.head(x)


def weights_that_later_become_ready_twice() -> None:
    """Exact at once, or an error in one step and exact from the next on."""
    for way in (WAYS[0], Way(1e-6, large_bytes=1)):
        oracle, replica = _made(Repeated), _made(Repeated)
        model = way.wrap(replica)
        for step in range(6):
            oracle.times = replica.times = 1 + (step >= 2)
            x, y = batch(step, 2 * dist.get_world_size())
            for module in (oracle, replica):
                module.zero_grad(set_to_none=way.set_to_none)
            with pytest.raises(ddp.errors.BackwardError, match="shared") if step == 2 else contextlib.nullcontext():
                loss_of(model, shard(x), shard(y)).backward()
                if step == 2:
                    raise ddp.errors.BackwardError("shared: exact at once")
            if step != 2:
                loss_of(oracle, x, y).backward()
                assert_close(replica, oracle, f"{way}, step {step}")


# Replicas, bit by bit


def replicas_stay_bitwise_equal(modes: list[str], steps: int) -> None:
    """In float32, with an optimizer that does not forgive: AdamW, clipped."""
    rank = dist.get_rank()
    for mode in modes:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            replica = (Words() if mode == "words" else Mlp()).to(torch.bfloat16 if mode == "half" else torch.float32)
        model = ddp.DistributedDataParallel(
            replica,
            compression=mode if mode in ("int8", "powersgd") else None,
            bucket_cap_mb=1e-3 if mode in ("words", "weighted") else None,
        )
        optimizer: Any = torch.optim.SGD if mode == "words" else torch.optim.AdamW
        optimizer = optimizer(model.parameters(), lr=0.01 if mode == "words" else 0.001)
        for step in range(steps):
            optimizer.zero_grad()
            x, y = (tensor.to(next(replica.parameters()).dtype) for tensor in batch(step * 100 + rank, 5))
            if mode == "words":
                _reads_words(model, x, y, rank, step).backward()
            else:
                loss = _mean_square(model, x, y, rank, step)
                model.backward(loss, weight=1 / (rank + 3) if mode == "weighted" else None)
                clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        assert_replicas_equal(_dense(model))
