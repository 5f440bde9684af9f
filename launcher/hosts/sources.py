"""Chooses the hosts of a run, from the one source that was given, never silently localhost."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import DtrainError, UsageError
from launcher.frozen import dataclass
from launcher.hosts.host import Host, HostKind, own_name, parse_hosts
from launcher.machine.processes import kill_session

_SOURCES = (
    "--hosts a,b (or DTRAIN_HOSTS, or `hosts` in dtrain.toml), --hostfile FILE, --hosts-script CMD, "
    "a SLURM allocation, --node-rank K --master-addr A typed on each node, or --simulate to divide this machine"
)
MAX_BYTES = 1 << 20  # most output of a discovery script
DISCOVERY_S = 10.0  # time limit of a discovery script; also the pause between its runs while too few hosts are known


@dataclass(frozen=True)
class Sources:
    """The sources that were given; at most one of `hosts`, `hostfile`, `script` and `simulate`.

    `environment` may contain a SLURM allocation; empty if none may be used.
    """

    hosts: str | None = None
    hostfile: Path | None = None
    include: str | None = None
    exclude: str | None = None
    script: str | None = None
    simulate: bool = False
    environment: Mapping[str, str] | None = None


def choose_hosts(sources: Sources, *, nnodes: tuple[int, int] | None, spares: bool = False) -> tuple[Host, ...]:
    """Return the hosts of a run from the sources; `nnodes` is the least and the most hosts that are wanted.

    With `spares`, hosts beyond the most are kept, to replace others. Reads a host file, and runs a discovery script
    once. Raises UsageError if more hosts are wanted than any source names.
    """
    least, most = nnodes or (None, None)
    _check_one(sources)
    if sources.simulate:
        if most is None:
            raise UsageError("--simulate needs the number of hosts to divide this machine into: --nnodes N")
        return tuple(Host(f"sim{part}", HostKind.SIMULATED, part=part, parts=most) for part in range(most))
    found = _named_hosts(sources)
    if found is None:
        if least is not None and least > 1:
            raise UsageError(f"--nnodes {least}, but no hosts are known. Name them: {_SOURCES}")
        return (Host(own_name(), HostKind.LOCAL),)
    hosts, where = found
    if least is not None and least > len(hosts):
        names = ", ".join(host.name for host in hosts)
        are = "1 host is" if len(hosts) == 1 else f"{len(hosts)} hosts are"
        raise UsageError(f"--nnodes {least}, but only {are} {where}: {names}")
    return hosts if spares else hosts[:most]


def in_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether this is a SLURM job."""
    return bool(environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID"))


def _check_one(sources: Sources) -> None:
    given = {
        "--hosts": sources.hosts is not None,
        "--hostfile": sources.hostfile is not None,
        "--hosts-script": sources.script is not None,
        "--simulate": sources.simulate,
    }
    names = [name for name, present in given.items() if present]
    if len(names) > 1:
        value = f", which are: {sources.hosts}" if sources.hosts is not None else ""
        why = "--simulate divides this machine; " if sources.simulate else ""
        raise UsageError(f"{why}{' and '.join(names)} cannot be used together{value}; hosts come from one source")
    if (sources.include or sources.exclude) and names[:1] not in ([], ["--hosts"], ["--hostfile"]):
        raise UsageError(
            f"--include and --exclude choose from --hosts, --hostfile or this machine, not from {names[0]}"
        )


def _named_hosts(sources: Sources) -> tuple[tuple[Host, ...], str] | None:
    """Return the hosts that a source names, with a phrase for messages."""
    if sources.hosts is not None:
        if not sources.hosts.strip():
            raise UsageError("--hosts is empty; name hosts as in --hosts a,b, or leave it out")
        return _filtered(parse_hosts(sources.hosts), sources), "named"
    if sources.hostfile is not None:
        from launcher.hosts.hostfile import read_hostfile

        return _filtered(read_hostfile(sources.hostfile), sources), f"in {sources.hostfile}"
    if sources.script is not None:
        return discover(sources.script), f"named by {sources.script}"
    if sources.environment is not None and in_slurm(sources.environment):
        from launcher.hosts.slurm_allocation import find_allocation, hosts_of, step_title

        allocation = find_allocation(sources.environment, step_title())
        if allocation is not None:
            return _filtered(hosts_of(allocation), sources), "in the SLURM allocation"
    if sources.include or sources.exclude:
        return _filtered((Host(own_name(), HostKind.LOCAL),), sources), "left"
    return None


def _filtered(hosts: tuple[Host, ...], sources: Sources) -> tuple[Host, ...]:
    if not sources.include and not sources.exclude:
        return hosts
    from launcher.hosts.include_exclude import filter_hosts

    return filter_hosts(hosts, include=sources.include, exclude=sources.exclude)


def discover(command: str, over: threading.Event | None = None) -> tuple[Host, ...]:
    """Run a discovery script in Horovod's form, which prints the present hosts. Blocks DISCOVERY_S at most.

    The command is split like a shell command, but no shell runs it. It is killed, with its descendants, if it takes too
    long, prints more than MAX_BYTES, or the run is `over`. Raises DtrainError if it fails.
    """
    from launcher.hosts.hostfile import parse_discovered

    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--hosts-script {command!r} cannot be read: {error}") from error
    if not argv:
        raise UsageError("--hosts-script is empty; name a program that prints HOST:SLOTS lines")
    argv[0] = os.path.expanduser(argv[0])
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(f"--hosts-script: {argv[0]} cannot be run: {error.strerror}") from error
    with process:
        try:
            answer = _answer(process, over, command)
        except BaseException:
            kill_session(process)
            raise
    text, complaint = (data.decode("utf-8", "replace") for data in answer)
    if process.returncode != 0:
        said = complaint.strip().splitlines()
        raise DtrainError(
            f"--hosts-script: {command} ended with {process.returncode}: {said[-1] if said else 'no message'}"
        )
    return parse_discovered(text, command=command)


def _answer(process: subprocess.Popen[bytes], over: threading.Event | None, command: str) -> tuple[bytes, bytes]:
    """Return the output of a program, once it has ended. Raises DtrainError if it must be killed instead."""
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + DISCOVERY_S
    out, err = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, out)
        selector.register(process.stderr, selectors.EVENT_READ, err)
        while selector.get_map() or process.poll() is None:
            if time.monotonic() >= deadline or (over is not None and over.is_set()):
                raise DtrainError(f"--hosts-script: {command} did not answer within {DISCOVERY_S:g} s")
            if not selector.get_map():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                continue
            for key, _ in selector.select(0.1):
                data = os.read(key.fd, 1 << 16)
                key.data.extend(data)
                if not data:
                    selector.unregister(key.fd)
            if len(out) + len(err) > MAX_BYTES:
                raise DtrainError(
                    f"--hosts-script: {command} was ended, since it printed more than {MAX_BYTES >> 20} MiB; "
                    "it must print one HOST:SLOTS line for each host, and end"
                )
    return bytes(out), bytes(err)


def wait_for_discovery(command: str, least: int, limit_s: float) -> None:
    """Wait until a discovery script names as many hosts as needed. Raises UsageError if it does not in time."""
    deadline = time.monotonic() + limit_s
    while len(hosts := discover(command)) < least:
        if time.monotonic() >= deadline:
            names = ", ".join(host.name for host in hosts) or "none"
            needed = "1 host is" if least == 1 else f"{least} hosts are"
            raise UsageError(f"--hosts-script: {needed} needed, {command} names {len(hosts)}: {names}")
        time.sleep(1.0)
