"""Models, batches and the oracle of tests that train: the same training in one process on the whole batch.

Each rank computes the oracle for itself, in float64, and compares after every pass.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import ddp
import ddp.data_parallel.buckets.bucket_plan

F64 = torch.float64
Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


class Odd(nn.Module):
    """Scalar, empty, transposed, frozen, shared and never used parameters, not in the order of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.randn(4))
        self.out = nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 5))
        self.transposed = nn.Parameter(torch.randn(9, 6).t())
        self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)
        self.tied = nn.Linear(9, 9)
        self.tied_again = nn.Linear(9, 9)
        self.tied_again.weight = self.tied.weight
        self.same_a = nn.Parameter(torch.randn(3, 3))
        self.same_b = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = (x @ self.transposed).tanh() * self.scale + self.frozen + self.empty.sum()
        hidden = self.tied_again(self.tied(hidden).tanh())
        # Autograd gives both of these one tensor as their gradient.
        return self.out(hidden) + self.same_a.view(-1)[:3] + (self.same_a.view(-1) + self.same_b.view(-1))[3:6]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.block(torch.stack([x, x.flip(-1), x * x, x.cos()], dim=-1).repeat(1, 1, 2))).mean(1)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 7, 2)
        self.again = nn.Conv2d(7, 5, 1)
        self.head = nn.Linear(10, 3)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it

    def forward(self, x: torch.Tensor) -> Any:
        image = x.view(-1, 1, 2, 3).contiguous(memory_format=torch.channels_last)
        return self.head(self.again(self.conv(image).tanh()).flatten(1))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.randn(5, dtype=F64))
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))
        self.tail = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> Any:
        out = x.to(torch.complex128) @ self.weight * self.tail
        return (out.real + out.imag * self.real.sum()).tanh()


class Branches(nn.Module):
    """Uses the branches that `use` names."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))
        self.use: list[int] = []

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.trunk(x).tanh()
        total = x.new_zeros(len(x), 3) + hidden.sum() * 0
        for branch in self.use:
            total = total + self.branches[branch](hidden)
        return total


class Normed(nn.Module):
    """Has buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("hidden", torch.tensor(1.5), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.linear(x)) * self.hidden


MODELS: dict[str, type[nn.Module]] = {
    "mlp": Mlp, "odd": Odd, "attention": Attention, "conv": Conv, "complex": Complex, "branches": Branches,
}  # fmt: skip


def build(model: str | Callable[[], nn.Module], seed: int = 0) -> Any:
    """Make a model in float64 (or complex128) with the same values on every rank; Any, for tests reach into it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = (MODELS[model] if isinstance(model, str) else model)()
        return made if isinstance(made, Complex) else made.to(F64)


def batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (rows, 6) and targets (rows, 3) on the default device: the same values on any."""
    generator, device = torch.Generator().manual_seed(step), torch.get_default_device()
    return (
        torch.randn(rows, 6, dtype=F64, generator=generator, device="cpu").to(device),
        torch.randn(rows, 3, dtype=F64, generator=generator, device="cpu").to(device),
    )


def uneven_batch(step: int) -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
    """A batch and each rank's part of it: of other sizes in every step, and of no rows for some rank."""
    sizes = [(rank + step) % 3 * 2 + (rank == 0) for rank in range(dist.get_world_size())]
    x, y = batch(step, sum(sizes))
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return x, y, [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - y).square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def innermost(model: Any) -> Any:
    """The user's module in wrappers by torch.compile and DistributedDataParallel."""
    while (inner := getattr(model, "_orig_mod", None) or getattr(model, "module", None)) is not None:
        model = inner
    return model


def compare_passes(
    model: Any, alone: nn.Module, step: int, *, what: str = "", set_to_none: bool = True, loss: Loss = loss_of
) -> None:
    """Make a pass of a wrapped model, and of the same model alone on the whole batch; compare gradients."""
    x, y = batch(step, 2 * dist.get_world_size())
    for module, mine in ((alone, whole), (model, shard)):
        module.zero_grad(set_to_none=set_to_none)
        loss(module, mine(x), mine(y)).backward()
    assert_close(innermost(model), alone, f"{what}, step {step}")


def follow_whole_batch(
    model: Any, *, alone: nn.Module | None = None, steps: int = 5, what: str = "", start: int = 0, **passes: Any
) -> None:
    """Train a wrapped model, and the same model alone on the whole batch; every step is exact."""
    alone = copy.deepcopy(innermost(model)) if alone is None else alone
    optimizers = [sgd(each) for each in (alone, model)]
    for step in range(start, start + steps):
        compare_passes(model, alone, step, what=what, **passes)
        for optimizer in optimizers:
            optimizer.step()
    assert_close(innermost(model), alone, f"{what}, at the end")
    assert_replicas_equal(innermost(model))


class Way(NamedTuple):
    """How gradients are bucketed, kept and reset."""

    bucket_cap_mb: float | None = None
    views: bool = False
    set_to_none: bool = True
    large_bytes: int = 32 << 10  # from where on a gradient in a flat bucket counts as large
    find_unused: bool = False

    def wrap(self, module: nn.Module, **settings: Any) -> ddp.DistributedDataParallel:
        ddp.data_parallel.buckets.bucket_plan._LARGE_BYTES = self.large_bytes
        return ddp.DistributedDataParallel(
            module,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.views,
            find_unused_parameters=self.find_unused,
            **settings,
        )


WAYS = (
    Way(),
    Way(views=True, set_to_none=False, large_bytes=1),
    Way(1e-4, set_to_none=False, large_bytes=100),
    Way(1e-6, views=True),
)


class Turn(NamedTuple):
    """Whose loss it is, and when."""

    rank: int
    step: int
    part: int = 0


def mean_square(model: Any, x: torch.Tensor, y: torch.Tensor, turn: Turn) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - y[:, :1]).square().mean()
    return loss


@dataclass(frozen=True)
class Program:
    """A module, a loss and what happens around them. `before` and `after` a pass get the bare module."""

    make: str | Callable[[], nn.Module] = Mlp
    loss: Callable[[Any, torch.Tensor, torch.Tensor, Turn], torch.Tensor] = mean_square
    before: Callable[[Any, int], object] = lambda module, step: None
    after: Callable[[Any, int], object] = lambda module, step: None
    backward: Callable[[torch.Tensor, nn.Module], None] = lambda loss, module: loss.backward()
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    resets: Callable[[int], bool] = lambda step: True  # whether gradients are reset before a step
    parts: int = 1  # micro-batches of a step, all but the last under no_sync
    steps: int = 5


def follow_program(program: Program, way: Way = WAYS[0]) -> None:
    """Train a replica, and alone with the sum of all ranks' losses; compare after every step."""
    world, rank = dist.get_world_size(), dist.get_rank()
    alone, replica = build(program.make), build(program.make, seed=rank)  # equal only after the broadcast
    model = way.wrap(replica)
    optimizers = [program.optimizer(each) for each in (alone, model)]
    for step in range(program.steps):
        for optimizer in optimizers if program.resets(step) else ():
            optimizer.zero_grad(set_to_none=way.set_to_none)
        for module in (alone, replica):
            program.before(module, step)
        for part in range(program.parts):
            x, y = batch(step * 10 + part, 2 * world)
            for turn in (Turn(other, step, part) for other in range(world)):
                loss = program.loss(alone, x.chunk(world)[turn.rank], y.chunk(world)[turn.rank], turn)
                program.backward(loss / world, alone)
            with contextlib.nullcontext() if part == program.parts - 1 else model.no_sync():
                loss = program.loss(model, shard(x), shard(y), Turn(rank, step, part))
            program.backward(loss, replica)
        for module in (alone, replica):
            program.after(module, step)
        assert_close(dense(replica), dense(alone), f"{way}, step {step}")
        for optimizer in optimizers:
            optimizer.step()
    assert_close(dense(replica), dense(alone), f"{way}, at the end")
    assert_replicas_equal(dense(replica))


def dense(module: nn.Module) -> nn.Module:
    """The module, or where it has sparse gradients a copy that has them dense, for comparing."""
    if all(p.grad is None or p.grad.layout is torch.strided for p in module.parameters()):
        return module
    copied = nn.Module()
    for name, parameter in module.named_parameters():
        other = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        other.grad = None if parameter.grad is None else parameter.grad.to_dense()
        copied.register_parameter(name.replace(".", "_"), other)
    return copied


def assert_close(actual: nn.Module, expected: nn.Module, what: str = "") -> None:
    """Parameters and gradients, to 1e-12."""
    for (name, a), (_, e) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        _assert_close(a, e, f"{what} {name}")
        assert (a.grad is None) == (e.grad is None), f"{what} {name}: gradient {a.grad} instead of {e.grad}"
        if e.grad is not None:
            _assert_close(a.grad, e.grad, f"{what} {name}.grad")


def assert_weights_close(actual: nn.Module, expected: nn.Module, what: str = "") -> None:
    """Parameters alone, to 1e-12."""
    for (name, a), e in zip(actual.named_parameters(), expected.parameters(), strict=True):
        _assert_close(a, e, f"{what} {name}")


def _assert_close(actual: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13, msg=lambda text: f"{what}: {text}")


def assert_replicas_equal(model: nn.Module) -> None:
    """Bitwise, gradients included."""
    for name, parameter in model.named_parameters():
        assert_same_bits([parameter.detach()], what=name)
        if parameter.grad is not None:
            assert_same_bits([parameter.grad], what=f"{name}.grad")


def assert_same_bits(
    tensors: list[torch.Tensor], group: dist.ProcessGroup | None = None, what: str = "tensors"
) -> None:
    """Of each tensor, on all ranks of a group."""
    for number, tensor in enumerate(tensors):
        mine = tensor.contiguous().view(-1).view(torch.uint8)
        if mine.numel():
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, mine, group=group)
            assert all(torch.equal(other, every[0]) for other in every), f"{what}: {number} differs between ranks"
