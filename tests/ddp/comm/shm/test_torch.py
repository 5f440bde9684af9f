"""What torch does with groups of the backend `shm`."""

from __future__ import annotations

import os
import resource
import warnings
from datetime import timedelta
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.training import batch, build, loss_of
from testbed.worlds import world
from torch import nn
from torch.distributed import TCPStore

from ddp.comm.objects import device_of
from ddp.comm.shared_memory import SharedSegment
from ddp.comm.shm.backend import connect, sharing
from ddp.comm.shm.other_devices import OtherDevices
from ddp.device_choice import agree_on_backend
from ddp.environment import Placement
from ddp.errors import ArgumentError, LaunchEnvironmentError, RendezvousError


def _store(name: str = "") -> Any:
    return dist.PrefixStore(f"{name}/", dist.distributed_c10d._get_default_store())


@world(2, backend="shm")
def test_functional_collectives_and_meshes_use_it() -> None:
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import DeviceMesh

    warnings.filterwarnings("ignore", ".* is deprecated. Please use")  # names that older torchs do not have otherwise
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = DeviceMesh("cpu", [*range(size)])
    group = mesh.get_group()
    summed = functional.all_reduce(torch.full((4,), float(rank)), "sum", group)
    assert (summed + 0 == sum(range(size))).all()
    whole = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    assert torch.equal(whole + 0, torch.arange(size).repeat_interleave(2).float())
    part = functional.reduce_scatter_tensor(torch.arange(float(size)), "sum", 0, group)
    assert (part + 0 == rank * size).all()


@world(3, backend="shm")
def test_a_device_mesh_moves_dtensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(36.0).view(12, 3)
    sharded: Any = distribute_tensor(whole, init_device_mesh("cpu", (3,)), [Shard(0)])
    assert sharded.to_local().shape == (4, 3)
    assert torch.equal(sharded.redistribute(placements=[Replicate()]).to_local(), whole)
    assert torch.equal((sharded + sharded).full_tensor(), 2 * whole)
    assert sharded.sum().full_tensor() == whole.sum()


@world(3, backend="shm")
def test_torchs_zero_optimizer_trains_to_one_process() -> None:
    with warnings.catch_warnings():  # torch.jit.script is deprecated
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, size = dist.get_rank(), dist.get_world_size()
    alone, net = build("mlp"), build("mlp")
    model = nn.parallel.DistributedDataParallel(net)
    whole, part = slice(2 * size), slice(2 * rank, 2 * rank + 2)
    for module, optimizer, rows in (
        (alone, torch.optim.Adam(alone.parameters(), lr=0.1), whole),
        (model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1), part),
    ):
        for step in range(3):
            x, y = batch(step, 2 * size)
            optimizer.zero_grad()
            loss_of(module, x[rows], y[rows]).backward()
            optimizer.step()
    for mine, other in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


@world(3, backend="shm")
def test_some_ranks_have_a_group_of_their_own() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([0, size - 1]), dist.new_group([size - 1])]
    tensor = torch.ones(3)
    if rank in (0, size - 1):
        assert dist.get_backend(groups[0]) == "shm"
        dist.all_reduce(tensor, group=groups[0])
        dist.broadcast(tensor, size - 1, group=groups[0])
        assert (tensor == 2).all()
    if rank == size - 1:
        dist.all_reduce(tensor, group=groups[1])
    dist.barrier()
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    dist.all_reduce(tensor)


@world(2, backend=("cpu:shm,cuda:gloo", "cuda:gloo,cpu:shm"))
def test_other_devices_have_their_backends() -> None:
    """There is no such device here; its backend is made, and the whole group ends without it, too."""
    group: Any = dist.group.WORLD
    assert "cpu:shm" in dist.get_backend_config()
    assert [device.type for device in group._device_types] == ["cpu", "cuda"]
    unknown: Any = object()  # as a group is to torch while it makes it
    assert OtherDevices(None, None).device_types(unknown) == []
    found: list[Any] = [None] * 2
    dist.all_gather_object(found, dist.get_rank())
    assert found == [0, 1]
    assert group._get_backend(torch.device("cuda")).name() == "gloo"
    with pytest.raises(RuntimeError, match="none on xpu"):
        group._get_backend(torch.device("xpu"))
    part = dist.new_group([0])
    if dist.get_rank() == 0:
        assert part._get_backend(torch.device("cuda")).name() == "gloo"
        assert device_of(part).type == "cpu"
        dist.destroy_process_group(part)
        assert device_of(part).type == "cpu", "what is called then has the group's own error"
    dist.barrier()


@world(2, backend="shm")
def test_sparse_tensors_go_by_gloo() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank, 0]]), [1.0, 2.0], (size,), check_invariants=True)
    dist.all_reduce(sparse)
    wanted = torch.ones(size)
    wanted[0] += 2 * size
    assert torch.equal(sparse.to_dense(), wanted)


@world(2, backend="shm")
def test_torch_checks_nothing_else_in_detail() -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.all_reduce(tensor := torch.ones(3), group=dist.new_group(backend="shm"))
    assert (tensor == 2).all()


@world(3, backend="shm")
def test_tensors_of_any_kind() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parameter = nn.Parameter(torch.full((3, 4), float(rank)))
    dist.all_reduce(parameter)
    assert (parameter == sum(range(size))).all()
    dist.broadcast(parameter, 0)
    with torch.inference_mode():
        inferred = torch.ones(5)
        works = [dist.all_reduce(inferred, async_op=True)]
    works.append(dist.all_reduce(torch.ones(3), async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    assert (inferred == size).all()
    whole = torch.zeros(4, 6)
    dist.all_reduce(whole[1:3, 2:5].fill_(1))
    assert whole.sum() == 6 * size
    assert (whole[1:3, 2:5] == size).all()
    turned = torch.ones(3, dtype=torch.complex64).mul(1j)
    dist.all_reduce(turned)
    assert torch.equal(turned, torch.full((3,), size * 1j, dtype=torch.complex64))
    for op, dtype in ((dist.ReduceOp.BAND, torch.float32), (dist.ReduceOp.AVG, torch.int32)):
        with pytest.raises(ArgumentError, match="convert the tensor first"):
            dist.all_reduce(torch.ones(3, dtype=dtype), op)
    with pytest.raises(ArgumentError, match="one a rank"):
        dist.all_gather([torch.ones(3)] * (size + 1), torch.ones(3))
    dist.barrier()  # a wrong argument has broken nothing


@world(3)
def test_ranks_that_share_no_memory_go_by_gloo() -> None:
    """The last rank cannot open the others' memory, nor they its: as if it were on another host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    limit = timedelta(seconds=30)
    assert sharing(_store("all"), rank, size, limit) == [tuple(range(size))]
    opened = SharedSegment.open.__func__  # type: ignore[attr-defined]

    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())

    def of_same_host(cls: type[SharedSegment], ticket: Any, **options: Any) -> SharedSegment | None:
        is_apart = ticket["pid"] == pids[-1]
        return opened(cls, ticket, **options) if is_apart == (rank == size - 1) else None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SharedSegment, "open", MethodType(of_same_host, SharedSegment))
        hosts = sharing(_store("some"), rank, size, limit)
        assert hosts == [tuple(range(size - 1)), (size - 1,)]
        group = dist.new_group(backend="shm")
        dist.all_reduce(mine := torch.full((100_000,), float(rank)), group=group)
        assert (mine == sum(range(size))).all()
        dist.destroy_process_group(group)
    dist.barrier()


def _backend(store: Any, backend: str | None = None, device: str = "cpu") -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    here = Placement(rank, size, rank, size, None, "a test")
    return agree_on_backend(here, backend, torch.device(device), store, timedelta(seconds=30))[0]


@world(2, 3)
def test_one_store_serves_several_times() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [served.port if served else 0]
    dist.broadcast_object_list(port)
    for store in (_store("store"), served or TCPStore("127.0.0.1", port[0])):
        for _ in range(3):
            assert _backend(store) == "shm"
            with pytest.MonkeyPatch.context() as patched:
                if rank == size - 1:
                    patched.setattr(SharedSegment, "open", lambda *_, **__: None)
                # The first two still share, where there are three.
                assert _backend(store) == ("shm" if size > 2 else "gloo")
    dist.barrier()  # or rank 0's ends before the others have left


@world(3)
def test_a_rank_without_memory_is_known_to_all() -> None:
    """Its limits or an old sandbox do not let it: all take gloo, or all have the error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = _store("store")
    limit = timedelta(seconds=30)

    def refuse(*_: Any) -> None:
        raise PermissionError("refused")

    for target, name in ((os, "pidfd_open"), (os, "memfd_create")):
        with pytest.MonkeyPatch.context() as patched:
            if rank == size - 1:
                patched.setattr(target, name, refuse)
            assert sharing(store, rank, size, limit) == [tuple(range(size - 1))]
            assert _backend(store) == "gloo"
            with pytest.raises(RendezvousError, match=rf"but rank {size - 1} cannot make memory .*; use gloo"):
                dist.new_group(backend="shm")
            if name == "pidfd_open":  # a group of one needs none
                alone = connect(store, 0, 1, limit)
                alone.allreduce([torch.ones(3)]).wait()
                alone.shutdown()
    assert sharing(store, rank, size, limit) == [tuple(range(size))]
    dist.barrier()


@world(2)
def test_what_is_tried_is_as_large_as_what_is_needed() -> None:
    """As with `ulimit -f`: a segment of a page is made, but not that of a group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        SharedSegment(4096).close()
    assert _backend(_store("store")) == "gloo"
    dist.barrier()


@world(3)
def test_unlike_devices_are_an_error_on_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    store = _store("store")
    is_last = rank == size - 1
    with pytest.raises(LaunchEnvironmentError, match=r"no backend and found cuda \(ranks 0-1\); no .* cpu \(rank 2\)"):
        _backend(store, device="cpu" if is_last else "cuda")
    with pytest.raises(LaunchEnvironmentError, match=r"no backend and found cpu \(ranks 0-1\); 'gloo' \(rank 2\)"):
        _backend(store, "gloo" if is_last else None)
    chosen = "gloo" if is_last else "cpu:gloo,cuda:nccl"  # the user's own choice
    assert _backend(store, chosen) == chosen
    assert _backend(store, device="cuda") == "cpu:gloo,cuda:nccl"
