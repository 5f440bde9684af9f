"""The world of this process: joins the ranks into a process group and says who and where this one is.

`init` is the entry. It makes at most one default process group and closes it when the interpreter ends;
a group that somebody else made is used as it is and left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import (
    PrefixStore,
    Store,
)

from ddp.comm.shm.backend import NAME as SHM
from ddp.comm.shm.backend import register
from ddp.device_choice import agree_on_backend, choose_device, device_to_connect, find_accelerator, words_of
from ddp.environment import ALONE, Placement, read_placement
from ddp.errors import ArgumentError, DdpError, LaunchEnvironmentError, RendezvousError
from ddp.generation.announcements import can_replace, generation_at_start
from ddp.generation.connections import Connections, clone
from ddp.generation.device_collectives import (
    NCCL_BESIDE_GLOO,
    DeviceCollectives,
    can_be_ended,
    leave_errors,
    leaves_errors,
)
from ddp.generation.meeting import meet
from ddp.generation.meeting import refuse as refuse_to_meet
from ddp.generation.pending_group import is_pending, make_pending_group
from ddp.group_store import leave_file, store_at_address, store_without_address
from ddp.monitoring import device_watch
from ddp.monitoring.progress import set_restart_policy
from ddp.torch_internals import (
    backend_of,
    device_recorder,
    device_types_of,
    is_by_gloo,
    number_groups_anew,
    open_groups,
)

__all__ = ["World", "init"]

_TIMEOUT, _NCCL_TIMEOUT = timedelta(minutes=30), timedelta(minutes=10)  # torch's, to meet


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks of its job; in a resilient function, other ranks may be there later on.

    `rank` counts from 0 to `world_size` - 1 over all hosts, `local_rank` from 0 to `local_world_size` - 1 on this one.
    `node_rank` is this host's index, None where the launcher does not tell. `device` is where this rank's model and
    batches belong. `backend` is what the process group was made with: "shm", "gloo", "nccl" and so on.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int | None
    device: torch.device
    backend: str

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0: the one that prints, logs and saves."""
        return self.rank == 0


_CONNECT_S = 10.0  # ranks that have met need no more to connect
_END_S = 1.0  # for a group to end: more than it takes where no collective is on its way
_BACKEND_KEY, _FINISHED_KEY = "ddp/backend", "ddp/finished"  # for those that start later
_world: World | None = None


@dataclass
class _Membership:
    """How this process belongs to the group that `init` has made, so that it can join again.

    `store` is the whole store, of which each generation has a prefix; `timeout` is what was asked for.
    """

    placement: Placement
    store: Store
    backend: str
    timeout: timedelta | None
    device_id: torch.device | None
    can_be_ended: bool  # what it does on devices, by NCCL
    generation: int = 0
    joining: int = -1  # the generation that it connects to now
    connections: Connections = field(default_factory=Connections)
    on_devices: DeviceCollectives = field(default_factory=DeviceCollectives)


_membership: _Membership | None = None


def init(backend: str | None = None, *, timeout_s: float | None = None) -> World:
    """Join the process group that the launcher prepared, and return this process's place in it.

    Every rank must call it; it blocks until all have, at most `timeout_s` seconds (default: torch's 30
    minutes, 10 for NCCL), which is also the limit of each later collective. Ranks come from RANK and
    WORLD_SIZE (dtrain run, torchrun), else from Open MPI's or SLURM's variables; without any, the process
    is a world of one with a group of its own. Where torch has an accelerator with collectives of its own (CUDA and
    ROCm with NCCL, XPU with xccl), the device is `cuda:LOCAL_RANK` (`cuda:0` if only one is visible), made current,
    and the backend NCCL, with gloo for CPU tensors. NCCL connects at once, unless ranks of a host see one device, which
    they may share; a user's `new_group()` of some ranks then splits the group, which all ranks must do at once.
    Otherwise the CPU, and `shm` if ranks share the memory of a host, which they find out by trying, else gloo.
    `backend="gloo"` stays on the CPU whatever there is, and never takes shm. The variable DTRAIN_BACKEND, the same on
    every rank, is what `backend` is by default.

    A second call returns the same object, also for "gloo" where the first has taken shm. A default group that already
    exists is used and not closed at exit. Raises LaunchEnvironmentError for an inconsistent environment, on all ranks
    if they would take unlike backends and some were given none; RendezvousError if the ranks cannot meet.
    """
    global _world
    if _world is not None and dist.is_initialized():
        if backend not in (None, _world.backend) and (backend, _world.backend) != ("gloo", SHM):
            raise ArgumentError(
                f"init(backend={backend!r}), but this process already joined with {_world.backend!r}: give the first "
                "init() this backend, or this one none"
            )
        return _world
    if dist.is_initialized():
        _world = _adopt()
        return _world
    placement = read_placement(os.environ)
    backend = backend or os.environ.get("DTRAIN_BACKEND") or None
    device = choose_device(placement, backend)
    _world = world_at(placement, device, _join(placement, backend, timeout_s, device))
    return _world


def world_at(placement: Placement, device: torch.device, backend: str) -> World:
    return World(
        rank=placement.rank,
        world_size=placement.world_size,
        local_rank=placement.local_rank,
        local_world_size=placement.local_world_size,
        node_rank=placement.node_rank,
        device=device,
        backend=backend,
    )


def _adopt() -> World:
    """Describe the default group that somebody else made; its rank and size count, not the environment's."""
    rank, world_size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    try:
        placement = read_placement(os.environ)
    except LaunchEnvironmentError:
        placement = ALONE
    if (placement.rank, placement.world_size) != (rank, world_size):
        placement = Placement(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            node_rank=None,
            source="an existing process group",
        )
    accelerator = find_accelerator()
    device = torch.device("cpu")
    if accelerator is not None and backend not in ("gloo", SHM):
        # Its maker has chosen the current device, perhaps not by LOCAL_RANK.
        device = torch.device(accelerator, torch.accelerator.current_device_index())
    return world_at(placement, device, backend)


def _join(placement: Placement, backend: str | None, timeout_s: float | None, device: torch.device) -> str:
    """Make the default group; return its backend, which the ranks choose together if None is given."""
    global _membership
    given = None if timeout_s is None else timedelta(seconds=timeout_s)
    is_by_address = (
        bool(os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")) and placement.source != "alone"
    )
    timeout = given or (_NCCL_TIMEOUT if backend == "nccl" else _TIMEOUT)
    try:
        store = store_at_address(placement, timeout) if is_by_address else store_without_address(placement)
        first = PrefixStore("default_pg", store) if is_by_address else store
        is_replacement = generation_at_start() > 0 and placement.world_size > 1
        if is_replacement:  # the others have left their choice
            backend = store.get(_BACKEND_KEY).decode()
            leave_errors(device, backend)
        else:
            leave_errors(device, backend)  # before the ranks compare what it sets
            backend = agree_on_backend(placement, backend, device, first, timeout)
        if SHM in words_of(backend):
            register()
        eager = device_to_connect(placement, backend, device)
        member = _Membership(placement, store, backend, given, eager, can_be_ended(words_of(backend)))
        if is_replacement:
            make_pending_group(store, placement.rank, placement.world_size, partial(set_restart_policy, 0))
            member.generation = -1  # in none yet
        else:
            if can_replace() and placement.rank == 0:
                store.set(_BACKEND_KEY, backend)
            _connect(member, first)
        _membership = member if is_by_address else None
        if "nccl" in words_of(backend) and placement.world_size > 1 and leaves_errors() and device_recorder():
            device_watch.start(placement.rank, lambda: member.on_devices.has_ended)
    except (RendezvousError, LaunchEnvironmentError):
        raise
    except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
        meeting_point = f" at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if is_by_address else ""
        how = "" if backend is None else f" with backend {backend!r}"
        raise RendezvousError(
            f"rank {placement.rank} of {placement.world_size} could not join the others{meeting_point}{how}: {error}"
        ) from error
    atexit.register(leave)
    return backend


def _connect(member: _Membership, store: Store) -> None:
    """Make the default group with the other ranks."""
    with member.connections.made_here() if can_replace() else contextlib.nullcontext():
        dist.init_process_group(
            member.backend,
            store=store,
            rank=member.placement.rank,
            world_size=member.placement.world_size,
            timeout=member.timeout,
            device_id=member.device_id,
        )


def current_generation() -> int | None:
    """The generation to which the default group belongs, -1 before a replacement has joined one.

    None where there are no generations: the launcher of this process announces none, `init` did not make the group, or
    it moves tensors on devices and nobody could end that (`DeviceCollectives`).
    """
    if _membership is None or not can_replace() or not dist.is_initialized():
        return None
    return _membership.generation if is_on_host() or _membership.can_be_ended else None


def is_on_host() -> bool:
    """Whether the group that `init` has made moves tensors in host memory only."""
    return _membership is not None and words_of(_membership.backend) <= {"cpu", "gloo", SHM}


def lacks_error_handling() -> bool:
    """Whether there are no generations only since TORCH_NCCL_ASYNC_ERROR_HANDLING is not 0, on this rank."""
    if _membership is None or not can_replace() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return current_generation() is None and words_of(_membership.backend) == NCCL_BESIDE_GLOO


def break_connections() -> None:
    """Let the collectives that this process waits for fail, here and on the other ranks. May be called by any thread.

    The group is of no use afterwards.
    """
    if _membership is None:
        return
    number, on_devices = _membership.on_devices.number, False
    group = dist.group.WORLD
    if group is not None:
        on_devices = any(device.type != "cpu" and not is_by_gloo(group, device) for device in device_types_of(group))
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend without `abort`
            backend_of(group, torch.device("cpu")).abort()
    _membership.connections.break_all()
    if on_devices:
        _membership.on_devices.end(number)
    if (joining := _membership.joining) >= 0:
        timer = threading.Timer(_CONNECT_S, _end_if_connecting, [_membership, joining])
        timer.daemon = True
        timer.start()


def _end_if_connecting(member: _Membership, number: int) -> None:
    """End this process, so that it is replaced.

    gloo waits for a rank that died while it connected, whatever breaks, and a store's client for a host that is off.
    """
    if member.joining == number:
        print(f"ddp: rank {member.placement.rank} waits for a rank that is gone, and ends", file=sys.stderr, flush=True)
        os._exit(1)


def settle(devices: Collection[torch.device]) -> bool:
    """Wait for what is queued on the current streams of devices; return False where that is not possible.

    Raises CollectiveError if collectives of this process were ended before, and may have left anything there.
    """
    return not devices or _membership is None or _membership.on_devices.settle(devices)


def rejoin(
    number: int, variables: Mapping[str, str], is_over: Callable[[], bool], devices: Collection[torch.device] = ()
) -> bool:
    """Make the default group anew, as generation `number`; return whether it is made.

    `variables` are those of the environment that may be others in it: this rank, the size of the world, where the store
    is. `devices` are those on which it will communicate. False once `is_over` says that there is a newer one: call
    again with that. What communicates over the old group has let it go then. Blocks until all ranks have called it;
    raises RendezvousError if they do not come.
    """
    member = _membership
    assert member is not None
    if not is_pending(dist.group.WORLD):
        member.on_devices.let_go(devices)
    _drop_group()
    number_groups_anew()  # one that could not connect was none to destroy
    member.on_devices.begin()
    member.generation, member.joining = -1, number
    try:
        _take_place(member, variables)
        placement = member.placement
        limit_s = (member.timeout or _TIMEOUT).total_seconds()
        prefix = f"generation/{number}"
        here = PrefixStore(f"{prefix}/here", member.store)
        member.joining = -1  # a replacement may take any time to start
        if not meet(here, placement.rank, placement.world_size, is_over, limit_s):
            return False
        member.connections = Connections()
        member.joining = number
        # Broken with the other connections, so that nobody waits in vain at the store.
        own = member.connections.clone(member.store, int(os.environ["MASTER_PORT"]))
        if is_over():  # announced before there was anything to break
            return False
        hook = sys.excepthook
        try:
            _connect(member, PrefixStore(f"{prefix}/default_pg", own))
            member.on_devices.connect(devices)
        finally:
            sys.excepthook = hook  # torch has put its own around it once more
    except DdpError:
        raise
    except (RuntimeError, ValueError) as error:
        if is_over():
            return False
        who = f"rank {member.placement.rank} of {member.placement.world_size}"
        raise RendezvousError(f"{who} could not join the others in generation {number}: {error}") from error
    finally:
        member.joining = -1
    if is_over():
        return False
    member.generation = number
    return True


def _take_place(member: _Membership, variables: Mapping[str, str]) -> None:
    """Be who this process is from now on, in its environment and in its World."""
    if not variables:
        return
    os.environ.update(variables)
    member.placement = placement = read_placement(os.environ)
    # Also at the same address: another store may be there since, and a host without power has closed no connection.
    member.store = store_at_address(placement, member.timeout or _TIMEOUT)
    member.store.set(_BACKEND_KEY, member.backend)
    if _world is not None:
        now = world_at(placement, _world.device, _world.backend)
        for name, value in vars(now).items():
            object.__setattr__(_world, name, value)  # the user has it


def own_store(number: int) -> Store:
    """Return the part of the store that belongs to a generation, on a connection for one thread alone."""
    assert _membership is not None
    return PrefixStore(f"generation/{number}", clone(_membership.store))


def note_finished() -> None:
    """Tell those that might still come that this rank, and so all others, will meet nobody any more."""
    if _membership is not None and _membership.placement.rank == 0:
        _membership.store.set(_FINISHED_KEY, "")


def has_finished() -> bool:
    """Whether the others have said so."""
    return _membership is not None and bool(_membership.store.check([_FINISHED_KEY]))


def refuse(number: int, why: str) -> None:
    """Tell those that wait for this rank under generation `number` that it will not come. May be called by any thread.

    `why` says what this rank "has" done.
    """
    if _membership is not None:
        refuse_to_meet(PrefixStore("here", own_store(number)), f"rank {_membership.placement.rank} {why}")


def _drop_group() -> None:
    """Let go of a group, whatever state it is in."""
    for owner, let_go in list(_owners.items()):
        let_go(owner)
    groups = open_groups()
    if dist.is_initialized():
        inspect.unwrap(dist.destroy_process_group)()  # under dtrain another one keeps the groups for a while
    gc.collect()
    end_groups(groups)


def end_groups(groups: list[Any]) -> None:
    """Empty a list that has the last references to groups. Blocks for a second at most.

    The destructor of a gloo group waits for its threads. One of them may wait in a collective for a rank that is gone,
    though its connections are broken, until the group's timeout (gloo of torch 2.13). So a thread drops the references.
    """
    thread = threading.Thread(target=groups.clear, name="end of groups", daemon=True)
    thread.start()
    thread.join(_END_S)


T = TypeVar("T")
_owners: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def before_leaving(owner: T, let_go: Callable[[T], None]) -> None:
    """Have `let_go(owner)` called before the group is closed at exit, if `owner` still lives then."""
    _owners[owner] = let_go


def communicating() -> list[Any]:
    """What would let go of the group before it is closed."""
    return list(_owners)


def leave() -> None:
    """Close the group at exit, unless the process ends with an error: closing may wait for a rank that is gone.

    A group ends its threads when the last reference to it goes. Left to the interpreter's teardown, such a thread may
    want the interpreter's lock when there is none any more: 2 of 24 runs aborted so, with torch 2.13.
    """
    if not dist.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    world_size = dist.get_world_size()
    _drop_group()
    leave_file(world_size)
