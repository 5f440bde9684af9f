"""Facts of an examiner on its host, as dataclasses that decode.py reads from an Answer (protocol/two_way.py)."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.protocol.reports import Facts


@dataclass(frozen=True)
class Gpu:
    """A card as the driver reports it. Unknown values are None; `lost` is the reason why it cannot be used at all."""

    index: int
    lost: str = ""
    uuid: str = ""
    name: str = ""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    busy_percent: int | None = None
    processes: tuple[str, ...] = ()  # "pid 812 (python, of ann)"
    ecc_errors: int | None = None  # uncorrectable ones since the driver was loaded
    pending: str = ""  # a repair that waits for a reset
    slowed: str = ""  # why the driver holds its clock down
    persistence: bool | None = None
    mig: bool | None = None


@dataclass(frozen=True)
class Driver:
    """The driver's version and the newest CUDA that it supports; None if there is no driver, or not applicable.

    `vendor` is NVIDIA or AMD. `trouble` is the reason if torch was built for its GPUs, but it does not list them.
    """

    vendor: str = "NVIDIA"
    driver: str | None = None
    driver_cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    logged: tuple[tuple[float, str], ...] = ()  # errors of GPUs in the kernel's log, each with its age in seconds
    trouble: str = ""


@dataclass(frozen=True)
class Packages:
    """Versions; None if missing. `torch_cuda`: the CUDA (or `ROCm x`) that torch was built for."""

    torch: str | None = None
    torch_cuda: str | None = None
    nccl: str | None = None
    numpy: str | None = None


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    mtu: int | None
    speed_mbit: int | None


@dataclass(frozen=True)
class Disk:
    """A file system. `what` is `workdir`, `temporary files` or `/dev/shm`."""

    what: str
    path: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Limit:
    """A limit as of `ulimit`; -1 is unlimited."""

    name: str
    soft: int
    hard: int


@dataclass(frozen=True, kw_only=True)
class HostFacts(Packages, Driver):
    """All facts of a single host; `offered` is what its agent would report to a run.

    `machine` is equal for two names of one machine. `code` and `script` are beginnings of SHA-256 sums, of dtrain's
    files and of the script. `workdir_mark` is equal if the working directory is the same folder on shared storage.
    """

    hostname: str
    machine: str
    system: str
    kernel: str
    user: str
    uid: int
    umask: str
    locale: str
    python: str
    executable: str
    dtrain: str
    code: str
    ddp: str  # its folder
    offered: Facts
    gpus_inherited: bool  # the variable that lists the GPUs was set there
    cpu_count: int
    load: float
    memory_bytes: int
    memory_free_bytes: int
    disks: tuple[Disk, ...]
    limits: tuple[Limit, ...]
    script: str | None
    workdir_mark: str
    name_resolves_to: tuple[str, ...]
    gloo_interface: str
    interfaces: tuple[Interface, ...]


@dataclass(frozen=True)
class Clock:
    """The offset of a host's clock ahead of ours, plus or minus `uncertainty_s`."""

    offset_s: float
    uncertainty_s: float
    round_trip_s: float


@dataclass(frozen=True)
class Listening:
    """The address on which an examiner listens. `store_problem`: why it cannot listen on the store's port."""

    address: str
    port: int
    store_port: int = 0  # 0: it does not listen there
    store_problem: str = ""


@dataclass(frozen=True)
class Target:
    """A connection to try, from one host to the address of another; the hosts by name."""

    source: str
    to: str
    address: str
    port: int


@dataclass(frozen=True)
class Probe(Target):
    """The result of a connection. `problem` is empty if data came back; otherwise `reason` has details.

    `problem`: refused, no answer, no route, stranger (something else answers), no large packets, other.
    """

    problem: str = ""
    reason: str = ""
    round_trip_s: float = 0.0
    local: str = ""
    interface: str = ""
    mtu: int = 0  # of the path
