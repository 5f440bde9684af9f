"""What users do to parameters, graphs and gradients, as programs for `testbed.training.follow_program`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from testbed.training import WAYS, Mlp, Normed, Program, Turn, follow_program, innermost, loss_of

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

    def forward(self, x: torch.Tensor) -> Any:
        lengths = torch.tensor([3 - row % 2 for row in range(len(x))])
        packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 3, 2), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


class Reused(nn.Module):
    """One layer used twice, one weight under two names, one in two roles."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(6, 3), nn.Linear(3, 3), nn.Linear(6, 3)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
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


def _unfreeze(module: Any, step: int) -> None:
    """One parameter at a time."""
    module.layers[2].weight.requires_grad_(step >= 1)
    module.layers[0].weight.requires_grad_(step >= 2)
    module.layers[0].bias.requires_grad_(step >= 4)


# Kinds of graphs


@dataclass
class Prediction:
    mean: torch.Tensor
    spread: torch.Tensor | None
    more: dict[str, Any]


class Pair(NamedTuple):
    first: Any
    rest: Any


class Answers(nn.Module):
    """Takes keywords only, and returns outputs in several forms."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(6, 3), nn.Linear(6, 3)
        self.kept: Any = None

    def forward(self, *, x: torch.Tensor, form: str) -> Any:
        mean, spread = self.mean(x), self.spread(x)
        self.kept = mean + spread
        both = torch.cat([mean, spread])
        return {
            "dict": {"mean": mean, "spread": spread, "text": "a"},
            "tuple": Pair([(mean, None), 3, spread], {"none": None}),
            "dataclass": Prediction(mean, None, {"spread": [spread]}),
            "view": (both[: len(mean)], both),
            "opaque": lambda: spread,
        }.get(form)


def _reads_answers(model: Any, x: torch.Tensor, y: torch.Tensor, turn: Turn) -> torch.Tensor:
    """A step uses both outputs, or one of them, or none."""
    form = ("dict", "dataclass", "tuple", "none", "view", "opaque")[turn.step % 6]
    out = model(x=x, form=form)
    if form == "view":
        out[0].mul_(2)  # changes what the other was, too
    found: torch.Tensor = {
        "dict": lambda: out["mean"],  # the other goes unused
        "dataclass": lambda: out.mean * out.more["spread"][0],
        "tuple": lambda: out.first[2],
        "view": lambda: out[1][: len(y)] * out[1][len(y) :],
        "opaque": lambda: out(),
        "none": lambda: innermost(model).kept,
    }[form]()
    return (found - y).square().mean()


def _two_forwards(model: Any, x: torch.Tensor, y: torch.Tensor, turn: Turn) -> torch.Tensor:
    with torch.no_grad():
        teacher = model(x * 2)
    first, second = model(x), model(x + 1)
    model.eval()
    model(x)  # sees no backward
    model.train()
    loss: torch.Tensor = (first * second - y).square().mean() + (second - teacher).square().mean()
    return loss


def _two_forwards_in_training(model: Any, x: torch.Tensor, y: torch.Tensor, turn: Turn) -> torch.Tensor:
    loss: torch.Tensor = (model(x) * model(x * 2 + 1)).square().mean()
    return loss


def _forward_without_backward(model: Any, x: torch.Tensor, y: torch.Tensor, turn: Turn) -> torch.Tensor:
    if turn.step % 2:
        model(x)
    return loss_of(model, x, y)


def _one_rank_evaluates(model: Any, x: torch.Tensor, y: torch.Tensor, turn: Turn) -> torch.Tensor:
    if turn.rank == turn.step % dist.get_world_size():
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


def _routed(
    route: Callable[[int, int], list[int]], model: Any, x: torch.Tensor, y: torch.Tensor, turn: Turn
) -> torch.Tensor:
    loss: torch.Tensor = (model(x.clone().requires_grad_(), route(turn.rank, turn.step)) - y).square().mean()
    return loss


def _other_order(rank: int, step: int) -> list[int]:
    route = [(rank + step + at) % 5 for at in range(5)]
    return route[::-1] if rank % 2 else route


def _other_layers(rank: int, step: int) -> list[int]:
    return [(rank + step) % 4, (2 * rank) % 4] * (1 + rank % 2)


def _none_on_odd_ranks(rank: int, step: int) -> list[int]:
    return [] if rank % 2 else [step % 5]


class Conditional(nn.Module):
    """A data-dependent loop, whose number of turns differs between rows and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.head, self.rare = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
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

    def forward(self, x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=self.use_reentrant).tanh()
        return checkpoint(self._nested, x, use_reentrant=self.use_reentrant)

    def _nested(self, x: torch.Tensor) -> Any:
        return self.outer(checkpoint(self.alone, x, use_reentrant=self.use_reentrant))


def _checkpointed(use_reentrant: bool, model: Any, x: torch.Tensor, y: torch.Tensor, turn: Turn) -> torch.Tensor:
    out = checkpoint(model, x.clone().requires_grad_(use_reentrant), use_reentrant=use_reentrant)
    loss: torch.Tensor = (out - y).square().mean()
    return loss


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

    def forward(self, x: torch.Tensor, turn: Turn) -> Any:
        index = (x * 10).long().abs() % 5  # (rows, 6)
        total, at = self.out(x[:, :3]), turn.rank + turn.step
        if at % 3 != 2:
            total = total + self.words(index[:, : 0 if at % 3 == 1 else 6]).sum(1) * (1 + turn.rank)
        if turn.step != 1:
            total = total + self.bags(index)
        if turn.rank == turn.step % 2:
            total = total + nn.functional.embedding(index, self.unannounced, sparse=True).sum(1)
        if (turn.rank, turn.step) == (0, 3):  # dense here, sparse elsewhere
            total = total + self.words.weight.sum(0)
        return total


def _reads_words(model: Any, x: torch.Tensor, y: torch.Tensor, turn: Turn) -> torch.Tensor:
    loss: torch.Tensor = (model(x, turn) - y).square().mean()
    return loss


class OnlyWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.words((x * 10).long().abs() % 7).sum(1).tanh()


def _plain(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)


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
        layers: Any = self.layers
        layers[0].weight.register_hook(lambda grad: grad * 2)
        layers[2].register_full_backward_hook(lambda module, ins, outs: (ins[0] * 3,))
        layers[4].register_full_backward_pre_hook(lambda module, outs: (outs[0] * 0.5,))
        layers[4].bias.register_hook(lambda grad: grad.zero_())

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        out.register_hook(lambda grad: grad * 1.5)
        return out


_unfreezing = functools.partial(Program, HalfFrozen, before=_unfreeze, steps=7)
_replacing = functools.partial(Program, after=_replace_gradients, resets=lambda step: False)
PROGRAMS = {
    "strided": Program(Strided),
    "recurrent": Program(Recurrent),
    "reused": Program(Reused),
    "frozen in turn": Program(before=_freeze_in_turn, parts=2),
    "unfrozen": _unfreezing(),
    "unfrozen, accumulating": _unfreezing(parts=3),
    "answers": Program(Answers, _reads_answers, steps=6),
    "answers, accumulating": Program(Answers, _reads_answers, parts=2, steps=6),
    "two forwards": Program(loss=_two_forwards),
    "forward without backward": Program(loss=_forward_without_backward),
    "one rank evaluates": Program(loss=_one_rank_evaluates),
    "two backwards": Program(backward=_twice_backward),
    "backward to some": Program(backward=_through_inputs_named),
    "backward of two": Program(backward=_autograd_backward),
    "other order": Program(Routed, functools.partial(_routed, _other_order)),
    "other layers": Program(Routed, functools.partial(_routed, _other_layers), parts=2),
    "no layer": Program(Routed, functools.partial(_routed, _none_on_odd_ranks)),
    "conditional": Program(Conditional),
    "recomputed": Program(lambda: Recomputed(False)),
    "recomputed, reentrant": Program(lambda: Recomputed(True)),
    "recomputed, accumulating": Program(lambda: Recomputed(True), parts=2),
    "wrapper recomputed": Program(loss=functools.partial(_checkpointed, False)),
    "wrapper recomputed, reentrant": Program(loss=functools.partial(_checkpointed, True)),
    "words": Program(Words, _reads_words, optimizer=_plain),
    "words, accumulating": Program(Words, _reads_words, optimizer=_plain, parts=2),
    "words by SparseAdam": Program(OnlyWords, optimizer=lambda module: torch.optim.SparseAdam([*module.parameters()])),
    "replaced": _replacing(),
    "replaced, accumulating": _replacing(parts=2),
    "hooked": Program(Hooked),
    "normed": Program(Normed),
    "normed, two forwards": Program(Normed, _two_forwards_in_training),
}


def follow(names: Iterable[str]) -> None:
    """Run each of these programs in one of the ways: in another at each world size."""
    for name in names:
        follow_program(PROGRAMS[name], WAYS[([*PROGRAMS].index(name) + dist.get_world_size()) % len(WAYS)])
