"""What ranks do that disagree, fail or drift apart: each function runs on every rank and returns what it learned."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from testbed.training import F64, Mlp, assert_close, assert_replicas_equal, batch, build, loss_of, shard
from torch import nn

import ddp
import ddp.horovod as hvd
from ddp.comm.failures import peers_failed
from ddp.data_parallel import reducer
from ddp.monitoring.stall_report import StallReport
from ddp.torch_internals import call_after_backward


class Fragile(nn.Module):
    """Fails in forward or backward on request."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.fails_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_in == "forward":
            raise ValueError("a bad batch")
        if self.fails_in == "backward":
            x = Explosive.apply(x.clone().requires_grad_())
        out = self.mlp(x)
        if self.fails_in == "hook":
            self.mlp.layers[2].weight.register_hook(_explode)
        return out


def _explode(_: torch.Tensor) -> None:
    raise ValueError("a bad hook")


class Explosive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        raise ValueError("a bad gradient")


@contextlib.contextmanager
def settings(views: bool, cap_mb: float | None) -> Iterator[dict[str, object]]:
    yield {"gradient_as_bucket_view": views, "bucket_cap_mb": cap_mb}


def failure_is_shared(fails_in: str, views: bool, cap_mb: float | None, catch: bool = True) -> tuple[str, float]:
    """The last rank fails in step 1; all raise there, go on together, and are exact in the other steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    fails = rank == world - 1
    oracle, replica = Mlp().to(F64), Fragile().to(F64)
    model = ddp.DistributedDataParallel(replica, gradient_as_bucket_view=views, bucket_cap_mb=cap_mb)
    oracle.load_state_dict(replica.mlp.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (oracle, model)]
    text, took_s = "", 0.0
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = batch(step, 2 * world)
        replica.fails_in = fails_in if fails and step == 1 else ""
        start = time.monotonic()
        if step == 1:
            with pytest.raises(ValueError if fails else ddp.errors.PeerFailedError) as caught:
                loss_of(model, shard(x), shard(y)).backward()
            error: Any = caught.value
            text, took_s = str(error), time.monotonic() - start
            assert fails or list(error.failures) == [world - 1]
            assert all(parameter.grad is None for parameter in model.parameters())
            replica.mlp.layers[2].weight._backward_hooks = None  # the user's hook that failed
            continue
        loss_of(model, shard(x), shard(y)).backward()
        loss_of(oracle, x, y).backward()
        assert_close(replica.mlp, oracle, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
    assert_replicas_equal(model)
    return text, took_s


class Turning(nn.Module):
    """Its gradients arrive in another order once it `turns`."""

    turns = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 40) for _ in range(5))
        self.head = nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = range(5)[::-1] if self.turns else range(5)
        outs = {at: self.layers[at](x).tanh() for at in order}
        return self.head(sum(outs[at] for at in range(5)))


def failures_change_no_bit(fails_in: str) -> None:
    """Each rank fails in some steps, and the step is made again: as if it had not failed.

    gloo's order of three sums depends on the buckets, which are planned by the first pass that succeeds.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = Fragile(), Fragile()
    for replica in replicas:
        replica.mlp = Turning()
    replicas[1].load_state_dict(replicas[0].state_dict())
    model, undisturbed = (ddp.DistributedDataParallel(replica, bucket_cap_mb=2e-3) for replica in replicas)
    plans = []
    for step in range(6):
        for replica in replicas:
            replica.mlp.turns = step >= 3
        x, y = (shard(each).float() for each in batch(step, 2 * world))
        for failing in range(world) if step in (0, 1, 3) else ():
            model.module.fails_in = fails_in if rank == failing else ""
            with pytest.raises(ValueError if rank == failing else ddp.errors.PeerFailedError):
                loss_of(model, x, y).backward()
            model.module.mlp.layers[2].weight._backward_hooks = None
        model.module.fails_in = ""
        for each in (model, undisturbed):
            each.zero_grad()
            loss_of(each, x, y).backward()
        for one, other in zip(model.parameters(), undisturbed.parameters(), strict=True):
            assert torch.equal(present(one.grad), present(other.grad)), step
        mine, plan = (each.gradient_reducer.sums.plan_state() for each in (model, undisturbed))
        assert mine == plan
        plans.append(plan["order"])
    assert plans[0] == plans[-1]
    every: list[Any] = [None] * world
    dist.all_gather_object(every, plans)
    assert all(each == plans for each in every)


def failed_without_a_word(count: int) -> str:
    """The text for ranks that failed and could not tell the store why."""
    return str(peers_failed(StallReport(present(dist.group.WORLD), timeout_s=None), count))


def _drop_in_another_thread(kept: list[object]) -> None:
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join(timeout=20)


def _keep_and_call(kept: list[object], end: Callable[[], None]) -> None:
    kept.append(end)
    call_after_backward(end)


def _failed_and_kept(kept: list[object]) -> tuple[ddp.DistributedDataParallel, Fragile, Fragile]:
    """A model, its replica and an oracle, after a pass that failed; `kept` holds it, as a graph that someone holds."""
    replica = Fragile().to(F64)
    model = ddp.DistributedDataParallel(replica)
    oracle = copy.deepcopy(replica)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "call_after_backward", functools.partial(_keep_and_call, kept))
        replica.fails_in = "hook"
        with pytest.raises(ValueError, match="a bad hook"):
            loss_of(model, *batch(0, 4)).backward()
    replica.mlp.layers[2].weight._backward_hooks = None
    replica.fails_in = ""
    assert len(kept) == 1
    return model, replica, oracle


def a_failed_pass_is_dropped_late() -> None:
    """The graph of a failed pass is freed by another thread while the next pass runs, which is exact all the same."""
    kept: list[object] = []
    model, replica, oracle = _failed_and_kept(kept)
    x, y = batch(1, 2 * dist.get_world_size())
    out = model(shard(x))
    out.register_hook(lambda _: _drop_in_another_thread(kept))
    (out - shard(y)).square().mean().backward()
    loss_of(oracle, x, y).backward()
    assert not kept
    assert_close(replica, oracle)


def a_failed_pass_is_dropped_while_the_next_begins() -> None:
    """Another thread frees the graph of a failed pass and fails it; the next forward pass waits until it has."""
    kept: list[object] = []
    model, replica, oracle = _failed_and_kept(kept)
    transfer = model._reducer.sums._transfers[0]
    gather, send = transfer.gather_nothing, transfer.send
    is_inside, sent = threading.Event(), []

    def gather_nothing() -> None:
        is_inside.set()
        time.sleep(0.5)  # for the next forward pass, if it does not wait
        gather()

    def noted_send() -> None:
        sent.append(threading.get_ident())
        send()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "gather_nothing", gather_nothing)
        patch.setattr(transfer, "send", noted_send)
        thread = threading.Thread(target=kept.clear)
        thread.start()
        assert is_inside.wait(20)
        x, y = batch(1, 2 * dist.get_world_size())
        loss = loss_of(model, shard(x), shard(y))
        assert sent == [thread.ident]
    thread.join(timeout=20)
    loss.backward()
    loss_of(oracle, x, y).backward()
    assert_close(replica, oracle)


def a_failed_pass_of_an_optimizer_is_dropped_late() -> None:
    """The same of the first of two backward passes of a step."""
    kept: list[object] = []
    replica = Fragile().to(F64)
    hvd.broadcast_parameters(replica.state_dict())
    oracle = copy.deepcopy(replica)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(replica.parameters(), 0.1), backward_passes_per_step=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "call_after_backward", functools.partial(_keep_and_call, kept))
        replica.fails_in = "hook"
        with pytest.raises(ValueError, match="a bad hook"):
            loss_of(replica, *batch(0, 4)).backward()
    replica.mlp.layers[2].weight._backward_hooks = None
    replica.fails_in = ""
    assert len(kept) == 1
    optimizer.zero_grad()
    replica.mlp.layers[0].weight.register_hook(lambda _: _drop_in_another_thread(kept))  # the last to get a gradient
    x, y = batch(1, 4 * dist.get_world_size())
    for rows, expected in zip(shard(x).chunk(2), shard(y).chunk(2), strict=True):
        (loss_of(replica, rows, expected) / 2).backward()
    loss_of(oracle, x, y).backward()
    assert not kept
    assert_close(replica, oracle)


def all_fail_and_go_on() -> None:
    """The same mistake on every rank: each gets its own exception, and the next step is exact."""
    replica = Fragile().to(F64)
    model = ddp.DistributedDataParallel(replica)
    oracle = copy.deepcopy(replica)
    for step, fails_in in enumerate(("forward", "backward", "hook", "")):
        x, y = batch(step, 2 * dist.get_world_size())
        replica.fails_in = fails_in
        with pytest.raises(ValueError, match="a bad") if fails_in else contextlib.nullcontext():
            loss_of(model, shard(x), shard(y)).backward()
        replica.mlp.layers[2].weight._backward_hooks = None
    loss_of(oracle, x, y).backward()
    assert_close(replica, oracle)


def skipped_backward_is_told() -> str:
    """Rank 1 makes a forward and no backward, as with a loss that is not finite; the next reduction says so."""
    replica = build("mlp")
    model = ddp.DistributedDataParallel(replica)
    oracle = copy.deepcopy(replica)
    world, rank = dist.get_world_size(), dist.get_rank()
    text = ""
    for step in range(4):
        x, y = batch(step, 2 * world)
        model.zero_grad()
        loss = loss_of(model, shard(x), shard(y))
        if step == 1 and rank == 1:
            continue
        try:
            loss.backward()
        except ddp.errors.BackwardError as error:
            text = str(error)
            assert all(parameter.grad is None for parameter in model.parameters())
            break
    x, y = batch(9, 2 * world)
    loss_of(model, shard(x), shard(y)).backward()
    loss_of(oracle, x, y).backward()
    assert_close(replica, oracle)
    return text


def drift_is_named(kind: str) -> tuple[str, str, int, tuple[int, ...]]:
    """Rank 1 changes one bit of a parameter, or takes another step; the next backward tells which."""
    replica = build("mlp").float()
    model = ddp.DistributedDataParallel(replica, weight_checksum=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x, y = batch(step, 2 * dist.get_world_size())
        optimizer.zero_grad()
        loss = loss_of(model, shard(x).float(), shard(y).float())
        if step == 4:
            with pytest.raises(ddp.errors.DriftError) as caught:
                loss.backward()
            return str(caught.value), caught.value.parameter, caught.value.step, caught.value.ranks
        loss.backward()
        optimizer.step()
        if step == 3 and dist.get_rank() == 1:
            with torch.no_grad():
                if kind == "bit":
                    replica.layers[2].weight.view(torch.int32)[5, 5] ^= 1
                else:
                    optimizer.step()
    raise AssertionError


def no_drift_with_checksum() -> None:
    model = ddp.DistributedDataParallel(build("odd"), weight_checksum=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(20):
        x, y = batch(step, 2 * dist.get_world_size())
        optimizer.zero_grad()
        loss_of(model, shard(x), shard(y)).backward()
        optimizer.step()
    assert_replicas_equal(model)


def replaced_parameter_is_refused(how: str) -> str:
    """A parameter that appears on rank 0 alone after wrapping: every rank learns of it in the same step."""
    replica = build("mlp")
    model = ddp.DistributedDataParallel(replica)
    x, y = batch(dist.get_rank(), 4)
    loss_of(model, x, y).backward()
    if dist.get_rank() == 0:
        if how == "replaced":
            replica.layers[2].weight = nn.Parameter(torch.randn(33, 40, dtype=F64))
        else:
            replica.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises((ddp.errors.BackwardError, ddp.errors.PeerFailedError)) as caught:
        loss_of(model, x, y).backward()
    assert isinstance(caught.value, ddp.errors.BackwardError) == (dist.get_rank() == 0)
    assert all(parameter.grad is None for parameter in replica.layers[0].parameters())
    return str(caught.value)


class Counting(nn.Module):
    """Has a buffer that each rank changes in another way, and notes what it is when forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.register_buffer("seen", torch.zeros(3))
        self.at_start: list[torch.Tensor] = []
        self.raises = False
        self.returns: Callable[[torch.Tensor], Any] = torch.clone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.at_start.append(self.seen.clone())
        self.seen += 1 + dist.get_rank()
        if self.raises:
            raise ValueError("a bad batch")
        return self.returns(self.mlp(x))


class Unmovable(torch.Tensor):
    """An input that does not fit on the device."""

    def to(self, *_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("a bad batch is too large")


class Unreadable(Mapping[str, torch.Tensor]):
    """An output that cannot be looked through."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out

    def __getitem__(self, key: str) -> torch.Tensor:
        raise ValueError("a bad output")

    def __iter__(self) -> Iterator[str]:
        return iter(["out"])

    def __len__(self) -> int:
        return 1


def failure_around_forward(fails_in: str, who: int) -> None:
    """Rank `who` raises beside a collective of a forward pass; the others learn it, and all go on together."""
    rank, world = dist.get_rank(), dist.get_world_size()
    replica = Counting().to(F64)
    model = ddp.DistributedDataParallel(replica)
    model.device_ids = [0]  # as for a device: inputs are moved, here to where they are
    oracle = copy.deepcopy(replica.mlp)
    is_bad = False

    def follow_first(_: object, buffers: dict[str, torch.Tensor]) -> None:
        dist.broadcast(buffers["seen"], 0)
        if fails_in == "hook" and is_bad:
            raise ValueError("a bad hook")

    if "hook" in fails_in:  # runs after forward
        model._register_buffer_comm_hook(None, follow_first)
    for step in range(4):
        is_bad = step == 1 and rank == who
        x, y = batch(step, 2 * world)
        mine = shard(x).as_subclass(Unmovable) if fails_in.startswith("inputs") and is_bad else shard(x)
        replica.raises = fails_in == "forward, hook" and is_bad
        replica.returns = Unreadable if fails_in == "output" and is_bad else torch.clone
        model.module = nn.Linear(2, 2) if fails_in == "module" and is_bad else replica
        error = Exception if is_bad else ddp.errors.PeerFailedError
        fails = pytest.raises(error, match=r"a bad|another parameter") if step == 1 else contextlib.nullcontext()
        with model.join() if "join" in fails_in else contextlib.nullcontext(), fails:
            (model(mine) - shard(y)).square().mean().backward()
        if step == 1:
            assert all(parameter.grad is None for parameter in replica.parameters())
            continue
        loss_of(oracle, x, y).backward()
        assert_close(replica.mlp, oracle, f"step {step}")
        for module in (model, oracle):
            module.zero_grad()
    own: Any = replica.seen
    seen = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(seen, own if "hook" in fails_in else replica.at_start[-1])
    assert all(torch.equal(other, seen[0]) for other in seen), seen
    assert_replicas_equal(replica.mlp)
