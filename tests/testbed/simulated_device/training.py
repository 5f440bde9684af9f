"""Training on the simulated device: each way gives the numbers of the CPU, whatever the device runs first.

A way is a function of a Place. It is called on every rank, with the CPU once and with the device for each seed, and
returns tensors in host memory.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ddp
import ddp.horovod as hvd
from ddp.data_parallel.planning.step_timer import DeviceClock
from ddp.errors import BackwardError, PeerFailedError
from ddp.strategies.central_storage import regions
from ddp.strategies.central_storage.strategy import CentralStorage
from ddp.training.losses_and_metrics import on_device
from testbed.present import present
from testbed.simulated_device import BACKEND, DEVICE, Device, Stream, group_of_all, register, simulated_device
from testbed.simulated_device.parts import (
    chunks,
    compressed_again,
    compressors,
    copied,
    hooked,
    packed,
    pinned,
    settled,
)

F64 = torch.float64
Found = list[torch.Tensor]
STEPS = 4
_kept: list[Any] = []  # groups: the last to hold one must not be a thread of gloo


@dataclass(frozen=True)
class Place:
    """Where a way runs."""

    device: Device | None = None  # None: the CPU

    @property
    def name(self) -> str:
        return "cpu" if self.device is None else DEVICE

    @contextlib.contextmanager
    def without_waits(self) -> Iterator[None]:
        """Have each wait of the host for the device be an error."""
        if self.device is not None:
            self.device.may_wait = False
        yield
        if self.device is not None:
            self.device.may_wait = True

    def inputs(self, step: int, dtype: torch.dtype = F64, *, is_moved: bool = True) -> torch.Tensor:
        """Return a batch of this rank, which is still on its way from pinned memory, or there."""
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        made = torch.randn(4, 6, generator=generator, dtype=F64).to(dtype)
        if self.device is None:
            return made
        pinned = torch.empty(made.shape, dtype=dtype, pin_memory=True)
        pinned.copy_(made)
        return on_device(pinned, torch.device(DEVICE)) if is_moved else pinned


class Net(nn.Module):
    """Layers, batch normalization, and one layer that is used on request. x: (rows, 6) -> (rows, 6)."""

    def __init__(self, *, has_norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        norm = nn.BatchNorm1d(6) if has_norm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6), norm)
        self.sometimes = nn.Linear(6, 6)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(6))
        self.uses_all, self.fails = True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("a bad batch")
        self.seen.mul_(0.5).add_(x.detach().mean(0))  # rank 0's counts, and the result depends on them
        out: torch.Tensor = self.layers(x) * (1 + self.seen.clone())
        return out + self.sometimes(x) if self.uses_all else out


def on_host(values: Sequence[torch.Tensor]) -> Found:
    return [value.detach().to("cpu", copy=True) for value in values]


def weights(model: nn.Module) -> Found:
    return on_host(list(model.state_dict().values()))


def _train(
    place: Place,
    *,
    dtype: torch.dtype = F64,
    before: Callable[[int, Net], None] = lambda *_: None,
    passes: int = 1,
    hook: Any = None,
    **settings: Any,
) -> Found:
    """Train some steps, the last ones without a wait for the device; return the weights."""
    net = Net(has_norm=dtype != torch.bfloat16).to(dtype).to(place.name)  # the CPU mixes types in it
    model = ddp.DistributedDataParallel(net, **{"bucket_cap_mb": 1e-3, **settings})
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS + 2):
        before(step, net)
        with place.without_waits() if step >= 3 else contextlib.nullcontext():
            for number in range(passes - 1):
                with model.no_sync():
                    model(place.inputs(10 * step + number, dtype)).square().mean().backward()
            model(place.inputs(step, dtype, is_moved=not model.device_ids)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    ddp.check_replicas(model)
    return weights(net)


def plain(place: Place) -> Found:
    return _train(place)


def only_device(place: Place) -> Found:
    """A group that moves nothing in host memory."""
    backend = "gloo" if place.device is None else "sim:nccl"
    return _train(place, process_group=dist.new_group(backend=backend), bucket_cap_mb=1e-6)


def skipped(place: Place) -> Found:
    """A rank makes one backward pass less than the other: an error on both."""
    model = ddp.DistributedDataParallel(Net().to(F64).to(place.name))
    out = model(place.inputs(0)).sum()
    if dist.get_rank() == 1:
        out = model(place.inputs(1)).sum()
    with pytest.raises(BackwardError, match="rank 1 made 1"):
        out.backward()
    return weights(model)


def views(place: Place) -> Found:
    """Gradients that are views of their buckets; the wrapper moves the inputs."""
    device_ids = None if place.device is None else [0]
    return _train(place, gradient_as_bucket_view=True, bucket_cap_mb=25, device_ids=device_ids)


def accumulated(place: Place) -> Found:
    return _train(place, passes=3)


def unused(place: Place) -> Found:
    def before(step: int, net: Net) -> None:
        net.uses_all = (dist.get_rank() == 0, False, True)[step % 3]

    return _train(place, before=before)


def bf16(place: Place) -> Found:
    return _train(place, dtype=torch.bfloat16)


def hooks(place: Place) -> Found:
    return [
        *_train(place, hook=default_hooks.allreduce_hook),
        *_train(place, hook=default_hooks.bf16_compress_hook, dtype=torch.float32),
    ]


def buffer_hook(place: Place) -> Found:
    """Buffers that a hook of the user's adds up while backward runs, by another communicator than the gradients."""
    group = dist.new_group(backend="gloo") if place.device is None else group_of_all()

    def add_up(_: object, named: dict[str, torch.Tensor]) -> list[Any]:
        return [dist.all_reduce(named["seen"], group=group, async_op=True).get_future()]

    net = Net().to(F64).to(place.name)
    model = ddp.DistributedDataParallel(net)
    model._register_buffer_comm_hook(None, add_up)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        model(place.inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


def checksum(place: Place) -> Found:
    """Whose wait for the device is meant: it comes once a step."""
    net = Net().to(F64).to(place.name)
    model = ddp.DistributedDataParallel(net, weight_checksum=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        model(place.inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


def status(place: Place, dtype: torch.dtype = F64, **settings: Any) -> Found:
    """A rank fails in one step; the others hear of it, and the next step is right."""
    net = Net().to(dtype).to(place.name)
    model = ddp.DistributedDataParallel(net, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        net.fails = step == 2 and dist.get_rank() == 1
        if step != 2:
            model(place.inputs(step, dtype)).square().mean().backward()
            optimizer.step()
        else:
            own = ValueError, "a bad batch"
            kind, text = own if net.fails else (PeerFailedError, "step 3 failed on rank 1")
            with pytest.raises(kind, match=text):
                model(place.inputs(step, dtype)).square().mean().backward()
            assert all(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
    return weights(net)


def status_int8(place: Place) -> Found:
    return status(place, torch.float32, compression="int8")


def half(place: Place) -> Found:
    return _train(place, dtype=torch.float32, compression=ddp.compression.Half(torch.bfloat16))


def int8(place: Place) -> Found:
    return _train(place, dtype=torch.float32, compression=ddp.compression.Int8(block=32))


def powersgd(place: Place) -> Found:
    return _train(place, dtype=torch.float32, compression=ddp.compression.PowerSGD(start_step=2))


def local_sgd(place: Place) -> Found:
    net = Net().to(F64).to(place.name)
    model = ddp.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    local = ddp.LocalSGD(model, optimizer, every=2, outer_lr=0.7, outer_momentum=0.9)
    for step in range(6):
        model(place.inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    local.sync()
    return weights(net)


def horovod(place: Place) -> Found:
    net = Net().to(F64).to(place.name)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    for step in range(3):
        net(place.inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    given = torch.full((3,), dist.get_rank() + 1.0, dtype=F64).to(place.name)
    short = given.bfloat16()
    with place.without_waits():
        handles = [hvd.allreduce_async(given * 2), hvd.broadcast_async(given + 1, root_rank=1)]
        handles += [hvd.allreduce_async(given, op=hvd.Max), hvd.allgather_async(given)]
        results = hvd.grouped_allreduce([given, short], compression="bf16")
        assert hvd.poll(handles[-1]) in (True, False)
        results += [hvd.synchronize(handle) for handle in handles]
    found = weights(net) + on_host(results)
    found += on_host([hvd.allgather(given[: dist.get_rank() + 1])])
    found += on_host([hvd.alltoall(torch.arange(4.0, dtype=F64).to(place.name))])
    hvd.allreduce_(given, op=hvd.Sum)
    return found + on_host([given])


def central(place: Place) -> Found:
    """In blocks of a few hundred bytes, so that several are copied in turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "_BLOCK_BYTES", 600)
        model: nn.Module = Net().to(F64).to(place.name)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = CentralStorage(max_grad_norm=1.0).prepare(model, optimizer)
        for step in range(4):
            model(place.inputs(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = weights(model)
        optimizer.close()
    return [
        value for value, name in zip(found, model.state_dict(), strict=True) if "running" not in name and name != "seen"
    ]


def background_saves(place: Place) -> Found:
    """What is saved are the weights of its step, although the next steps are queued behind the copies."""
    folder = [tempfile.mkdtemp(prefix="simulated-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, device=torch.device("cpu"))
    net = Net().to(F64).to(place.name)
    model = ddp.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoint = ddp.Checkpoint(folder[0])
    found: Found = []
    for step in range(4):
        model(place.inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(step, model=model, optimizer=optimizer)
        if step % 2:
            for again in range(2):
                model(place.inputs(9 + again)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert present(checkpoint.load(model=model, optimizer=optimizer)).step == step
            found += weights(net)
    checkpoint.wait()
    return found


def scaled(place: Place) -> Found:
    """A GradScaler, with gradients that are infinite in one step."""
    net = Net().to(place.name)
    model = ddp.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(place.name.partition(":")[0], init_scale=64.0, growth_interval=2)
    for step in range(5):
        loss = model(place.inputs(step, torch.float32)).square().mean()
        if step == 2:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*weights(net), torch.tensor(scaler.get_scale())]


def explained(place: Place) -> Found:
    """Events are read only once the device has passed them; the times differ, their order does not."""
    net = Net().to(F64).to(place.name)
    model = ddp.DistributedDataParallel(net, measure=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(16):
        model(place.inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.measurement is not None
    record = model.measurement.record
    ready = [gradient.ready_s for gradient in record.gradients]
    assert 0 <= ready[0] <= ready[-1] <= record.backward_s
    assert min(record.forward_s, record.other_s, model.measurement.step_s) > 0
    if place.device is not None:
        clock, scheduler = DeviceClock(torch.device(DEVICE)), place.device.scheduler
        scheduler.current = Stream(scheduler, "other")
        start = clock.now()
        scheduler.current = scheduler.default
        clock.seconds(start, clock.now())
    return weights(net)


WAYS: dict[str, Callable[[Place], Found]] = {
    way.__name__: way
    for way in (
        plain, only_device, skipped, views, accumulated, unused, bf16, hooks, buffer_hook, checksum, status,
        status_int8, half, int8, powersgd, local_sgd, horovod, central, background_saves, copied, scaled, explained,
        pinned, packed, hooked, chunks, compressors, compressed_again, settled,
    )
}  # fmt: skip
# Of the CPU's numbers, which are rounded elsewhere.
_LOOSE = {"bf16": 0.1, "hooks": 0.02, "half": 0.05, "int8": 0.05, "status_int8": 0.05, "powersgd": 0.05, "scaled": 1e-4}


@contextlib.contextmanager
def world_with_device(seed: int) -> Iterator[Device]:
    """Have the device, and replace the default group by one of the same ranks that moves its tensors."""
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    with simulated_device(seed + rank) as device:
        dist.init_process_group(BACKEND, store=PrefixStore(f"{len(_kept)}", store), rank=rank, world_size=size)
        _kept.append(dist.group.WORLD)
        yield device


def equals_the_cpu(names: Sequence[str], seeds: Sequence[int], then: Callable[[], object] = lambda: None) -> None:
    """Run each way with each seed, in a world of this size whose group has the device.

    `then` is called once the CPU's numbers are there.
    """
    register()
    right = {name: WAYS[name](Place()) for name in names}
    then()
    for seed in seeds:
        for name in names:
            with world_with_device(seed) as device:
                try:
                    found = WAYS[name](Place(device))
                    torch.accelerator.synchronize()
                except Exception as error:
                    raise AssertionError(f"{name}, --seed {seed}") from error
                _compare(name, found, right[name], seed)
                dist.barrier()


def _compare(name: str, found: Found, right: Found, seed: int) -> None:
    bound = _LOOSE.get(name, 1e-9)
    for number, (mine, theirs) in enumerate(zip(found, right, strict=True)):
        where = f"{name} {number}, seed {seed}"
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound, msg=lambda text, at=where: f"{at}: {text}")
