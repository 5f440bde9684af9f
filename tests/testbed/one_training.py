# mypy: disable-error-code="no-any-return"
"""One training under every strategy, and its oracle: the same training in one process, without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ddp.data.permutation import choose
from ddp.strategies.strategy import Strategy
from testbed.same import assert_same
from testbed.training import Odd

F64 = torch.float64
LENGTH = 45  # with batches of 11, the last one has a single sample: nothing for most replicas
EPOCHS = 3
State = dict[str, Any]


class Norm(nn.Module):
    """Batch normalization: statistics are of a replica's own share, the buffers those of replica 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 17, bias=False)  # a bias here would have a gradient of rounding noise
        self.norm = nn.BatchNorm1d(17)
        self.last = nn.Linear(17, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh())


class Words(nn.Module):
    """An embedding with sparse gradients of few rows, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(300, 8, mode="sum", sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words((x * 100).abs().long() % 300).tanh())


class Bag(nn.Module):
    """Nothing but sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(300, 3, mode="sum", sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words((x * 100).abs().long() % 300)


class Tied(nn.Module):
    """One table as embedding and as the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle, self.last = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)
        self.last.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.words((x * 100).abs().long() % 20).mean(1)).tanh())


class Unused(nn.Module):
    """A layer that is never used, and two of which a replica uses one in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never = nn.Linear(6, 16), nn.Linear(16, 16)
        self.ways = nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ways[int(x[0, 0] > 0)](self.first(x).tanh())


class Unfrozen(nn.Module):
    """The first layer is frozen until the third step, the last bias from the fifth on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def thaw(self, step: int) -> None:
        self.layers[0].requires_grad_(step >= 2)
        self.layers[4].bias.requires_grad_(step < 4)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "odd": Odd, "norm": Norm, "words": Words, "bag": Bag, "tied": Tied, "unused": Unused,
    "unfrozen": Unfrozen,
}  # fmt: skip
BY_SHARES = {"norm", "unused"}  # whose results depend on how a batch is shared out
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.2, momentum=0.9, nesterov=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=0.2),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02),
    "sparse adam": lambda groups: torch.optim.SparseAdam(groups, lr=0.05),
}


@dataclass(frozen=True)
class Setting:
    """What is trained, and how: `options` are the strategy's."""

    model: str = "mlp"
    optimizer: str = "sgd"
    batch: int = 11
    groups: int = 1
    options: State = field(default_factory=dict)
    dtype: torch.dtype = F64
    epochs: int = EPOCHS
    decay: float = 0.5  # of the rates, after each epoch


def data(dtype: torch.dtype = F64) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(LENGTH, 6, generator=generator, dtype=F64)
    return TensorDataset(x.to(dtype), (x @ torch.randn(6, 3, generator=generator, dtype=F64)).argmax(1))


def build(setting: Setting, seed: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the model and optimizer of a setting, in several groups with rates of their own."""
    torch.manual_seed(seed)
    model = MODELS[setting.model]().to(setting.dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts = [parameters[number :: setting.groups] for number in range(setting.groups)]
    more = [{} if number == 0 else {"lr": 0.01 * number, "weight_decay": 0.1} for number in range(setting.groups)]
    groups = [{"params": part, **extra} for part, extra in zip(parts, more, strict=True)]
    thaw(model, 0)
    return model, OPTIMIZERS[setting.optimizer](groups)


def oracle(setting: Setting, replicas: int, *, every: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """Train in this process alone, on whole batches; by shares where they count.

    With `every`, each replica has a model of its own, and these are averaged after so many steps.
    """
    trained = [build(setting) for _ in range(replicas if every else 1)]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, setting.decay) for _, optimizer in trained]
    losses: list[float] = []
    for epoch in range(setting.epochs):
        for batch in batches(setting, epoch):
            shares = [batch[replica::replicas] for replica in range(replicas)]
            parts = [[each] for each in shares] if every else [shares if setting.model in BY_SHARES else [batch]]
            for (model, optimizer), part in zip(trained, parts, strict=True):
                thaw(model, len(losses))
                loss = _step_by_shares(model, optimizer, part, len(batch) / len(trained))
            losses.append(loss)
            if every and len(losses) % every == 0:
                _average([model for model, _ in trained])
        for schedule in schedules:
            schedule.step()
    return *trained[0], losses


def thaw(model: nn.Module, step: int) -> None:
    if isinstance(model, Unfrozen):
        model.thaw(step)


@torch.no_grad()
def _average(models: Sequence[nn.Module]) -> None:
    for tensors in zip(*([*model.parameters(), *model.buffers()] for model in models), strict=True):
        if tensors[0].is_floating_point():
            mean = torch.stack([each.double() for each in tensors]).mean(0)
            for each in tensors:
                each.copy_(mean)


def batches(setting: Setting, epoch: int) -> Sequence[torch.Tensor]:
    """The indices of each whole batch of an epoch."""
    return choose(LENGTH, seed=0, epoch=epoch)(torch.arange(LENGTH)).split(setting.batch)


def _step_by_shares(
    model: nn.Module, optimizer: torch.optim.Optimizer, shares: Sequence[torch.Tensor], rows: float
) -> float:
    x, y = data(next(model.parameters()).dtype).tensors
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    total = 0.0
    for share in reversed(shares):  # the buffers that remain are those of replica 0
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        loss = F.cross_entropy(_logits(model, x[share]), y[share], reduction="sum") / rows
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def _logits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return out.float() if out.dtype == torch.bfloat16 else out


def train(
    strategy: Strategy,
    setting: Setting,
    *,
    begin: Callable[[], None] = lambda: None,
    each_step: Callable[[], None] = lambda: None,
) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """Train as a user's script does; return the user's model, the strategy's optimizer and the losses of all batches.

    Replicas begin with other values each: those of replica 0 count.
    """
    model, optimizer = strategy.prepare(*build(setting, seed=3 + strategy.replica))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, setting.decay)
    loader = strategy.loader(data(setting.dtype), global_batch_size=setting.batch, shuffle=True)
    losses: list[torch.Tensor] = []
    begin()
    device = next(model.parameters()).device
    for _ in loader.epochs(setting.epochs):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            thaw(strategy.unwrap(model), len(losses))
            loss = strategy.mean(F.cross_entropy(_logits(model, x), y, reduction="none"))
            loss.backward()
            each_step()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        schedule.step()
    strategy.sync()
    return strategy.unwrap(model), optimizer, [loss.item() for loss in losses]


def assert_equals_oracle(
    strategy: Strategy, setting: Setting, *, has_buffers: bool = True, has_state: bool = True
) -> None:
    """Train, and compare weights, losses, and, where this replica has the same, buffers and the optimizer's state."""
    model, optimizer, losses = train(strategy, setting)
    expected, its_optimizer, its_losses = oracle(setting, strategy.replicas)
    assert_same(strategy.reduce("sum", losses), its_losses, "losses")
    names = list(expected.state_dict() if has_buffers else dict(expected.named_parameters()))
    assert_same({n: model.state_dict()[n] for n in names}, {n: expected.state_dict()[n] for n in names}, "model")
    state = optimizer.state_dict()  # collective under some strategies
    if not (has_buffers and has_state):
        return
    assert_same(state, its_optimizer.state_dict(), "optimizer")
    _goes_on_in_plain_torch(setting, model, state, expected, its_optimizer)


def _goes_on_in_plain_torch(
    setting: Setting, model: nn.Module, state: State, expected: nn.Module, its_optimizer: torch.optim.Optimizer
) -> None:
    plain, optimizer = build(setting, seed=99)
    plain.load_state_dict(model.state_dict())
    optimizer.load_state_dict(state)
    share = [torch.arange(LENGTH)]
    mine, its = (_step_by_shares(*each, share, LENGTH) for each in ((plain, optimizer), (expected, its_optimizer)))
    assert_same(mine, its, "loss")
    assert_same(dict(plain.state_dict()), dict(expected.state_dict()), "a step of torch")


def whole_loss(model: nn.Module) -> float:
    """The loss of the whole data set, evaluated."""
    x, y = data(next(model.parameters()).dtype).tensors
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


def check_mean(strategy: Strategy) -> None:
    rank, replicas = strategy.replica, strategy.replicas
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.rand(rank + 1, 5, dtype=F64, generator=generator, requires_grad=True)
    weights = torch.rand(rank + 1, dtype=F64, generator=generator)
    size = sum(range(1, replicas + 1))
    loss = strategy.mean(tokens, weights, global_batch_size=size)
    loss.backward()
    assert_same(loss, (tokens.detach().mean(1) * weights).sum() / size)
    # averaged over the replicas, that is the gradient of the global mean
    assert_same(tokens.grad, (weights[:, None] / 5 / size * replicas).expand(-1, 5))


def check_reduce(strategy: Strategy) -> None:
    rank, n = strategy.replica, strategy.replicas
    value = {"a": 0.1 * rank, "b": [rank, (torch.tensor([rank, 7]), torch.tensor(True))], "c": torch.full((2,), 0.1)}
    total = strategy.reduce("sum", value)
    assert total["b"][0] == n * (n - 1) // 2
    assert isinstance(total["b"][0], int)
    assert isinstance(total["b"][1], tuple)
    assert total["b"][1][0].tolist() == [n * (n - 1) // 2, 7 * n]
    assert total["b"][1][1].item() == n
    assert total["c"].dtype == torch.float32
    assert_same(strategy.reduce("mean", 0.1 * rank), 0.1 * (n - 1) / 2)
    assert strategy.reduce("min", {"x": -rank})["x"] == 1 - n
    assert strategy.reduce("max", torch.tensor([rank, -rank])).tolist() == [n - 1, 0]
    assert strategy.reduce("max", float("nan") if rank == 0 else 1.0) != 0.0
