"""`dtrain cache`: lists or removes what `--sync` keeps on hosts. Called by main.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

from launcher.errors import DtrainError, HostError, UsageError
from launcher.hosts.host import Host
from launcher.output.text import count, printable, size, table
from launcher.placement.job_spec import JobSpec
from launcher.transport.connect import Connector
from launcher.transport.fetching import ordered

_AT_ONCE = 16
_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))

Kept = list[tuple[str, int, float]]  # its run, or empty for packages; bytes; seconds since its last use


def run_cache(spec: JobSpec, *, clear: bool, say: Callable[[str], None]) -> int:
    """List what the hosts keep, or remove it; return the exit code, 1 if a host cannot be asked. Blocks."""
    hosts = [host for host in spec.hosts if host.remote]
    if not hosts:
        raise UsageError(
            "--sync sends nothing to this machine itself; name other hosts: dtrain cache --hosts alpha,beta"
        )
    with closing(Connector(spec)) as connector, ThreadPoolExecutor(_AT_ONCE) as threads:
        answers = list(threads.map(partial(_ask, connector, spec, clear), hosts))
    rows = []
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            say(f"{host.name}: {answer}")
        elif clear:
            say(f"{host.name}: removed {count(len(answer), 'tree')}, {size(sum(each[1] for each in answer))}")
        else:
            rows += [_row(host, *each) for each in answer]
    if rows:
        sys.stdout.write("".join(f"{line}\n" for line in table(rows)))
    elif not clear:
        say("nothing is kept there that no run uses")
    return 1 if any(isinstance(answer, str) for answer in answers) else 0


def _ask(connector: Connector, spec: JobSpec, clear: bool, host: Host) -> Kept | str:
    """Return what a host keeps, or why it cannot be asked."""
    try:
        with ordered(connector, spec, host, {"clear": clear}) as exchange:
            found = exchange.read_message()["cache"]
            return [(str(run), int(bytes_), float(age_s)) for run, bytes_, age_s in found]
    except (DtrainError, LookupError, ValueError, TypeError) as error:
        return error.reason if isinstance(error, HostError) else str(error)


def _row(host: Host, run: str, bytes_: int, age_s: float) -> dict[str, str]:
    seconds, unit = next((each for each in _UNITS if age_s >= each[0]), _UNITS[-1])
    ago = f"{count(max(0, int(age_s / seconds)), unit)} ago"
    what = f"code of run {printable(run)}" if run else "packages"
    return {"host": host.name, "what": what, "size": size(bytes_), "last use": ago}
