"""What an exception of a signal's handler leaves: threads that were not started, and questions without an answer."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.interrupts import Died, Interrupt
from testbed.present import present
from testbed.worlds import world
from torch import nn

import ddp
from ddp.checkpoint import file as checkpoint_file
from ddp.checkpoint import writer
from ddp.comm.shm.agreement import agree
from ddp.comm.sums import small_sum
from ddp.compression.row_exchange import BucketRows, RowMemory, _Messages, _Pipeline, open_exchange
from ddp.data.ledger import Ledger
from ddp.errors import CollectiveError
from ddp.monitoring.stall_channel import StoreThread
from ddp.monitoring.stall_text import Position
from ddp.strategies.parameter_server.snapshot import Snapshots
from ddp.torch_internals import backend_of, default_store, is_gloo_on_host, timeout_of

_LIMIT = timedelta(seconds=20)


def _is_in(*functions: Callable[..., object]) -> Callable[[FrameType], bool]:
    codes = {getattr(each, "__func__", each).__code__ for each in functions}
    return lambda frame: frame.f_code in codes


def _at_each_line(*functions: Callable[..., object]) -> Iterator[Interrupt]:
    """Yield interrupts at each line of these functions in turn, until one has not come; there must be some."""
    for line in itertools.count(1):
        interrupt = Interrupt(line, _is_in(*functions))
        yield interrupt
        if not interrupt.has_come:
            break
    assert line > 1, "there are no such lines"


def _raises_what_interrupts(call: Callable[[], object], interrupt: Interrupt) -> None:
    try:
        with interrupt:
            call()
    except Died:
        assert interrupt.has_come
    else:
        assert not interrupt.has_come, "the exception was swallowed"


@world(2, backend="gloo")
def test_small_sums_have_a_thread() -> None:
    for interrupt in _at_each_line(small_sum._queue_of):
        group = present(dist.new_group())
        _raises_what_interrupts(partial(small_sum._queue_of, group), interrupt)
        small_sum._start(group, flat := torch.ones(3)).wait(_LIMIT)
        assert flat.tolist() == [2.0] * 3


def _rows(size: int) -> BucketRows:
    """A bucket of four bytes for each rank, whose average is the first row."""
    memory = RowMemory(torch.full((size, 4), dist.get_rank(), dtype=torch.uint8), torch.zeros(size, 4).byte())
    return BucketRows("bucket 0", memory, lambda received: received[0], lambda gathered: gathered)


def _set(event: Event, _: object) -> None:
    event.set()


@world(2, backend="gloo")
def test_compressed_buckets_have_threads() -> None:
    for interrupt in _at_each_line(_Pipeline._start_threads):
        group = present(dist.new_group())
        exchange = open_exchange(group)
        _raises_what_interrupts(present(exchange._pipeline)._start_threads, interrupt)
        future, done = exchange.start(group, rows := _rows(2)), Event()
        future.add_done_callback(partial(_set, done))
        assert done.wait(_LIMIT.total_seconds())
        assert rows.memory.send.tolist() == [[0] * 4] * 2
        exchange.leave()


@world(2, backend="gloo")
def test_a_compressed_bucket_that_a_signal_interrupts_is_the_last_one() -> None:
    """The others may have sent it: the next would be taken for it."""
    group = present(dist.group.WORLD)
    exchange = open_exchange(group)
    with pytest.raises(Died), Interrupt(1, _is_in(_Messages.__init__)):
        exchange.start(group, _rows(2))
    with pytest.raises(CollectiveError, match=f"rank {dist.get_rank()} was interrupted in the compressed average"):
        exchange.start(group, _rows(2))


@world(1)
def test_no_timer_is_taken_for_a_full_disk_of_the_ledger(tmp_path: Path) -> None:
    kept = Ledger()
    kept.path = str(tmp_path / "ledger")
    for interrupt in _at_each_line(Ledger.flush, vars(Ledger)["_file"].func):
        vars(kept).pop("_file", None)
        kept._lines.append("line\n")
        _raises_what_interrupts(kept.flush, interrupt)
    assert "line\n" in (tmp_path / "ledger").read_text()


class _Reporter:
    interval_s = 1.0

    def position(self) -> Position:
        return Position(0, "here", is_waiting=False, for_s=0.0)

    def line(self) -> str:
        return ""

    def look(self) -> None:
        pass


@world(1)
def test_a_rank_answers_where_it_is() -> None:
    for interrupt in _at_each_line(StoreThread.enter):
        thread, reporter = StoreThread(default_store(), 0), _Reporter()
        _raises_what_interrupts(partial(thread.enter, "first", reporter), interrupt)
        thread.enter("second", reporter)
        assert thread.ask([0], patience_s=_LIMIT.total_seconds()).answers
        thread.end()


@world(1)
def test_a_save_is_written_once_or_not_at_all(tmp_path: Path) -> None:
    checkpoint, written, write = ddp.Checkpoint(tmp_path), list[int](), checkpoint_file.write

    def noted(folder: Path, step: int, content: Any) -> Path:
        written.append(step)
        return write(folder, step, content)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint_file, "write", noted)
        for step, interrupt in enumerate(_at_each_line(writer._start)):
            _raises_what_interrupts(partial(checkpoint.save, 2 * step), interrupt)
            checkpoint.save(2 * step + 1)
            checkpoint.wait()
    assert len(set(written)) == len(written)
    assert {*range(1, 2 * step + 2, 2)} <= {*written}


@world(1)
def test_a_servers_next_snapshot_is_written(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, 0, "")
    for step, interrupt in enumerate(_at_each_line(Snapshots.write)):
        _raises_what_interrupts(partial(snapshots.write, 2 * step, {}), interrupt)
        snapshots.write(2 * step + 1, {})
        snapshots.wait()
        assert 2 * step + 1 in snapshots.whole_steps()


@world(1, backend="gloo")
def test_a_question_to_a_group_has_no_other_answer() -> None:
    """Else this rank alone would choose another way to add up."""
    group = present(dist.group.WORLD)
    for ask in (is_gloo_on_host, partial(timeout_of, device=torch.device("cpu"))):
        for interrupt in _at_each_line(backend_of):
            _raises_what_interrupts(partial(ask, group), interrupt)


@world(1)
def test_an_agreement_raises_what_interrupts_it() -> None:
    for interrupt in _at_each_line(agree):
        _raises_what_interrupts(partial(agree, dist.HashStore(), 0, 1, 7, list, 1.0), interrupt)


def _raise_in_a_handler(*_: object) -> Any:
    with Interrupt(0):
        signal.raise_signal(signal.SIGUSR2)


def _raise_as_a_collective(*_: object) -> Any:
    raise CollectiveError("rank 1 is missing", rank=0, what="save")


@pytest.mark.parametrize(("hook", "error"), [(_raise_in_a_handler, Died), (_raise_as_a_collective, CollectiveError)])
@world(1)
def test_a_callback_out_of_step_raises_its_own_error(hook: Callable[..., Any], error: type[Exception]) -> None:
    """The ranks cannot agree on its failure: it may be in the middle of a collective of the callback."""
    callback = ddp.callbacks.Callback()
    callback.on_fit_begin = hook  # type: ignore[method-assign]
    data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
    net = nn.Linear(2, 1)
    trainer = ddp.Trainer(net, torch.optim.SGD(net.parameters(), 0.1), nn.MSELoss(), callbacks=[callback])
    with pytest.raises(error):
        trainer.fit(data, epochs=1, global_batch_size=2)


@world(2)
def test_verify_raises_what_interrupts_the_loss() -> None:
    with pytest.raises(Died):
        ddp.verify(nn.Linear(2, 1), _raise_in_a_handler, [torch.ones(4, 2)])
