"""Places ranks on hosts, with their GPUs and processors: a pure function of the resources of the hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from launcher.errors import PlacementError
from launcher.frozen import dataclass, replace
from launcher.hosts.host import Host
from launcher.machine.processors import share
from launcher.placement.job_spec import JobSpec
from launcher.placement.roles import DEFAULT_ROLE, Roles
from launcher.protocol.reports import Facts

NO_ROLES = Roles()


@dataclass(frozen=True)
class HostOffer:
    """The resources of one host for this job. `gpus` are ids in the order in which workers get them."""

    name: str
    slots: int | None
    gpus: tuple[str, ...]
    gpus_verified: bool
    gpu_variable: str
    cores: tuple[int, ...]
    cpu_limit: int
    max_slots: int | None = None  # None: `slots`; 0: no limit
    machine: str = ""  # offers with the same machine are tasks there, each with some of its workers
    room: int | None = None  # most workers that its `room_limit` allows
    room_limit: str = ""

    @classmethod
    def of(cls, host: Host, facts: Facts) -> HostOffer:
        """Combine a host's entry in the list with its facts. Keeps only GPUs that the user has chosen."""
        gpus = tuple(facts.gpus)
        if host.chosen is not None:
            gpus = tuple(gpus[place] for place in host.chosen if place < len(gpus))
        return cls(
            name=host.name,
            slots=facts.slots or host.slots,
            max_slots=host.max_slots,
            gpus=gpus,
            gpus_verified=facts.gpus_verified,
            gpu_variable=facts.gpu_variable,
            cores=tuple(facts.cores),
            cpu_limit=facts.cpu_limit,
            machine=facts.machine,
            room=facts.room,
            room_limit=facts.room_limit,
        )

    @property
    def limit(self) -> int | None:
        return self.slots if self.max_slots is None else self.max_slots or None


@dataclass(frozen=True)
class WorkerPlace:
    """The place of one worker. `local_rank` counts the workers of its role on its host.

    `visible` is the value of the GPU variable; None: it is not set. `gpus` are the worker's own. `cores` are the
    processors of its fair share; workers are not pinned to them. `threads` is the size of that share, at least 1.
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
    local_world_size: int
    role: str = DEFAULT_ROLE
    role_rank: int = 0
    role_world_size: int = 1
    needed: bool = True  # the run waits until it ends
    world_rank: int = 0  # among workers with the same command, which have a world of their own
    world_size: int = 1
    bound: bool = False  # SLURM or MIG restricts it to its own GPUs, without an option that requests that


@dataclass(frozen=True)
class Placement:
    """All workers, with dense ranks: ordinary ones in the order of the hosts, then those of other roles.

    `per_host` is their number by offer, `nodes` the number of machines.
    """

    workers: tuple[WorkerPlace, ...]
    per_host: tuple[int, ...]
    nodes: int
    ordinary: int  # number of ordinary workers

    @property
    def world_size(self) -> int:
        return len(self.workers)


def place(
    offers: Sequence[HostOffer],
    *,
    nproc: int | str | None,
    gpus_per_proc: int | None = None,
    oversubscribe: bool = False,
    isolate: bool = False,
    roles: Roles = NO_ROLES,
) -> Placement:
    """Place the workers. Raises PlacementError that names every host on which they do not fit.

    With `isolate`, each worker sees only its own GPUs. Other roles' processes are distributed in turn, and see no GPU.
    """
    counts = [_count(offer, nproc, gpus_per_proc) for offer in offers]
    _refuse(
        {
            offer.name: problem
            for offer, count in zip(offers, counts, strict=True)
            if (problem := _misfit(offer, count, nproc, gpus_per_proc, oversubscribe)) is not None
        }
    )
    layout = _Layout(offers, counts, [place % len(offers) for place in range(sum(r.count for r in roles.others))])
    _refuse(
        {
            offer.name: f"{_counted(count, 'worker', 'is', 'are')} too many for {offer.room_limit}; "
            f"there is room for {offer.room}"
            for offer, count in zip(offers, layout.totals, strict=True)
            if offer.room is not None and count > offer.room
        }
    )
    workers = [
        _worker(layout, place, local_rank, nproc, gpus_per_proc, isolate=isolate)
        for place, count in enumerate(counts)
        for local_rank in range(count)
    ]
    workers = _with_roles(workers, roles)
    for role in roles.others:
        workers += _others(layout, role.name, role.count, first=len(workers), needed=roles.needs(role.name))
    return Placement(tuple(_with_worlds(workers, roles)), tuple(layout.totals), layout.nodes, sum(counts))


def place_job(spec: JobSpec, offers: Sequence[HostOffer]) -> Placement:
    """Place the workers of a run on its hosts. Raises PlacementError."""
    placement = place(
        offers,
        nproc=spec.nproc,
        gpus_per_proc=spec.gpus_per_proc,
        oversubscribe=spec.oversubscribe,
        isolate=spec.virtual_local_rank,
        roles=spec.roles,
    )
    if spec.command.is_standard_input and placement.world_size > 1:
        raise PlacementError(
            f"{spec.command.target} is the script of one worker only: the others' standard input is empty, and there "
            f"are {placement.world_size} workers; save the script to a file, or use --nproc-per-node 1 on one host"
        )
    return placement


class _Layout:
    """Numbers of workers: `counts` are ordinary workers by offer, `others` the offers of all others in their order.

    Also by offer: the `node_rank` of its machine; `before`, the number of ordinary workers of earlier offers of that
    machine; `on_machine`, the number of all of them on it; `totals`, with the other roles; and `sharing`, the number of
    workers of all offers of that machine with the same processors.
    """

    def __init__(self, offers: Sequence[HostOffer], counts: Sequence[int], others: Sequence[int]) -> None:
        self.offers, self.counts, self.others = offers, counts, others
        machines = [offer.machine or f"offer {place}" for place, offer in enumerate(offers)]
        order = {machine: node for node, machine in enumerate(dict.fromkeys(machines))}
        self.nodes = len(order)
        self.node_rank = [order[machine] for machine in machines]
        self.before: list[int] = []
        self.first_rank = [0, *accumulate(counts)]
        so_far: Counter[int] = Counter()
        for node, count in zip(self.node_rank, counts, strict=True):
            self.before.append(so_far[node])
            so_far[node] += count
        self.on_machine = [so_far[node] for node in self.node_rank]
        more = Counter(others)
        self.totals = [count + more[place] for place, count in enumerate(counts)]
        processors = [(node, offer.cores) for node, offer in zip(self.node_rank, offers, strict=True)]
        users: Counter[tuple[int, tuple[int, ...]]] = Counter()
        for own, total in zip(processors, self.totals, strict=True):
            users[own] += total
        self.sharing = [users[own] for own in processors]

    def threads(self, place: int) -> int:
        return max(1, self.offers[place].cpu_limit // max(1, self.sharing[place]))


def _with_roles(workers: list[WorkerPlace], roles: Roles) -> list[WorkerPlace]:
    """Assign roles to the ordinary workers."""
    lead = 1 if roles.first else 0
    named = []
    for worker in workers:
        first = worker.rank < lead
        role = roles.first if first else roles.worker
        size = lead if first else len(workers) - lead
        rank = worker.rank if first else worker.rank - lead
        named.append(replace(worker, role=role, role_rank=rank, role_world_size=size, needed=roles.needs(role)))
    return named


def _with_worlds(workers: list[WorkerPlace], roles: Roles) -> list[WorkerPlace]:
    """Number the workers of each command separately: workers of another would never join their rendezvous."""
    worlds = [worker.role if roles.command(worker.role) else "" for worker in workers]
    sizes, seen = Counter(worlds), Counter[str]()
    numbered = []
    for worker, world in zip(workers, worlds, strict=True):
        numbered.append(replace(worker, world_rank=seen[world], world_size=sizes[world]))
        seen[world] += 1
    return numbered


def _others(layout: _Layout, role: str, count: int, *, first: int, needed: bool) -> list[WorkerPlace]:
    """Place the processes of a role other than the ordinary workers; their ranks start at `first`."""
    start = first - sum(layout.counts)
    places = layout.others[start : start + count]
    own, seen = Counter(places), Counter[int]()
    workers = []
    for role_rank, place in enumerate(places):
        offer = layout.offers[place]
        workers.append(
            WorkerPlace(
                rank=first + role_rank,
                local_rank=seen[place],
                node_rank=layout.node_rank[place],
                host=offer.name,
                gpus=(),
                visible="" if offer.gpus else None,
                gpu_variable=offer.gpu_variable,
                cores=offer.cores,
                threads=layout.threads(place),
                local_world_size=own[place],
                role=role,
                role_rank=role_rank,
                role_world_size=count,
                needed=needed,
            )
        )
        seen[place] += 1
    return workers


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


def _refuse(problems: Mapping[str, str]) -> None:
    """Raise PlacementError if there are any problems, by host."""
    if problems:
        from launcher.hosts.folding import lines_by_reason  # slow to import, and rarely needed

        raise PlacementError("\n".join(lines_by_reason(problems)))


def _misfit(
    offer: HostOffer, count: int, nproc: int | str | None, gpus_per_proc: int | None, oversubscribe: bool
) -> str | None:
    if count == 0:
        wanted = (
            f"a worker needs {_counted(gpus_per_proc, 'GPU')} (--gpus-per-proc)"
            if gpus_per_proc
            else "one worker for each GPU"
        )
        return f"{wanted}, but it has {len(offer.gpus) or 'none'}"
    if offer.limit is not None and count > offer.limit:
        slots = _counted(offer.limit, "slot")
        return f"{_counted(count, 'worker')}, but its entry in the host list has {slots}"
    if not _uses_gpus(offer, count, nproc, gpus_per_proc):
        needed = count * (gpus_per_proc or 0)
        if needed > len(offer.gpus) and not oversubscribe:
            gpus = _counted(needed, "GPU")
            return f"--gpus-per-proc {gpus_per_proc} needs {gpus}, it has {len(offer.gpus)}"
        return None
    if (gpus_per_proc or 1) > 1 and any(map(is_part, offer.gpus)):
        return (
            f"--gpus-per-proc {gpus_per_proc}, but a process can use one MIG slice (or tile) only, "
            f"and its GPUs are {', '.join(offer.gpus)}; use --gpus-per-proc 1, or whole GPUs"
        )
    needed = count * (gpus_per_proc or 1)
    if needed > len(offer.gpus) and not oversubscribe:
        return (
            f"{_counted(count, 'worker', 'needs', 'need')} {_counted(needed, 'GPU')}, "
            f"it has {len(offer.gpus)} "
            f"({', '.join(offer.gpus)}); use fewer with --nproc-per-node, or share them with --oversubscribe"
        )
    return None


def is_part(gpu: str) -> bool:
    """Return whether an id names a MIG slice."""
    return gpu.startswith("MIG-")


def _uses_gpus(offer: HostOffer, count: int, nproc: int | str | None, gpus_per_proc: int | None) -> bool:
    """Return whether workers get GPUs: ids known only from the environment are used if there are enough of them."""
    if nproc == "cpu" and gpus_per_proc is None:
        return False
    return bool(offer.gpus) and (offer.gpus_verified or count * (gpus_per_proc or 1) <= len(offer.gpus))


def _worker(
    layout: _Layout, place: int, index: int, nproc: int | str | None, gpus_per_proc: int | None, *, isolate: bool
) -> WorkerPlace:
    """Place the `index`-th ordinary worker of an offer."""
    offer, count = layout.offers[place], layout.counts[place]
    local_rank, on_machine = layout.before[place] + index, layout.on_machine[place]
    own: tuple[str, ...] = ()
    visible: str | None = None
    bound = False
    if _uses_gpus(offer, count, nproc, gpus_per_proc):
        size = min(gpus_per_proc or 1, len(offer.gpus))  # CUDA shows no GPU if one is listed twice
        # If a task sees enough GPUs for all workers of its machine, the tasks share them; else they are its own.
        bound = bool(offer.machine) and len(offer.gpus) < on_machine * size
        start = index if bound else local_rank
        own = tuple(offer.gpus[(start * size + k) % len(offer.gpus)] for k in range(size))
        # By default each worker sees its host's whole list in slot order: `cuda:LOCAL_RANK` is then its own. But CUDA
        # shows a process only the first of several MIG slices: given the whole list, all workers would share that one.
        in_parts = any(map(is_part, offer.gpus))
        bound = bound or (in_parts and gpus_per_proc is None)
        whole = gpus_per_proc is None and not isolate and not in_parts
        visible = ",".join(offer.gpus if whole else own)
    elif offer.gpus_verified:
        visible = ""
    return WorkerPlace(
        rank=layout.first_rank[place] + index,
        local_rank=local_rank,
        node_rank=layout.node_rank[place],
        host=offer.name,
        gpus=own,
        visible=visible,
        gpu_variable=offer.gpu_variable,
        cores=share(offer.cores, index, count) or offer.cores,
        threads=layout.threads(place),
        local_world_size=on_machine,
        bound=bound,
    )


def _counted(number: int, noun: str, *verb: str) -> str:
    """Format a count: `1 worker`, `2 workers`; `verb` is its singular and plural, which follows."""
    return " ".join([f"{number} {noun}{'' if number == 1 else 's'}", *verb[number != 1 :][:1]])
