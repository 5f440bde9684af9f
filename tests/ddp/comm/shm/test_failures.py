"""Ranks of the backend `shm` that end, stall, fork or are interrupted."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.interrupts import Died, Interrupt
from testbed.processes import wait_until
from testbed.slow import slow
from testbed.worlds import world

from ddp.comm.objects import gather_values
from ddp.comm.shm.group import ShmGroup
from ddp.comm.shm.hosts_group import HostsGroup
from ddp.comm.shm.memory import STATE
from ddp.comm.shm.process_end import close_all
from ddp.comm.shm.rounds import Lost
from ddp.comm.shm.waiting import Fence
from ddp.comm.shm.work import ShmWork
from ddp.errors import CollectiveError

LIMIT_S = 60.0
_LARGE = 3_000_000  # elements: several chunks


def _store(name: str) -> Any:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def _group(timeout_s: float = LIMIT_S) -> ShmGroup:
    return ShmGroup(_store("shm"), dist.get_rank(), dist.get_world_size(), timedelta(seconds=timeout_s))


def _exit_code_of(run: Callable[[], object]) -> int:
    """Run in a forked process; return its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


KINDS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "recv", "barrier")


def _call(name: str, group: ShmGroup) -> Any:
    """One of each kind, large enough for several rounds."""
    rank, size = group.rank(), group.size()
    mine = torch.ones(_LARGE)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.allreduce([mine]),
        "broadcast": lambda: group.broadcast([mine]),
        "reduce": lambda: group.reduce([mine]),
        "all_gather": lambda: group.allgather([[torch.zeros(_LARGE) for _ in range(size)]], [mine]),
        "reduce_scatter": lambda: group.reduce_scatter([torch.zeros(_LARGE)], [[mine] * size]),
        "all_to_all": lambda: group.alltoall([torch.zeros(_LARGE) for _ in range(size)], [mine] * size),
        "recv": lambda: group.recv([mine], size - 1) if rank == 0 else group.allreduce([mine]),
        "barrier": group.barrier,
    }
    return calls[name]()


@pytest.mark.parametrize(("name", "chunks"), [*itertools.product(KINDS, [0]), *itertools.product(KINDS[:6], [2])])
@world(3)
def test_a_dead_rank_is_named_on_all_others(name: str, chunks: int) -> None:
    """The last rank is killed: after so many chunks of the call, or before it."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def dies() -> None:
        group = _group()
        group.allreduce([torch.ones(3)]).wait()
        if chunks:
            rounds: Any = group._engine.rounds
            began = rounds.begin

            def begin(words: tuple[int, int]) -> Any:
                if rounds.round == chunks + 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return began(words)

            rounds.begin = begin
            _call(name, group).wait()
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == last:
        assert _exit_code_of(dies) == -signal.SIGKILL
        return
    group = _group()
    group.allreduce([torch.ones(3)]).wait()
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=rf"rank {last} \(pid \d+\) has ended"):
        _call(name, group).wait()
    assert time.monotonic() - began < LIMIT_S / 2
    with pytest.raises(CollectiveError, match=rf"refused on rank {rank}, since the group has failed: .*rank {last} "):
        group.barrier()
    group.shutdown()


@world(3)
def test_a_rank_that_stalls_is_named() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = _group(timeout_s=LIMIT_S if rank == last else 3.0)
    if rank == last:
        dist.barrier()  # until the others have given up
        with pytest.raises(CollectiveError, match=rf"rank {last} did not come within 3 s"):
            group.allreduce([torch.ones(3)]).wait()
        return
    try:
        with pytest.raises(Lost, match=rf"all_reduce failed on rank .*rank {last} did not come within 3 s"):
            group.allreduce([torch.ones(3)]).wait()
    finally:
        dist.barrier()


@world(3)
def test_a_monitored_barrier_names_all_that_are_missing() -> None:
    rank = dist.get_rank()
    group = _group()
    group.monitored_barrier()
    if rank == 0:
        with pytest.raises(CollectiveError, match=r"monitored_barrier failed on rank 0: ranks 1-2 did not come"):
            group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
    dist.barrier()


@world(3)
def test_ctrl_c_ends_a_wait() -> None:
    """And the operation goes on."""
    group, tensor = _group(), torch.ones(4)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if dist.get_rank() == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        work = group.allreduce([tensor])
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        group.allreduce([tensor]).wait()
    assert (tensor == dist.get_world_size()).all()


@world(3)
def test_a_wait_costs_no_core() -> None:
    rank = dist.get_rank()
    group = _group()
    group.barrier().wait()
    if rank == 0:
        began, used = time.monotonic(), time.process_time()
        group.barrier().wait()
        assert time.process_time() - used < 0.2 * (time.monotonic() - began)
    else:
        time.sleep(2)
        group.barrier().wait()


@world(3)
def test_a_forked_child_leaves_the_group_alone() -> None:
    group: Any = _group()
    group.barrier().wait()

    def child() -> None:
        nonlocal group
        with pytest.raises(CollectiveError, match="this process was forked from the rank that made the group"):
            group.barrier()
        del group
        gc.collect()

    assert _exit_code_of(child) == 0
    group.allreduce([tensor := torch.ones(1000)]).wait()
    assert (tensor == dist.get_world_size()).all()


@world(3)
def test_a_rank_that_leaves_is_named() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = _group()
    group.barrier().wait()
    if rank == last:
        group.shutdown()
        with pytest.raises(CollectiveError, match="was destroyed"):
            group.barrier()
    else:
        with pytest.raises(CollectiveError, match=rf"rank {last} \(pid \d+\) has destroyed the group"):
            group.barrier().wait()
    dist.barrier()


@world(3)
def test_a_rank_that_fails_after_a_collective_fails_the_next() -> None:
    """The others look at the collective only after that failure: they return from it, as that rank did."""
    rank = dist.get_rank()
    group = _group()
    group.barrier().wait()
    if rank:
        rounds = group._engine.rounds
        posted, all_posted = rounds.post, rounds.all_posted

        def post() -> None:
            posted()
            time.sleep(0.2)

        rounds.post = post
        rounds.all_posted = lambda: rounds.others[0].words[STATE // 8] != 0 and all_posted()
    group.barrier().wait()
    if rank == 0:
        group._engine.close("ValueError: it fails")
    else:
        rounds.post, rounds.all_posted = posted, all_posted
        with pytest.raises(CollectiveError, match=f"barrier failed on rank {rank}: ValueError: it fails .said rank 0"):
            group.barrier().wait()
    dist.barrier()


@world(3)
def test_a_message_of_a_rank_that_has_left_arrives() -> None:
    """It comes between the receiver's look into the channel and its look at who has left."""
    rank = dist.get_rank()
    group = _group()
    group.barrier().wait()
    if rank == 0:
        for receiver in (1, 2):
            group.send([torch.full((3,), 7.0)], receiver).wait()
        group.shutdown()
    dist.barrier()
    if rank:
        advanced, got = group._engine._messages.advance, torch.zeros(3)

        looks = iter(range(2))  # of the call, and of who drives first

        def not_yet() -> bool:
            if next(looks, None) is None:
                return bool(advanced())
            group._engine._looked = 0.0
            return False

        group._engine._messages.advance = not_yet
        (group.recv([got], 0) if rank == 1 else group.recv_anysource([got])).wait()
        assert (got == 7).all()
    dist.barrier()


@world(3)
def test_all_threads_that_wait_learn_of_a_dead_rank() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def dies() -> None:
        group = _group()
        group.barrier().wait()
        time.sleep(0.5)  # the others wait by now, or later: both must end
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == last:
        assert _exit_code_of(dies) == -signal.SIGKILL
        return
    group = _group()
    group.barrier().wait()
    rounds = group._engine.rounds
    sleep = rounds.sleep

    def sleep_until_woken(is_ready: Callable[[], bool]) -> bool:
        sleep(is_ready)
        return True  # so many threads wait that one of them always wakes the driver before its time

    rounds.sleep = sleep_until_woken
    works = [group.allreduce([torch.ones(3)]) for _ in range(6)]
    reported: list[str] = []

    def wait(work: Any) -> None:
        with pytest.raises(CollectiveError) as caught:
            work.wait()
        reported.append(str(caught.value))

    threads = [threading.Thread(target=wait, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LIMIT_S / 2
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    assert len(reported) == 6
    assert all(f"rank {last} (pid" in each for each in reported)


@world(3)
def test_a_callback_that_waits_ends_with_the_group() -> None:
    rank = dist.get_rank()
    group = _group()
    if rank == 0:
        is_called = threading.Event()

        def again(_: Any) -> None:
            is_called.set()
            group.allreduce([torch.ones(3)]).wait()  # in which the others never are

        future = group.allreduce([torch.ones(3)]).get_future().then(again)
        dist.barrier()
        assert is_called.wait(LIMIT_S)
        group.abort()
        with pytest.raises(RuntimeError, match="was destroyed"):
            future.wait()
    else:
        dist.barrier()
        group.allreduce([torch.ones(3)]).wait()
    dist.barrier()


@world(3)
def test_a_rank_that_leaves_ends_its_collectives_first() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = _group()
    tensors = [torch.ones(_LARGE), torch.ones(3)]
    if rank:
        dist.barrier()
    works = [group.allreduce([tensor]) for tensor in tensors]
    if rank == 0:
        assert not works[0].is_completed()
        dist.barrier()
        group.shutdown()
        assert all(work.is_success() for work in works)
    for work in works:
        work.wait()
    assert all((tensor == size).all() for tensor in tensors)
    dist.barrier()


@world(3)
def test_a_message_is_late_by_the_clock_of_its_rank() -> None:
    """Rank 1 sends to rank 0 all the time; the last one, of which rank 0 waits for a message, never does."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = _group(timeout_s=3.0 if rank == 0 else LIMIT_S)
    group.barrier().wait()
    store, until = _store("over"), time.monotonic() + LIMIT_S / 4
    if rank == 0:
        works = [group.recv([torch.zeros(3)], source) for source in (last, *[1] * 1000)]
        with pytest.raises(CollectiveError, match=f"rank {last} did not come within 3 s"):
            works[0].wait(timedelta(seconds=LIMIT_S / 4))
        store.set("over", "")
    while rank == 1 and not store.check(["over"]) and time.monotonic() < until:
        with contextlib.suppress(CollectiveError):  # once rank 0 has given up
            group.send([torch.ones(3)], 0)
        time.sleep(0.1)
    dist.barrier()


@world(3)
def test_a_message_that_no_one_waits_for_has_no_limit() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = _group(timeout_s=0.5 if rank == 0 else LIMIT_S)
    if rank == 0:
        got = torch.zeros(3)
        work = group.recv([got], last)
        time.sleep(1)
        dist.barrier()
        group.set_timeout(timedelta(seconds=LIMIT_S))
        group.barrier().wait()
        work.wait()
        assert (got == 7).all()
        group.set_timeout(timedelta(seconds=0.5))
        with pytest.raises(CollectiveError, match=rf"rank {last} did not come within 0.5 s"):
            group.recv([got], last).wait()
    else:
        dist.barrier()
        if rank == last:
            group.send([torch.full((3,), 7.0)], 0).wait()
        group.barrier().wait()
    dist.barrier()


@world(3)
def test_a_work_keeps_its_group() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group: Any = _group()
    tensor = torch.ones(_LARGE)
    if rank:
        dist.barrier()
    work = group.allreduce([tensor])
    del group
    gc.collect()
    if rank == 0:
        dist.barrier()
    work.wait()
    assert (tensor == size).all()
    dist.barrier()


@world(3)
def test_across_hosts_a_forked_child_closes_nothing() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    store = _store("hosts")
    group = HostsGroup(store, rank, size, timedelta(seconds=LIMIT_S), [(0, 1), (2,)])
    tensor = torch.ones(4)
    group.allreduce([tensor]).wait()

    def child() -> None:
        close_all()  # as at the end of the interpreter
        with pytest.raises(CollectiveError, match="this process was forked"):
            group.barrier()

    assert _exit_code_of(child) == 0
    group.allreduce([tensor]).wait()
    assert (tensor == size**2).all()
    if rank == 2:
        began = time.monotonic()
        with pytest.raises(CollectiveError, match="all_reduce failed on rank 2"):
            group.allreduce([tensor], timeout=timedelta(seconds=0.5)).wait()
        assert time.monotonic() - began < LIMIT_S / 2
        with pytest.raises(CollectiveError, match="refused on rank 2"):
            group.allreduce([tensor])
    dist.barrier()
    group.abort()


@world(3)
def test_nothing_is_left_of_a_group() -> None:
    rank = dist.get_rank()
    group: Any = dist.new_group(backend="shm")
    assert _left()
    dist.all_reduce(torch.ones(_LARGE), group=group, async_op=True).wait()
    dist.barrier(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    dist.barrier()
    assert _left() == [], rank


def _left() -> list[str]:
    """Memory, descriptors and threads of groups that this process has."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:dtrain" in line]
    paths = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    found = [path for path in paths if "pidfd" in path or "memfd:dtrain" in path]
    return maps + found + [thread.name for thread in threading.enumerate() if thread.name == "shm"]


def _is_open(descriptor: str) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").is_symlink()


@world(3)
def test_all_hosts_that_are_late_are_named() -> None:
    """Each rank is a host of its own; rank 1 comes late, the last one never, and rank 0 cannot know who is to blame."""
    store, rank = _store("hosts"), dist.get_rank()
    group = HostsGroup(store, rank, 3, timedelta(seconds=3), [(0,), (1,), (2,)])
    group.allreduce([torch.ones(3)]).wait()
    if rank == 0:
        with pytest.raises(Lost, match="ranks 1-2 on other hosts"):
            group.allreduce([torch.ones(3)]).wait()
    dist.barrier()
    if rank == 1:
        with pytest.raises(Lost, match="all_reduce failed on rank 1"):
            group.allreduce([torch.ones(3)]).wait()
    dist.barrier()
    group.abort()


@world(4)
def test_a_rank_that_stalls_on_another_host_fails_all_others() -> None:
    """In the middle of an all-reduce. Each of two hosts has two of four ranks, of which the last one stalls."""
    store, rank = _store("hosts"), dist.get_rank()
    group = HostsGroup(store, rank, 4, timedelta(seconds=3), [(0, 1), (2, 3)])
    group.allreduce([torch.ones(_LARGE)]).wait()
    if rank < 3:
        start = time.monotonic()
        with pytest.raises(Lost, match=r"rank [23] on another host|among ranks 2-3"):
            group.allreduce([torch.ones(_LARGE)]).wait()
        assert time.monotonic() - start < LIMIT_S
    dist.barrier()
    group.shutdown()


@world(2)
@pytest.mark.parametrize("what", ["barrier", slow("broadcast")])
def test_a_group_ends_while_gloo_s_threads_hang_in_it(what: str) -> None:
    """A destructor of gloo's waits for a rank that does not come, and `abort` must not wait for that."""
    store, rank = _store("hosts"), dist.get_rank()
    group = HostsGroup(store, rank, 2, timedelta(seconds=60), [(0,), (1,)])
    group.allreduce([torch.ones(3)]).wait()
    if rank == 0:
        work = group.barrier() if what == "barrier" else group.broadcast([torch.ones(3)], 1)
        wait_until(lambda: group._engine._running is not None, "it is in gloo, or soon is")
        time.sleep(0.5)
        began = time.monotonic()
        group.abort()
        assert time.monotonic() - began < LIMIT_S / 2
        with pytest.raises(CollectiveError, match="the group was destroyed"):
            work.wait()
    dist.barrier()


def test_a_fence_works_after_an_interrupt_in_the_middle_of_one() -> None:
    fence = Fence()
    fence._release()
    fence()
    fence()


def _set(event: threading.Event, _: object) -> None:
    event.set()


def _makes_a_future(frame: FrameType) -> bool:
    return frame.f_code is ShmWork.get_future.__code__


@world(2)
def test_a_future_that_a_signal_interrupts_is_made_by_the_next_call() -> None:
    """torch has no limit for a wait for one."""
    group = _group()
    for line in itertools.count(1):
        work, interrupt, done = group.allreduce([torch.ones(3)]), Interrupt(line, _makes_a_future), threading.Event()
        with contextlib.suppress(Died), interrupt:
            work.get_future()
        work.get_future().add_done_callback(functools.partial(_set, done))
        work.wait()
        assert done.wait(LIMIT_S / 4), line
        if not interrupt.has_come:
            break
    assert line > 5


def _is_in_the_engine(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith("shm/engine.py")


@pytest.mark.parametrize("stride", [slow(1), 5])
@world(2, backend="gloo")
def test_a_signal_in_the_engine_does_not_keep_its_rank(stride: int) -> None:
    """Rank 1 leaves its group, wherever the handler of the signal has raised."""
    line, has_come = -random.Random(os.getppid()).randrange(stride), True  # the same on both ranks
    while has_come:
        line += stride
        group = dist.new_group(backend="shm")
        interrupt, began = Interrupt(line if dist.get_rank() == 1 else 0, _is_in_the_engine), time.monotonic()
        with contextlib.suppress(Died, CollectiveError), interrupt:
            for work in [dist.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(2)]:
                work.wait()
            dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)
        assert time.monotonic() - began < LIMIT_S, line
        _, has_come = gather_values(interrupt.has_come)
    assert line > 50
