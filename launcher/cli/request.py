"""Converts the command line's options to a request: the JobSpec, our role in it, the output filter.

Reads files named by options, and looks at this machine; starts nothing.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from launcher.cli import torchrun
from launcher.cli.config_file import current_folder
from launcher.cli.node_role import NodeRole, find_node_role
from launcher.cli.options import Options, launch_options
from launcher.errors import UsageError
from launcher.hosts.host import Host, HostKind
from launcher.hosts.sources import Sources, choose_hosts, in_slurm, wait_for_discovery
from launcher.output.filter import OutputFilter, parse_ranks, parse_std
from launcher.output.logfiles import attempts_in
from launcher.placement.chaos_plan import parse_chaos
from launcher.placement.environment import parse_ecosystems
from launcher.placement.job_spec import (
    CommandKind,
    JobSpec,
    SshOptions,
    WorkerCommand,
    new_run_id,
    parse_duration,
    parse_exports,
    parse_hang,
    parse_nproc,
)
from launcher.placement.roles import Roles, roles_of

_SOURCES = ("hosts", "hostfile", "hosts_script", "simulate")
# Options that JobSpec has unchanged, with the same name; _spec makes its other fields.
_UNCHANGED = (
    "nnodes", "gpus_per_proc", "oversubscribe", "start_timeout_s", "grace_s", "max_restarts", "grow",
    "heartbeat_timeout_s", "stall_timeout_s", "on_nonfinite", "master_addr", "master_port", "pass_local_rank",
    "flight_recorder", "virtual_local_rank", "last_call_s", "signals", "start_method", "hosts_script", "requeue",
    "fetch", "replayable",
)  # fmt: skip
_MADE = (
    "command", "hosts", "nproc", "workdir", "python", "export", "log_dir", "run_id", "hang", "chaos", "interfaces",
    "roles", "env_for", "numa_binding", "keep_warm_s", "first_attempt", "ssh", "setup", "agent_prefix",
    "launch_prefix", "stdin_rank", "sync", "names_workdir",
)  # fmt: skip


def _check_fields() -> None:
    """Raise TypeError if a field of JobSpec is in neither list above, or has another type than its option."""
    job, options = ({found.name: found.type for found in fields(declared)} for declared in (JobSpec, Options))
    wrong = {*_UNCHANGED, *_MADE} ^ job.keys() | {name for name in _UNCHANGED if options.get(name) != job.get(name)}
    if wrong:
        raise TypeError(f"request.py does not set these fields of JobSpec, or has another type: {sorted(wrong)}")


_check_fields()


@dataclass(frozen=True)
class Request:
    """The checked request. `node_role`: our role among several commands of one run, None if there is only this one.

    Each of the `notices` should be printed once.
    """

    spec: JobSpec
    node_role: NodeRole | None
    output_filter: OutputFilter
    notices: tuple[str, ...]


def read_request(options: Options, *, wait: bool = False) -> Request:
    """Check the options and make the request from them.

    Raises UsageError. With `wait`, blocks until a discovery script names enough hosts, at most --start-timeout-s.
    """
    changed, notices = torchrun.translate(options)
    options = replace(options, **changed)
    if options.typed.intersection(_SOURCES) and "node_rank" not in options.typed:
        options = replace(options, node_rank=None)  # from the environment or a file: a flag takes precedence
    sources = _sources(options)
    roles = roles_of(
        options.role, chief=options.chief, ps=options.ps, evaluator=options.evaluator, ends_with=options.ends_with
    )
    nproc = _nproc(options.nproc_per_node, roles)
    node_role = find_node_role(options, nproc=nproc, has_source=_has_source(sources))
    nnodes = options.nnodes if node_role is None else node_role.nodes
    elastic = nnodes is not None and nnodes[0] < nnodes[1]
    grow = options.grow or (sources.script is not None and elastic)
    options = replace(options, nnodes=nnodes, grow=grow, hosts_script=sources.script)
    if node_role is None:
        hosts = _hosts(sources, options, spares=options.max_restarts > 0 or elastic, wait=wait)
        spec = _spec(options, hosts, nproc, roles, travels=any(host.remote for host in hosts))
    elif sources.include or sources.exclude:
        raise UsageError("--include and --exclude are for lists of hosts; nodes started by hand have none (--nnodes)")
    else:
        # Each node has its own number of workers, and its user's variables.
        spec = replace(_spec(options, node_role.hosts, nproc, roles), nproc=None, master_port=None, master_addr=None)
    notices += _misplaced(spec.command, spec.workdir)
    return Request(spec, node_role, _output_filter(options), tuple(notices))


def _misplaced(command: WorkerCommand, workdir: Path) -> list[str]:
    """Warn of dtrain's options after the script if no file in its folder mentions them."""
    ours = launch_options()
    args = itertools.takewhile(lambda arg: arg != "--", command.args)
    typed = [arg for arg in args if arg.partition("=")[0].replace("_", "-") in ours]
    if not typed or command.kind is not CommandKind.SCRIPT:
        return []
    script = workdir / command.target
    try:
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in {script, *script.parent.glob("*.py")}]
    except OSError:  # the script is missing or unreadable here: its options are unknown
        return []
    names = dict.fromkeys(arg.partition("=")[0] for arg in typed)
    unknown = [name for name in names if not _occurs(name, texts)]
    return [
        f"{name} comes after {command.target}, so it is passed to the script, which does not mention it; if it is for "
        f"dtrain: dtrain run {name} ... {command.target}"
        for name in unknown
    ]


def _occurs(option: str, texts: Sequence[str]) -> bool:
    name = re.compile(re.sub("[-_]", "[-_]", option.lstrip("-")))
    return any(name.search(text) for text in texts)


def _output_filter(options: Options) -> OutputFilter:
    if options.log_format == "json" and options.lines == "merge":
        raise UsageError("--lines merge is for text; --log-format json shows each line with its rank")
    return OutputFilter(
        ranks=parse_ranks(options.only_rank, "--only-rank"),
        local_ranks=parse_ranks(options.local_ranks_filter, "--local-ranks-filter"),
        redirected=parse_std(options.redirects, "--redirects"),
        teed=parse_std(options.tee, "--tee"),
    )


def check_here(spec: JobSpec) -> None:
    """Raise UsageError for a missing script before anything is started, if one of the hosts is this machine."""
    if spec.command.is_standard_input and spec.stdin_rank != 0:
        raise UsageError(
            f"the script is {spec.command.target}, but rank 0 does not read the standard input of this command; "
            "save the script to a file, or leave --stdin, --detach out"
        )
    is_sent = "code" in spec.sync and spec.workdir.is_dir()
    check_script(spec.command, spec.workdir, is_seen=is_sent or not all(host.remote for host in spec.hosts))


def check_script(command: WorkerCommand, workdir: Path, *, is_seen: bool) -> None:
    """Raise UsageError if the script is an interpreter, or missing although the hosts' files are here (`is_seen`)."""
    if command.kind is not CommandKind.SCRIPT:
        return
    if _is_interpreter(command.target, workdir):
        raise UsageError(f"leave out {command.target}: dtrain starts the interpreter by itself (--python)")
    if not is_seen:
        return
    if not workdir.is_dir():
        raise UsageError(f"the working directory {workdir} does not exist; see --workdir")
    script = workdir / command.target
    if not os.path.exists(script):
        raise UsageError(f"the script {script} does not exist{_hint_at_missing(command.target, workdir)}")
    if (shell := _shell_of(script)) is not None:
        raise UsageError(
            f"{script} is not a Python script but one for {shell}: dtrain run --no-python {shell} {command.target}"
        )


def _hint_at_missing(target: str, workdir: Path) -> str:
    """Suggest what the user may have meant by a script that does not exist."""
    folder, name = os.path.split(target)
    try:
        files = [file for file in os.listdir(workdir / folder) if (workdir / folder / file).is_file()]
    except OSError:  # the folder does not exist either
        files = []
    if close := difflib.get_close_matches(name, files, n=1, cutoff=0.7):
        return f"; did you mean {os.path.join(folder, close[0])}?"
    return "; for a module write -m, for another program --no-python" if not os.path.splitext(name)[1] else ""


def _shell_of(script: Path) -> str | None:
    """Return the interpreter in a script's first line, if it is not Python, and Python cannot parse the script."""
    try:
        data = script.read_bytes() if script.is_file() else b""  # a pipe can be read only once
    except OSError:
        return None
    first = re.match(rb"#![ \t]*(\S+)(?:[ \t]+(\S+))?", data)
    if first is None or b"python" in first[0]:
        return None
    import ast  # needed for few scripts, and slow

    try:
        ast.parse(data)
    except (SyntaxError, ValueError):
        return os.fsdecode(first[2] if first[1].endswith(b"/env") and first[2] else first[1])
    return None


def check_values(options: Options) -> None:
    """Check the options whose values do not depend on the hosts or this machine. Raises UsageError."""
    roles = roles_of(
        options.role, chief=options.chief, ps=options.ps, evaluator=options.evaluator, ends_with=options.ends_with
    )
    _nproc(options.nproc_per_node, roles)
    parse_ecosystems(options.env_for, roles)
    parse_hang(options.hang)
    if options.chaos is not None:
        parse_chaos(options.chaos)
    _output_filter(options)
    _ssh(options)
    _split("--agent-prefix", options.agent_prefix)
    _split("--launch-prefix", options.launch_prefix)
    about_hosts = ("nnodes", "grow")
    values = {name: getattr(options, name) for name in _UNCHANGED if name not in about_hosts}
    values["run_id"] = options.run_id or new_run_id()
    JobSpec(parse_command(options), (Host("any", HostKind.SRUN),), **values)


def _is_interpreter(target: str, workdir: Path) -> bool:
    """Return whether the script is a Python interpreter: by its name in PATH, or by its path."""
    path = workdir / target
    if not re.fullmatch(r"python(3(\.\d+)?)?", path.name):
        return False
    return path.is_file() and os.access(path, os.X_OK) if "/" in target else not path.exists()


def _sources(options: Options) -> Sources:
    given: dict[str, Any] = {name: found for name in _SOURCES if (found := getattr(options, name)) not in (None, False)}
    if chosen := [name for name in given if name in options.typed]:  # a flag takes precedence
        given = {name: given[name] for name in chosen}
    elif "node_rank" in options.typed or (options.as_torchrun and "nnodes" in options.typed):
        given = {}
    if options.standalone and given:
        raise UsageError(
            f"--standalone is a run on this machine only; leave out either it or --{min(given).replace('_', '-')}"
        )
    hostfile = given.get("hostfile")
    return Sources(
        hosts=given.get("hosts"),
        hostfile=Path(hostfile).expanduser() if hostfile else None,
        include=options.include,
        exclude=options.exclude,
        script=given.get("hosts_script"),
        simulate=bool(given.get("simulate")),
        environment=None if options.as_torchrun or options.standalone else dict(os.environ),
    )


def _has_source(sources: Sources) -> bool:
    return sources.simulate or any(x is not None for x in (sources.hosts, sources.hostfile, sources.script))


def listed_hosts(options: Options) -> tuple[Host, ...]:
    """Return the hosts of --hosts or --hostfile; empty without them. Raises UsageError."""
    sources = _sources(replace(options, as_torchrun=True))
    if sources.simulate or sources.script is not None:
        raise UsageError("--print-commands is for nodes started by hand; leave out --simulate, --hosts-script")
    return choose_hosts(sources, nnodes=None, spares=True) if _has_source(sources) else ()


def _hosts(sources: Sources, options: Options, *, spares: bool, wait: bool) -> tuple[Host, ...]:
    if sources.script is not None:
        if options.nnodes is None:
            raise UsageError("--hosts-script needs the number of hosts that the run may have: --nnodes MIN:MAX")
        if wait:
            wait_for_discovery(sources.script, options.nnodes[0], options.start_timeout_s)
    return choose_hosts(sources, nnodes=options.nnodes, spares=spares)


def _spec(
    options: Options, hosts: tuple[Host, ...], nproc: int | str | None, roles: Roles, *, travels: bool = False
) -> JobSpec:
    """Make the JobSpec; `travels`: variables of known libraries are sent to the hosts."""
    spec = JobSpec(
        command=parse_command(options),
        hosts=hosts,
        nproc=nproc,
        workdir=workdir_of(options.workdir),
        python=options.python or sys.executable,
        stdin_rank=_stdin(options, hosts),
        export=tuple(parse_exports(options.export, dict(os.environ), remote=travels).items()),
        log_dir=Path(options.log_dir) if options.log_dir else JobSpec.log_dir,
        run_id=options.run_id or new_run_id(),
        interfaces=_interfaces(options.interface),
        roles=roles,
        env_for=parse_ecosystems(options.env_for, roles),
        numa_binding=options.numa_binding or "",
        hang=parse_hang(options.hang),
        chaos=None if options.chaos is None else parse_chaos(options.chaos),
        keep_warm_s=_keep_warm_s(options.keep_warm),
        ssh=_ssh(options),
        setup=options.setup or "",
        agent_prefix=_split("--agent-prefix", options.agent_prefix),
        launch_prefix=_split("--launch-prefix", options.launch_prefix),
        sync=_sync(options.sync),
        names_workdir=options.workdir is not None,
        **{name: getattr(options, name) for name in _UNCHANGED},
    )
    if spec.ssh.command:
        from launcher.transport.ssh.client import login_command

        for host in hosts:
            login_command(host, spec.ssh)  # raises UsageError for what it cannot be given
    return _in_slurm(spec, named=bool(options.run_id))


def _stdin(options: Options, hosts: tuple[Host, ...]) -> int | None:
    """Return the rank that reads this command's standard input."""
    text = options.stdin
    if text is not None and text != "none" and not re.fullmatch("[0-9]{1,6}", text):
        raise UsageError(f"--stdin is {text!r}; write a rank such as 0, or none")
    has_none = ""
    if options.detach:
        has_none = "a detached run"
    elif any(host.kind in (HostKind.JOINED, HostKind.SRUN) for host in hosts) or in_slurm(os.environ):
        has_none = "a run of SLURM, or of nodes started by hand,"
    if has_none and "stdin" in options.typed and text != "none":
        raise UsageError(f"--stdin {text}: {has_none} has no standard input to pass on; leave out --stdin")
    return None if has_none or text == "none" else int(text or 0)


def _nproc(text: str | None, roles: Roles) -> int | str | None:
    if text and roles.others and not text.strip("0"):
        others = ", ".join(f"{role.count} of role {role.name}" for role in roles.others)
        raise UsageError(
            f"servers without workers: --nproc-per-node is {text}, beside {others}; "
            "write the number of workers on each host, 1 or more"
        )
    return parse_nproc(text)


def _in_slurm(spec: JobSpec, *, named: bool) -> JobSpec:
    """Apply what SLURM knows about earlier starts of the job; `named`: the user chose the run's id."""
    if not in_slurm(os.environ):
        if spec.requeue:
            raise UsageError("--requeue is for SLURM jobs, and this is not one: SLURM_JOB_ID is not set")
        return spec
    from launcher.hosts.slurm_allocation import restart_count, slurm_run_id

    name = (not named and slurm_run_id(os.environ)) or spec.run_id
    if not named and not spec.requeue:  # a job may have several runs
        name = f"{name}-{spec.run_id}"
    starts = restart_count(os.environ)
    # Numbering continues after the attempts of earlier starts, which may have had several each.
    first = max([starts, *(number + 1 for number in attempts_in(spec.log_dir / name))]) if starts else 0
    return replace(spec, run_id=name, first_attempt=first)


def parse_command(options: Options) -> WorkerCommand:
    """Return the command that the workers run. Raises UsageError."""
    argv = options.command
    if not argv:
        raise UsageError("nothing to run: name a script, as in `dtrain run train.py`; see dtrain run --help")
    if options.module and options.no_python:
        raise UsageError("--module and --no-python exclude each other")
    program = options.no_python and not options.run_path
    kind = CommandKind.MODULE if options.module else CommandKind.PROGRAM if program else CommandKind.SCRIPT
    return WorkerCommand(kind, argv[0], argv[1:])


def workdir_of(named: str | None) -> Path:
    """Return the working directory by the name that the user sees: other hosts may not have the same links."""
    if named is not None:
        return Path(named).expanduser().absolute()
    shell = os.environ.get("PWD", "")
    if os.path.isabs(shell) and os.path.isdir(shell) and os.path.samefile(shell, "."):
        return Path(shell)
    return current_folder()


def _ssh(options: Options) -> SshOptions:
    command = _split("--ssh-command", options.ssh_command)
    if command and options.accept_new_host_keys:
        raise UsageError(
            "--accept-new-host-keys is for dtrain's own SSH; with --ssh-command, host keys are that command's: "
            "--ssh-command 'ssh -o StrictHostKeyChecking=accept-new'"
        )
    config = Path(options.ssh_config).expanduser() if options.ssh_config else None
    return SshOptions(config=config, accept_new=options.accept_new_host_keys, command=command)


def _split(option: str, text: str | None) -> tuple[str, ...]:
    """Split a command as a shell does; empty without one. Raises UsageError."""
    if text is None:
        return ()
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} is {text!r}, which cannot be split as by a shell: {error}") from error
    if not words:
        raise UsageError(f"{option} is {text!r}; write a command, or leave it out")
    return words


def _sync(text: str | None) -> tuple[str, ...]:
    return ("code", "env") if text == "both" else (text,) if text else ()


def _keep_warm_s(text: str | None) -> float:
    keep_s = 0.0 if text is None else parse_duration(text, "--keep-warm")
    if keep_s and in_slurm(os.environ):
        raise UsageError("--keep-warm leaves processes behind, which a SLURM job must not have; leave it out here")
    return keep_s


def _interfaces(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise UsageError(f"--interface is {text!r}; write one name, or several with commas")
    return names
