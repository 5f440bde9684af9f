"""Which rank runs on which host, with which GPUs and processors: a pure function of what the hosts have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.devices import share
from launcher.errors import PlacementError

__all__ = ["HostOffer", "Placement", "WorkerPlace", "place"]


@dataclass(frozen=True)
class HostOffer:
    """What one host has for this job. `gpus` are ids in the order in which workers get them."""

    name: str
    slots: int | None
    gpus: tuple[str, ...]
    gpus_verified: bool
    gpu_variable: str
    cores: tuple[int, ...]
    cpu_limit: int
    max_slots: int | None = None  # None: `slots`; 0: no limit

    @property
    def limit(self) -> int | None:
        return self.slots if self.max_slots is None else self.max_slots or None


@dataclass(frozen=True)
class WorkerPlace:
    """The place of one worker.

    `visible` is the value of the GPU variable, None where it is left as it is; `gpus` are the worker's own. `cores` are
    the processors that make its fair share; workers are not pinned to them. `threads` is that share, at least 1.
    """

    rank: int
    local_rank: int
    node_rank: int
    host: str
    gpus: tuple[str, ...]
    visible: str | None
    gpu_variable: str
    cores: tuple[int, ...]
    threads: int


@dataclass(frozen=True)
class Placement:
    """All workers, ranks dense in the order of the hosts; `per_host` counts them."""

    workers: tuple[WorkerPlace, ...]
    per_host: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.workers)


def place(
    offers: Sequence[HostOffer],
    *,
    nproc: int | str | None,
    gpus_per_proc: int | None = None,
    oversubscribe: bool = False,
) -> Placement:
    """Place the workers. Raises PlacementError naming every host on which they do not fit."""
    counts = [_count(offer, nproc, gpus_per_proc) for offer in offers]
    problems = [
        problem
        for offer, count in zip(offers, counts, strict=True)
        if (problem := _misfit(offer, count, nproc, gpus_per_proc, oversubscribe)) is not None
    ]
    if problems:
        raise PlacementError("\n".join(problems))
    workers: list[WorkerPlace] = []
    for node_rank, (offer, count) in enumerate(zip(offers, counts, strict=True)):
        for local_rank in range(count):
            workers.append(_worker(offer, count, len(workers), local_rank, node_rank, nproc, gpus_per_proc))
    return Placement(tuple(workers), tuple(counts))


def _count(offer: HostOffer, nproc: int | str | None, gpus_per_proc: int | None) -> int:
    by_gpu = len(offer.gpus) // (gpus_per_proc or 1)
    if isinstance(nproc, int):
        return nproc
    if nproc == "gpu":
        return by_gpu
    if nproc == "cpu":
        return offer.cpu_limit
    if nproc == "auto":
        return by_gpu if offer.gpus else offer.cpu_limit
    if offer.slots is not None:
        return offer.slots
    return by_gpu if offer.gpus and offer.gpus_verified else 1


def _misfit(
    offer: HostOffer, count: int, nproc: int | str | None, gpus_per_proc: int | None, oversubscribe: bool
) -> str | None:
    if count == 0:
        wanted = (
            f"a worker needs {gpus_per_proc} GPUs (--gpus-per-proc)" if gpus_per_proc else "one worker for each GPU"
        )
        return f"{offer.name}: {wanted}, but it has {len(offer.gpus) or 'none'}"
    if offer.limit is not None and count > offer.limit:
        return f"{offer.name}: {count} workers, but its entry in the host list has {offer.limit} slots"
    if not _uses_gpus(offer, count, nproc, gpus_per_proc):
        needed = count * (gpus_per_proc or 0)
        if needed > len(offer.gpus) and not oversubscribe:
            return f"{offer.name}: --gpus-per-proc {gpus_per_proc} needs {needed} GPUs, it has {len(offer.gpus)}"
        return None
    needed = count * (gpus_per_proc or 1)
    if needed > len(offer.gpus) and not oversubscribe:
        return (
            f"{offer.name}: {count} workers need {needed} GPUs, it has {len(offer.gpus)} "
            f"({', '.join(offer.gpus)}); use fewer with --nproc-per-node, or share them with --oversubscribe"
        )
    return None


def _uses_gpus(offer: HostOffer, count: int, nproc: int | str | None, gpus_per_proc: int | None) -> bool:
    """Ids that only the environment names are handed out where they suffice, but they limit nothing."""
    if nproc == "cpu" and gpus_per_proc is None:
        return False
    return bool(offer.gpus) and (offer.gpus_verified or count * (gpus_per_proc or 1) <= len(offer.gpus))


def _worker(
    offer: HostOffer,
    count: int,
    rank: int,
    local_rank: int,
    node_rank: int,
    nproc: int | str | None,
    gpus_per_proc: int | None,
) -> WorkerPlace:
    own: tuple[str, ...] = ()
    visible: str | None = None
    if _uses_gpus(offer, count, nproc, gpus_per_proc):
        size = min(gpus_per_proc or 1, len(offer.gpus))  # CUDA shows none at all if one is listed twice
        own = tuple(offer.gpus[(local_rank * size + k) % len(offer.gpus)] for k in range(size))
        # By default each worker sees its host's whole list in slot order: `cuda:LOCAL_RANK` is then its own. But of MIG
        # slices CUDA shows a process the first one alone: given the whole list, all workers would share that one.
        whole = gpus_per_proc is None and not any(gpu.startswith("MIG-") for gpu in offer.gpus)
        visible = ",".join(offer.gpus if whole else own)
    elif offer.gpus_verified:
        visible = ""
    return WorkerPlace(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        host=offer.name,
        gpus=own,
        visible=visible,
        gpu_variable=offer.gpu_variable,
        cores=share(offer.cores, local_rank, count) or offer.cores,
        threads=max(1, offer.cpu_limit // count),
    )
