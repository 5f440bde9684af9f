"""What the ranks of a test world do: each function runs on every rank, inside a process group, and asserts there.

The oracle is always the same training in one process on the whole batch, computed by every rank for itself.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from torch import nn

import ddp
import ddp.data_parallel.buckets.bucket_plan

F64 = torch.float64


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ self.transposed).tanh() * self.scale + self.frozen + self.empty.sum()
        hidden = self.tied_again(self.tied(hidden).tanh())
        # Autograd gives both of these one tensor as their gradient.
        return self.out(hidden) + self.same_a.view(-1)[:3] + (self.same_a.view(-1) + self.same_b.view(-1))[3:6]


def models_that_one_backward_reaches_in_another_order_on_each_rank_are_reduced() -> None:
    """Their passes end in the order in which the models were wrapped, on every rank."""
    models = [ddp.DistributedDataParallel(nn.Linear(3, 2).to(F64)) for _ in range(2)]
    for step in range(4):
        for model in models:
            model.zero_grad()
        order = models if dist.get_rank() == 0 else models[::-1]
        x = torch.full((1, 3), step + dist.get_rank() + 1.0, dtype=F64)
        outputs = [model(x).sum() for model in order]
        (outputs[0] + outputs[1]).backward()
        for model in models:
            assert torch.equal(model.module.weight.grad, torch.full((2, 3), step + 1.5, dtype=F64)), step


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(torch.stack([x, x.flip(-1), x * x, x.cos()], dim=-1).repeat(1, 1, 2))).mean(1)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 7, 2)
        self.again = nn.Conv2d(7, 5, 1)
        self.head = nn.Linear(10, 3)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(-1, 1, 2, 3).contiguous(memory_format=torch.channels_last)
        return self.head(self.again(self.conv(image).tanh()).flatten(1))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.randn(5, dtype=F64))
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))
        self.tail = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.to(torch.complex128) @ self.weight * self.tail
        return (out.real + out.imag * self.real.sum()).tanh()


MODELS: dict[str, type[nn.Module]] = {
    "mlp": Mlp, "odd": Odd, "attention": Attention, "conv": Conv, "complex": Complex,
}  # fmt: skip


def build(name: str, seed: int = 0) -> nn.Module:
    """A model in float64 (or complex128) with the same values on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]()
        return model if name == "complex" else model.to(F64)


def batch(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (rows, 6) and targets (rows, 3) on the default device: the same values on any."""
    generator, device = torch.Generator().manual_seed(step), torch.get_default_device()
    return (
        torch.randn(rows, 6, dtype=F64, generator=generator, device="cpu").to(device),
        torch.randn(rows, 3, dtype=F64, generator=generator, device="cpu").to(device),
    )


def shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def assert_close(actual: nn.Module, expected: nn.Module, what: str = "") -> None:
    for (name, a), (_, e) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{what} {n}: {m}")
        assert (a.grad is None) == (e.grad is None), f"{what} {name}: gradient {a.grad} instead of {e.grad}"
        if e.grad is not None:
            torch.testing.assert_close(
                a.grad, e.grad, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{what} {n}.grad: {m}"
            )


def assert_replicas_equal(model: nn.Module) -> None:
    """Bitwise, gradients included."""
    for name, parameter in model.named_parameters():
        for tensor in (parameter.detach(), parameter.grad):
            if tensor is not None:
                every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
                dist.all_gather(every, tensor.contiguous())
                assert all(torch.equal(other, every[0]) for other in every), f"{name} differs between ranks"


class Setup(NamedTuple):
    """One way to configure the module and the loop."""

    model: str = "mlp"
    bucket_cap_mb: float | None = None
    views: bool = False
    set_to_none: bool = True
    accumulate: int = 1
    find_unused: bool = False
    large_bytes: int = 32 << 10  # from where on a gradient in a flat bucket counts as large


def train(setup: Setup, steps: int) -> None:
    """Train replicas and oracle side by side and compare after every step."""
    ddp.data_parallel.buckets.bucket_plan._LARGE_BYTES = setup.large_bytes
    world = dist.get_world_size()
    oracle = build(setup.model)
    replica = build(setup.model, seed=dist.get_rank())  # equal only after the broadcast
    model = ddp.DistributedDataParallel(
        replica,
        bucket_cap_mb=setup.bucket_cap_mb,
        gradient_as_bucket_view=setup.views,
        find_unused_parameters=setup.find_unused,
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (oracle, model)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=setup.set_to_none)
        for part in range(setup.accumulate):
            x, y = batch(step * 10 + part, 2 * world)
            (loss_of(oracle, x, y) / setup.accumulate).backward()
            is_last = part == setup.accumulate - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                (loss_of(model, shard(x), shard(y)) / setup.accumulate).backward()
        assert_close(model.module, oracle, f"{setup} step {step}")
        for optimizer in optimizers:
            optimizer.step()
    assert_close(model.module, oracle, f"{setup} at the end")
    assert_replicas_equal(model)


def equals_whole_batch(setups: list[tuple[Any, ...]], steps: int) -> None:
    for setup in setups:
        train(Setup(*setup), steps)


class Branches(nn.Module):
    """Which of its branches a rank uses is said from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))
        self.use: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(x).tanh()
        total = x.new_zeros(len(x), 3) + hidden.sum() * 0
        for branch in self.use:
            total = total + self.branches[branch](hidden)
        return total


MODELS["branches"] = Branches


def unused_parameters(setups: list[tuple[Any, ...]]) -> None:
    for setup in setups:
        train_with_unused(Setup(*setup))


def train_with_unused(setup: Setup) -> None:
    """Every rank uses other branches, some are used by none; the oracle adds the ranks' losses."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ddp.data_parallel.buckets.bucket_plan._LARGE_BYTES = setup.large_bytes
    oracle, replica = build("branches"), build("branches")
    model = ddp.DistributedDataParallel(
        replica,
        bucket_cap_mb=setup.bucket_cap_mb,
        gradient_as_bucket_view=setup.views,
        find_unused_parameters=setup.find_unused,
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (oracle, model)]
    uses = [  # [step][rank][microbatch]
        [[[0, 1], [0]], [[1], [1]], [[0, 1, 2], []], [[2], [2]]],
        [[[0], []], [[0], []], [[0], []], [[0], []]],
        [[[], [3]], [[3], []], [[], [2]], [[3], [3]]],
        [[[], []], [[], []], [[1], []], [[], []]],
        [[[0, 1, 2, 3], []], [[0, 1, 2, 3], []], [[0, 1, 2, 3], []], [[0, 1, 2, 3], []]],
        [[[3, 0], [1]], [[], [2]], [[], []], [[1], [0]]],
    ]
    for step, use in enumerate(uses):
        for optimizer in optimizers:
            if step != 2:  # once, gradients pile up over two steps
                optimizer.zero_grad(set_to_none=setup.set_to_none)
        parts = setup.accumulate
        for part in range(parts):
            x, y = batch(step * 10 + part, 2 * world)
            for other in range(world):
                oracle.use = use[other][part]
                (loss_of(oracle, x.chunk(world)[other], y.chunk(world)[other]) / world).backward()
            replica.use = use[rank][part]
            with contextlib.nullcontext() if part == parts - 1 else model.no_sync():
                loss_of(model, shard(x), shard(y)).backward()
        assert_close(replica, oracle, f"{setup} step {step}")
        for optimizer in optimizers:
            optimizer.step()
    assert_replicas_equal(model)


def unused_everywhere_keeps_its_gradient_to_the_bit(views: bool, large_bytes: int) -> None:
    """Also at a world size where the mean of equal numbers is not always that number."""
    ddp.data_parallel.buckets.bucket_plan._LARGE_BYTES = large_bytes
    replica = build("branches")
    model = ddp.DistributedDataParallel(replica, gradient_as_bucket_view=views)
    for step in range(3):
        replica.use = [0, 1]
        model.zero_grad()
        x, y = batch(step, 2 * dist.get_world_size())
        loss_of(model, shard(x), shard(y)).backward()
        before = copy.deepcopy(replica.branches[1].weight.grad)
        replica.use = [0]
        loss_of(model, shard(x), shard(y)).backward()
        assert torch.equal(replica.branches[1].weight.grad, before)
        assert replica.branches[2].weight.grad is None


class Identity(nn.Module):
    """Uses its parameters on even ranks only; elsewhere the output depends on the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if dist.get_rank() % 2 == 0 else x * 2


def rank_that_reaches_no_parameter_takes_part() -> None:
    oracle = nn.Linear(6, 6).to(F64)
    module = Identity().to(F64)
    model = ddp.DistributedDataParallel(module)
    oracle.load_state_dict(module.linear.state_dict())
    for step in range(3):
        x, _ = batch(step, dist.get_world_size())
        model(shard(x).requires_grad_()).sum().backward()
        (oracle(x[::2]).sum() / dist.get_world_size()).backward()
    torch.testing.assert_close(module.linear.weight.grad, oracle.weight.grad, rtol=1e-12, atol=1e-13)


def autograd_grad_reduces_nothing_and_penalties_work() -> None:
    """A gradient penalty; before it, one rank alone looks at gradients of an input and of a parameter."""
    oracle, replica = build("mlp"), build("mlp")
    model = ddp.DistributedDataParallel(replica)
    for step in range(2):
        x, y = batch(step, 2 * dist.get_world_size())
        x.requires_grad_()
        if dist.get_rank() == 0:
            with pytest.warns(UserWarning, match="nothing averages them") if step == 0 else contextlib.nullcontext():
                torch.autograd.grad(model(shard(x)).sum(), next(replica.parameters()))
            torch.autograd.grad(model(shard(x)).sum(), x)
        for module, mine in ((oracle, lambda t: t), (model, shard)):
            module.zero_grad()
            inputs = mine(x).detach().requires_grad_()
            out = module(inputs)
            (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
            ((out - mine(y)).square().mean() + slope.square().mean()).backward()
        assert_close(replica, oracle, f"step {step}")


def two_backwards_of_one_forward_are_both_reduced() -> None:
    oracle, replica = build("mlp"), build("mlp")
    model = ddp.DistributedDataParallel(replica, gradient_as_bucket_view=True)
    x, y = batch(0, 2 * dist.get_world_size())
    for module, mine in ((oracle, lambda t: t), (model, shard)):
        loss = loss_of(module, mine(x), mine(y))
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    assert_close(replica, oracle, "two backwards")
    for module, mine in ((oracle, lambda t: t), (model, shard)):
        module.zero_grad()
        first, second = (
            loss_of(module, mine(x), mine(y)),
            loss_of(module, mine(y) @ torch.ones(3, 6, dtype=F64), mine(y)),
        )
        with torch.no_grad():
            module(mine(x))
        (first + 2 * second).backward()
    assert_close(replica, oracle, "two forwards")
    for module, mine in ((oracle, lambda t: t), (model, shard)):
        module.zero_grad()
        first, second = loss_of(module, mine(x), mine(y)), loss_of(module, mine(x) * 2, mine(y))
        first.backward()
        second.backward()
    assert_close(replica, oracle, "two forwards, two backwards")


def no_sync_is_local_nested_and_survives_exceptions() -> None:
    replica = build("mlp")
    model = ddp.DistributedDataParallel(replica)
    x, y = batch(dist.get_rank(), 4)
    local = copy.deepcopy(build("mlp"))
    loss_of(local, x, y).backward()
    with contextlib.suppress(KeyError), model.no_sync():
        with model.no_sync():
            loss_of(model, x, y).backward()
        assert not model.require_backward_grad_sync
        raise KeyError
    assert model.require_backward_grad_sync
    assert_close(replica, local)
    loss_of(model, x, y).backward()
    assert_replicas_equal(model)


def outputs_may_be_nested_opaque_or_missing() -> None:
    class Out(NamedTuple):
        first: torch.Tensor
        rest: dict[str, Any]

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()
            self.kept: torch.Tensor | None = None

        def forward(self, *, x: torch.Tensor, form: str) -> Any:
            out = self.mlp(x)
            self.kept = out
            return {"tuple": Out(out, {"none": None, "half": [out / 2, 3]}), "opaque": lambda: out, "none": None}[form]

    oracle, replica = Many().to(F64), Many().to(F64)
    model = ddp.DistributedDataParallel(replica)
    oracle.load_state_dict(replica.state_dict())
    x, _ = batch(0, 2 * dist.get_world_size())
    reads: dict[str, Callable[[Many, Any], torch.Tensor]] = {
        "tuple": lambda m, out: out.rest["half"][0],
        "opaque": lambda m, out: out(),
        "none": lambda m, out: present(m.kept),
    }
    for form, read in reads.items():
        model.zero_grad()
        oracle.zero_grad()
        read(replica, model(x=shard(x), form=form)).square().mean().backward()
        read(oracle, oracle(x=x, form=form)).square().mean().backward()
        assert_close(replica, oracle, form)


def user_replaced_gradients_are_reduced() -> None:
    for views in (False, True):
        replica = build("mlp")
        model = ddp.DistributedDataParallel(replica, gradient_as_bucket_view=views)
        x, y = batch(0, 2 * dist.get_world_size())
        oracle = build("mlp")
        for step in range(3):
            for parameter in (*replica.parameters(), *oracle.parameters()):
                parameter.grad = torch.full_like(parameter, step)
            loss_of(model, shard(x), shard(y)).backward()
            loss_of(oracle, x, y).backward()
            assert_close(replica, oracle, f"views {views}, step {step}")


def kept_gradients_stay(large_bytes: int, keep: str, *, counts: bool = True) -> None:
    """A gradient that is kept, or anything that shares its memory, is unchanged after the next steps.

    Unless torch `counts` who owns a tensor, every place that was given away is in doubt.
    """
    if not counts:
        ddp.data_parallel.buckets.transfers.tensor_owner_count = None  # type: ignore[attr-defined]  # replaced in this process
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "itself": lambda grad: grad,
        "detached": lambda grad: grad.detach(),
        "part": lambda grad: grad.flatten()[1:],
        "numpy": lambda grad: grad.numpy(),
        "storage": lambda grad: grad.untyped_storage(),
        "graph": lambda grad: (torch.ones_like(grad, requires_grad=True) * grad).sum(),
        "nothing": lambda grad: None,
    }

    def values(kept: Any) -> list[float]:
        if isinstance(kept, torch.UntypedStorage):
            kept = torch.tensor([], dtype=F64).set_(kept)
        elif isinstance(kept, torch.Tensor) and kept.requires_grad:
            (kept,) = torch.autograd.grad(kept, _leaves_of(kept), retain_graph=True)
        return [] if kept is None else torch.as_tensor(kept).flatten().tolist()

    ddp.data_parallel.buckets.bucket_plan._LARGE_BYTES = large_bytes
    model = ddp.DistributedDataParallel(build("mlp"))
    kept, before = [], []
    for step in range(4):
        x, y = batch(step, 2 * dist.get_world_size())
        model.zero_grad()
        loss_of(model, shard(x), shard(y)).backward()
        grads = [p.grad for i, p in enumerate(model.parameters()) if p.grad is not None and i % 2 == step % 2]
        kept += [ways[keep](grad) for grad in grads]
        before += [values(mine) for mine in kept[-len(grads) :]]
        del grads
        assert_replicas_equal(model)
    assert [values(mine) for mine in kept] == before


def kept_gradients_outlive_a_failed_step(large_bytes: int) -> None:
    """A forward pass that fails on one rank overwrites no gradient that someone kept of an older step."""
    ddp.data_parallel.buckets.bucket_plan._LARGE_BYTES = large_bytes
    replica = build("mlp")
    model = ddp.DistributedDataParallel(replica)
    for step in range(3):
        x, y = batch(step, 2 * dist.get_world_size())
        loss_of(model, shard(x), shard(y)).backward()
        kept = [p.grad.detach() for p in model.parameters()]
        before = [grad.clone() for grad in kept]
        model.zero_grad()
        is_cause = dist.get_rank() == 0
        with pytest.raises(RuntimeError if is_cause else ddp.errors.PeerFailedError):
            loss_of(model, shard(x)[:, : 1 if is_cause else None], shard(y)).backward()
        assert all(map(torch.equal, kept, before)), step
    loss_of(model, shard(x), shard(y)).backward()  # waits for what the last failure left on its way


def _leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    (product,) = (node for node, _ in tensor.grad_fn.next_functions)
    return [node.variable for node, _ in product.next_functions if node is not None]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("hidden", torch.tensor(1.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.hidden


def buffers_follow_rank_zero() -> None:
    """Each forward after a reduction starts with rank 0's buffers, as in a run of rank 0 alone on its shards."""
    rank = dist.get_rank()
    replica = Normed().to(F64)
    replica.norm.running_mean.fill_(rank)
    replica.flag.fill_(rank > 0)
    model = ddp.DistributedDataParallel(replica)
    assert float(replica.norm.running_mean.sum()) == 0
    assert replica.flag.tolist() == [False, False]
    rank_zero = Normed().to(F64)
    rank_zero.load_state_dict(replica.state_dict())
    for step in range(4):
        x, _ = batch(step, 4 * dist.get_world_size())
        if step == 2:
            replica.hidden = torch.tensor(2.5 + rank, dtype=F64)  # reassigned, and different between the ranks
        model(shard(x)).sum().backward()
        rank_zero(x.chunk(dist.get_world_size())[0])
    model.eval()
    model(shard(x))  # brings the buffers of rank 0
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(replica.norm, name), getattr(rank_zero.norm, name), rtol=1e-12, atol=0)
    assert replica.hidden.item() == 2.5
    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        kept = ddp.DistributedDataParallel(Normed().to(F64), broadcast_buffers=False)
    kept.module.hidden.fill_(rank)
    for _ in range(2):
        kept(shard(x)).sum().backward()
    assert float(kept.module.hidden) == rank


def two_forwards_through_batch_norm_then_backward() -> None:
    """torch's buffer copy in the second forward makes the first graph's backward fail; ours must not."""
    model = ddp.DistributedDataParallel(Normed().to(F64))
    for step in range(2):
        x, _ = batch(step, 4 * dist.get_world_size())
        model.eval()
        first = model(shard(x)).square().sum()
        second = model(shard(x) * 2).square().sum()
        (first + second).backward()


def replicas_stay_bitwise_equal(setup: tuple[Any, ...], steps: int) -> None:
    setup = Setup(*setup)
    model = ddp.DistributedDataParallel(
        build(setup.model).float() if setup.model != "complex" else build(setup.model),
        bucket_cap_mb=setup.bucket_cap_mb,
        gradient_as_bucket_view=setup.views,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=setup.set_to_none)
        x, y = batch(step * 100 + dist.get_rank(), 5)
        loss_of(model, x.float(), y.float()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert_replicas_equal(model)


def layout_error(kind: str) -> tuple[str, int, str]:
    """What differs on the last rank, and the error that every rank gets: (text, rank, entry)."""
    is_odd_one = dist.get_rank() == dist.get_world_size() - 1
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module.register_buffer("table", torch.zeros(2))
    arguments: dict[str, Any] = {}
    if is_odd_one:
        if kind == "shape":
            module[1] = nn.Linear(3, 4)
        elif kind == "dtype":
            module[1].weight.data = module[1].weight.data.to(F64)
        elif kind == "stride":
            module[1].weight.data = module[1].weight.data.t()
        elif kind == "order":
            first, second = nn.Linear(3, 3), nn.Linear(3, 3)
            module = nn.Sequential()
            module.add_module("1", first)
            module.add_module("0", second)
            module.register_buffer("table", torch.zeros(2))
        elif kind == "requires_grad":
            module[1].bias.requires_grad_(False)
        elif kind == "more":
            module.register_buffer("extra", torch.zeros(1))
        elif kind == "buffer":
            module.table = torch.zeros(3)
        elif kind == "setting":
            arguments["bucket_cap_mb"] = 3
    with pytest.raises(ddp.errors.LayoutMismatchError) as caught:
        ddp.DistributedDataParallel(module, **arguments)
    return str(caught.value), caught.value.rank, caught.value.entry


def gradients_around_the_wrapper_are_warned_of() -> None:
    x, _ = batch(dist.get_rank(), 4)
    model = ddp.DistributedDataParallel(build("mlp"))
    model(x).sum().backward()
    with pytest.raises(UserWarning, match="did not go through the forward"):
        model.module(x).sum().backward()


def subgroups_reduce_among_themselves() -> None:
    """Of three ranks, 0 and 2 form a group; 1 is not a member."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        with pytest.raises(ddp.errors.ArgumentError, match="not a member"):
            ddp.DistributedDataParallel(build("mlp"), process_group=group)
        return
    oracle, replica = build("mlp"), build("mlp", seed=dist.get_rank())
    model = ddp.DistributedDataParallel(replica, process_group=group)
    x, y = batch(0, 4)
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, 4)
    loss_of(model, x[mine], y[mine]).backward()
    loss_of(oracle, x, y).backward()
    assert_close(replica, oracle)


def lost_rank_is_named() -> str | None:
    """The last rank leaves in the middle; the others get an error instead of a wrong result."""
    model = ddp.DistributedDataParallel(build("mlp"))
    x, y = batch(dist.get_rank(), 4)
    loss_of(model, x, y).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        return None
    with pytest.raises(ddp.errors.CollectiveError) as caught:
        loss_of(model, x, y).backward()
    assert caught.value.rank == dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"caught.{dist.get_rank()}", "")  # one that ends before another has asked is missing, too
    store.wait([f"caught.{rank}" for rank in range(dist.get_world_size() - 1)])
    return str(caught.value)


def follows_order_of_use() -> list[int]:
    """A model that uses its layers in the order of registration reversed: the plan follows after the first step."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                x = layer(x).tanh()
            return x[:, :3]

    oracle, replica = Backwards().to(F64), Backwards().to(F64)
    model = ddp.DistributedDataParallel(replica, bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
    oracle.load_state_dict(replica.state_dict())
    for step in range(3):
        x, y = batch(step, 2 * dist.get_world_size())
        loss_of(model, shard(x), shard(y)).backward()
        loss_of(oracle, x, y).backward()
        assert_close(replica, oracle, f"step {step}")
    return list(model._reducer.sums.order)
