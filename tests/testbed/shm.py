"""Groups of the backend `shm`, on one host and over hosts that share no memory."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp.comm.shm import backend
from testbed.nursery import Nursery
from testbed.worlds import run_by

LIMIT_S = 20.0  # of a group that nothing is wrong with
# Pairs, of which each test tries one by default: ranks, and who shares memory where not all do.
WORLDS = ((3, ""), (2, ""), (4, "0,2|1|3"), (4, "0,1|2,3"))
_turn = itertools.count()
Op = dist.ReduceOp
_STEPS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


def over_shm(function: Callable[..., None]) -> Callable[..., None]:
    """Run a test on each rank with a group of all ranks, by shm on one host and over hosts."""
    turn = next(_turn) % 2
    worlds = [
        pytest.param(*each, marks=[] if at % 2 == turn else pytest.mark.slow, id=f"{each[0]} {each[1]}".strip())
        for at, each in enumerate(WORLDS)
    ]

    @functools.wraps(function)
    def test(nursery: Nursery, _ranks: int, _hosts: str, **arguments: Any) -> None:
        __tracebackhide__ = True
        nursery.run(_ranks, function, group="gloo", deadline_s=60.0, _hosts=_hosts, **arguments)

    def on_rank(_hosts: str, **arguments: Any) -> None:
        pretend_hosts(_hosts)
        warnings.filterwarnings("ignore", ".* is deprecated. Please use")  # older torchs have no other names
        group = dist.new_group(backend="shm", timeout=timedelta(seconds=LIMIT_S))
        function(group, **arguments)
        dist.barrier()
        dist.destroy_process_group(group)

    names = ["nursery", "_ranks", "_hosts", *[*inspect.signature(function).parameters][1:]]
    parametrized: Callable[..., None] = pytest.mark.parametrize(("_ranks", "_hosts"), worlds)(
        run_by(test, on_rank, names)
    )
    return parametrized


def pretend_hosts(hosts: str) -> None:
    """Let groups of shm believe that only these ranks of the world share memory: "0,1|2" is two and one."""
    if not hosts:
        return
    sharing_ranks = [[int(rank) for rank in ranks.split(",")] for ranks in hosts.split("|")]

    def sharing(store: Any, rank: int, size: int, timeout: timedelta) -> list[tuple[int, ...]]:
        store.set(f"global/{rank}", str(dist.get_rank()))
        known = [int(store.get(f"global/{other}")) for other in range(size)]
        found = [tuple(known.index(each) for each in ranks if each in known) for ranks in sharing_ranks]
        return sorted(ranks for ranks in found if ranks)

    backend.sharing = sharing


def tree_of(op: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours in pairs, then the pairs in pairs, and so on; half precision in float32, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype.itemsize < 4 and dtype.is_floating_point else dtype
    step, level = _STEPS[op], [part.to(wide) for part in parts]
    while len(level) > 1:
        level = [step(*level[at : at + 2]) if at + 1 < len(level) else level[at] for at in range(0, len(level), 2)]
    return (level[0] / len(parts) if op == Op.AVG else level[0]).to(dtype)
