"""An exception that a signal's handler raises at any line of a step: that rank's own, and nothing is sent twice."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.interrupts import Died, Interrupt
from testbed.nursery import Nursery
from testbed.slow import slow
from testbed.worlds import world
from torch import nn

import ddp
from ddp.compression.row_exchange import RowExchange
from ddp.monitoring.interrupts import is_interrupt

_AT_ONCE_S = 40.0  # the stall timeout is more; who asks where a rank is waits for some seconds
_OTHERS_S = 4.0  # for rank 0 to notice that it need not wait


def _interrupted_from(first: int, stride: int) -> tuple[int, list[str]]:
    """Make steps, in which rank 1 is interrupted at line `first` of ddp's code, at `first` + `stride` and so on.

    Where the others can go on, as PeerFailedError promises, all make one step more; else rank 1 ends, as scripts do.
    Return the last line, 0 where a step had none as late, and what was wrong.
    """
    torch.manual_seed(3)
    rank = dist.get_rank()
    store = dist.PrefixStore("outcomes", dist.distributed_c10d._get_default_store())
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = ddp.DistributedDataParallel(net, stall_timeout_s=2 * _AT_ONCE_S)
    for _ in range(3):
        assert (error := _caught(model, None)) is None, error
    dist.barrier()
    for at in itertools.count(first, stride):
        wrong, began = [], time.monotonic()
        interrupt = Interrupt(at if rank == 1 else 0)
        error = _caught(model, interrupt)
        if rank == 0:
            kinds = (ddp.errors.PeerFailedError, ddp.errors.CollectiveError, type(None))
            store.set(str(at), next((kind.__name__ for kind in kinds if isinstance(error, kind)), repr(error)))
        if rank and not interrupt.has_come:
            return 0, [] if error is None else [f"without an interrupt: {error!r}"]
        if rank and not isinstance(error, Died):
            wrong.append(f"line {at}: the exception became {_text(error)}")
        try:
            store.wait([str(at)], timedelta(seconds=_OTHERS_S))
            outcome = store.get(str(at)).decode()
        except RuntimeError:  # rank 0 waits for this one
            outcome = ""
        if outcome not in ("NoneType", "PeerFailedError", "CollectiveError", ""):
            wrong.append(f"line {at}: {_text(error)} on rank {rank}")
        goes_on = outcome == "PeerFailedError"
        if goes_on and (after := _caught(model, None)) is not None:
            wrong.append(f"line {at}: the next step failed: {_text(after)}")
        if time.monotonic() - began > _AT_ONCE_S:
            wrong.append(f"line {at}: took {time.monotonic() - began:.1f} s, with {_text(error)}")
        if wrong or not goes_on:
            return at, wrong
    raise AssertionError


def _step() -> Callable[[], object]:
    """Make a step in which a parameter becomes trained: all change their buckets together."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model = ddp.DistributedDataParallel(net, stall_timeout_s=2 * _AT_ONCE_S)

    def make() -> None:
        net[0].requires_grad_(False)
        for is_trained in (False, True):
            net[0].requires_grad_(is_trained)
            model.zero_grad()
            model(torch.ones(3, 4)).sum().backward()

    return make


def _fit() -> Callable[[], object]:
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))

    def make() -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        trainer = ddp.Trainer(net, torch.optim.SGD(net.parameters(), 0.1), nn.MSELoss())
        trainer.fit(data, epochs=2, global_batch_size=16, validation=data)

    return make


def _compressed_steps() -> Callable[[], object]:
    def make() -> None:
        model = ddp.DistributedDataParallel(nn.Linear(4, 2), compression="int8", stall_timeout_s=2 * _AT_ONCE_S)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(3, 4)).sum().backward()

    return make


def _local_steps() -> Callable[[], object]:
    def make() -> None:
        model = ddp.DistributedDataParallel(nn.Linear(4, 2), stall_timeout_s=2 * _AT_ONCE_S)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        local = ddp.LocalSGD(model, optimizer, every=2)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        local.sync()

    return make


def _horovods_calls() -> Callable[[], object]:
    hvd = ddp.horovod

    def make() -> None:
        handles = [hvd.allreduce_async(torch.ones(5)), hvd.broadcast_async_(torch.ones(5), 0)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.allgather(torch.ones(1 + hvd.rank(), 2))
        hvd.reducescatter(torch.ones(4))

    return make


_CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "check_replicas": lambda: partial(ddp.check_replicas, nn.Linear(4, 4)),
    "gather_metrics": lambda: partial(ddp.gather_metrics, {"loss": (1.5, 3), "count": 2}),
    "gather_samples": lambda: partial(ddp.gather_samples, torch.ones(2, 3)),
    "broadcast_object": lambda: partial(ddp.horovod.broadcast_object, {"lr": 0.1, "w": torch.ones(3)}, 0),
    "step that unfreezes": _step,
    "fit": _fit,
    "compressed steps": _compressed_steps,
    "local steps": _local_steps,
    "Horovod's calls": _horovods_calls,
}


def _caught(model: nn.Module, interrupt: Interrupt | None) -> Exception | None:
    try:
        with interrupt or contextlib.nullcontext():
            model.zero_grad()
            model(torch.ones(3, 4) * (dist.get_rank() + 1)).square().sum().backward()
    except Exception as error:
        return error
    return None


def _text(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)) if error is not None else "no exception"


def interrupt_from(nursery: Nursery, backend: str, first: int, stride: int, worlds: int = 1000) -> list[str]:
    """Interrupt steps at lines `first`, `first` + `stride` and so on, until a step has no such line; what was wrong."""
    wrong: list[str] = []
    for _ in range(worlds):
        results = nursery.run(2, _interrupted_from, group=backend, first=first, stride=stride)
        wrong += [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(results) for text in texts]
        last = results[1][0]
        if not last:
            break
        first = last + stride
    return wrong


@pytest.mark.parametrize("backend", [slow("gloo"), "shm"])
def test_a_signal_at_any_line_of_a_step_raises_on_its_rank_alone(nursery: Nursery, backend: str) -> None:
    """And no rank waits. In two worlds at some lines; in many more in test_a_signal_all_through_a_step."""
    first = random.randrange(1, 500)
    print("first line:", first)
    assert interrupt_from(nursery, backend, first, 90, worlds=2) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_signal_all_through_a_step(nursery: Nursery, backend: str) -> None:
    first = random.randrange(1, 38)
    print("first line:", first)
    assert interrupt_from(nursery, backend, first, 37) == []


def _is_in_a_function_of_the_reducer(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith("data_parallel/reducer.py") and "self" not in frame.f_locals


class _Alone(ddp.DistributedDataParallel):
    _least_ranks = 1


@world(1)
def test_a_signal_at_each_line_where_passes_end_together() -> None:
    for at in itertools.count(1):
        model, interrupt = _Alone(nn.Linear(4, 2), measure=False), Interrupt(at, _is_in_a_function_of_the_reducer)
        error = _caught(model, interrupt)
        if not interrupt.has_come:
            break
        assert isinstance(error, Died), f"line {at}: the exception became {_text(error)}"
    assert at > 5, "there are no such lines"


@world(2, backend="gloo")
def test_a_compressed_bucket_is_not_sent_twice() -> None:
    """An exception that comes when it is sent, and before that is counted, is not one of the hook."""
    model = ddp.DistributedDataParallel(nn.Linear(4, 2), compression="int8", stall_timeout_s=2 * _AT_ONCE_S)
    assert (error := _caught(model, None)) is None, error
    start, sent = RowExchange.start, 0
    interrupt = Interrupt(3, lambda frame: frame.f_code is start.__code__)

    def counted(*given: Any) -> Any:
        nonlocal sent
        sent += 1
        return start(*given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RowExchange, "start", counted)
        error = _caught(model, interrupt if dist.get_rank() else None)
    assert sent == 1
    assert isinstance(error, Died if dist.get_rank() else ddp.errors.DdpError), _text(error)


def _random_part(call: str, backend: str) -> Any:
    is_slow = call in SLOW[backend]
    return pytest.param(call, backend, marks=pytest.mark.slow if is_slow else ())


_LATER = ("compressed steps", "local steps", "Horovod's calls")
SLOW = {
    "gloo": ("check_replicas", "gather_samples", "step that unfreezes", *_LATER),
    "shm": ("broadcast_object", "fit", "gather_metrics", *_LATER),
}


@pytest.mark.parametrize(("call", "backend"), [_random_part(*each) for each in itertools.product(_CALLS, SLOW)])
def test_a_signal_in_a_call_raises_on_its_rank_alone(nursery: Nursery, call: str, backend: str) -> None:
    """A call that the other rank makes, too, at any line."""
    part = random.random()
    print("part:", part)
    nursery.run(2, _interrupt_call, group=backend, call=call, part=part)


def _interrupt_call(call: str, part: float) -> None:
    """Interrupt rank 1 in a call of `_CALLS`, after `part` of the lines of ddp's code that it runs through.

    Rank 1 raises what its handler has raised, or an error with that as its cause; rank 0 an error of ddp, or none.
    """
    torch.manual_seed(3)
    rank, make, whole = dist.get_rank(), _CALLS[call](), Interrupt(math.inf)
    with whole:
        make()
    dist.barrier()
    interrupt, began = Interrupt(1 + int(part * whole.seen) if rank == 1 else 0), time.monotonic()
    error: Exception | None = None
    try:
        with interrupt:
            make()
    except Exception as raised:
        error = raised
    if rank == 1 and interrupt.has_come:
        assert is_interrupt(error), f"the exception at line {interrupt.seen} became {_text(error)}"
    if rank == 0:
        assert isinstance(error, ddp.errors.DdpError | None), _text(error)
    assert time.monotonic() - began < _AT_ONCE_S, _text(error)
