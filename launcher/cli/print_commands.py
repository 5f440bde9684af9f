"""`dtrain run --print-commands`: what to type on each node of a run that is started by hand. Called by run.py."""

from __future__ import annotations

import os
import shlex
from dataclasses import fields
from pathlib import Path

from launcher.cli.options import Options
from launcher.cli.request import listed_hosts, parse_command
from launcher.errors import UsageError
from launcher.hosts.host import Host

__all__ = ["commands"]

_ABOUT_SSH = {"ssh_config", "accept_new_host_keys"}
_ABOUT_HOSTS = {"hosts", "hostfile", "include", "exclude", "print_commands", "node_rank", "master_addr", "command"}
_LEFT_OUT = _ABOUT_SSH | _ABOUT_HOSTS


def commands(options: Options) -> str:
    """Return what to type on each node for this run. Raises UsageError."""
    parse_command(options)
    hosts = listed_hosts(options)
    nodes = options.nnodes[1] if options.nnodes else len(hosts)
    if nodes < 2:
        raise UsageError("--print-commands needs the number of nodes, 2 or more; write --nnodes N, or --hosts")
    args = _typed_words(options)
    if not (options.nnodes and "nnodes" in options.typed):
        args = ["--nnodes", str(nodes), *args]
    address = options.master_addr or (_address_of(hosts[0], options) if hosts else "ADDRESS_OF_NODE_0")
    folder = shlex.quote(os.getcwd())
    lines = [
        "# once, on one machine: the secret that the nodes share; copy the file to every node",
        "(umask 077; mkdir -p ~/.config/dtrain; openssl rand -hex 32 > ~/.config/dtrain/token)",
    ]
    for k in range(nodes):
        host = hosts[k] if k < len(hosts) else None
        slots = host.slots if host else None
        own = [] if slots is None or options.nproc_per_node else ["--nproc-per-node", str(slots)]
        node = ["dtrain", "run", "--node-rank", str(k), "--master-addr", address]
        line = shlex.join([*node, *own, *args, *options.command])
        if host is not None and host.chosen is not None:  # by --include or --exclude, which a node does not take
            line = f"CUDA_VISIBLE_DEVICES={','.join(map(str, host.chosen))} {line}"
        lines += [f"# on {host.name if host else f'node {k}'}", f"cd {folder} && {line}"]
    return "\n".join(lines)


def _address_of(host: Host, options: Options) -> str:
    """Return the name or address that ssh would connect to: the other nodes know no alias of this user's."""
    from launcher.transport.ssh.config import Target, look_up

    config = Path(options.ssh_config).expanduser() if options.ssh_config else None
    try:
        found = look_up(Target(host.name, host.user, host.port), config, options.start_timeout_s)
    except TimeoutError as error:
        raise UsageError(f"{error}; write --master-addr") from error
    return found.get("hostname", [host.name])[0]


def _typed_words(options: Options) -> list[str]:
    """Return the options that were typed, but those that say who and where the nodes are."""
    args = []
    for name in (found.name for found in fields(Options) if found.name in options.typed - _LEFT_OUT):
        flag, value = f"--{name.replace('_', '-')}", getattr(options, name)
        if name == "nnodes":
            value = ":".join(map(str, dict.fromkeys(value)))
        given = value if isinstance(value, tuple) else [value]
        args += [flag] if value is True else [word for one in given for word in (flag, str(one))]
    return args
