"""From the options of the command line to what is asked for: the JobSpec, who we are in it, what is shown.

Called by main.py. Reads files that options name, and looks around on this machine; starts nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.cli import torchrun
from launcher.cli.node_role import Place, find_place
from launcher.cli.options import current_folder
from launcher.errors import UsageError
from launcher.hosts.host import Host
from launcher.hosts.sources import Sources, choose_hosts, in_slurm, wait_for_discovery
from launcher.output.filter import Shown, parse_ranks, parse_std
from launcher.output.logfiles import attempts_in
from launcher.placement.ecosystems import parse_ecosystems
from launcher.placement.job_spec import (
    SIGNALS,
    Command,
    CommandKind,
    JobSpec,
    SshOptions,
    new_run_id,
    parse_exports,
    parse_nproc,
)
from launcher.placement.roles import Roles, roles_of

__all__ = ["Request", "check_here", "listed_hosts", "parse_command", "read_request"]

_SOURCES = ("hosts", "hostfile", "hosts_script", "simulate")


@dataclass(frozen=True)
class Request:
    """`place`: which of several commands of one run this is, None if the run needs only this one.

    `notices` are to be said once.
    """

    spec: JobSpec
    nproc: int | str | None  # as it was said here
    place: Place | None
    shown: Shown
    notices: tuple[str, ...]


def read_request(
    command: tuple[str, ...],
    options: Mapping[str, Any],
    *,
    typed: Callable[[str], bool],
    as_torchrun: bool = False,
    wait: bool = False,
) -> Request:
    """Check everything that can be checked here. `typed` says whether an option stands on the command line.

    Raises UsageError. With `wait`, blocks until a discovery script names enough hosts, at most --start-timeout-s.
    """
    options, notices = torchrun.translate(options)
    if any(map(typed, _SOURCES)) and not typed("node_rank"):
        options["node_rank"] = None  # from the environment or a file: a flag is stronger
    sources = _sources(options, typed, as_torchrun=as_torchrun)
    place = find_place(options, os.environ, as_torchrun=as_torchrun, has_source=_has_source(sources))
    hosts = _hosts(sources, place, options, wait=wait)
    spec = _spec(command, options, hosts, place, sources.script)
    shown = Shown(
        ranks=parse_ranks(options["only_rank"], "--only-rank"),
        local_ranks=parse_ranks(options["local_ranks_filter"], "--local-ranks-filter"),
        redirected=parse_std(options["redirects"], "--redirects"),
        teed=parse_std(options["tee"], "--tee"),
    )
    nproc = parse_nproc(options["nproc_per_node"])
    return Request(spec, nproc, place, shown, tuple(notices))


def check_here(spec: JobSpec) -> None:
    """Find a missing script before anything is started, where one of the hosts is this machine."""
    if all(host.remote for host in spec.hosts) or spec.command.kind is not CommandKind.SCRIPT:
        return
    if not spec.workdir.is_dir():
        raise UsageError(f"the working directory {spec.workdir} does not exist; see --workdir")
    script = spec.workdir / spec.command.target
    if not os.path.exists(script):
        hint = "; for a module write -m, for another program --no-python" if not script.suffix else ""
        raise UsageError(f"the script {script} does not exist{hint}")


# ---- hosts ---------------------------------------------------------------------------------------------------


def _sources(options: Mapping[str, Any], typed: Callable[[str], bool], *, as_torchrun: bool) -> Sources:
    given = {name: options[name] for name in _SOURCES if options[name] is not None and options[name] is not False}
    if chosen := [name for name in given if typed(name)]:  # a flag is stronger than the environment or a file
        given = {name: given[name] for name in chosen}
    elif typed("node_rank") or (as_torchrun and typed("nnodes")):
        given = {}
    if options["standalone"] and given:
        raise UsageError(
            f"--standalone is a run on this machine alone; leave it out, or --{min(given).replace('_', '-')}"
        )
    hostfile = given.get("hostfile")
    return Sources(
        listed=given.get("hosts"),
        hostfile=Path(hostfile).expanduser() if hostfile else None,
        include=options["include"],
        exclude=options["exclude"],
        script=given.get("hosts_script"),
        simulate=bool(given.get("simulate")),
        environment=None if as_torchrun or options["standalone"] else dict(os.environ),
    )


def _has_source(sources: Sources) -> bool:
    return sources.simulate or any(x is not None for x in (sources.listed, sources.hostfile, sources.script))


def listed_hosts(options: Mapping[str, Any], *, typed: Callable[[str], bool]) -> tuple[Host, ...]:
    """Return the hosts of --hosts or --hostfile; empty without them. Raises UsageError."""
    sources = _sources(options, typed, as_torchrun=True)
    if sources.simulate or sources.script is not None:
        raise UsageError("--print-commands is for nodes that are started by hand; leave --simulate, --hosts-script out")
    return choose_hosts(sources, nnodes=None, spares=True) if _has_source(sources) else ()


def _hosts(sources: Sources, place: Place | None, options: Mapping[str, Any], *, wait: bool) -> tuple[Host, ...]:
    if place is not None:
        if sources.include or sources.exclude:
            raise UsageError("--include and --exclude are for lists of hosts; here every node is its own, see --nnodes")
        return place.hosts
    nnodes: tuple[int, int] | None = options["nnodes"]
    if sources.script is not None:
        if nnodes is None:
            raise UsageError("--hosts-script needs to know how many hosts the run may have: --nnodes MIN:MAX")
        if wait:
            wait_for_discovery(sources.script, nnodes[0], options.get("start_timeout_s", 0.0))
    spares = options.get("max_restarts", 0) > 0 or (nnodes is not None and nnodes[0] < nnodes[1])
    return choose_hosts(sources, nnodes=nnodes, spares=spares)


# ---- the job -------------------------------------------------------------------------------------------------


def _spec(
    command: tuple[str, ...],
    options: Mapping[str, Any],
    hosts: tuple[Host, ...],
    place: Place | None,
    script: str | None,
) -> JobSpec:
    config = options.get("ssh_config")
    roles = roles_of(
        options["role"],
        chief=options["chief"],
        ps=options["ps"],
        evaluator=options["evaluator"],
        ends_with=options["ends_with"],
    )
    nnodes: tuple[int, int] | None = place.nodes if place is not None else options["nnodes"]
    travels = any(host.remote for host in hosts) and place is None  # who types the command has set the variables there
    spec = JobSpec(
        command=parse_command(command, options),
        hosts=hosts,
        nnodes=nnodes,
        max_restarts=options.get("max_restarts", 0),
        grow=options.get("grow", False) or (script is not None and nnodes is not None and nnodes[0] < nnodes[1]),
        hosts_script=script,
        heartbeat_timeout_s=options.get("heartbeat_timeout_s", 30.0),
        stall_timeout_s=options.get("stall_timeout_s"),
        nproc=_nproc(options["nproc_per_node"], roles),
        gpus_per_proc=options["gpus_per_proc"],
        oversubscribe=options["oversubscribe"],
        workdir=_workdir(options.get("workdir")),
        python=options.get("python") or sys.executable,
        export=tuple(parse_exports(options.get("export") or (), dict(os.environ), remote=travels).items()),
        log_dir=Path(options.get("log_dir") or "runs"),
        run_id=options.get("run_id") or new_run_id(),
        start_timeout_s=options.get("start_timeout_s", 60.0),
        grace_s=options.get("grace_s", 10.0),
        master_addr=options["master_addr"],
        master_port=options["master_port"],
        interfaces=_names(options.get("interface"), "--interface"),
        roles=roles,
        env_for=parse_ecosystems(options["env_for"], roles),
        pass_local_rank=options["pass_local_rank"],
        virtual_local_rank=options["virtual_local_rank"],
        last_call_s=options.get("last_call_s"),
        signals=options.get("signals", SIGNALS),
        numa_binding=options.get("numa_binding") or "",
        requeue=options.get("requeue", False),
        ssh=SshOptions(
            config=Path(config).expanduser() if config else None,
            accept_new=options.get("accept_new_host_keys", False),
        ),
    )
    return _in_slurm(place.adapt(spec) if place is not None else spec, options)


def _nproc(text: str | None, roles: Roles) -> int | str | None:
    if text and roles.others and not text.strip("0"):
        others = ", ".join(f"{role.count} of role {role.name}" for role in roles.others)
        raise UsageError(
            f"servers without workers: --nproc-per-node is {text}, beside {others}; "
            "write how many workers each host is to have, 1 or more"
        )
    return parse_nproc(text)


def _in_slurm(spec: JobSpec, options: Mapping[str, Any]) -> JobSpec:
    """Take over what a SLURM job knows of its earlier starts."""
    if not in_slurm(os.environ):
        if spec.requeue:
            raise UsageError("--requeue is for jobs of SLURM, and this is none: SLURM_JOB_ID is not set")
        return spec
    from launcher.hosts.slurm_allocation import restart_count, slurm_run_id

    name = slurm_run_id(os.environ) or spec.run_id
    if options.get("run_id"):
        name = spec.run_id
    elif not spec.requeue:  # a job may have several runs
        name = f"{name}-{spec.run_id}"
    starts = restart_count(os.environ)
    # Attempts of earlier lives, each of which may have had several, are counted on.
    first = max([starts, *(number + 1 for number in attempts_in(spec.log_dir / name))]) if starts else 0
    return replace(spec, run_id=name, first_attempt=first)


def parse_command(words: tuple[str, ...], options: Mapping[str, Any]) -> Command:
    """Return what is to be run. Raises UsageError."""
    if not words:
        raise UsageError("nothing to run: name a script, as in `dtrain run train.py`; see dtrain run --help")
    module, program = options["module"], options["no_python"] and not options["run_path"]
    if module and options["no_python"]:
        raise UsageError("--module and --no-python exclude each other")
    kind = CommandKind.MODULE if module else CommandKind.PROGRAM if program else CommandKind.SCRIPT
    return Command(kind, words[0], words[1:])


def _workdir(named: str | None) -> Path:
    """Return the working directory by the name under which the user knows it: other hosts may have no such links."""
    if named is not None:
        return Path(named).expanduser().absolute()
    shell = os.environ.get("PWD", "")
    if os.path.isabs(shell) and os.path.isdir(shell) and os.path.samefile(shell, "."):
        return Path(shell)
    return current_folder()


def _names(text: str | None, option: str) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageError(f"{option} is {text!r}; write one name, or several with commas")
    return names
