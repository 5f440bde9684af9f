"""Text on processes kept warm: at the end of a run, and for `dtrain warm`."""

from __future__ import annotations

import time
from collections.abc import Iterable

from launcher.hosts.folding import lines_by_reason
from launcher.job.ending import Outcome
from launcher.output.text import count
from launcher.placement.job_spec import JobSpec


def warm_lines(spec: JobSpec, outcome: Outcome, *, verbose: bool) -> list[str]:
    """Return the lines to print at the end of a run."""
    lines = []
    if spec.keep_warm_s:
        kept = [host for host, bye in outcome.warm if not bye.not_kept]
        if kept:
            verb = "stays" if len(kept) == 1 else "stay"
            until = local_time(time.time() + spec.keep_warm_s)
            lines.append(f"{count(len(kept), 'host')} {verb} warm until {until}: dtrain warm --stop")
        lines += _by_reason("nothing stays warm", ((host, bye.not_kept) for host, bye in outcome.warm))
    if verbose:
        if warm := sum(bye.was_warm for _, bye in outcome.warm):
            lines.append(f"{count(warm, 'host')} had the packages imported since an earlier run")
        lines += _by_reason("warm processes could not be used", ((host, bye.cold) for host, bye in outcome.warm))
    return lines


def _by_reason(what: str, reasons: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{what}: {line}" for line in lines_by_reason({host: why for host, why in reasons if why})]


def local_time(at: float) -> str:
    """Format a local time, with the date if it is not today."""
    there = time.localtime(at)
    form = "%H:%M" if there[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M"
    return time.strftime(form, there)
