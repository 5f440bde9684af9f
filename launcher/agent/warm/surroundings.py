"""Surroundings that must be the same for a later run that uses a process kept warm: limits, identity, cgroup, ...

An agent reads them at its start, before it changes any of its own. Packages and variables are compared elsewhere:
workers/keeper.py, workers/warm_start.py.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from collections.abc import Iterator

from launcher import __version__
from launcher.machine.system_files import read_text
from launcher.machine.variables import may_be_secret

# Prefixes of variables that an interpreter reads at its start.
_READ_AT_START = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LANG", "LC_ALL", "LC_CTYPE")
_STATUS = {
    "Uid": "user", "Gid": "group", "Groups": "groups", "Umask": "umask",
    "SigBlk": "blocked signals", "SigIgn": "ignored signals",
    "CapInh": "capabilities", "CapPrm": "capabilities", "CapEff": "capabilities",
    "CapBnd": "capabilities", "CapAmb": "capabilities", "NoNewPrivs": "right to new privileges",
    "Seccomp": "seccomp filter", "Cpus_allowed_list": "processors that may be used",
    "Mems_allowed_list": "NUMA nodes that may be used",
}  # fmt: skip
# Each tab of some terminals has a group of its own, with the user's limits. But sessions are distinguished: if logind
# ends leftovers of a session (KillUserProcesses), it would end a run of another session as well.
_OF_TAB = re.compile(r"/vte-spawn-[^/]*\.scope")
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}  # syscall number; the C library has no function for it
_ROOT = __file__.rpartition("/agent/")[0]
_DEVICES = re.compile("nvidia[0-9]*|kfd|renderD[0-9]+")


def find_surroundings() -> dict[str, str]:
    """Return them by their names in reports."""
    found: dict[str, str] = {}
    for line in read_text("/proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name in _STATUS:
            found[_STATUS[name]] = found.get(_STATUS[name], "") + value.strip() + " "
    found["resource limits (ulimit)"] = str([resource.getrlimit(number) for number in range(16)])
    found["niceness"] = str(os.getpriority(os.PRIO_PROCESS, 0))
    found["scheduling policy"] = f"{os.sched_getscheduler(0)} {os.sched_getparam(0).sched_priority}"
    found["priority of input and output"] = _io_priority()
    found["memory policy"] = _memory_policy()
    found["personality"] = read_text("/proc/self/personality")
    found["security label"] = read_text("/proc/self/attr/current").strip("\0\n ")
    found["out-of-memory score"] = read_text("/proc/self/oom_score_adj")
    found["control group"] = _OF_TAB.sub("/*.scope", read_text("/proc/self/cgroup"))
    kinds = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
    found["namespaces"] = " ".join(filter(None, map(_namespace, kinds)))
    root = os.stat("/")
    found["root folder"] = f"{root.st_dev} {root.st_ino}"
    found["GPUs"] = " ".join(
        [*_listing("/dev", _DEVICES), *_listing("/dev/dri", _DEVICES), read_text("/proc/driver/nvidia/version")]
    )
    found["interpreter"] = f"{sys.executable} {sys.version} {sys.prefix}"
    found["folders of packages (sys.path)"] = "\n".join(path for path in sys.path if path not in ("", "/"))
    found["dtrain"] = f"{__version__} {_ROOT} {list(_own_files())}"
    found.update(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_READ_AT_START) and not may_be_secret(name)
    )
    return found


def _own_files() -> Iterator[int]:
    """Yield the modification times of the files that an agent consists of."""
    for folder in (_ROOT, f"{_ROOT}/agent", f"{_ROOT}/agent/warm", f"{_ROOT}/agent/workers", f"{_ROOT}/machine"):
        with os.scandir(folder) as entries:
            yield from sorted(entry.stat().st_mtime_ns for entry in entries if entry.name.endswith(".py"))


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:  # an older kernel
        return ""


def _io_priority() -> str:
    number = _IOPRIO_GET.get(os.uname().machine)
    return "" if number is None else str(ctypes.CDLL(None).syscall(number, 1, 0))


def _memory_policy() -> str:
    """Return the policy of this process's first memory area; empty if the kernel has no NUMA nodes."""
    try:
        with open("/proc/self/numa_maps", encoding="ascii", errors="replace") as file:
            return file.readline().split(" ")[1]
    except (OSError, IndexError):
        return ""


def _listing(folder: str, names: re.Pattern[str]) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if names.fullmatch(name))
    except OSError:
        return []
