"""The world of this process: join the ranks into a process group, and describe this rank.

The entry point is `init`. It creates at most one default process group and closes it when the interpreter ends;
a group created by other code is used as it is and left open.
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
from ddp.device_choice import agree_on_backend, choose_device, find_accelerator, words_of
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
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.progress import set_restart_policy
from ddp.torch_internals import (
    backend_of,
    device_recorder,
    device_types_of,
    end_groups,
    is_by_gloo,
    open_groups,
    release_default_group,
    reset_group_numbers,
)

_TIMEOUT, _NCCL_TIMEOUT = timedelta(minutes=30), timedelta(minutes=10)  # torch's, for the rendezvous


@dataclass(frozen=True)
class World:
    """This process among the ranks of its job; in a resilient function, the values may change later.

    `rank` counts from 0 to `world_size` - 1 over all hosts, `local_rank` from 0 to `local_world_size` - 1 on this one.
    `node_rank` is this host's index, None if the launcher does not provide it. `device` is the one for this rank's
    model and batches. `backend` is that of the process group: "shm", "gloo", "nccl" and so on.
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
        """Whether this is rank 0, which prints, logs and saves."""
        return self.rank == 0


_CONNECT_S = 10.0  # enough to connect once all ranks have met
_DUMP_KEY = "exception_dump"  # by which NCCL's watchdogs have all ranks dump, and end (torch 2.13)
_BACKEND_KEY, _FINISHED_KEY = "ddp/backend", "ddp/finished"  # for ranks that start later
_world: World | None = None


@dataclass
class _Membership:
    """Membership of this process in the group that `init` has created, to join again.

    `store` is the whole store, where each generation has a prefix; `timeout` is the requested one.
    """

    placement: Placement
    store: Store
    backend: str
    timeout: timedelta | None
    device_id: torch.device | None
    can_be_ended: bool  # its collectives on devices, by NCCL
    generation: int = 0
    joining: int = -1  # the generation that it is connecting to
    connections: Connections = field(default_factory=Connections)
    on_devices: DeviceCollectives = field(default_factory=DeviceCollectives)

    @property
    def choice(self) -> str:
        """What ranks that start later do as this one: the backend, and whether devices are connected at once."""
        return self.backend if self.device_id is None else f"{self.backend} at once"


_membership: _Membership | None = None


def init(backend: str | None = None, *, timeout_s: float | None = None) -> World:
    """Join the process group that the launcher prepared, and return this process's place in it.

    Every rank must call it; it blocks until all have, at most `timeout_s` seconds (default: torch's 30
    minutes, 10 for NCCL), which is also the limit of each later collective. Ranks come from RANK and
    WORLD_SIZE (dtrain run, torchrun), else from Open MPI's or SLURM's variables; without any, the process
    is a world of one with a group of its own. If torch has an accelerator with its own collectives (CUDA and
    ROCm with NCCL, XPU with xccl), the device is `cuda:LOCAL_RANK` (`cuda:0` if only one is visible), made current,
    and the backend NCCL, with gloo for CPU tensors. NCCL connects at once, unless ranks of a host see one device, which
    they may share; a user's `new_group()` of some ranks then splits the group, which all ranks must do at once.
    Otherwise the device is the CPU, and the backend `shm` if ranks share the memory of a host, which they find out by
    trying, else gloo. `backend="gloo"` always stays on the CPU and never uses shm. The variable DTRAIN_BACKEND, the
    same on every rank, is the default of `backend`.

    A second call returns the same object, also for "gloo" if the first has chosen shm. A default group that already
    exists is used and not closed at exit. Raises LaunchEnvironmentError for an inconsistent environment, on all ranks
    if their backends differ and some were given none; RendezvousError if the ranks cannot meet.
    """
    global _world
    if _world is not None and dist.is_initialized():
        if backend not in (None, _world.backend) and (backend, _world.backend) != ("gloo", SHM):
            raise ArgumentError(
                f"init(backend={backend!r}), but this process already joined with {_world.backend!r}: give the first "
                "init() this backend, or omit it here"
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
    """Describe a default group created by other code; its rank and size count, not the environment's."""
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
        # The code that created it has chosen the device, perhaps not by LOCAL_RANK, or else the current one.
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        if bound is not None and bound.type == accelerator and bound.index is not None:
            torch.accelerator.set_device_index(bound.index)
        device = torch.device(accelerator, torch.accelerator.current_device_index())
    return world_at(placement, device, backend)


def _join(placement: Placement, backend: str | None, timeout_s: float | None, device: torch.device) -> str:
    """Create the default group; return its backend, which the ranks choose together if None is given."""
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
        if is_replacement:  # the store has the others' choice
            backend, _, how = store.get(_BACKEND_KEY).decode().partition(" ")
            at_once = bool(how)
            leave_errors(device, backend)
        else:
            leave_errors(device, backend)  # before the ranks compare what it sets
            backend, at_once = agree_on_backend(placement, backend, device, first, timeout)
        if SHM in words_of(backend):
            register()
        eager = device if at_once else None
        member = _Membership(placement, store, backend, given, eager, can_be_ended(words_of(backend)))
        if is_replacement:
            make_pending_group(store, placement.rank, placement.world_size, partial(set_restart_policy, 0))
            member.generation = -1  # no member of one yet
        else:
            if can_replace() and placement.rank == 0:
                store.set(_BACKEND_KEY, member.choice)
            _connect(member, first)
        _membership = member if is_by_address else None
        if "nccl" in words_of(backend) and placement.world_size > 1 and leaves_errors() and device_recorder():
            device_watch.start(placement.rank, lambda: member.on_devices.has_ended)
    except (RendezvousError, LaunchEnvironmentError):
        raise
    except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
        if is_interrupt(error):
            raise
        meeting_point = f" at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if is_by_address else ""
        how = "" if backend is None else f" with backend {backend!r}"
        raise RendezvousError(
            f"rank {placement.rank} of {placement.world_size} could not join the others{meeting_point}{how}: {error}"
        ) from error
    atexit.register(leave)
    return backend


def _connect(member: _Membership, store: Store) -> None:
    """Create the default group with the other ranks."""
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
    """Return the generation of the default group, -1 before a replacement has joined one.

    None if there are no generations: the launcher announces none, `init` did not create the group, or it moves tensors
    on devices in a way that cannot be ended (`DeviceCollectives`).
    """
    if _membership is None or not can_replace() or not dist.is_initialized():
        return None
    return _membership.generation if is_on_host() or _membership.can_be_ended else None


def is_on_host() -> bool:
    """Return whether the group that `init` has created moves tensors in host memory only."""
    return _membership is not None and words_of(_membership.backend) <= {"cpu", "gloo", SHM}


def lacks_error_handling() -> bool:
    """Return whether TORCH_NCCL_ASYNC_ERROR_HANDLING, not 0 on this rank, is the only obstacle to generations."""
    if _membership is None or not can_replace() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return current_generation() is None and words_of(_membership.backend) == NCCL_BESIDE_GLOO


def break_connections() -> None:
    """Make the collectives that this process waits for fail, here and on the other ranks. May be called by any thread.

    The group is unusable afterwards.
    """
    if _membership is None:
        return
    number, on_devices = _membership.on_devices.number, False
    _membership.connections.break_all()  # first: a backend may wait for what hangs in them
    group = dist.group.WORLD
    if group is not None:
        on_devices = any(device.type != "cpu" and not is_by_gloo(group, device) for device in device_types_of(group))
        try:
            backend_of(group, torch.device("cpu")).abort()
        except (RuntimeError, AttributeError) as error:  # a backend without `abort`
            if is_interrupt(error):
                raise
    if on_devices:
        _membership.on_devices.end(number)
    if (joining := _membership.joining) >= 0:
        timer = threading.Timer(_CONNECT_S, _end_if_connecting, [_membership, joining])
        timer.daemon = True
        timer.start()


def _end_if_connecting(member: _Membership, number: int) -> None:
    """End this process if it is still connecting to generation `number`, so that it is replaced.

    gloo keeps waiting for a rank that died while connecting, even if connections break, and a store's client for a host
    that is off.
    """
    if member.joining == number:
        print(f"ddp: rank {member.placement.rank} waits for a rank that is gone, and ends", file=sys.stderr, flush=True)
        os._exit(1)


def settle(devices: Collection[torch.device]) -> bool:
    """Wait for the work queued on the current streams of devices; return False if that is not possible.

    Raises CollectiveError if collectives of this process were ended before, and may have left undefined values there.
    """
    return not devices or _membership is None or _membership.on_devices.settle(devices)


def rejoin(
    number: int, variables: Mapping[str, str], is_over: Callable[[], bool], devices: Collection[torch.device] = ()
) -> bool:
    """Create the default group again, as generation `number`; return whether that succeeded.

    `variables` are environment variables that may change with it: this rank, the size of the world, the store's
    address. `devices` are those on which it will communicate. Returns False once `is_over` reports a newer generation:
    call again with that. Users of the old group have released it by then. Blocks until all ranks have called it; raises
    RendezvousError if they do not come.
    """
    member = _membership
    assert member is not None
    if not is_pending(dist.group.WORLD):
        member.on_devices.let_go(devices)
    _drop_group()
    reset_group_numbers()  # a group that could not connect was not destroyed
    member.on_devices.begin()
    member.generation, member.joining = -1, number
    try:
        _take_place(member, variables)
        placement = member.placement
        limit_s = (member.timeout or _TIMEOUT).total_seconds()
        prefix = f"generation/{number}"
        member.connections = Connections()
        # Broken with the other connections, so that this process does not wait in vain at a store that is silent.
        own = member.connections.clone(member.store, int(os.environ["MASTER_PORT"]))
        if is_over():  # announced before there was a connection to break
            return False
        member.joining = -1  # a replacement may take any time to start
        if not meet(PrefixStore(f"{prefix}/here", own), placement.rank, placement.world_size, is_over, limit_s):
            return False
        member.joining = number
        if placement.rank == 0:  # else watchdogs of this group would end on the word of those of the last one
            own.delete_key(_DUMP_KEY)
        hook = sys.excepthook
        try:
            _connect(member, PrefixStore(f"{prefix}/default_pg", own))
            member.on_devices.connect(devices)
        finally:
            sys.excepthook = hook  # torch has wrapped it again
    except DdpError:
        raise
    except (RuntimeError, ValueError) as error:
        if is_interrupt(error):
            raise
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
    """Update the environment and the World of this process to its new rank."""
    if not variables:
        return
    os.environ.update(variables)
    member.placement = placement = read_placement(os.environ)
    # Even at the same address there may be another store now, and a host without power has closed no connection.
    member.store = store_at_address(placement, member.timeout or _TIMEOUT)
    member.store.set(_BACKEND_KEY, member.choice)
    if _world is not None:
        now = world_at(placement, _world.device, _world.backend)
        for name, value in vars(now).items():
            object.__setattr__(_world, name, value)  # the user holds this object


def own_store(number: int) -> Store:
    """Return a generation's part of the store, on a connection of its own for one thread."""
    assert _membership is not None
    return PrefixStore(f"generation/{number}", clone(_membership.store))


def note_finished() -> None:
    """Announce to processes that may still come that this rank, and so all others, will meet no one any more."""
    if _membership is not None and _membership.placement.rank == 0:
        _membership.store.set(_FINISHED_KEY, "")


def has_finished() -> bool:
    """Return whether the others have announced that they finished."""
    return _membership is not None and bool(_membership.store.check([_FINISHED_KEY]))


def refuse(number: int, why: str) -> None:
    """Notify ranks that wait for this one in generation `number` that it will not come. May be called by any thread.

    `why` continues the sentence "rank N ...".
    """
    if _membership is not None:
        refuse_to_meet(PrefixStore("here", own_store(number)), f"rank {_membership.placement.rank} {why}")


def _drop_group() -> None:
    """Release the group, in any state."""
    for owner, let_go in list(_owners.items()):
        let_go(owner)
    groups = open_groups()
    if dist.is_initialized():
        inspect.unwrap(dist.destroy_process_group)()  # under dtrain a wrapper keeps the groups for a while
    release_default_group()
    gc.collect()
    end_groups(groups)


T = TypeVar("T")
_owners: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def before_leaving(owner: T, let_go: Callable[[T], None]) -> None:
    """Call `let_go(owner)` before the group is closed at exit, if `owner` still lives then."""
    _owners[owner] = let_go


def communicating() -> list[Any]:
    """Return the living owners registered by `before_leaving`."""
    return list(_owners)


def leave() -> None:
    """Close the group at exit, unless the process ends with an error: closing may wait for a rank that is gone.

    A group ends its threads with the last reference to it. During the interpreter's teardown, such a thread may want
    the interpreter's lock after it is gone: 2 of 24 runs aborted like that, with torch 2.13.
    """
    if not dist.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    world_size = dist.get_world_size()
    _drop_group()
    leave_file(world_size)
