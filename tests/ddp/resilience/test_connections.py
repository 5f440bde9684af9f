"""The connections of a group can be broken by another thread, and only those."""

from __future__ import annotations

import selectors
import socket
import threading

import pytest
import torch
import torch.distributed as dist
from testbed.worlds import world

from ddp.generation.connections import Connections


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
