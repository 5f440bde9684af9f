"""The connections of a group can be broken by another thread, and only those."""

from __future__ import annotations

import math
import selectors
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from testbed.worlds import world

import ddp
from ddp.comm.sums import small_sum
from ddp.comm.sums.tree_sum import start_tree_sum
from ddp.generation.connections import Connections
from ddp.monitoring import stall_report
from ddp.monitoring.stall_report import ended_with_connections


@world(2, backend="gloo")
def test_connections_of_other_threads_stay() -> None:
    """While the group connects, another thread starts a server, whose epoll watches its listener and connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening, selectors.EpollSelector() as selector:
        others: list[socket.socket] = []

        def connect() -> None:
            others.append(socket.create_connection(listening.getsockname()))
            others.append(listening.accept()[0])
            selector.register(listening, selectors.EVENT_READ)
            selector.register(others[1], selectors.EVENT_READ)

        connections = Connections()
        with connections.made_here():
            thread = threading.Thread(target=connect)
            thread.start()
            thread.join()
            group = dist.new_group(backend="gloo")
        dist.all_reduce(torch.ones(1), group=group)
        connections.break_all()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        others[0].sendall(b"still there")
        assert selector.select(timeout=60)
        assert others[1].recv(100) == b"still there"
        for each in others:
            each.close()
    dist.barrier()


@world(2, backend="gloo")
def test_a_cloned_store_is_broken_and_the_store_is_not() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connections = Connections()
    broken, other = connections.clone(store, store.port), store.clone()  # type: ignore[attr-defined]  # not in stubs
    broken.set("key", "value")
    connections.break_all()
    with pytest.raises(RuntimeError):
        broken.get("key")
    assert store.get("key") == other.get("key") == b"value"


def _late(wait: Callable[[dist.ProcessGroup, torch.Tensor], object]) -> None:
    """Have rank 1 come late, by more than the time between two looks at the connections."""
    group, flat = present(dist.group.WORLD), torch.ones(20_000)
    stall_report._POLL_S = 0.01
    with ended_with_connections():
        for _ in range(2):
            if group.rank() == 1:
                time.sleep(0.2)
            wait(group, flat)


@world(3, backend="gloo")
@pytest.mark.parametrize("what", ["tree", "small", "message", "all_reduce"])
def test_a_wait_for_a_late_rank_breaks_no_connection(what: str) -> None:
    """gloo closes all connections of a group after a wait for a message with a limit."""

    def message(group: dist.ProcessGroup, flat: torch.Tensor) -> None:
        if group.rank() == 1:
            dist.send(flat, 0)
        elif group.rank() == 0:
            dist.recv(flat, 1)

    _late(
        {
            "tree": lambda group, flat: start_tree_sum(group, flat).wait(),
            "small": small_sum.add_up,
            "message": message,
            "all_reduce": lambda _, flat: dist.all_reduce(flat),
        }[what]
    )


@world(2, backend="gloo")
def test_a_collective_that_ends_just_as_time_is_up_has_ended() -> None:
    """Between the end of a wait with a limit and the question whether the collective has ended."""
    wait, waits = dist.Work.wait, []

    def until_time_is_up(work: dist.Work, *timeout: timedelta) -> bool:
        waits.append(timeout)
        ended: bool = wait(work)
        if timeout:
            time.sleep(timeout[0].total_seconds())
            raise RuntimeError("Operation timed out!")
        return ended

    dist.Work.wait = until_time_is_up  # type: ignore[method-assign, assignment]  # in this process alone
    with ended_with_connections():
        dist.all_reduce(torch.ones(1))
    assert [len(each) for each in waits] == [1, 0]


@world(2, backend="gloo")
def test_nor_do_compressed_gradients() -> None:
    net = torch.nn.Linear(30, 30)
    model = ddp.DistributedDataParallel(net, compression="int8")
    _late(lambda *_: model(torch.ones(1, 30)).sum().backward())


@world(2, backend="gloo")
def test_a_wait_for_a_message_ends_with_the_connections() -> None:
    """Also where gloo forgets it: it tells no one who has received a part of a message."""
    if dist.get_rank() == 0:
        broken_at = time.monotonic() + 0.2
        vars(stall_report)["broken_for_s"] = lambda: math.inf if time.monotonic() > broken_at else -1.0
        with ended_with_connections(), pytest.raises(RuntimeError, match="another rank has failed"):
            dist.recv(torch.ones(1), 1)
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
