"""What the ranks of a test world do with LocalSGD: each function runs on every rank and asserts there.

The oracle simulates all ranks in one process, in float64, with optimizers of its own.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ddp_worlds.data_parallel_cases import Mlp, assert_replicas_equal, batch, build, loss_of
from testbed.present import present
from torch import nn

import ddp
from ddp.strategies.local_sgd.averaging import LocalSGD
from ddp.strategies.sharding.stand_in_optimizer import StandInOptimizer

F64 = torch.float64
ROWS = 3  # of a rank's batch


class Outer(NamedTuple):
    """One way to average."""

    every: int
    after: int = 0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = True


class Simulated:
    """All ranks in one process: replicas, each with its optimizer, and the point from which they left."""

    def __init__(self, outer: Outer, world: int, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.outer = outer
        self.replicas = [build("mlp") for _ in range(world)]
        self.optimizers = [make(replica.parameters()) for replica in self.replicas]
        self.anchor = [p.detach().clone() for p in self.replicas[0].parameters()]
        self.velocity = [torch.zeros_like(p) for p in self.anchor]
        self.steps = self.own_steps = 0

    def step(self, gradients: list[list[torch.Tensor]], skipping: frozenset[int] = frozenset()) -> None:
        """Step every replica with its gradients, or all with their mean while steps are ordinary."""
        if self.own_steps == self.outer.every:
            self.average()
        is_own = self.steps >= self.outer.after
        mean = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]
        for rank, (replica, optimizer) in enumerate(zip(self.replicas, self.optimizers, strict=True)):
            for p, g in zip(replica.parameters(), gradients[rank] if is_own else mean, strict=True):
                p.grad = g.clone()
            if rank not in skipping:
                optimizer.step()
        self.steps += 1
        self.own_steps += is_own
        if not is_own:
            self.anchor = [p.detach().clone() for p in self.replicas[0].parameters()]

    @torch.no_grad()
    def average(self) -> None:
        momentum = self.outer.outer_momentum
        for position, anchor in enumerate(self.anchor):
            mine = [list(replica.parameters())[position] for replica in self.replicas]
            gradient = anchor - torch.stack(list(mine)).mean(0)
            self.velocity[position] = momentum * self.velocity[position] + gradient
            ahead = gradient + momentum * self.velocity[position]
            anchor -= self.outer.outer_lr * (ahead if self.outer.nesterov else self.velocity[position])
            for p in mine:
                p.copy_(anchor)
        self.own_steps = 0

    def gradients(self, step: int, parts: int = 1) -> list[list[torch.Tensor]]:
        """Each replica's gradients where it is now."""
        if self.own_steps == self.outer.every:
            self.average()
        found = []
        for rank, replica in enumerate(self.replicas):
            replica.zero_grad()
            for part in range(parts):
                (loss_of(replica, *data(step, rank, part)) / parts).backward()
            found.append([present(p.grad) for p in replica.parameters()])
        return found


def data(step: int, rank: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(1000 * step + 10 * rank + part, ROWS)


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "ours": ddp.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}


def assert_is(module: nn.Module, expected: nn.Module, what: str) -> None:
    for (name, a), e in zip(module.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{what} {n}: {m}")


def equals_the_oracle(outers: list[tuple[Any, ...]], inner: str, wrapper: str, parts: int, steps: int) -> None:
    """Before every forward pass this rank's replica is that of the oracle, and after `sync()` all are one."""
    for outer in outers:
        train_beside_the_oracle(Outer(*outer), inner, wrapper, parts, steps)


def train_beside_the_oracle(outer: Outer, inner: str, wrapper: str, parts: int, steps: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    oracle = Simulated(outer, world, OPTIMIZERS[inner])
    replica = build("mlp", seed=rank)
    model = WRAPPERS[wrapper](replica)
    optimizer = OPTIMIZERS[inner](model.parameters())
    local = LocalSGD(model, optimizer, **outer._asdict())
    before = list(replica.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            with model.no_sync() if part < parts - 1 else contextlib.nullcontext():
                (loss_of(model, *data(step, rank, part)) / parts).backward()
        gradients = oracle.gradients(step, parts)  # which averages first, as the forward pass does
        assert_is(replica, oracle.replicas[rank], f"{outer} {inner} step {step} before it")
        optimizer.step()
        oracle.step(gradients)
        assert_is(replica, oracle.replicas[rank], f"{outer} {inner} step {step}")
        assert local.has_diverged == (step >= outer.after)
    local.sync()
    oracle.average()
    assert local.step == steps
    assert not local.has_diverged
    assert_is(replica, oracle.replicas[rank], f"{outer} {inner} at the end")
    assert all(a is b for a, b in zip(before, replica.parameters(), strict=True))
    replica.zero_grad()
    assert_replicas_equal(replica)


class Normed(nn.Module):
    """BatchNorm, whose statistics differ between ranks, and things that must keep their bits."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm, self.out = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)
        self.frozen = nn.Parameter(torch.full((5,), 0.1), requires_grad=False)
        self.teacher = nn.Parameter(torch.zeros(9, 6), requires_grad=False)
        self.register_buffer("constant", torch.full((5,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.mlp(x).tanh())) + self.frozen.sum() * self.constant[:3]


def replicas_are_bitwise_equal_after(steps: int, outer: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Also of what is averaged without being trained: statistics, and a teacher that follows the weights."""
    rank = dist.get_rank()
    model = ddp.DistributedDataParallel(Normed().to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    local = LocalSGD(model, optimizer, **Outer(*outer)._asdict())
    for step in range(steps):
        optimizer.zero_grad()
        x, y = data(step, rank)
        loss_of(model, x.to(dtype), y.to(dtype)).backward()
        optimizer.step()
        with torch.no_grad():
            model.module.teacher.lerp_(model.module.mlp.weight, 0.1)
    assert differs(model.module.norm.running_mean)
    assert differs(model.module.teacher)
    local.sync()
    for name, tensor in [*model.module.named_parameters(), *model.module.named_buffers()]:
        assert not differs(tensor.detach()), name
    assert torch.equal(model.module.frozen, torch.full((5,), 0.1, dtype=dtype))
    assert torch.equal(model.module.constant, torch.full((5,), 0.1, dtype=dtype))


def differs(tensor: torch.Tensor) -> bool:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return not all(torch.equal(other, every[0]) for other in every)


def every_step_is_ordinary_training() -> None:
    """Bitwise, beside the wrapper alone; with `after`, until then."""
    for outer, same_until in ((Outer(1), 6), (Outer(4, after=3), 3)):
        plain, mine = (ddp.DistributedDataParallel(build("mlp").float()) for _ in range(2))
        optimizers = [adamw(m.parameters()) for m in (plain, mine)]
        local = LocalSGD(mine, optimizers[1], **outer._asdict())
        for step in range(6):
            x, y = data(step, dist.get_rank())
            for model, optimizer in zip((plain, mine), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, x.float(), y.float()).backward()
                optimizer.step()
            are_equal = all(torch.equal(a, b) for a, b in zip(plain.parameters(), mine.parameters(), strict=True))
            assert are_equal == (step < same_until)
            assert local.has_diverged == (step >= same_until)


def a_step_that_one_rank_skips_loses_no_count() -> None:
    """An inf on one rank at a time, also in the last step before averaging: GradScaler skips that step there only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    outer = Outer(3, outer_lr=0.7, outer_momentum=0.5)
    oracle = Simulated(outer, world, sgd)
    model = ddp.DistributedDataParallel(build("mlp"))
    optimizer = sgd(model.parameters())
    local = LocalSGD(model, optimizer, **outer._asdict())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    skips = {1: 0, 2: 1, 3: 0, 5: world - 1, 8: 0}  # step: the rank that has an inf
    for step in range(11):
        optimizer.zero_grad()
        loss = loss_of(model, *data(step, rank))
        if skips.get(step) == rank:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        # Something else that ranks do together between steps must find them all.
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == world
        oracle.step(oracle.gradients(step), frozenset({skips[step]} if step in skips else ()))
        assert_is(model.module, oracle.replicas[rank], f"step {step}")
    assert scaler.get_scale() == 2.0 ** (8 - list(skips.values()).count(rank))
    local.sync()
    oracle.average()
    assert_is(model.module, oracle.replicas[rank], "at the end")


def ranks_with_less_data_wait_in_sync() -> None:
    """Rank r has 3 r + 2 batches, and averages come after every third step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for outer in (Outer(3), Outer(3, outer_momentum=0.9)):
        model = ddp.DistributedDataParallel(build("mlp"))
        optimizer = sgd(model.parameters())
        local = LocalSGD(model, optimizer, **outer._asdict())
        for epoch in range(2):
            for step in range(3 * rank + 2):
                optimizer.zero_grad()
                loss_of(model, *data(epoch * 50 + step, rank)).backward()
                optimizer.step()
            local.sync()
            assert local.step == (epoch + 1) * (3 * world - 1)
            model.zero_grad()
            assert_replicas_equal(model)


def training_resumes_from_a_state(path: str) -> None:
    """Save after `sync()`, train on; a second run from the saved state gets the same bits."""

    def start() -> tuple[nn.Module, torch.optim.Optimizer, LocalSGD]:
        model = ddp.DistributedDataParallel(build("mlp"))
        optimizer = adamw(model.parameters())
        return model, optimizer, LocalSGD(model, optimizer, every=3, after=2, outer_lr=0.7, outer_momentum=0.9)

    def run(steps: range, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, *data(step, dist.get_rank())).backward()
            optimizer.step()

    model, optimizer, local = start()
    run(range(7), model, optimizer)
    for diverged in (model, model.module, local):
        with pytest.raises(ddp.errors.DdpError, match=r"made 2 steps by itself .* sync\(\)"):
            diverged.state_dict()
    copied = copy.deepcopy(model.module)
    assert copied.state_dict().keys() == build("mlp").state_dict().keys()  # a copy is someone else's
    pickle.loads(pickle.dumps(model.module)).state_dict()
    local.sync()
    inner = copy.deepcopy(optimizer.state_dict())  # each rank's own
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "local": local.state_dict()}, path)
    dist.barrier()
    run(range(7, 15), model, optimizer)
    local.sync()

    again, optimizer, local = start()
    saved = torch.load(path, weights_only=True)
    again.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(inner)
    local.load_state_dict(saved["local"])
    assert local.step == 7
    run(range(7, 15), again, optimizer)
    local.sync()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def a_state_fits_another_world(path: str) -> None:
    """One that two ranks have saved, on three."""
    outer = Outer(3, after=2, outer_lr=0.7, outer_momentum=0.9)
    saved = torch.load(path, weights_only=True)
    model = ddp.DistributedDataParallel(build("mlp", seed=1))
    optimizer = sgd(model.parameters())
    local = LocalSGD(model, optimizer, **outer._asdict())
    model.module.load_state_dict(saved["model"])
    local.load_state_dict(saved["local"])
    oracle = Simulated(outer, dist.get_world_size(), sgd)
    for replica in oracle.replicas:
        replica.load_state_dict(saved["model"])
    oracle.anchor = [p.detach().clone() for p in oracle.replicas[0].parameters()]
    oracle.velocity = [t.clone() for t in saved["local"]["outer_momentum"].values()]
    oracle.steps = 7
    for step in range(7):
        optimizer.zero_grad()
        loss_of(model, *data(step, dist.get_rank())).backward()
        optimizer.step()
        oracle.step(oracle.gradients(step))
        assert_is(model.module, oracle.replicas[dist.get_rank()], f"step {step}")


def a_subgroup_averages_among_its_members() -> None:
    """Of three ranks, 0 and 2 form a group; 1 trains alone and is not waited for."""
    groups = {0: dist.new_group([0, 2]), 1: dist.new_group([1])}
    rank = dist.get_rank()
    group = groups[rank % 2]
    model = ddp.DistributedDataParallel(build("mlp"), process_group=group)
    optimizer = sgd(model.parameters())
    outer = Outer(2, outer_momentum=0.9)
    local = LocalSGD(model, optimizer, **outer._asdict())
    oracle = Simulated(outer, group.size(), sgd)
    place = group.rank()
    for step in range(5 if rank % 2 else 9):
        optimizer.zero_grad()
        loss_of(model, *data(step, place)).backward()
        optimizer.step()
        oracle.step(oracle.gradients(step))
    local.sync()
    oracle.average()
    assert_is(model.module, oracle.replicas[place], f"rank {rank}")


def ranks_that_cannot_become_equal() -> list[str]:
    """Return the errors, which every rank gets."""
    rank = dist.get_rank()
    x, y = data(0, rank)

    def start(**outer: Any) -> tuple[nn.Module, Callable[[], None], LocalSGD]:
        model = ddp.DistributedDataParallel(build("mlp"))
        optimizer = sgd(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()

        return model, step, LocalSGD(model, optimizer, **outer)

    errors = []
    _, step, local = start(every=2 + rank)
    step()
    with pytest.raises(ddp.errors.LayoutMismatchError) as mismatch:
        local.sync()
    assert (mismatch.value.rank, mismatch.value.entry) == (1, "settings")
    errors.append(str(mismatch.value))

    model, step, local = start(every=2, outer_momentum=0.9)
    step()
    local.sync()
    state = local.state_dict()
    state["outer_momentum"]["layers.2.bias"] = state["outer_momentum"]["layers.2.bias"] + rank
    local.load_state_dict(state)
    step()
    with pytest.raises(ddp.errors.DriftError) as drift:
        local.sync()
    assert (drift.value.parameter, drift.value.step, drift.value.ranks) == ("layers.2.bias", 2, (1,))
    errors.append(str(drift.value))

    model, step, local = start(every=2, outer_lr=0.9)
    with torch.no_grad():
        model.module.layers[4].bias[-1] += rank * 1e-9
    step()
    with pytest.raises(ddp.errors.DriftError) as drift:
        local.sync()
    assert drift.value.parameter == "layers.4.bias"
    errors.append(str(drift.value))
    return errors


class StandIn(StandInOptimizer):
    """As that of central storage and that of parameter servers."""

    _make_step = _whole_state = _load_whole_state = lambda *_: None


def compression_is_of_averaged_gradients(compression: Any) -> None:
    """Compressed steps, own steps, compressed steps: bitwise what two ranks do by hand, what is owed included."""
    rank, after, own = dist.get_rank(), 5, 4
    model, other = (ddp.DistributedDataParallel(build("mlp"), compression=compression) for _ in range(2))
    optimizer, others_optimizer = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, other))
    local = LocalSGD(model, optimizer, every=2, after=after)

    def make_step(net: nn.Module, stepped: torch.optim.Optimizer, step: int) -> None:
        stepped.zero_grad()
        loss_of(net, *data(step, rank)).backward()
        stepped.step()

    owed: list[Any] = []
    for step in range(after + own):
        make_step(model, optimizer, step)
        if step >= after:
            owed.append(model.reduction_state())
    local.sync()
    local.close()
    for step in range(after + own):
        if step < after:
            make_step(other, others_optimizer, step)
            continue
        twin = build("mlp")
        twin.load_state_dict(other.module.state_dict())
        loss_of(twin, *data(step, rank)).backward()
        for parameter, own_parameter in zip(other.parameters(), twin.parameters(), strict=True):
            parameter.grad = own_parameter.grad
        others_optimizer.step()
        if (step - after) % 2:
            with torch.no_grad():
                for parameter in other.parameters():
                    dist.all_reduce(parameter.div_(2))
    other.reduction_state()  # brings what the ranks owe together, as it did above
    for step in range(after + own, after + own + 3):
        make_step(model, optimizer, step)
        make_step(other, others_optimizer, step)
        assert all(map(torch.equal, model.parameters(), other.parameters())), step
    assert_replicas_equal(model)
    for state in owed:  # waits for the next averaged gradients
        assert all(
            torch.equal(tensor, state["compression"]["parameters"][key][name])
            for key, held in owed[0]["compression"]["parameters"].items()
            for name, tensor in held.items()
            if torch.is_tensor(tensor)
        )


def misuse_is_warned_of_or_refused() -> None:
    rank = dist.get_rank()
    x, y = data(0, rank)
    model = ddp.DistributedDataParallel(build("mlp"))
    optimizer = sgd(model.parameters())
    local = LocalSGD(model, optimizer, every=4)
    loss_of(model, x, y).backward()
    optimizer.step()
    with torch.no_grad(), pytest.raises(UserWarning, match=r"sync\(\) of LocalSGD on every rank before evaluating"):
        model(x)
    with pytest.raises(UserWarning, match="stay different"):
        local.close()
    model._join_config = model._join_config._replace(enable=True)  # what join() does, without its end
    with pytest.raises(ddp.errors.UnsupportedError, match=r"inside join\(\)"):
        model(x)
    model._join_config = model._join_config._replace(enable=False)
    assert model.require_backward_grad_sync
    local.sync()
    with torch.no_grad():
        model(x)
    model.module.layers[0].bias.grad = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            with model.no_sync():
                loss_of(model, x, y).backward()
            optimizer.step()
    assert [("does not count" in str(each.message)) for each in caught] == [True]
    for bad, name in (
        ({"every": 0}, "every"),
        ({"every": 2, "after": -1}, "after"),
        ({"every": 2, "outer_lr": 0.0}, "outer_lr"),
        ({"every": 2, "outer_momentum": 1.0}, "outer_momentum"),
    ):
        with pytest.raises(ddp.errors.ArgumentError, match=name):
            LocalSGD(model, optimizer, **bad)
    with pytest.raises(ddp.errors.ArgumentError, match="wrap it"):
        LocalSGD(model.module, optimizer, every=2)
    with pytest.raises(ddp.errors.ArgumentError, match="none of the model's parameters"):
        LocalSGD(model, sgd(build("mlp").parameters()), every=2)
    with pytest.raises(ddp.errors.UnsupportedError, match="LBFGS"):
        LocalSGD(model, torch.optim.LBFGS(model.parameters()), every=2)
    with pytest.raises(ddp.errors.UnsupportedError, match="prepare"):
        LocalSGD(model, StandIn(sgd(model.parameters())), every=2)
    with pytest.raises(ddp.errors.ArgumentError, match=r"layers\.0\.bias"):
        local.load_state_dict({"step": 1, "outer_momentum": {"layers.0.bias": torch.zeros(3)}})


def hooks_end_with_close_or_the_wrapper() -> None:
    rank = dist.get_rank()
    replica = build("mlp")
    x, y = data(0, rank)

    def hooks() -> int:
        found = len(replica._state_dict_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
        return found + sum(len(p._post_accumulate_grad_hooks or ()) for p in replica.parameters())

    model = ddp.DistributedDataParallel(replica)
    optimizer = sgd(model.parameters())
    before = hooks()
    local = LocalSGD(model, optimizer, every=2)
    assert hooks() > before
    loss_of(model, x, y).backward()
    local.sync()
    local.close()
    local.close()
    assert hooks() == before
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    with pytest.raises(ddp.errors.ArgumentError, match="closed"):
        local.sync()
    replica.zero_grad()
    loss_of(model, x, y).backward()
    assert_replicas_equal(model)  # reduced again

    kept = weakref.ref(LocalSGD(model, optimizer, every=2))
    gc.collect()
    assert kept() is not None  # it works on without a name
    del model
    gc.collect()
    assert kept() is None
    assert hooks() == 0


def parameters_thawed_later_are_counted() -> None:
    """What trained at first is frozen, and what was frozen trains: gradients come from other hooks."""
    rank = dist.get_rank()
    replica = Mlp().to(F64)
    for p in replica.layers[4].parameters():
        p.requires_grad_(False)
    model = nn.parallel.DistributedDataParallel(replica, find_unused_parameters=True)
    optimizer = sgd(replica.parameters())
    local = LocalSGD(model, optimizer, every=2)
    for step in range(8):
        if step == 3:
            for index in (0, 2, 4):
                for p in replica.layers[index].parameters():
                    p.requires_grad_(index == 4)
                    p.grad = None
        optimizer.zero_grad()
        loss_of(model, *data(step, rank)).backward()
        optimizer.step()
    local.sync()
    assert local.step == 7  # the one that changed hooks was seen, not counted
    replica.zero_grad()
    assert_replicas_equal(replica)


def world_of_one_looks_ahead() -> None:
    """Nothing is sent, but the outer optimizer steps (Zhang et al. 2019, Lookahead, is outer_lr alone)."""
    outer = Outer(3, outer_lr=0.5, outer_momentum=0.3, nesterov=False)
    model = ddp.DistributedDataParallel(build("mlp"))
    optimizer = sgd(model.parameters())
    local = LocalSGD(model, optimizer, **outer._asdict())
    oracle = Simulated(outer, 1, sgd)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, *data(step, 0)).backward()
        optimizer.step()
        oracle.step(oracle.gradients(step))
        assert_is(model.module, oracle.replicas[0], f"step {step}")
    local.sync()
    state = io.BytesIO()
    torch.save(local.state_dict(), state)
    state.seek(0)
    assert torch.load(state, weights_only=True)["step"] == 8
