"""What a user's loop may do around backward: the same as one process on the whole batch, to 1e-12."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.training import (
    F64,
    WAYS,
    Normed,
    Way,
    assert_close,
    assert_replicas_equal,
    assert_same_bits,
    batch,
    build,
    compare_passes,
    loss_of,
    sgd,
    shard,
    whole,
)
from testbed.worlds import world
from torch import nn

import ddp


@world(2)
def test_no_sync_is_local_nested_and_survives_exceptions() -> None:
    replica, local = build("mlp"), build("mlp")
    model = ddp.DistributedDataParallel(replica)
    x, y = batch(dist.get_rank(), 4)
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


@world(1, 2)
def test_no_sync_counts_where_the_forward_is() -> None:
    """Around backward alone it has no effect, whatever the world; around forward alone it accumulates."""
    rows = 2 * dist.get_world_size()
    for weight, way in ((None, WAYS[0]), (None, WAYS[1]), (3.0, WAYS[2]), (3.0, WAYS[3])):
        replica, alone = build("mlp"), build("mlp")
        model = way.wrap(replica)
        for step in range(5):
            x, y = batch(step, rows)
            first, second = batch(step + 50, rows)
            for module in (alone, replica):
                module.zero_grad(set_to_none=way.set_to_none)
            (loss_of(alone, x, y) + loss_of(alone, first, second)).div(1 if weight is None else 2).backward()
            with model.no_sync():
                loss = loss_of(model, shard(x), shard(y))
            model.backward(loss, weight=weight)
            loss = loss_of(model, shard(first), shard(second))
            with contextlib.suppress(KeyError), model.no_sync(), model.no_sync():
                model.backward(loss, weight=weight)
                raise KeyError
            assert_close(replica, alone, f"{way}, weight {weight}, step {step}")


@world(3)
def test_forwards_before_backwards_are_reduced() -> None:
    alone, replica = build("mlp"), build("mlp")
    model = Way(views=True).wrap(replica)
    x, y = batch(0, 2 * dist.get_world_size())
    for module, mine in ((alone, whole), (model, shard)):
        first, second = loss_of(module, mine(x), mine(y)), loss_of(module, mine(x) * 2, mine(y))
        first.backward()
        second.backward()
    assert_close(replica, alone)


@world(2)
def test_models_that_one_backward_reaches_in_another_order() -> None:
    """Their passes end in the order in which the models were wrapped, on every rank."""
    models = [ddp.DistributedDataParallel(nn.Linear(3, 2).to(F64)) for _ in range(2)]
    for step in range(4):
        for model in models:
            model.zero_grad()
        order = models if dist.get_rank() == 0 else models[::-1]
        x = torch.full((1, 3), step + dist.get_rank() + 1.0, dtype=F64)
        first, second = (model(x).sum() for model in order)
        (first + second).backward()
        for model in models:
            assert torch.equal(model.module.weight.grad, torch.full((2, 3), step + 1.5, dtype=F64)), step


@world(2)
def test_gradients_around_the_wrapper_are_warned_of() -> None:
    x, _ = batch(dist.get_rank(), 4)
    model = ddp.DistributedDataParallel(build("mlp"))
    model(x).sum().backward()
    with pytest.raises(UserWarning, match="did not go through the forward"):
        model.module(x).sum().backward()


# Second derivatives


@world(2)
def test_autograd_grad_reduces_nothing_and_penalties_work() -> None:
    """A gradient penalty; before it, one rank alone looks at gradients of an input and of a parameter."""
    alone, replica = build("mlp"), build("mlp")
    model = ddp.DistributedDataParallel(replica)
    for step in range(2):
        x, y = batch(step, 2 * dist.get_world_size())
        x.requires_grad_()
        if dist.get_rank() == 0:
            with pytest.warns(UserWarning, match="nothing averages them") if step == 0 else contextlib.nullcontext():
                torch.autograd.grad(model(shard(x)).sum(), next(replica.parameters()))
            torch.autograd.grad(model(shard(x)).sum(), x)
        for module, mine in ((alone, whole), (model, shard)):
            module.zero_grad()
            inputs = mine(x).detach().requires_grad_()
            out = module(inputs)
            (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
            ((out - mine(y)).square().mean() + slope.square().mean()).backward()
        assert_close(replica, alone, f"step {step}")


@world(2)
def test_penalties_on_the_averaged_gradient() -> None:
    """backward(create_graph=True), then backward through the gradients that it left, as Hessian methods do."""
    warnings.filterwarnings("ignore", message=".*create_graph=True will create a reference cycle")
    for keeps, way in ((False, WAYS[2]), (False, WAYS[3]), (True, WAYS[0]), (True, WAYS[1])):
        replica, alone = build("mlp"), build("mlp")
        replica.never, alone.never = nn.Parameter(torch.ones(3, dtype=F64)), nn.Parameter(torch.ones(3, dtype=F64))
        model = way.wrap(replica)
        for step in range(5):
            x, y = batch(step, 2 * dist.get_world_size())
            for bare, module, mine in ((alone, alone, whole), (replica, model, shard)):
                bare.zero_grad()
                loss_of(module, mine(x), mine(y)).backward(create_graph=True)
                gradients = [p.grad for p in bare.parameters() if p.grad is not None]
                if not keeps:
                    bare.zero_grad()
                penalties = [grad.square().sum() * (1 + grad.sum()) for grad in gradients]
                torch.stack(penalties).sum().backward()
                for parameter in bare.parameters():
                    parameter.grad = None if parameter.grad is None else parameter.grad.detach()
            assert replica.never.grad is None
            assert_close(replica, alone, f"{way}, keeps {keeps}, step {step}")
            for parameter in (*alone.parameters(), *replica.parameters()):
                parameter.data.sub_(0 if parameter.grad is None else 0.05 * parameter.grad)


# Hooks of the user


@pytest.mark.parametrize("is_after", [False, True])
@world(2)
def test_hooks_of_the_user_run_before_the_average(is_after: bool) -> None:
    """Registered before or after wrapping: what they do to `.grad` is what is averaged, as in torch."""
    ways = (WAYS[0], WAYS[1], WAYS[3], Way(1e-3)) if is_after else WAYS[2:]
    for way, replaces in itertools.product(ways, (False, True)):
        replica, alone = build("mlp"), build("mlp")
        seen: dict[Any, torch.Tensor] = {}

        def hook(parameter: Any, seen: dict[Any, torch.Tensor] = seen, replaces: bool = replaces) -> None:
            seen[parameter] = parameter.grad.clone()
            if replaces:
                parameter.grad = parameter.grad.clamp(-0.01, 0.01)
            else:
                parameter.grad.clamp_(-0.01, 0.01)

        model = way.wrap(replica) if is_after else None
        for parameter in replica.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        model = model or way.wrap(replica)
        for step in range(5):
            x, y = batch(step, 2 * dist.get_world_size())
            replica.zero_grad(set_to_none=way.set_to_none)
            loss_of(model, shard(x), shard(y)).backward()
            expected = [torch.zeros_like(p) for p in alone.parameters()]
            for other, (rows, targets) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
                alone.zero_grad()
                loss_of(alone, rows, targets).backward()
                for total, mine, theirs in zip(expected, replica.parameters(), alone.parameters(), strict=True):
                    total += theirs.grad.clamp(-0.01, 0.01) / 2
                    if other == dist.get_rank():
                        torch.testing.assert_close(seen[mine], theirs.grad, rtol=1e-12, atol=1e-13)
            for total, mine in zip(expected, replica.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, total, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("is_after", [False, True])
@world(2)
def test_gradients_that_a_hook_takes_are_an_error(is_after: bool, steps: bool) -> None:
    """An optimizer that steps in a hook would step on this rank's gradients."""
    replica = build("mlp")
    model = ddp.DistributedDataParallel(replica) if is_after else None
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in replica.parameters()}

    def take(parameter: Any) -> None:
        if steps:
            optimizers[parameter].step()
        parameter.grad = None

    for parameter in replica.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    model = model or ddp.DistributedDataParallel(replica)
    for step in range(2):
        x, y = batch(step, 2 * dist.get_world_size())
        said = "SGD stepped .* before its gradient was averaged" if steps else "was taken away before it was averaged"
        with pytest.raises(ddp.errors.BackwardError, match=said) as caught:
            loss_of(model, shard(x), shard(y)).backward()
        assert caught.value.parameter in dict(replica.named_parameters())


# Precision


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 5).to(F64)
        self.b = nn.Linear(5, 5)
        self.c = nn.Linear(5, 3).to(torch.bfloat16)
        self.d = nn.Parameter(torch.ones(3, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> Any:
        return self.c(self.b(self.a(x).float()).bfloat16()).float() * self.d.float()


@pytest.mark.parametrize("way", WAYS)
@world(2)
def test_half_precision_is_rounded_once(way: Way) -> None:
    """The average of two ranks is that of both gradients, each halved, to the bit."""
    replica: Any = Mixed()
    model = way.wrap(replica)
    both = [copy.deepcopy(replica) for _ in range(2)]
    for step in range(5):
        x, _ = batch(step, 8)
        model.zero_grad(set_to_none=way.set_to_none)
        model(shard(x)).mean().backward()
        for rows, alone in zip(x.chunk(2), both, strict=True):
            alone.zero_grad()
            alone(rows).mean().backward()
        for mine, one, two in zip(replica.parameters(), *(alone.parameters() for alone in both), strict=True):
            assert mine.grad.dtype is mine.dtype
            assert torch.equal(mine.grad, one.grad / 2 + two.grad / 2), step


@pytest.mark.parametrize("way", WAYS[::2])
@world(2)
def test_a_scaler_skips_on_all_ranks_together(way: Way) -> None:
    """A step whose gradients are not finite on one rank: all skip it, and scale the same."""
    alone, replica = build("mlp").float(), build("mlp").float()
    model = way.wrap(replica)
    optimizers = [sgd(each) for each in (alone, model)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        before = copy.deepcopy(replica.state_dict())
        x, y = (tensor.float() for tensor in batch(step, 2 * dist.get_world_size()))
        if step in (2, 3):
            x[0 if step == 2 else -1] = float("inf")  # on the first rank, then the last
        for module, optimizer, scaler, mine in zip((alone, model), optimizers, scalers, (whole, shard), strict=True):
            optimizer.zero_grad(set_to_none=way.set_to_none)
            scaler.scale(loss_of(module, mine(x), mine(y))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale(), step
        if step in (2, 3):
            assert all(torch.equal(before[name], value) for name, value in replica.state_dict().items())
        for one, two in zip(replica.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert_replicas_equal(model)


@pytest.mark.parametrize("way", WAYS[1::2])
@world(2)
def test_clipping_is_the_same_everywhere(way: Way) -> None:
    alone, replica = build("odd"), build("odd")
    model = way.wrap(replica)
    optimizers = [sgd(each) for each in (alone, model)]
    for step in range(5):
        compare_passes(model, alone, step, set_to_none=way.set_to_none)
        norms = []
        for module in (alone, model):
            norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.1, foreach=bool(step % 2)))
            nn.utils.clip_grad_value_(module.parameters(), 0.01)
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-12, atol=0)
        assert_same_bits([norms[1]])
        assert_close(replica, alone, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()


# Buffers


@pytest.mark.parametrize("forwards", [1, 2])
@world(3)
def test_buffers_are_those_of_rank_zero(forwards: int) -> None:
    """Each forward in training begins with rank 0's, as in a run of rank 0 alone on its shards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    replica: Any = Normed().to(F64)
    replica.norm.running_mean.fill_(rank)
    replica.flag.fill_(rank > 0)
    model = ddp.DistributedDataParallel(replica)
    assert float(replica.norm.running_mean.sum()) == 0
    assert replica.flag.tolist() == [False, False]
    first: Any = Normed().to(F64)
    first.load_state_dict(replica.state_dict())
    for step in range(4):
        x, _ = batch(step, 4 * size)
        if step == 2:
            replica.hidden = torch.tensor(2.5 + rank, dtype=F64)  # reassigned, and different between the ranks
            replica.norm.running_mean = replica.norm.running_mean.clone()
        torch.stack([model(shard(x) * factor).sum() for factor in range(1, forwards + 1)]).sum().backward()
        for factor in range(1, forwards + 1):
            first(x.chunk(size)[0] * factor)
    model.eval()
    model(shard(x))  # brings the buffers of rank 0
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(replica.norm, name), getattr(first.norm, name), rtol=1e-12, atol=0)
    assert replica.hidden.item() == 2.5
    dist.barrier()  # rank 0, which only sends, stays until the others have its buffers


@world(3)
def test_buffers_are_kept_where_that_is_asked_for() -> None:
    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        model = ddp.DistributedDataParallel(build(Normed), broadcast_buffers=False)
    model.module.hidden.fill_(dist.get_rank())
    for _ in range(2):
        model(batch(0, 4)[0]).sum().backward()
    assert float(model.module.hidden) == dist.get_rank()


@world(2)
def test_two_forwards_through_batch_norm_in_eval() -> None:
    """torch's buffer copy in the second forward makes the first graph's backward fail; ours must not."""
    model = ddp.DistributedDataParallel(build(Normed))
    for step in range(2):
        x, _ = batch(step, 4 * dist.get_world_size())
        model.eval()
        first, second = model(shard(x)).square().sum(), model(shard(x) * 2).square().sum()
        (first + second).backward()
