"""Trains under dtrain in the way that the first argument names; a rank kills itself where a later one says.

A word is `rank.step.place`, such as `1.5.backward`: the first process that comes there makes a file of that name, and
dies. Each rank prints at the end what must not depend on failures.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ddp

world = ddp.init()  # what is imported after this is no matter of testbed.warm
from torch import Tensor, nn  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import ddp.horovod as hvd  # noqa: E402
from ddp.comm.broadcast import broadcast_tensors  # noqa: E402
from ddp.resilience import parts  # noqa: E402

numbers = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(96, 6, generator=numbers), torch.randint(3, (96,), generator=numbers))
sampler = ddp.DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)


def network(*widths: int) -> nn.Module:
    torch.manual_seed(1)
    first, middle, last = widths
    net = nn.Sequential(
        nn.Linear(first, middle), nn.BatchNorm1d(middle), nn.ReLU(), nn.Dropout(0.3), nn.Linear(middle, last)
    )
    torch.manual_seed(10 + world.rank)
    return net


def fail(state: ddp.State, place: str) -> None:
    word = f"{world.rank}.{state.step}.{place}"
    if word in sys.argv[2:]:
        try:
            Path(word).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def fail_in_a_hand_over(group: Any, tensors: list[Tensor], root: int) -> None:
    """Broadcast, and let the root die once the first tensor has arrived everywhere."""
    broadcast_tensors(group, tensors[:1], root)
    if group.rank() == root and not Path("handed over").exists():
        Path("handed over").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    broadcast_tensors(group, tensors[1:], root)


if "hand-over" in sys.argv:
    parts.broadcast_tensors = fail_in_a_hand_over  # type: ignore[attr-defined]  # replaced in this process


def loop(state: ddp.State, step: Callable[[Tensor, Tensor], None]) -> None:
    for state.epoch in range(state.epoch, 3):  # noqa: B020
        sampler.set_epoch(state.epoch)
        for x, y in loader:
            step(x, y)
            state.step += 1
            state.commit()
            fail(state, "commit")


class Meter:
    """Something with a state that holds a tensor, and changes before the optimizer's step."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums, self.count = state["sums"], state["count"]


def adversarial() -> list[Any]:
    """Two models and two optimizers, a scaler, accumulated gradients, an average of weights, checkpoints.

    One model is frozen in a part of each step.
    """
    generator_net = network(2, 8, 6)
    generator, critic = map(ddp.DistributedDataParallel, (generator_net, network(6, 8, 1)))
    optimizers = torch.optim.Adam(generator.parameters(), 0.02), torch.optim.RMSprop(critic.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    average, meter = AveragedModel(generator_net, use_buffers=True), Meter()
    state = ddp.State(
        generator=generator, critic=critic, generator_optimizer=optimizers[0], critic_optimizer=optimizers[1],
        scaler=scaler, average=average, meter=meter, sampler=sampler, epoch=0, step=0,
    )  # fmt: skip
    assert state.critic is critic
    checkpoint = ddp.Checkpoint("saved")

    def step(x: Tensor, _: Tensor) -> None:
        critic.requires_grad_(True)
        optimizers[1].zero_grad()
        made = generator(torch.randn(len(x), 2))
        fail(state, "critic")
        meter.sums += made.detach().double().sum() * torch.ones(3, dtype=torch.float64)
        scaler.scale((critic(made.detach()) - critic(x)).mean()).backward()
        scaler.step(optimizers[1])
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.3, 0.3)
        optimizers[0].zero_grad()
        critic.requires_grad_(False)
        with generator.no_sync(), critic.no_sync():
            scaler.scale(-critic(generator(torch.randn(len(x), 2))).mean() / 2).backward()
        fail(state, "generator")
        scaler.scale(-critic(generator(torch.randn(len(x), 2))).mean() / 2).backward()
        fail(state, "backward")
        scaler.step(optimizers[0])
        scaler.update()
        average.update_parameters(generator_net)
        meter.count += 1

    @ddp.resilient
    def train(state: ddp.State) -> None:
        for state.epoch in range(state.epoch, 3):  # noqa: B020
            sampler.set_epoch(state.epoch)
            for x, y in loader:
                step(x, y)
                state.step += 1
                state.commit()
                if checkpoint.due(state.step, every=3):
                    fail(state, "save")
                    checkpoint.save(state.step, model=generator, optimizer=optimizers[0], done=state.step)
                    fail(state, "saved")
        checkpoint.wait()

    train(state)
    saved = torch.load("saved/step-0000000018.pt", weights_only=True)
    assert saved["values"] == {"done": 18}
    return [*generator_net.state_dict().values(), *state.critic.state_dict().values(), *average.state_dict().values(),
            *saved["model"].values(), scaler.get_scale(), meter.count]  # fmt: skip


def inside(wrap: Callable[[nn.Module], nn.Module]) -> list[Any]:
    """A wrapper made inside of the function, and thus again after each failure."""
    net = network(6, 16, 3)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    state = ddp.State(model=net, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    @ddp.resilient
    def train(state: ddp.State) -> None:
        model = wrap(net)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            fail(state, "forward")
            loss.backward()
            fail(state, "backward")
            optimizer.step()
            fail(state, "step")

        loop(state, step)

    train(state)
    return [*net.state_dict().values()]


def unfreezing() -> list[Any]:
    """A layer is trained from one step on until another one. That it is, a replaced rank learns from the others."""
    net = network(6, 16, 3)
    net[0].requires_grad_(False)
    model = ddp.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    state = ddp.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    def step(x: Tensor, y: Tensor) -> None:
        if state.step in (3, 7):
            net[0].requires_grad_(state.step == 3)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fail(state, "forward")
        loss.backward()
        fail(state, "backward")
        optimizer.step()

    ddp.resilient(loop)(state, step)
    return [*net.state_dict().values()]


class Words(nn.Module):
    """Has sparse gradients, which no one knows before they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.words = network(6, 16, 3), nn.Embedding(5, 6, sparse=True)

    def forward(self, x: Tensor, words: Tensor) -> Any:
        return self.net(x + self.words(words))


def horovods() -> list[Any]:
    """An optimizer in Horovod's style, over two backward passes, after its broadcasts; some gradients are sparse."""
    model = Words()
    groups: list[dict[str, Any]] = [
        {"params": model.net.parameters(), "momentum": 0.9},
        {"params": model.words.parameters()},
    ]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(groups, 0.05),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2,
        op=hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = ddp.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    def step(x: Tensor, y: Tensor) -> None:
        assert hvd.allgather_object(state.step) == [state.step] * world.world_size
        optimizer.zero_grad()
        for half in range(2):
            loss = nn.functional.cross_entropy(model(x[half::2], y[half::2]), y[half::2]) / 2
            fail(state, f"forward{half}")
            loss.backward()
        fail(state, "backward")
        optimizer.step()
        fail(state, "step")

    ddp.resilient(loop)(state, step)
    return [*model.state_dict().values()]


def local() -> list[Any]:
    """Replicas that step by themselves, with an outer optimizer."""
    net = network(6, 16, 3)
    model = ddp.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    averages = ddp.LocalSGD(model, optimizer, every=3, outer_lr=0.7, outer_momentum=0.9)
    state = ddp.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        fail(state, "forward")
        nn.functional.cross_entropy(model(x), y).backward()
        fail(state, "backward")
        optimizer.step()

    @ddp.resilient
    def train(state: ddp.State) -> None:
        loop(state, step)
        averages.sync()

    train(state)
    ddp.check_replicas(model)
    return [*net.state_dict().values()]


def foreign() -> list[Any]:
    """A model that is broadcast before the function, and that the State does not hold."""
    net, teacher = network(6, 16, 3), network(6, 8, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.05))
    hvd.broadcast_parameters(teacher.state_dict())
    state = ddp.State(model=net, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        fail(state, "forward")
        (net(x) - teacher(x).detach()).square().mean().backward()
        optimizer.step()

    ddp.resilient(loop)(state, step)
    return []


def central() -> list[Any]:
    net = network(6, 16, 3)
    model, optimizer = ddp.strategy("central_storage").prepare(net, torch.optim.SGD(net.parameters(), 0.05))
    ddp.resilient(loop)(ddp.State(model=model, optimizer=optimizer, epoch=0, step=0), print)
    return []


def uncommitted() -> list[Any]:
    """A checkpoint before the step is committed."""
    net = network(6, 16, 3)
    model = ddp.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    state = ddp.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)
    checkpoint = ddp.Checkpoint("saved")

    def step(x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if checkpoint.due(state.step, every=1):
            checkpoint.save(state.step, model=model, optimizer=optimizer)

    ddp.resilient(loop)(state, step)
    return []


kinds: dict[str, Callable[[], list[Any]]] = {
    "adversarial": adversarial, "torch": lambda: inside(nn.parallel.DistributedDataParallel),
    "inside": lambda: inside(ddp.DistributedDataParallel), "horovod": horovods, "local": local, "central": central,
    "foreign": foreign, "unfreezing": unfreezing, "uncommitted": uncommitted,
}  # fmt: skip
found = kinds[sys.argv[1]]()


def left() -> list[str]:
    gc.collect()
    held = (ddp.State, nn.Module, torch.optim.Optimizer)
    return sorted({type(each).__name__ for each in gc.get_objects() if issubclass(type(each), held)})


deadline = time.monotonic() + 60.0
while left() and time.monotonic() < deadline:
    time.sleep(0.1)  # the thread of stall reports may look at one now
print("left", left(), flush=True)
sums = [f"{torch.as_tensor(value).double().sum().item():.17g}" for value in found]
print("result", *sums, torch.rand(1).item(), flush=True)
