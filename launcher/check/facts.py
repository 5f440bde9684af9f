"""What `dtrain check` asks of a host and what it is told, as data: made there by the examiner, read here by command.py.

It goes through the stream in an Answer (protocol.py); `read` takes nothing else than these fields.
"""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

from launcher.errors import ProtocolError
from launcher.protocol import Facts

__all__ = [
    "FORMAT", "Dialled", "Disk", "Gpu", "HostFacts", "Interface", "Limit", "Listening", "Target", "read",
]  # fmt: skip

FORMAT = 1  # of `dtrain check --json`

T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    """A card as the driver sees it. What it does not tell is None; `lost` says why it cannot be used at all."""

    index: int
    lost: str = ""
    uuid: str = ""
    name: str = ""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    busy_percent: int | None = None
    processes: tuple[str, ...] = ()  # "pid 812 (python, of ann)"
    ecc_errors: int | None = None  # that could not be corrected, since the driver was loaded
    pending: str = ""  # a repair that waits for a reset
    persistence: bool | None = None
    mig: bool | None = None


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
    """One of `ulimit`'s, -1 for none."""

    name: str
    soft: int
    hard: int


@dataclass(frozen=True)
class HostFacts:
    """All that is asked of a host without the others.

    `machine` is the same for two names of one machine. `code` and `script` are beginnings of SHA-256 sums, of dtrain's
    own files and of the script. `workdir_mark` is the same where the working directory is the same folder on shared
    storage. `gpu_ids` are those that a run may hand out, before the user's choice among them. `problems` are why a run
    cannot start here.
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
    torch: str | None
    torch_cuda: str | None
    nccl: str | None
    numpy: str | None
    driver: str | None
    driver_cuda: str | None
    gpus: tuple[Gpu, ...]
    gpu_ids: tuple[str, ...]
    gpu_variable: str
    gpus_verified: bool
    gpus_inherited: bool  # the variable was set there
    slots: int | None
    room: int | None
    room_limit: str
    cpu_count: int
    cores: tuple[int, ...]
    cpu_limit: int
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
    problems: tuple[str, ...]

    def offered(self) -> Facts:
        """Return the part of it that a run asks for."""
        return Facts(
            gpus=list(self.gpu_ids),
            gpu_variable=self.gpu_variable,
            gpus_verified=self.gpus_verified,
            cores=list(self.cores),
            cpu_limit=self.cpu_limit,
            problems=list(self.problems),
            time=0.0,
            slots=self.slots,
            room=self.room,
            room_limit=self.room_limit,
        )


@dataclass(frozen=True)
class Listening:
    """Where an examiner waits for the others. `store_problem`: why the store's port cannot be had."""

    address: str
    port: int
    store_port: int = 0  # 0: it does not listen there
    store_problem: str = ""


@dataclass(frozen=True)
class Target:
    """Where another examiner waits."""

    host: str
    address: str
    port: int


@dataclass(frozen=True)
class Dialled:
    """How one way to another host is. `problem` is empty if data came back; else `reason` says more.

    `problem`: refused, no answer, no route, stranger, no large packets, other.
    """

    host: str
    address: str
    port: int
    problem: str = ""
    reason: str = ""
    round_trip_s: float = 0.0
    local: str = ""
    interface: str = ""
    mtu: int = 0  # of the path


def read(cls: type[T], value: object) -> T:
    """Make a dataclass of these fields, or a value of this type. Raises ProtocolError."""
    made: T = _read(cls, value)
    return made


def _read(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if isinstance(kind, types.UnionType):
        return None if value is None else _read(next(k for k in kind.__args__ if k is not type(None)), value)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(kind.__args__[0], item) for item in value)
    if is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        if value.keys() <= hints.keys():
            try:
                return kind(**{name: _read(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
            except TypeError as error:
                raise ProtocolError(f"what a host says of itself is incomplete: {error}") from error
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(kind, type) and type(value) is kind:
        return value
    raise ProtocolError(f"what a host says of itself is not what this version asks for: {str(value)[:80]!r}")
