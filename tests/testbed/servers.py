"""Ranks of a test world as workers, servers and an evaluator, without a launcher."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

import ddp
from ddp.strategies.parameter_server.strategy import ParameterServer
from testbed.one_training import Setting
from testbed.worlds import world

T = TypeVar("T")
KEY = "5a" * 32


def in_roles(workers: int, servers: int, body: Callable[[], T], *, evaluator: bool = False, key: str = KEY) -> T | None:
    """Run `body` in the first ranks as so many workers, servers and perhaps an evaluator.

    Returns what it returned; None in a server, in which `prepare` ends the process, and in ranks without a role.
    """
    rank = dist.get_rank()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [None if store is None else store.port]
    dist.broadcast_object_list(port)
    roles = {"default": workers, "ps": servers, "evaluator": int(evaluator)}
    places = [(name, number) for name, count in roles.items() for number in range(count)]
    result = None
    if rank < len(places):
        name, number = places[rank]
        with pytest.MonkeyPatch.context() as patch:
            said = {
                "RANK": rank,
                "WORLD_SIZE": workers if name == "default" else servers,
                "ROLE_NAME": name,
                "ROLE_RANK": number,
                "DTRAIN_ROLES": ",".join(f"{role}:{count}" for role, count in roles.items() if count),
                "DTRAIN_RUN_KEY": key,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port[0],
            }
            for variable, value in said.items():
                patch.setenv(variable, str(value))
            try:
                result = body()
                assert name != "ps", "a server must not come back from prepare()"
            except SystemExit as end:
                if (name, end.code) != ("ps", 0):
                    raise
    dist.barrier()  # the store must stay until all are through
    return result


def start(setting: Setting, **more: Any) -> ParameterServer:
    strategy = ddp.strategy("parameter_server", **{"timeout_s": 20.0, **setting.options, **more})
    assert isinstance(strategy, ParameterServer)
    return strategy


def with_servers(workers: int, servers: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test, as `world` does, on workers and on servers, which leave it in `prepare`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @world(workers + servers)
        @functools.wraps(function)
        def in_their_roles(**arguments: Any) -> None:
            in_roles(workers, servers, functools.partial(function, **arguments))

        return in_their_roles

    return decorate
