"""`dtrain env`: facts on this machine for a bug report, without anything that must not be published.

With --torch also the output of `python -m torch.utils.collect_env`, which takes seconds.
Values of environment variables and settings are shown only if their names are known to be harmless; otherwise only the
names. In all text the home folder becomes `~`, and user, host and addresses are replaced.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.agent.observation.evidence import find_py_spy
from launcher.check.examiner_gpus import find_cards
from launcher.check.examiner_host import (
    code_digest,
    disks,
    find_packages,
    interfaces,
    limits,
    memory,
    system_name,
)
from launcher.check.facts import Driver, Interface
from launcher.errors import UsageError
from launcher.hosts.slurm_allocation import find_allocation
from launcher.machine import processors
from launcher.machine.gpus.vendors import vendor_named
from launcher.machine.gpus.visible import find_gpus
from launcher.machine.packages import how_tested, torch_build, version_of
from launcher.machine.processes import kill_session
from launcher.machine.system_files import read_text
from launcher.machine.variables import in_pod, may_be_secret
from launcher.output.text import count, size

FORMAT = 2
ASK_S = 5.0
TORCH_S = 120.0  # it imports torch, which is slow from a network folder
PTRACE_BIT = 19  # CAP_SYS_PTRACE
WITHHELD = "(set)"
_PACKAGES = ("click", "cryptography", "nvidia-ml-py", "paramiko", "psutil", "pyzmq", "rich", "accelerate",
             "lightning", "transformers", "deepspeed", "tensorflow")  # fmt: skip
_PROGRAMS = {"OpenSSH": ("ssh", "-V"), "SLURM": ("srun", "--version"), "Open MPI": ("mpirun", "--version"),
             "ROCm": ("amd-smi", "version")}  # fmt: skip

_RELEVANT = re.compile(
    r"(?:NCCL|GLOO|TORCH\w*|PYTORCH|CUDA|HIP|ROCR|OMP|MKL|KMP|PYTHON\w*|SLURM|DTRAIN|HF|WANDB|MASTER|TORCHELASTIC|OMPI"
    r"|PMIX?|UCX|FI|CONDA|APPTAINER|SINGULARITY|KUBERNETES)_\w+|PYTHON[A-Z]+|RANK|WORLD_SIZE|LOCAL_RANK|LD_LIBRARY_PATH"
    r"|LD_PRELOAD|VIRTUAL_ENV|LANG|LC_ALL|TMPDIR|SSH_AUTH_SOCK"
)
_HARMLESS_OPTIONS = re.compile(
    r"nnodes|nproc_per_node|gpus_per_proc|oversubscribe|simulate|max_restarts|grow|interface|master_port|\w+_s"
    r"|virtual_local_rank|pass_local_rank|requeue|env_for|quiet|verbose|accept_new_host_keys"
)
_HARMLESS = re.compile(
    r"(?:NCCL|GLOO)_(?!.*(?:COMM_ID|HOST)).*|(?:CUDA|HIP|ROCR)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER"
    r"|CUDA_LAUNCH_BLOCKING|(?:OMP|MKL)_NUM_THREADS|OMP_PROC_BIND|KMP_AFFINITY|TORCH_NCCL_\w+|TORCH_DISTRIBUTED_DEBUG"
    r"|TORCH_CPP_LOG_LEVEL|PYTORCH_CUDA_ALLOC_CONF|PYTHON(?:UNBUFFERED|HASHSEED|FAULTHANDLER|DONTWRITEBYTECODE|SAFEPATH)"
    r"|SLURM_(?:NNODES|JOB_NUM_NODES|NTASKS|NPROCS|NODEID|PROCID|LOCALID|CPUS_ON_NODE|CPUS_PER_TASK|TASKS_PER_NODE"
    r"|NTASKS_PER_NODE|GPUS_ON_NODE|GPUS_PER_NODE|GPUS_PER_TASK|RESTART_COUNT|JOB_CPUS_PER_NODE)"
    rf"|DTRAIN_(?i:{_HARMLESS_OPTIONS.pattern})|RANK|WORLD_SIZE|LOCAL_RANK|LANG|LC_ALL"
)
_VALUE = re.compile(r"[A-Za-z0-9_.,:;+=^@*()/ -]{0,120}")


def run_env(settings: Mapping[str, Any], *, as_json: bool, with_torch: bool = False) -> int:
    """Print the report; `settings` are the effective ones. Blocks while some programs print their versions."""
    found = scrub({**_report(settings), **({"torch": {"collect_env": _collect_env()}} if with_torch else {})})
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if as_json else _as_text(found))
    sys.stdout.flush()
    return 0


def _collect_env() -> list[str]:
    """Return the lines of torch's report, or the reason why there is none."""
    argv = [sys.executable, "-m", "torch.utils.collect_env"]
    try:
        return _output(argv, TORCH_S, cwd="/").splitlines()  # the current folder may contain another torch
    except OSError as error:
        return [str(error)]


def _report(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report as data; fields may be added under the same `format`."""
    packages = find_packages()
    driver = find_cards()
    total, free = memory()
    relevant = {name: value for name, value in sorted(os.environ.items()) if _RELEVANT.fullmatch(name)}
    return {
        "format": FORMAT,
        "versions": {
            "dtrain": f"{__version__} ({code_digest()})",
            "Python": f"{platform.python_version()} ({platform.python_implementation()})",
            "torch": packages.torch,
            "torch is tested": packages.torch and how_tested(packages.torch),
            "CUDA of torch": packages.torch_cuda,
            "NCCL": packages.nccl,
            f"{driver.vendor} driver": driver.driver
            and driver.driver + (f" (CUDA {driver.driver_cuda})" if driver.driver_cuda else ""),
            "numpy": packages.numpy,
            **{name: version_of(name) for name in _PACKAGES},
            **{name: _version(*argv) for name, argv in _PROGRAMS.items()},
            "py-spy": _version(find_py_spy(), "--version"),
        },
        "system": {
            "system": system_name(),
            "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
            "C library": " ".join(platform.libc_ver()),
            "container": _container(),
            "virtual environment": "yes" if sys.prefix != sys.base_prefix else "no",
            "user": "root" if os.getuid() == 0 else "not root",
            "ptrace": ptrace(),
        },
        "hardware": {
            "processors": f"{os.cpu_count()}, {len(processors.cores())} usable, {processors.cpu_limit()} at a time",
            "memory": f"{size(total)}, {size(free)} free",
            "GPUs": [_gpu(gpu.name, gpu.memory_bytes, gpu.lost) for gpu in driver.gpus],
            "GPUs for workers": _for_workers(driver),
            **{disk.what: f"{size(disk.total_bytes)}, {size(disk.free_bytes)} free" for disk in disks(Path.cwd())},
        },
        "SLURM": slurm_job(os.environ),
        "limits": {limit.name: f"{_limit(limit.soft)} (at most {_limit(limit.hard)})" for limit in limits()},
        "interfaces": {interface.name: _interface(interface) for interface in interfaces()},
        "variables": _shown(relevant, _HARMLESS),
        "settings": _shown(settings, _HARMLESS_OPTIONS),
    }


def _shown(values: Mapping[str, Any], harmless: re.Pattern[str]) -> dict[str, str]:
    """Return all names, with values only if name and value are harmless."""
    return {
        name: str(value)
        if harmless.fullmatch(name) and not may_be_secret(name) and _VALUE.fullmatch(str(value))
        else WITHHELD
        for name, value in values.items()
    }


def _as_text(report: Mapping[str, Any]) -> str:
    lines = []
    for title, section in report.items():
        if title != "format" and section:
            shown = {name: "; ".join(value) if isinstance(value, list) else value for name, value in section.items()}
            lines += [f"{title}:", *(f"  {name}: {text}" for name, text in shown.items() if text)]
    return "\n".join(lines) + "\n"


def scrub(value: Any) -> Any:
    """Replace the home folder, the names of user and host, and addresses anywhere in the data."""
    replaced = _replacements()

    def clean(text: str) -> str:
        for pattern, new in replaced:
            text = pattern.sub(new, text)
        return text

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {clean(name): walk(item) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return clean(value) if isinstance(value, str) else value

    return walk(value)


def _replacements() -> list[tuple[re.Pattern[str], str]]:
    home = os.path.expanduser("~").rstrip("/")
    found = [(re.compile(rf"{re.escape(home)}(?=/|\b)"), "~")] if len(home) > 1 else []
    found.append((re.compile(r"/(home|Users)/[^/\s:,;]+"), r"/\1/USER"))
    host = socket.gethostname()
    for names, new in (({_user(), os.environ.get("LOGNAME", "")}, "USER"), ({host, host.partition(".")[0]}, "HOST")):
        known = [name for name in names if len(name) > 2 and name not in ("root", "localhost")]  # too common otherwise
        found += [
            (re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"), new)
            for name in sorted(known, key=len, reverse=True)
        ]
    found.append((re.compile(r"(?<![0-9.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![0-9.])"), "ADDRESS"))
    return found


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a uid without a name
        return ""


def _version(program: str | None, option: str) -> str | None:
    """Return the line with a program's version; None if the program is missing or prints none."""
    if program is None or shutil.which(program) is None:
        return None
    try:
        lines = _output([program, option], ASK_S).splitlines()
    except OSError as error:
        return f"unknown: {error.strerror or error}"
    return next((line[:120] for line in lines if re.search(r"[0-9]\.[0-9]", line)), None)


def _output(argv: Sequence[str], limit_s: float, cwd: str | None = None) -> str:
    """Return a program's output on both streams. Raises OSError, such as TimeoutError."""
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd=cwd,
    ) as program:
        try:
            output, _ = program.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no answer within {limit_s:g} s") from None
        finally:
            kill_session(program)
    return output.decode("utf-8", "replace").strip()


def slurm_job(env: Mapping[str, str]) -> dict[str, str]:
    """Return SLURM's allocation of this job; empty outside of one."""
    try:
        allocation = find_allocation(env)
    except UsageError as error:
        return {"allocation": f"cannot be read: {error}"}
    if allocation is None:
        return {}
    tasks = sum(node.tasks or 1 for node in allocation.nodes)
    where = "on one of its nodes" if allocation.here else "on none of its nodes"
    nodes = f"{count(len(allocation.nodes), 'node')}, {count(tasks, 'task')}"
    shown = {"allocation": f"job {allocation.job}, {nodes}; we are {where}"}
    if allocation.step:
        shown["step"] = f"of {count(allocation.step.tasks, 'task')}"
    return {**shown, "GPUs on this node": env.get("SLURM_GPUS_ON_NODE", "none")}


def ptrace(proc: Path = Path("/proc")) -> str:
    """Format whether py-spy may attach to workers, which are not its children."""
    scope = read_text(proc / "sys/kernel/yama/ptrace_scope") or "0"  # a kernel without Yama
    capabilities = re.search(r"^CapEff:\s*(\w+)", read_text(proc / "self/status"), re.MULTILINE)
    capable = capabilities is not None and int(capabilities[1], 16) >> PTRACE_BIT & 1
    if scope == "0" or (scope in ("1", "2") and capable):
        return "permitted"
    return f"not permitted, so py-spy cannot attach to workers (kernel.yama.ptrace_scope is {scope})"


def _container() -> str:
    env = os.environ
    hints = {
        "docker": Path("/.dockerenv").exists(),
        "podman": Path("/run/.containerenv").exists(),
        "apptainer": "APPTAINER_CONTAINER" in env or "SINGULARITY_CONTAINER" in env,
        "kubernetes": in_pod(env),
        "systemd-nspawn or lxc": env.get("container") in ("systemd-nspawn", "lxc"),
    }
    return ", ".join(hint for hint, here in hints.items() if here) or "none seen"


def _interface(interface: Interface) -> str:
    """Describe an interface without its addresses."""
    kinds = []
    for address in interface.addresses:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        kind = "loopback" if parsed.is_loopback else "private" if parsed.is_private else "public"
        kinds.append(f"{kind} IPv{parsed.version}")
    speed = f"; {interface.speed_mbit} Mbit/s" if interface.speed_mbit else ""
    return f"{', '.join(kinds)}; MTU {interface.mtu}{speed}"


def _gpu(name: str, memory_bytes: int | None, lost: str) -> str:
    return f"lost: {lost}" if lost else f"{name or 'unknown'}{f', {size(memory_bytes)}' if memory_bytes else ''}"


def _for_workers(driver: Driver) -> str:
    """Format how many GPUs a run here would assign, and the variable; or why it does not use those of `driver`."""
    try:
        gpus = find_gpus(os.environ)
    except UsageError as error:
        return f"none: {error}"
    if gpus.trouble:
        return f"none: the driver does not list them; {gpus.trouble}"
    if gpus.ids:
        return f"{len(gpus.ids)} ({gpus.variable})"
    vendor = vendor_named(driver.vendor)
    if driver.gpus and vendor.name != "NVIDIA" and torch_build() != vendor.built:  # NVIDIA's do not need torch
        return f"none: {vendor.name}'s need a torch built for {vendor.platform}"
    return "none"


def _limit(number: int) -> str:
    return "unlimited" if number < 0 else str(number)
