"""Findings on single hosts, and on differences between them, from the facts of their examiners. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.check.facts import Gpu, HostFacts
from launcher.check.finding import Examined, Finding, Severity, fix_in, grouped, most_common
from launcher.errors import PlacementError
from launcher.hosts.folding import fold
from launcher.hosts.host import HostKind
from launcher.job.orders import mismatch
from launcher.machine.gpus.vendors import vendor_named
from launcher.machine.packages import install_command
from launcher.output.text import size
from launcher.placement.job_spec import JobSpec
from launcher.placement.placement import is_part, place_job

CLOCK_S = 1.0
LEAST = 4096  # open files, and processes
SHM_BYTES = 64 << 20  # the default of containers, too small for DataLoader's workers
DISK_BYTES, DISK_SHARE = 1 << 30, 0.05
MEMORY_SHARE = 0.1
BUSY = 1.5  # load per processor
GPU_BYTES = 1 << 30  # more than a driver, a display or an idle context uses
GPU_PERCENT = 10
_PRINTED = 3
_ERROR, _WARNING, _NOTE = Severity
_SENT_TO = (HostKind.SSH, HostKind.SRUN)
_SENT = {  # by part of --sync, the findings that it would mend
    "code": ("no-dtrain", "no-workdir", "no-script", "script"),
    "env": ("no-dtrain", "versions", "dtrain-code", "torch-missing", "torch"),
}


def host_findings(
    spec: JobSpec, examined: Sequence[Examined], *, code_here: str, script_here: str | None
) -> Iterator[Finding]:
    """Yield the findings on the hosts, not merged, in no particular order.

    `code_here` and `script_here` are the digests of dtrain and of the script on this machine.
    """
    found = [*_findings(spec, examined, code_here, script_here)]
    yield from found
    if not spec.sync:
        yield from _what_sync_sends([one.name for one in examined if one.host.kind in _SENT_TO], found)


def _what_sync_sends(names: Sequence[str], found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield which --sync would send hosts what the findings say they lack."""
    for part, kinds in _SENT.items():
        lacking = {name for finding in found if finding.kind in kinds for name in finding.hosts}
        if hosts := tuple(name for name in names if name in lacking):
            what = "your code" if part == "code" else "this Python's packages"
            yield Finding(_NOTE, f"sync-{part}", hosts, f"dtrain run --sync {part} sends {what} to hosts that lack it")


def _findings(
    spec: JobSpec, examined: Sequence[Examined], code_here: str, script_here: str | None
) -> Iterator[Finding]:
    there = []
    for one in examined:
        if one.facts is None:
            (message, fix), kind = fix_in(one.problem), "unusable"
            if any(words in one.problem for words in ("has no dtrain", "has dtrain", "older dtrain")):
                command = "" if "there is no Python" in one.problem else install_command(spec.python)
                fix = one.on_host(command) if command else ""
                kind = "no-dtrain"
            yield one.finding(_ERROR, kind, message, fix=fix or one.on_host("true"))
            continue
        there.append(one)
        yield from _versions(spec, one, code_here)
        yield from _can_start(spec, one)
        yield from _resources(one)
        yield from _gpus(spec, one)
    yield from _differences(spec, there)
    yield from _scripts(spec, there, script_here)
    yield from _one_machine(there)
    yield from _shared_folder(there)


def _versions(spec: JobSpec, one: Examined, code_here: str) -> Iterator[Finding]:
    greeting, facts = one.greeting, one.known
    assert greeting is not None
    install = f"{spec.python} -m pip install"
    if (problem := mismatch(spec, greeting)) is not None:
        yield one.finding(_ERROR, "versions", *fix_in(problem))
    elif facts.code != code_here and not spec.sync:  # which sends what an agent needs
        message = f"dtrain has the same version, but different code ({facts.code}, here {code_here})"
        yield one.finding(
            _WARNING, "dtrain-code", message, install_command(spec.python, "--force-reinstall", "--no-deps")
        )
    if facts.torch is None:
        yield one.finding(_ERROR, "torch-missing", f"{facts.executable} has no torch", f"{install} torch")


def _can_start(spec: JobSpec, one: Examined) -> Iterator[Finding]:
    """Yield what the host reported as missing, and whether the workers fit there."""
    for problem in one.known.offered.problems:
        (message, fix), kind = fix_in(problem), "cannot-start"
        if "the working directory" in problem:
            fix, kind = one.on_host(f"mkdir -p {shlex.quote(str(spec.workdir))}"), "no-workdir"
        elif "the script" in problem:
            fix, kind = one.copy(_script(spec)), "no-script"
        elif one.known.offered.gpu_trouble and one.known.offered.gpu_trouble in problem:
            fix, kind = one.on_host("nvidia-smi"), "gpu-driver"
        yield one.finding(_ERROR, kind, message, fix=fix)
    try:
        place_job(spec, [one.offer])
    except PlacementError as error:
        look = "ulimit -a" if "too many for" in str(error) else vendor_named(one.known.vendor).commands.list
        yield one.finding(_ERROR, "placement", str(error).removeprefix(f"{one.name}: "), look)


def _resources(one: Examined) -> Iterator[Finding]:
    facts = one.known
    limits = {limit.name: limit.hard for limit in facts.limits}
    for kind, what in (("nofile", "open files"), ("nproc", "processes")):
        if 0 <= limits.get(kind, -1) < LEAST:
            message = f"its limit of {what} is {limits[kind]}; DataLoader and NCCL need {LEAST} or more"
            raised = f"echo '* hard {kind} {16 * LEAST}' | sudo tee /etc/security/limits.d/dtrain.conf"
            yield one.finding(_WARNING, f"limit-{kind}", message, raised)
    for disk in facts.disks:
        free, total = size(disk.free_bytes), size(disk.total_bytes)
        if disk.what == "/dev/shm":
            if disk.total_bytes <= SHM_BYTES:
                message = f"/dev/shm has {total}; DataLoader's workers need more (in docker: --shm-size)"
                yield one.finding(_WARNING, "shm", message, "sudo mount -o remount,size=50% /dev/shm")
            elif disk.free_bytes < SHM_BYTES:
                yield one.finding(_WARNING, "shm", f"/dev/shm is full: {free} of {total} are free", "ls -lS /dev/shm")
        elif disk.free_bytes < max(min(DISK_BYTES, DISK_SHARE * disk.total_bytes), DISK_BYTES / 10):
            look = f"du -xh --max-depth=1 {shlex.quote(disk.path)}"
            yield one.finding(_WARNING, "disk", f"{disk.path} ({disk.what}) has {free} of {total} free", look)
    if facts.memory_free_bytes < MEMORY_SHARE * facts.memory_bytes:
        message = f"of its memory {size(facts.memory_free_bytes)} of {size(facts.memory_bytes)} are free"
        yield one.finding(_WARNING, "memory", message, "ps -eo pid,user,rss,comm --sort=-rss | head")
    if facts.load > BUSY * facts.cpu_count:
        message = f"its processors are busy: a load of {facts.load:.0f} on {facts.cpu_count}"
        yield one.finding(_NOTE, "load", message, "ps -eo pid,user,pcpu,comm --sort=-pcpu | head")
    clock = one.clock
    if clock is not None and abs(clock.offset_s) - clock.uncertainty_s > CLOCK_S:
        ahead = "ahead of" if clock.offset_s > 0 else "behind"
        yield one.finding(
            _WARNING, "clock", f"its clock is {abs(clock.offset_s):.1f} s {ahead} ours", "sudo chronyc makestep"
        )


def _gpus(spec: JobSpec, one: Examined) -> Iterator[Finding]:
    """Yield findings on the cards that a run would assign, and on lost ones."""
    facts = one.known
    commands = vendor_named(facts.vendor).commands
    if facts.trouble and not any(facts.trouble in problem for problem in facts.offered.problems):
        message = f"the driver does not list the GPUs; {facts.trouble}"
        yield one.finding(_WARNING, "gpu-driver", message, "nvidia-smi")
    for gpu in facts.gpus:
        which = f"GPU {gpu.index}" + (f" ({gpu.name})" if gpu.name else "")
        if gpu.lost:
            severity = _NOTE if facts.gpus_inherited else _ERROR
            message = f"{which} cannot be used: {gpu.lost}; a run would go without it"
            yield one.finding(severity, "gpu-lost", message, commands.log)
        elif not _handed_out(gpu, one.offer.gpus):
            continue
        elif gpu.ecc_errors or gpu.pending:
            found = gpu.pending or f"{gpu.ecc_errors} memory errors that could not be corrected"
            yield one.finding(_ERROR, "gpu-memory", f"{which}: {found}", commands.memory.format(index=gpu.index))
        elif gpu.slowed:
            yield one.finding(_WARNING, "gpu-slow", f"{which}: {gpu.slowed}", "nvidia-smi -q -d PERFORMANCE")
        elif busy := _gpu_use(gpu):
            pid = gpu.processes[0].split()[1] if gpu.processes else ""
            look = f"ps -fp {shlex.quote(pid)}" if pid else commands.show.format(index=gpu.index)
            yield one.finding(_WARNING, "gpu-busy", f"{which} is in use: {busy}", look)
    if facts.logged:
        age_s, newest = facts.logged[-1]
        many = f"{len(facts.logged)} errors of GPUs, the newest " if len(facts.logged) > 1 else "an error of a GPU "
        message = f"the kernel's log has {many}{age_s / 60:.0f} minutes ago: {newest}"
        yield one.finding(_WARNING, "gpu-log", message, "sudo dmesg -T | grep -i xid")
    if any(gpu.persistence is False for gpu in facts.gpus):
        message = "persistence mode is off: the first use of a GPU takes seconds"
        yield one.finding(_NOTE, "gpu-persistence", message, "sudo nvidia-smi -pm 1")
    if (slices := sum(name.startswith("MIG-") for name in one.offer.gpus)) > 1:
        message = f"its GPUs are {slices} MIG slices; NCCL may refuse several of one card (Duplicate GPU detected)"
        yield one.finding(_NOTE, "mig", message, commands.list)
    if facts.gpus and facts.torch is not None:
        yield from _build(spec, one)


def _build(spec: JobSpec, one: Examined) -> Iterator[Finding]:
    """Check whether a host's torch is built for its GPUs. Within a major version of CUDA an older driver suffices."""
    facts = one.known
    torch, driver, built = facts.torch or "", facts.driver_cuda, facts.torch_cuda
    install, platform = f"{spec.python} -m pip install --force-reinstall", vendor_named(facts.vendor).platform
    if (_platform(built) if built else "") != platform:
        what = f"for {_platform(built)}" if built else f"without {platform}"
        message = f"it has GPUs of {facts.vendor}, but torch {torch} is built {what}; a run would not use them"
        fix = "amd-smi version" if platform == "ROCm" else f"{install} torch=={torch.partition('+')[0]}"
        severity = _WARNING if platform == "CUDA" else _NOTE  # others may be integrated graphics
        yield one.finding(severity, f"torch-without-{platform.lower()}", message, fix)
    elif driver and built and _major(built) > _major(driver):
        message = (
            f"torch {torch} needs CUDA {built}, the driver {facts.driver} supports up to {driver}; "
            f"install a newer driver, or a torch for CUDA {driver}"
        )
        index = f"https://download.pytorch.org/whl/cu{driver.replace('.', '')}"
        yield one.finding(_ERROR, "driver-too-old", message, f"{install} torch --index-url {index}")


def _platform(torch_cuda: str) -> str:
    """Return the platform that torch was built for: for CUDA, `torch_cuda` is only the version."""
    return "ROCm" if torch_cuda.startswith("ROCm ") else "CUDA"


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _handed_out(gpu: Gpu, names: Sequence[str]) -> bool:
    """Return whether a card, or a slice of it, is among those of the run; slices are not mapped to their cards."""
    return any(name == str(gpu.index) or (gpu.uuid and gpu.uuid.startswith(name)) or is_part(name) for name in names)


def _gpu_use(gpu: Gpu) -> str:
    use = []
    if gpu.processes:
        more = len(gpu.processes) - _PRINTED
        use.append(", ".join(gpu.processes[:_PRINTED]) + (f" and {more} more" if more > 0 else ""))
    if gpu.used_bytes is not None and gpu.memory_bytes and (gpu.processes or gpu.used_bytes > GPU_BYTES):
        use.append(f"{gpu.used_bytes >> 20} of {gpu.memory_bytes >> 20} MB are used")
    if gpu.busy_percent is not None and gpu.busy_percent >= GPU_PERCENT:
        use.append(f"{gpu.busy_percent} % busy")
    return "; ".join(use)


def _differences(spec: JobSpec, there: Sequence[Examined]) -> Iterator[Finding]:
    if len(there) < 2:
        return
    for compared in _COMPARED:
        alike = grouped(there, compared.value)
        usual = max(alike, key=lambda value: len(alike[value]))
        example = alike[usual][0]
        for found, odd in alike.items():
            if found != usual:
                names = fold([one.name for one in alike[usual]])
                message = f"{compared.what}: {found or 'none'}, but {usual or 'none'} on {names}"
                fix = odd[0].on_host(compared.mend or _install_as(spec, example.known, compared.package))
                hosts = tuple(one.name for one in odd)
                yield Finding(compared.severity_of(found, usual), compared.kind, hosts, message, fix)


def _install_as(spec: JobSpec, example: HostFacts, package: str) -> str:
    """Return the command that installs a package in another host's version, or shows the Python if that has none."""
    version = example.numpy if package == "numpy" else example.torch
    if version is None:
        return f"{spec.python} --version"
    release, _, build = version.partition("+")
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return f"{spec.python} -m pip install {package}=={release}{index}"


@dataclass(frozen=True)
class _Compared:
    """A value that should be equal on all hosts.

    `release`: if this many first parts of the versions are equal, the severity is `otherwise`; 0: any difference.
    `mend` is a command, which may only show the value; without it, `package` is installed.
    """

    kind: str
    what: str
    value: Callable[[Examined], str]
    severity: Severity
    release: int = 0
    otherwise: Severity = _NOTE
    mend: str = ""
    package: str = "torch"

    def severity_of(self, found: str, usual: str) -> Severity:
        one, other = (re.split(r"[.+]", version)[: self.release] for version in (found, usual))
        return self.otherwise if self.release and one == other else self.severity


_COMPARED = (
    _Compared("torch", "torch", lambda one: one.known.torch or "", _ERROR, release=2, otherwise=_WARNING),
    _Compared("torch-cuda", "torch's CUDA", lambda one: one.known.torch_cuda or "", _WARNING),
    _Compared("nccl", "NCCL", lambda one: one.known.nccl or "", _ERROR),  # it comes with torch
    _Compared("driver", "GPU driver", lambda one: one.known.driver or "", _WARNING, release=1, mend="nvidia-smi"),
    _Compared("python-patch", "Python", lambda one: one.known.python, _NOTE, mend="python3 --version"),
    _Compared("numpy", "numpy", lambda one: one.known.numpy or "", _WARNING, release=1, package="numpy"),
    _Compared("gpus", "GPUs", lambda one: one.gpus, _WARNING, mend="nvidia-smi -L"),
    _Compared(
        "cores", "processors that may be busy", lambda one: str(one.known.offered.cpu_limit), _NOTE, mend="nproc"
    ),
    _Compared("system", "system", lambda one: one.known.system, _NOTE, mend="cat /etc/os-release"),
)


def _scripts(spec: JobSpec, there: Sequence[Examined], script_here: str | None) -> Iterator[Finding]:
    """Compare the script with ours, or if there is none here, with the most common one."""
    digests = {one.name: one.known.script for one in there if one.known.script}
    if not digests:
        return
    right = script_here or most_common(digests.values())
    where = "the one here" if script_here else "most hosts'"
    for one in there:
        if (found := digests.get(one.name, right)) != right:
            message = f"the script {spec.command.target} differs from {where} (SHA-256 {found}, not {right})"
            yield one.finding(_ERROR, "script", message, fix=one.copy(_script(spec)))


def _script(spec: JobSpec) -> Path:
    return spec.workdir / spec.command.target


def _one_machine(there: Sequence[Examined]) -> Iterator[Finding]:
    """Find host names that refer to the same machine."""
    for same in grouped((one for one in there if one.host.parts == 1), lambda one: one.known.machine).values():
        names = tuple(one.name for one in same)
        if len(same) > 1 and set.intersection(*(set(one.offer.gpus) for one in same)):
            message = "they are one machine, whose GPUs would be assigned twice; name it once"
            yield Finding(_WARNING, "same-machine", names, message, "hostname")
        elif len(same) > 1:
            yield Finding(_NOTE, "same-machine", names, "they are one machine")


def _shared_folder(there: Sequence[Examined]) -> Iterator[Finding]:
    """Find users who share the working directory but not its files."""
    for mark, sharing in grouped(there, lambda one: one.known.workdir_mark).items():
        if mark and len({one.known.uid for one in sharing}) > 1:
            users = {one.name: f"{one.known.user} ({one.known.uid})" for one in sharing}
            usual = most_common(users.values())
            odd = tuple(name for name, user in users.items() if user != usual)
            message = f"the user is {users[odd[0]]}, elsewhere {usual}, and the working directory is shared"
            yield Finding(_WARNING, "user", odd, message, "id")
