"""The facts of this host for `dtrain check` and `dtrain env`: system, memory, disks, limits, interfaces, packages.

Reads /proc, /sys and the file system; starts no process, writes nothing, and does not import torch (seconds).
"""

from __future__ import annotations

import hashlib
import locale
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import psutil

from launcher import __version__
from launcher.agent.host_facts import find_facts
from launcher.check.examiner_gpus import find_cards
from launcher.check.facts import Disk, HostFacts, Interface, Limit, Packages
from launcher.errors import DtrainError
from launcher.machine import network
from launcher.machine.cgroup import folders_of
from launcher.machine.gpus.vendors import VENDORS
from launcher.machine.packages import assigned, folder_of, torch_file, version_of
from launcher.machine.system_files import read_text
from launcher.protocol.commands import Prepare

SHA_DIGITS = 12
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK,
           "core": resource.RLIMIT_CORE}  # fmt: skip


def find_host_facts(prepare: Prepare) -> HostFacts:
    """Return this host's facts for a prepared job; sets the job's environment in this process, as an agent does."""
    os.environ.update(prepare.export)
    workdir = Path(prepare.workdir)
    total, free = memory()
    umask = re.search(r"^Umask:\s*(\S+)", read_text("/proc/self/status"), re.MULTILINE)
    return HostFacts(
        hostname=socket.gethostname(),
        machine=_machine(),
        system=system_name(),
        kernel=platform.release(),
        user=psutil.Process().username(),
        uid=os.getuid(),
        umask=umask[1] if umask else "",
        locale=locale.setlocale(locale.LC_CTYPE) + "/" + locale.getpreferredencoding(False),
        python=platform.python_version(),
        executable=sys.executable,
        dtrain=__version__,
        code=code_digest(),
        ddp=folder_of("ddp") or "",
        **vars(find_packages()),
        **vars(find_cards()),
        offered=find_facts(prepare, problems=[], left=[]),
        gpus_inherited=any(name in os.environ for vendor in VENDORS for name in vendor.lists),
        cpu_count=os.cpu_count() or 1,
        load=os.getloadavg()[0],
        memory_bytes=total,
        memory_free_bytes=free,
        disks=tuple(disks(workdir)),
        limits=tuple(limits()),
        script=None if prepare.script is None else file_digest(workdir / prepare.script),
        workdir_mark=_mark(workdir),
        name_resolves_to=_resolve(socket.gethostname()),
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        interfaces=tuple(interfaces()),
    )


def system_name() -> str:
    """Return the name of the system, such as `Debian GNU/Linux 12 (bookworm)`."""
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def memory() -> tuple[int, int]:
    """Return the bytes of memory that processes here may use, and those free: the cgroup's, if less."""
    host = psutil.virtual_memory()
    total, free = host.total, host.available
    for folder in folders_of("memory"):
        most = read_text(f"{folder}/memory.max") or read_text(f"{folder}/memory.limit_in_bytes")
        used = read_text(f"{folder}/memory.current") or read_text(f"{folder}/memory.usage_in_bytes")
        if most.isdigit() and used.isdigit() and int(most) < total:
            total, free = int(most), min(free, max(0, int(most) - int(used)))
    return total, free


def disks(workdir: Path) -> list[Disk]:
    """Return the file systems that a run uses, once each. Blocks as long as they block."""
    found = []
    for what, path in (("workdir", str(workdir)), ("temporary files", tempfile.gettempdir()), ("/dev/shm", "/dev/shm")):
        try:
            space = shutil.disk_usage(path)
        except OSError:  # missing, which is a separate finding
            continue
        found.append(Disk(what, path, space.total, space.free))
    return found


def limits() -> list[Limit]:
    return [Limit(name, *resource.getrlimit(number)) for name, number in _LIMITS.items()]


def interfaces() -> list[Interface]:
    """Return the interfaces that are up and have an address."""
    try:
        named = network.addresses()
    except DtrainError:
        return []
    return [
        Interface(name, tuple(found), _number(f"/sys/class/net/{name}/mtu"), _number(f"/sys/class/net/{name}/speed"))
        for name, found in named.items()
    ]


def find_packages() -> Packages:
    """Return versions, from torch's version file and the metadata of packages."""
    folder, text = folder_of("torch"), torch_file()
    cuda, rocm = (assigned(text, name) for name in ("cuda", "hip"))
    return Packages(
        torch=assigned(text, "__version__") or version_of("torch") if folder else None,
        torch_cuda=cuda or (f"ROCm {rocm}" if rocm else None),
        nccl=_nccl(folder) if folder and cuda else None,
        numpy=version_of("numpy"),
    )


def code_digest() -> str:
    """Return the beginning of a SHA-256 of dtrain's files: in a clone, one version may have different code."""
    digest = hashlib.sha256()
    for package in ("launcher", "ddp"):
        folder = folder_of(package)
        if folder is None:
            continue
        for file in sorted(Path(folder).rglob("*.py")):
            try:
                content = file.read_bytes()
            except OSError:  # gone meanwhile, or unreadable: hosts where this holds have the same digest
                content = b""
            name = f"{package}/{file.relative_to(folder).as_posix()}"
            # A hash of each part: both have a fixed length, so that no byte counts as another file's.
            digest.update(hashlib.sha256(os.fsencode(name)).digest() + hashlib.sha256(content).digest())
    return digest.hexdigest()[:SHA_DIGITS]


def _nccl(torch_folder: str) -> str | None:
    """Return NCCL's version: of the package used by torch's wheels, otherwise of the library that would be loaded."""
    for major in ("13", "12", "11"):
        if version := version_of(f"nvidia-nccl-cu{major}"):
            return version
    import ctypes

    for path in (Path(torch_folder).parent / "nvidia" / "nccl" / "lib" / "libnccl.so.2", "libnccl.so.2"):
        number = ctypes.c_int()
        try:
            failed = ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
        except (OSError, AttributeError):
            continue
        if not failed and number.value >= 10000:
            return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return None


def _machine() -> str:
    """Return an id that is equal for all names of one machine, or of one container's network."""
    boot = read_text("/proc/sys/kernel/random/boot_id")
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    return hashlib.sha256(f"{boot} {network}".encode()).hexdigest()[:16]


def file_digest(path: Path) -> str | None:
    """Return the beginning of a file's SHA-256; None if the file cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:SHA_DIGITS]
    except OSError:  # a folder, or missing, which is a separate finding
        return None


def _mark(folder: Path) -> str:
    """Return an id that is equal on all hosts for a folder on shared storage: its inode and time of change."""
    try:
        known = folder.stat()
    except OSError:
        return ""
    return f"{known.st_ino}:{known.st_ctime_ns}"


def _resolve(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(where[0]) for *_, where in found))


def _number(path: str) -> int | None:
    text = read_text(path)
    return int(text) if text.isdigit() and int(text) > 0 else None
