"""Parts of ddp on the simulated device, alone: each gives the numbers of the CPU. See training.py."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp.checkpoint.copies import HostCopy
from ddp.comm.broadcast import BufferSync
from ddp.comm.pinned_buffer import PinnedBuffer
from ddp.compression import Half, Int8, PowerSGD
from ddp.data_parallel.forward_buffers import BufferHook, ForwardBuffers
from ddp.generation import device_collectives
from ddp.generation.device_collectives import DeviceCollectives
from ddp.monitoring.stall_report import report_of
from ddp.strategies.parameter_server.server_link import DeviceCopies
from ddp.strategies.sharding.chunk_gradient import ChunkGradient
from ddp.strategies.sharding.partition import partition
from testbed.compressed import Bucket
from testbed.simulated_device import DEVICE, Stream

if TYPE_CHECKING:
    from testbed.simulated_device.training import Found, Place

COMPRESSORS: tuple[Half | Int8 | PowerSGD, ...] = (
    Half(), Half(torch.float16), Int8(), Int8(error_feedback=False), PowerSGD(1, 2), PowerSGD(2, 2), PowerSGD(3, 2),
)  # fmt: skip


def copied(place: Place) -> Found:
    """A copy of a state for a checkpoint is that of its moment, and starting it does not wait."""
    made = [torch.full((5,), float(value)).to(place.name) for value in range(3)]
    with place.without_waits():
        copy = HostCopy()
        found = copy.of({"tensors": made})
        for each in made:
            each.add_(10)
        del each, made
    copy.wait()
    return list(found["tensors"])


def pinned(place: Place) -> Found:
    """Transfers by one buffer, each as soon as it may start, on two streams; what is fetched is freed at once."""
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(6, generator=generator) for _ in range(12)]
    if place.device is None:
        return [each for value in values[::2] for each in (value, value * 2, value * 3)]
    scheduler = place.device.scheduler
    buffer = PinnedBuffer(6, torch.float32, torch.device(DEVICE))
    other = Stream(scheduler, "other")
    found: Found = []
    for value, last in zip(values[::2], values[1::2], strict=True):
        first, second = ([torch.zeros(2, 2).to(DEVICE), torch.zeros(2).to(DEVICE)] for _ in range(2))
        given = value.clone()
        scheduler.current = other
        tripled = value.to(DEVICE) * 3
        scheduler.current = scheduler.default
        with place.without_waits():
            buffer.start_sending([given], first)
            given.zero_()
            buffer.start_sending([last], second)
            buffer.start_sending([value], second)
            scheduler.current = other  # as a hook of a backward pass may have it
            buffer.start_fetching([tripled])
            scheduler.current = scheduler.default
        third = torch.empty(6)
        buffer.finish_fetching([third])
        with place.without_waits():
            buffer.start_fetching([each * 2 for each in second])
        back = torch.empty(6)
        buffer.finish_fetching([back])
        found += [torch.cat([each.cpu().view(-1) for each in first]), back, third]
    return found


def chunks(place: Place) -> Found:
    """Copies of a worker of parameter servers: gradients of which one is absent, and values by more chunks than memory.

    The gradients change as soon as their copies have been started, and values as soon as they are sent.
    """
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(3, 4, generator=generator) for _ in range(6)]
    if place.device is None:
        return [*values[1:], *(value * 2 for value in values)]
    parameters = [torch.zeros(3, 4).to(DEVICE) for _ in values]
    split = partition(parameters, servers=2, chunk_bytes=96)
    copies = DeviceCopies(split, torch.device(DEVICE))
    gradients = [value.to(DEVICE) * 1 for value in values]
    with place.without_waits():
        copies.start([None, *gradients[1:]])
        for gradient in gradients:
            gradient.zero_()
    found = [torch.zeros(3, 4) for _ in values]
    for chunk in split.chunks:
        taken = copies.gradient_of(chunk)
        flat = taken.flat if isinstance(taken, ChunkGradient) else taken
        if flat is not None:
            for to, piece in zip(chunk.in_parameters(found), chunk.in_flat(flat), strict=True):
                to.copy_(piece)
        sent = torch.cat([piece.reshape(-1) * 2 for piece in chunk.in_parameters(values)])
        copies.install(chunk, sent, chunk.in_parameters(parameters))
        sent.zero_()
    return [*found[1:], *(each.cpu() for each in parameters)]


def packed(place: Place) -> Found:
    """Buffers of rank 0 several times in a row, without a collective of another kind in between."""
    module = nn.BatchNorm1d(5).to(place.name)
    assert dist.group.WORLD is not None
    sync = BufferSync(dist.group.WORLD, module, (), lambda work, what, *, device: work.wait())
    found = []
    for step in range(4):
        for buffer in module.buffers():
            buffer.fill_(10 * step + 5 * dist.get_rank())
        sync.run()
        found += [buffer.clone() for buffer in module.buffers()]
    return [each.cpu() for each in found]


def hooked(place: Place) -> Found:
    """A user's hook for buffers runs again before anything has waited for it, as in a forward pass without backward."""
    buffer = torch.ones(5).to(place.name)

    def add_up(_: object, named: dict[str, torch.Tensor]) -> Any:
        work = dist.all_reduce(named["seen"].add_(1), async_op=True)
        assert work is not None
        return work.get_future()

    hook = BufferHook(None, add_up, None)
    for _ in range(3):
        hook.run([("seen", buffer)])
    ForwardBuffers(report_of(dist.group.WORLD), None, hook).wait()  # as when backward has ended
    return [buffer.cpu()]


def compressors(place: Place) -> Found:
    """No compressor waits for the device, once it has what it keeps; gradients change places after some steps.

    Their numbers are those of other ways.
    """
    if place.device is None:
        return []
    assert dist.group.WORLD is not None
    shapes = [(40, 30), (7,), (), (0, 3), (6, 5, 3, 3)]
    owners = [torch.empty(shape, device=DEVICE) for shape in shapes]
    for dtype, method in itertools.product((torch.float32, torch.bfloat16, torch.float64), COMPRESSORS):
        made = method.compressor(dist.group.WORLD, None)
        for step in range(8):
            if step == 5:
                shapes[:2], owners[:2] = reversed(shapes[:2]), reversed(owners[:2])
            flat = torch.zeros(sum(map(math.prod, shapes)), dtype=dtype, device=DEVICE)
            with place.without_waits() if step > 2 else contextlib.nullcontext():
                result = made.reduce(Bucket(0, flat, last=True, shapes=shapes, owners=owners)).wait()
            assert (result.device.type, result.dtype, result.shape) == (flat.device.type, dtype, flat.shape)
        made.close()
    return []


def compressed_again(place: Place) -> Found:
    """A bucket is averaged again before anything has waited for its last average."""
    assert dist.group.WORLD is not None
    made = Half().compressor(dist.group.WORLD, None)
    buckets = [torch.full((64,), 1.0 + number).to(place.name) for number in range(4)]
    shapes, owners = [(64,)], [torch.empty(64).to(place.name)]
    every = [made.reduce(Bucket(0, flat, last=True, shapes=shapes, owners=owners)) for flat in buckets]
    found = [each.wait().cpu() for each in every]
    made.close()
    return found


def settled(place: Place) -> Found:
    """After `settle`, `connect` and `let_go` the device has done what was queued."""
    if place.device is None:
        return []
    devices, collectives, size = [torch.device(DEVICE)], DeviceCollectives(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_collectives, "abort_on_devices", lambda: None)  # the group is used after this
        for waits in (collectives.settle, collectives.connect, collectives.let_go):
            given = torch.ones(3).to(DEVICE)
            dist.all_reduce(given, async_op=waits != collectives.settle)
            waits(devices)
            assert place.device.memory.below(given).tolist() == [size] * 3, waits.__name__
    return []
