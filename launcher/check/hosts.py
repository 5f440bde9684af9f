"""What is wrong with single hosts, and between them, by what their examiners found. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence

from launcher.check.facts import HostFacts
from launcher.check.finding import Examined, Finding, Severity, fix_in, most_common, named, on_host, size
from launcher.check.gpus import gpu_findings
from launcher.errors import PlacementError
from launcher.job.orders import mismatch
from launcher.placement.job_spec import JobSpec
from launcher.placement.placement import HostOffer, place
from launcher.protocol import Hello

__all__ = ["host_findings", "offer"]

CLOCK_S = 1.0
_TWICE = "they are one machine, whose GPUs would be handed out twice; name it once"
NOFILE = 4096
NPROC = 4096
SHM_BYTES = 64 << 20  # what a container has by default, with which DataLoader's workers die
DISK_BYTES, DISK_SHARE = 1 << 30, 0.05
MEMORY_SHARE = 0.1
BUSY = 1.5  # as many times its processors
_ERROR, _WARNING, _NOTE = Severity


def host_findings(
    spec: JobSpec, examined: Sequence[Examined], *, code_here: str, script_here: str | None
) -> Iterator[Finding]:
    """Yield what is to be said of the hosts; not merged, in no order.

    `code_here` and `script_here` are the digests of dtrain and of the script on this machine.
    """
    for one in examined:
        if one.facts is None:
            message, fix = fix_in(one.problem)
            fix = _install(spec, one) or fix or on_host(spec, one.host)("true")
            yield Finding(_ERROR, "unusable", (one.host.name,), message, fix)
            continue
        yield from _versions(spec, one, code_here)
        yield from _can_start(spec, one)
        yield from _resources(spec, one)
        yield from gpu_findings(spec, one)
    there = [one for one in examined if one.facts is not None]
    yield from _placement(spec, there)
    yield from _differences(spec, there)
    yield from _scripts(spec, there, script_here)
    yield from _machines(there)


def offer(one: Examined) -> HostOffer:
    """Return what a host has for the placement of workers."""
    facts = one.facts
    assert facts is not None
    host = one.host
    return HostOffer(
        name=host.name,
        slots=host.slots if facts.slots is None else facts.slots,
        gpus=facts.gpu_ids,
        gpus_verified=facts.gpus_verified,
        gpu_variable=facts.gpu_variable,
        cores=facts.cores,
        cpu_limit=facts.cpu_limit,
        max_slots=host.max_slots,
    )


# ---- one host ------------------------------------------------------------------------------------------------


def _install(spec: JobSpec, one: Examined) -> str:
    """Return what installs dtrain where an examiner did not start for want of it."""
    from launcher import __version__

    if "has no dtrain" in one.problem or "has dtrain" in one.problem or "older dtrain" in one.problem:
        return on_host(spec, one.host)(f"{spec.python} -m pip install dtrain=={__version__}")
    return ""


def _versions(spec: JobSpec, one: Examined, code_here: str) -> Iterator[Finding]:
    greeting, facts = one.greeting, one.facts
    assert greeting is not None
    assert facts is not None
    hello = Hello(greeting.protocol, greeting.version, greeting.python, greeting.hostname, greeting.pid, "", 0.0)
    name = (one.host.name,)
    there = on_host(spec, one.host)
    if (problem := mismatch(spec, hello)) is not None:
        message, fix = fix_in(problem)
        yield Finding(_ERROR, "versions", name, message, there(fix) if fix else "")
    elif facts.code != code_here:
        message = f"dtrain is the same version, but other code ({facts.code}, here {code_here})"
        yield Finding(
            _WARNING,
            "dtrain-code",
            name,
            message,
            there(f"{spec.python} -m pip install --force-reinstall dtrain=={facts.dtrain}"),
        )
    if facts.torch is None:
        yield Finding(
            _ERROR,
            "torch-missing",
            name,
            f"{facts.executable} has no torch",
            there(f"{spec.python} -m pip install torch"),
        )


def _can_start(spec: JobSpec, one: Examined) -> Iterator[Finding]:
    assert one.facts is not None
    there = on_host(spec, one.host)
    for problem in one.facts.problems:
        message, fix = fix_in(problem)
        if "the working directory" in problem:
            fix = there(f"mkdir -p {shlex.quote(str(spec.workdir))}")
        elif "the script" in problem:
            fix = _copy(spec, one)
        yield Finding(_ERROR, "cannot-start", (one.host.name,), message, fix)


def _copy(spec: JobSpec, one: Examined) -> str:
    """Return what copies the script to a host."""
    script = shlex.quote(str(spec.workdir / spec.command.target))
    if not one.host.remote:
        return f"ls -l {script}"
    config = "" if spec.ssh.config is None else f"-F {shlex.quote(str(spec.ssh.config))} "
    port = f"-P {one.host.port} " if one.host.port else ""
    user = f"{one.host.user}@" if one.host.user else ""
    return f"scp {config}{port}{script} {user}{{host}}:{script}"


def _resources(spec: JobSpec, one: Examined) -> Iterator[Finding]:
    facts, name, there = one.facts, (one.host.name,), on_host(spec, one.host)
    assert facts is not None
    limits = {limit.name: limit.hard for limit in facts.limits}
    for kind, least in (("nofile", NOFILE), ("nproc", NPROC)):
        if 0 <= limits.get(kind, -1) < least:
            message = f"its limit of {_WHAT[kind]} is {limits[kind]}; DataLoader and NCCL want {least} or more"
            fix = there(f"echo '* hard {kind} {16 * least}' | sudo tee /etc/security/limits.d/dtrain.conf")
            yield Finding(_WARNING, f"limit-{kind}", name, message, fix)
    for disk in facts.disks:
        if disk.what == "/dev/shm":
            if disk.total_bytes <= SHM_BYTES:
                message = (
                    f"/dev/shm has {size(disk.total_bytes)}; DataLoader's workers need more (in docker: --shm-size)"
                )
                yield Finding(_WARNING, "shm", name, message, there("sudo mount -o remount,size=50% /dev/shm"))
            elif disk.free_bytes < SHM_BYTES:
                message = f"/dev/shm is full: {size(disk.free_bytes)} of {size(disk.total_bytes)} are free"
                yield Finding(_WARNING, "shm", name, message, there("ls -lS /dev/shm"))
        elif disk.free_bytes < min(DISK_BYTES, DISK_SHARE * disk.total_bytes) or disk.free_bytes < DISK_BYTES / 10:
            message = f"{disk.path} ({disk.what}) has {size(disk.free_bytes)} of {size(disk.total_bytes)} free"
            yield Finding(_WARNING, "disk", name, message, there(f"du -xh --max-depth=1 {shlex.quote(disk.path)}"))
    if facts.memory_free_bytes < MEMORY_SHARE * facts.memory_bytes:
        message = f"of its memory {size(facts.memory_free_bytes)} of {size(facts.memory_bytes)} are free"
        yield Finding(_WARNING, "memory", name, message, there("ps -eo pid,user,rss,comm --sort=-rss | head"))
    if facts.load > BUSY * facts.cpu_count:
        message = f"its processors are busy: a load of {facts.load:.0f} on {facts.cpu_count}"
        yield Finding(_NOTE, "load", name, message, there("ps -eo pid,user,pcpu,comm --sort=-pcpu | head"))
    clock = one.clock
    if clock is not None and abs(clock.offset_s) - clock.uncertainty_s > CLOCK_S:
        ahead = "ahead of" if clock.offset_s > 0 else "behind"
        message = f"its clock is {abs(clock.offset_s):.1f} s {ahead} ours"
        yield Finding(_WARNING, "clock", name, message, there("sudo chronyc makestep"))


_WHAT = {"nofile": "open files", "nproc": "processes"}


# ---- between hosts -------------------------------------------------------------------------------------------


def _placement(spec: JobSpec, there: Sequence[Examined]) -> Iterator[Finding]:
    """Say on which hosts the workers do not fit."""
    for one in there:
        try:
            place(
                [offer(one)],
                nproc=spec.nproc,
                gpus_per_proc=spec.gpus_per_proc,
                oversubscribe=spec.oversubscribe,
                isolate=spec.virtual_local_rank,
                roles=spec.roles,
            )
        except PlacementError as error:
            message = str(error).removeprefix(f"{one.host.name}: ")
            yield Finding(_ERROR, "placement", (one.host.name,), message, on_host(spec, one.host)("nvidia-smi -L"))


def _differences(spec: JobSpec, there: Sequence[Examined]) -> Iterator[Finding]:
    if len(there) < 2:
        return
    for kind, what, value, severity_of in _COMPARED:
        values = {one.host.name: value(one.facts) for one in there if one.facts is not None}
        usual = most_common(values)
        for found in dict.fromkeys(values.values()):
            if found == usual:
                continue
            odd = tuple(name for name, its in values.items() if its == found)
            others = [name for name, its in values.items() if its == usual]
            severity = severity_of(found, usual)
            message = f"{what}: {found or 'none'}, but {usual or 'none'} on {named(others)}"
            example = next(one for one in there if one.host.name == others[0]).facts
            host = next(one.host for one in there if one.host.name == odd[0])
            assert example is not None
            yield Finding(severity, kind, odd, message, on_host(spec, host)(_make_equal(spec, kind, example)))


def _make_equal(spec: JobSpec, kind: str, example: HostFacts) -> str:
    """Return what gives a host what another one has, or shows what it has where that is no single command."""
    package, version = {"numpy": ("numpy", example.numpy)}.get(kind, ("torch", example.torch))  # NCCL comes with it
    if kind in _SHOWN_BY or version is None:
        return _SHOWN_BY.get(kind, f"{spec.python} --version")
    release, _, build = version.partition("+")
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return f"{spec.python} -m pip install {package}=={release}{index}"


_SHOWN_BY = {
    "driver": "nvidia-smi",
    "gpus": "nvidia-smi -L",
    "cores": "nproc",
    "system": "cat /etc/os-release",
    "python-patch": "python3 --version",
}


def _release(version: str, parts: int) -> list[str]:
    return re.split(r"[.+]", version)[:parts]


def _differ_in(parts: int, severity: Severity, otherwise: Severity) -> Callable[[str, str], Severity]:
    return lambda one, other: severity if _release(one, parts) != _release(other, parts) else otherwise


_COMPARED: tuple[tuple[str, str, Callable[[HostFacts], str], Callable[[str, str], Severity]], ...] = (
    ("torch", "torch", lambda f: f.torch or "", _differ_in(2, _ERROR, _WARNING)),
    ("torch-cuda", "torch's CUDA", lambda f: f.torch_cuda or "", lambda *_: _WARNING),
    ("nccl", "NCCL", lambda f: f.nccl or "", lambda *_: _ERROR),
    ("driver", "CUDA driver", lambda f: f.driver or "", _differ_in(1, _WARNING, _NOTE)),
    ("python-patch", "Python", lambda f: f.python, _differ_in(2, _NOTE, _NOTE)),
    ("numpy", "numpy", lambda f: f.numpy or "", _differ_in(1, _WARNING, _NOTE)),
    ("gpus", "GPUs", lambda f: _gpus(f), lambda *_: _WARNING),
    ("cores", "processors that may be busy", lambda f: str(f.cpu_limit), lambda *_: _NOTE),
    ("system", "system", lambda f: f.system, lambda *_: _NOTE),
)  # fmt: skip


def _gpus(facts: HostFacts) -> str:
    names = sorted({gpu.name for gpu in facts.gpus if gpu.name})
    return f"{len(facts.gpu_ids)} {' and '.join(names)}".strip() if facts.gpu_ids else ""


def _scripts(spec: JobSpec, there: Sequence[Examined], script_here: str | None) -> Iterator[Finding]:
    """Compare the script with ours, or where we have none, with what most have."""
    digests = {one.host.name: one.facts.script for one in there if one.facts is not None and one.facts.script}
    if not digests:
        return
    right = script_here or most_common(digests)
    for one in there:
        found = digests.get(one.host.name, right)
        if found != right:
            where = "the one here" if script_here else "most hosts'"
            message = f"the script {spec.command.target} is another file than {where} (SHA-256 {found}, not {right})"
            yield Finding(_ERROR, "script", (one.host.name,), message, _copy(spec, one))


def _machines(there: Sequence[Examined]) -> Iterator[Finding]:
    """Find names of one machine, and users who share a folder but not its files."""
    by_machine: dict[str, list[Examined]] = {}
    by_folder: dict[str, list[Examined]] = {}
    for one in there:
        assert one.facts is not None
        if one.host.parts == 1:
            by_machine.setdefault(one.facts.machine, []).append(one)
        by_folder.setdefault(one.facts.workdir_mark, []).append(one)
    for same in by_machine.values():
        cards = [set(one.facts.gpu_ids) for one in same if one.facts is not None]
        names = tuple(one.host.name for one in same)
        if len(same) > 1 and set.intersection(*cards):
            yield Finding(_WARNING, "same-machine", names, _TWICE, "hostname")
        elif len(same) > 1:
            yield Finding(_NOTE, "same-machine", names, "they are one machine")
    for mark, sharing in by_folder.items():
        users = {one.host.name: f"{one.facts.user} ({one.facts.uid})" for one in sharing if one.facts is not None}
        if mark and len({one.facts.uid for one in sharing if one.facts is not None}) > 1:
            usual = most_common(users)
            odd = tuple(name for name, user in users.items() if user != usual)
            message = f"the user is {users[odd[0]]}, elsewhere {usual}, and the working directory is shared"
            yield Finding(_WARNING, "user", odd, message, "id")
