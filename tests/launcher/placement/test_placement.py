"""Ranks on hosts: a pure function, tried with whatever hosts there may be."""

from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from launcher.errors import PlacementError
from launcher.hosts.folding import lines_by_reason
from launcher.placement.placement import HostOffer, Placement, WorkerPlace, place

CPU_HOST = HostOffer("a", None, (), False, "CUDA_VISIBLE_DEVICES", (0, 1, 2, 3), 4)
GPU_HOST = replace(CPU_HOST, gpus=("0", "1", "2", "3"), gpus_verified=True)

GPU_IDS = st.one_of(
    st.integers(0, 15).map(str),
    st.uuids().map(lambda uuid: f"GPU-{uuid}"),
    st.uuids().map(lambda uuid: f"MIG-{uuid}"),
)
CORES = st.lists(st.integers(0, 255), min_size=1, max_size=16, unique=True).map(lambda cores: tuple(sorted(cores)))


@st.composite
def offers(draw: st.DrawFn) -> list[HostOffer]:
    hosts = []
    for number in range(draw(st.integers(1, 5))):
        cores = draw(CORES)
        hosts.append(
            HostOffer(
                name=f"host{number}",
                slots=draw(st.none() | st.integers(1, 6)),
                gpus=tuple(draw(st.lists(GPU_IDS, max_size=6, unique=True))),
                gpus_verified=draw(st.booleans()),
                gpu_variable=draw(st.sampled_from(["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])),
                cores=cores,
                cpu_limit=draw(st.integers(1, len(cores))),
            )
        )
    return hosts


NPROC = st.one_of(st.none(), st.sampled_from(["gpu", "cpu", "auto"]), st.integers(1, 8))
GPUS_PER_PROC = st.none() | st.integers(1, 4)


@settings(deadline=None)
@given(offers(), NPROC, GPUS_PER_PROC, st.booleans())
def test_a_placement_is_consistent_or_every_misfit_is_named(
    hosts: list[HostOffer], nproc: int | str | None, gpus_per_proc: int | None, oversubscribe: bool
) -> None:
    def attempt(some: list[HostOffer]) -> Placement | PlacementError:
        try:
            return place(some, nproc=nproc, gpus_per_proc=gpus_per_proc, oversubscribe=oversubscribe)
        except PlacementError as error:
            return error

    alone = {host.name: attempt([host]) for host in hosts}
    misfits = {
        name: str(result).partition(": ")[2] for name, result in alone.items() if isinstance(result, PlacementError)
    }
    placement = attempt(hosts)
    if isinstance(placement, PlacementError):
        assert str(placement).splitlines() == lines_by_reason(misfits)
        return
    assert misfits == {}
    _check_ranks(placement, hosts)
    for worker in placement.workers:
        _check_gpus(worker, hosts[worker.node_rank], gpus_per_proc, oversubscribe)
        _check_processors(worker, hosts[worker.node_rank], placement)


def _check_ranks(placement: Placement, hosts: list[HostOffer]) -> None:
    workers = placement.workers
    assert [worker.rank for worker in workers] == list(range(placement.world_size))
    assert sum(placement.per_host) == placement.world_size
    assert len(placement.per_host) == len(hosts)
    by_host = [list(group) for _, group in groupby(workers, key=lambda worker: worker.node_rank)]
    assert [group[0].node_rank for group in by_host] == list(range(len(hosts)))
    for group, host, count in zip(by_host, hosts, placement.per_host, strict=True):
        assert [worker.local_rank for worker in group] == list(range(count))
        assert {worker.host for worker in group} == {host.name}
        assert count <= (host.slots or count)


def _check_gpus(worker: WorkerPlace, host: HostOffer, gpus_per_proc: int | None, oversubscribe: bool) -> None:
    listed = (worker.visible or "").split(",") if worker.visible else []
    assert set(worker.gpus) <= set(listed) <= set(host.gpus)
    assert len(set(listed)) == len(listed), "CUDA shows no device at all if one is listed twice"
    assert worker.gpu_variable == host.gpu_variable
    if host.gpus_verified:
        assert worker.visible is not None
    if not listed:
        return
    if gpus_per_proc is None and not any(gpu.startswith("MIG-") for gpu in host.gpus):
        assert tuple(listed) == host.gpus
    else:
        assert tuple(listed) == worker.gpus
    if not oversubscribe:
        assert len(worker.gpus) == (gpus_per_proc or 1)
        start = worker.local_rank * (gpus_per_proc or 1)
        assert worker.gpus == host.gpus[start : start + len(worker.gpus)], "cuda:LOCAL_RANK is its own"


def _check_processors(worker: WorkerPlace, host: HostOffer, placement: Placement) -> None:
    count = placement.per_host[worker.node_rank]
    assert set(worker.cores) <= set(host.cores)
    assert worker.cores
    assert worker.threads == max(1, host.cpu_limit // count)


# ---- how many ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "nproc", "count"),
    [
        (CPU_HOST, None, 1),
        (CPU_HOST, "cpu", 4),
        (CPU_HOST, "auto", 4),
        (CPU_HOST, 7, 7),
        (replace(CPU_HOST, cpu_limit=2), "cpu", 2),
        (replace(CPU_HOST, slots=3), None, 3),
        (GPU_HOST, None, 4),
        (GPU_HOST, "gpu", 4),
        (GPU_HOST, "auto", 4),
        (GPU_HOST, 3, 3),
        (replace(GPU_HOST, cpu_limit=2), "cpu", 2),
        (replace(GPU_HOST, slots=2), None, 2),
        (replace(GPU_HOST, gpus_verified=False), None, 1),
        (replace(GPU_HOST, gpus_verified=False), "auto", 4),
    ],
)
def test_how_many_workers_a_host_takes(host: HostOffer, nproc: int | str | None, count: int) -> None:
    assert place([host], nproc=nproc).per_host == (count,)


def test_hosts_may_be_unequal() -> None:
    hosts = [replace(GPU_HOST, slots=3), replace(CPU_HOST, name="b"), replace(GPU_HOST, name="c")]
    placement = place(hosts, nproc=None)
    assert placement.per_host == (3, 1, 4)
    assert [(w.rank, w.host, w.local_rank) for w in placement.workers][2:5] == [(2, "a", 2), (3, "b", 0), (4, "c", 0)]


@pytest.mark.parametrize(
    ("hosts", "nproc", "gpus_per_proc"),
    [
        ([GPU_HOST], 2, 3),
        ([replace(GPU_HOST, gpus=("0",))], 1, 3),
        ([CPU_HOST], 2, 3),
        ([replace(GPU_HOST, gpus=("0",))], None, 3),
        ([CPU_HOST], "gpu", None),
        ([replace(CPU_HOST, slots=2)], 3, None),
        ([replace(CPU_HOST, slots=1)], 2, None),
        ([replace(CPU_HOST, room=0, room_limit="limit")], 1, None),
        ([GPU_HOST, replace(GPU_HOST, name="b", gpus=tuple("012345")), replace(GPU_HOST, name="c")], 5, None),
        ([replace(CPU_HOST, name=f"n{k}", room=0, room_limit="limit") for k in range(4)], 1, None),
    ],
)
def test_what_does_not_fit(
    hosts: list[HostOffer], nproc: int | str | None, gpus_per_proc: int | None, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(PlacementError) as raised:
        place(hosts, nproc=nproc, gpus_per_proc=gpus_per_proc)
    assert str(raised.value) == snapshot


# ---- which GPUs ----------------------------------------------------------------------------------------------


def _visible(host: HostOffer, nproc: int | str | None, **options: int) -> list[str | None]:
    placement = place(
        [host],
        nproc=nproc,
        gpus_per_proc=options.get("gpus_per_proc"),
        oversubscribe=bool(options.get("oversubscribe")),
    )
    return [worker.visible for worker in placement.workers]


def test_by_default_a_worker_sees_its_host_s_whole_list() -> None:
    assert _visible(GPU_HOST, 2) == ["0,1,2,3", "0,1,2,3"]


def test_of_mig_slices_a_worker_sees_its_own() -> None:
    assert _visible(replace(GPU_HOST, gpus=("MIG-a", "MIG-b")), None) == ["MIG-a", "MIG-b"]


def test_with_gpus_per_proc_it_sees_its_own() -> None:
    assert _visible(GPU_HOST, None, gpus_per_proc=2) == ["0,1", "2,3"]
    assert _visible(GPU_HOST, "cpu", gpus_per_proc=1) == ["0", "1", "2", "3"]


def test_shared_gpus_go_round_and_are_never_listed_twice() -> None:
    two = replace(GPU_HOST, gpus=("5", "7"))
    assert _visible(two, 3, gpus_per_proc=1, oversubscribe=1) == ["5", "7", "5"]
    assert _visible(two, 2, gpus_per_proc=3, oversubscribe=1) == ["5,7", "5,7"]


def test_gpus_that_only_the_environment_names_limit_nothing() -> None:
    named = replace(GPU_HOST, gpus=("2", "3"), gpus_verified=False)
    assert _visible(named, 2) == ["2,3", "2,3"]
    assert _visible(named, 5) == [None] * 5
    assert _visible(named, "cpu") == [None] * 4


def test_workers_without_gpus_see_none_where_there_are_some() -> None:
    assert _visible(GPU_HOST, "cpu") == [""] * 4
    assert _visible(replace(CPU_HOST, gpus_verified=True), 2) == ["", ""]
    assert _visible(CPU_HOST, 2) == [None, None]
