"""The simulated device of the tests: late, with values, and it notices what does not wait."""

import contextlib
import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from testbed.seeds import Seeds
from testbed.simulated_device import DEVICE, Device, HostWaits, ReadTooEarly, Stream, group_of_all, simulated_device
from testbed.worlds import world
from torch import nn

from ddp.comm.pinned_buffer import PinnedBuffer
from ddp.torch_internals import allgather_flat


def _is_wrong(found: torch.Tensor, right: torch.Tensor) -> bool:
    return not torch.equal(found.cpu(), right)


@world(1)
def test_output_has_no_value_until_it_has_run(seeds: Seeds) -> None:
    late = 0
    for seed in seeds(20):
        with simulated_device(seed) as device:
            x = torch.arange(4.0, device=DEVICE)
            y = (x * 2).add_(1)
            below = device.memory.below(y)
            late += bool(below.isnan().any())
            assert y.cpu().tolist() == [1, 3, 5, 7]
            counts = torch.arange(3, device=DEVICE) + 1
            late += device.memory.below(counts)[0].item() == -1
            assert counts.cpu().tolist() == [1, 2, 3]
    assert late > 20


@world(1)
def test_training_equals_the_cpu(seeds: Seeds) -> None:
    """Forward, backward in autograd's thread, buffers and an optimizer, in float64: the same bits."""

    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).double().to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for _ in range(3):
            net(torch.randn(6, 8, dtype=torch.float64).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [value.detach().cpu() for value in net.state_dict().values()]

    for seed in seeds(4):
        with simulated_device(seed):
            for found, right in zip(train(DEVICE), train("cpu"), strict=True):
                assert torch.equal(found, right), seed


@world(1)
def test_a_pinned_copy_not_waited_for_has_the_old_bytes(seeds: Seeds) -> None:
    late = 0
    for seed in seeds(20):
        with simulated_device(seed):
            memory = torch.zeros(4, pin_memory=True)
            assert memory.is_pinned()
            assert not torch.zeros(4).is_pinned()
            memory.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
            if memory.numpy().sum() == 0:
                late += 1
                for use in (memory.sum, memory[1:].clone, memory[1].zero_):
                    with pytest.raises(ReadTooEarly, match=r"test_testbed_device\.py:\d+ in "):
                        use()
            event = torch.Event(DEVICE)
            event.record()
            event.synchronize()
            assert memory.sum() == 4
    assert late > 10


def _share_with_another_stream(device: Device, *, waits: bool, keeps: bool) -> bool:
    """Use a tensor on another stream; return whether the result was wrong."""
    other = Stream(device.scheduler, "other")
    made = torch.ones(4, device=DEVICE) + 1
    if waits:
        other.wait_stream(device.scheduler.default)
    device.scheduler.current = other
    doubled = made * 2
    device.scheduler.current = device.scheduler.default
    if not keeps:
        del made
        gc.collect()
    device.scheduler.default.synchronize()
    with contextlib.suppress(ReadTooEarly):
        doubled.cpu()
    other.synchronize()
    return _is_wrong(doubled, torch.full((4,), 4.0))


@world(1)
def test_streams_that_do_not_wait_and_freed_memory_are_noticed(seeds: Seeds) -> None:
    wrong = {(True, True): 0, (False, True): 0, (True, False): 0}
    for seed in seeds(40):
        for waits, keeps in wrong:
            with simulated_device(seed) as device:
                wrong[waits, keeps] += _share_with_another_stream(device, waits=waits, keeps=keeps)
    assert wrong[True, True] == 0
    assert wrong[False, True] > 4
    assert wrong[True, False] > 4


@world(2)
def test_a_peer_that_does_not_come_is_waited_for_until_an_abort(seeds: Seeds) -> None:
    with simulated_device(*seeds(1)):
        group = group_of_all()
        began = time.monotonic()
        if dist.get_rank() == 0:
            x = torch.ones(2).to(DEVICE)
            threading.Timer(0.5, group._get_backend(torch.device(DEVICE)).abort).start()
            work = group.allreduce([x])
            work.wait()
            event = torch.accelerator.current_stream().record_event()
            for _ in range(50):
                assert not event.query()
            assert not work.is_completed()
            event.synchronize()
            later = torch.ones(2).to(DEVICE)
            group.allreduce([later]).wait()
            assert later.isnan().all().cpu()
        assert dist.get_rank() or time.monotonic() - began > 0.4
        dist.barrier()


@world(1)
def test_planted_faults_are_noticed(seeds: Seeds) -> None:
    """A status read early, a buffer used again before its transfer has ended, a scale read before its copy."""
    noticed = dict.fromkeys(FAULTS, 0)
    for seed in seeds(20):
        for fault in FAULTS:
            for has_fault in (False, True):
                with simulated_device(seed):
                    try:
                        is_right = fault(has_fault)
                        torch.accelerator.synchronize()
                    except ReadTooEarly:
                        is_right = False
                if has_fault:
                    noticed[fault] += not is_right
                else:
                    assert is_right, (fault, seed)
    assert all(count > 10 for count in noticed.values()), noticed


def _status_read_early(has_fault: bool) -> bool:
    status = torch.zeros(3).to(DEVICE)
    buffer = PinnedBuffer(3, torch.float32, status.device)
    buffer.start_fetching([status + 1])
    memory = buffer._memory if has_fault else buffer.wait()
    return bool(memory.numpy().sum() == 3)


def _buffer_used_again(has_fault: bool) -> bool:
    buffer = PinnedBuffer(3, torch.float32, torch.device(DEVICE))
    sent, sent_next = torch.zeros(3).to(DEVICE), torch.zeros(3).to(DEVICE)
    buffer.start_sending([torch.ones(3)], [sent])
    if has_fault:
        buffer._is_busy = False
    buffer.start_sending([torch.full((3,), 2.0)], [sent_next])
    return sent.cpu().tolist() == [1.0] * 3 and sent_next.cpu().tolist() == [2.0] * 3


def _scale_read_before_its_copy(has_fault: bool) -> bool:
    scale = (torch.full((1,), 2.0).to(DEVICE) * 4).to("cpu", non_blocking=True)
    if not has_fault:
        torch.accelerator.synchronize()
    return bool(scale.numpy()[0] == 8.0)


FAULTS: tuple[Callable[[bool], bool], ...] = (_status_read_early, _buffer_used_again, _scale_read_before_its_copy)


@world(1)
def test_the_host_waits_where_a_device_has_it_wait() -> None:
    with simulated_device(0) as device:
        x = torch.zeros(4, 8).to(DEVICE)
        device.may_wait = False
        for wait in (
            x.cpu,
            x.nonzero,
            lambda: bool(x.sum()),
            lambda: x[0, 0].item(),
            lambda: torch.tensor([1.0, 2.0], device=DEVICE),
            lambda: torch.empty(4, 8).copy_(x),
            lambda: x.copy_(torch.empty(4, 8)),
            lambda: x[torch.tensor([1, 2])],
        ):
            with pytest.raises(HostWaits, match=r"test_testbed_device\.py"):
                wait()
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(4, 8)
        with pytest.raises(RuntimeError, match="must have same reduction dim"):
            x @ x
        with pytest.raises(NotImplementedError, match="sparse_coo"):
            torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), x[0, :1], (3,))
        device.may_wait = True


@world(2)
def test_collectives_are_in_order_and_seen_after_a_wait(seeds: Seeds) -> None:
    """Sums, a gather and an exchange by one communicator; the results are read with and without `wait`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = 0
    for seed in seeds(8):
        with simulated_device(seed + rank):
            group = group_of_all()
            x = torch.full((3,), rank + 1.0).to(DEVICE)
            works = [group.allreduce([x]) for _ in range(3)]
            for work in works[:-1]:
                work.wait()
            last = works[-1].get_future().then(lambda future: future.value()[0] + 1)
            gathered = torch.empty(size * 3).to(DEVICE)
            allgather_flat(group, gathered, last.wait()).wait()
            assert gathered.cpu().tolist() == [sum(range(size + 1)) * size * size + 1.0] * 3 * size
            mean = torch.full((2,), float(rank)).to(DEVICE)
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
            assert mean.cpu().tolist() == [(size - 1) / 2] * 2
            late = torch.ones(2).to(DEVICE)
            work = group.allreduce([late])
            try:
                wrong += late.cpu().tolist() != [float(size)] * 2
            except ReadTooEarly:
                wrong += 1
            work.wait()
            assert late.cpu().tolist() == [float(size)] * 2
            torch.accelerator.synchronize()
            dist.barrier()
    assert wrong > 8 // 2, wrong
