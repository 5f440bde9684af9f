"""torchrun's command line: translates its options, and has the defaults of `dtrain-torchrun` (main.py).

`dtrain run` accepts the same options. `dtrain-torchrun` differs where torchrun does: one worker per host by default,
several nodes are started by hand, and PET_* variables set the defaults of options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from launcher.cli.options import Options
from launcher.errors import UsageError
from launcher.placement.job_spec import TORCHRUN_START_METHODS, JobSpec

_BACKENDS = ("static", "c10d")
_SECONDS = ("join_timeout", "timeout")  # of --rdzv-conf: how long to wait for nodes
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def defaults(environment: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options' defaults: PET_* variables, else the config file, else torchrun's."""
    values: dict[str, Any] = {"nproc_per_node": "1", **settings}
    for name, is_flag in ((f.name, f.type == "bool") for f in fields(Options) if f.metadata):
        value = environment.get(f"PET_{name.upper()}")
        if value is not None and name != "export":  # torchrun has no such option
            values[name] = value == "1" if is_flag else [value] if name == "role" else value
    return values


def translate(options: Options) -> tuple[dict[str, Any], list[str]]:
    """Return the changes to our options by torchrun's, and notices about those without a meaning, to print once."""
    notices = [
        f"--{option.name.replace('_', '-')} has no meaning here: {option.metadata['no_meaning']}"
        for option in fields(Options)
        if option.metadata.get("no_meaning") and getattr(options, option.name) is not None
    ]
    if options.standalone:
        changed: dict[str, Any] = {"nnodes": (1, 1), "node_rank": None, "rdzv_endpoint": None, "rdzv_backend": None}
    else:
        changed = _rendezvous(options, notices)
    if options.start_method in TORCHRUN_START_METHODS:
        notices.append(f"--start-method has no meaning here as {options.start_method}; see dtrain run --help")
        changed["start_method"] = JobSpec.start_method
    if options.shutdown_timeout is not None:
        changed["grace_s"] = options.shutdown_timeout
    if options.rdzv_id not in (None, "none") and not options.run_id:
        run_id = re.sub(r"[^A-Za-z0-9._-]", "-", options.rdzv_id or "")
        changed["run_id"] = re.sub(r"^[^A-Za-z0-9]", "rdzv-", run_id)[:128]
    if options.signals_to_handle is not None:
        changed["signals"] = _signals(options.signals_to_handle)
    return changed, notices


def _rendezvous(options: Options, notices: list[str]) -> dict[str, Any]:
    """Return the options for --rdzv-endpoint and --rdzv-conf: where the nodes meet and how long they wait."""
    backend = (options.rdzv_backend or "static").lower()
    if backend not in _BACKENDS:
        raise UsageError(f"--rdzv-backend {backend} is not supported; dtrain does the rendezvous itself: leave it out")
    ours: dict[str, Any] = {}
    if options.rdzv_endpoint:
        host, port = _endpoint(options.rdzv_endpoint)
        ours["master_addr"] = options.master_addr or host
        ours["master_port"] = options.master_port or port or None
        ours["any_port"] = port == 0
    for key, value in _conf(options.rdzv_conf).items():
        if key in _SECONDS:
            ours["start_timeout_s"] = _seconds(key, value)
        elif key == "is_host":
            ours["rdzv_is_host"] = value.lower() in ("1", "true", "t", "yes", "y")
        elif key == "last_call_timeout":
            ours["last_call_s"] = _seconds(key, value)
        elif key != "rank":
            notices.append(f"--rdzv-conf {key} has no meaning here")
        elif re.fullmatch("[0-9]{1,6}", value):
            ours["node_rank"] = int(value)
        else:
            raise UsageError(f"--rdzv-conf rank={value}: it must be the number of this node, from 0")
    return ours


def _signals(text: str) -> tuple[str, ...]:
    chosen = tuple(name.strip().upper() for name in text.split(",") if name.strip())
    for name in chosen:
        if name not in SIGNALS:
            raise UsageError(f"--signals-to-handle {name} is not one of: {', '.join(SIGNALS)}")
    return chosen


def _endpoint(text: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"\[([0-9A-Fa-f:.%\w]+)\](?::(\d+))?|([^:\s]+)(?::(\d+))?", text.strip())
    if match is None:
        raise UsageError(f"--rdzv-endpoint is {text!r}; write HOST:PORT")
    ipv6, port6, host, port = match.groups()
    number = port6 or port
    return ipv6 or host, int(number) if number else None


def _conf(text: str | None) -> dict[str, str]:
    pairs = {}
    for item in (text or "").split(","):
        if not item.strip():
            continue
        key, equals, value = item.strip().partition("=")
        if not equals:
            raise UsageError(f"--rdzv-conf: {item.strip()!r} is not KEY=VALUE")
        pairs[key] = value
    return pairs


def _seconds(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise UsageError(f"--rdzv-conf {key}={value}: it must be a number of seconds") from error
