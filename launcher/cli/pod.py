"""Options from the variables of a pod of Kubernetes, and the message of its end.

The variables are those of an Indexed Job, and those of Kubeflow's operators: PET_* of TrainJobs, MASTER_ADDR,
MASTER_PORT, WORLD_SIZE and RANK of PyTorchJobs. They count only in a pod, since any shell may have them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.cli.options import Options
from launcher.errors import UsageError
from launcher.machine.variables import in_pod
from launcher.placement.job_spec import parse_nnodes

TERMINATION_LOG = "/dev/termination-log"  # the file that Kubernetes makes in each container, for this message
_MESSAGE_BYTES = 4096  # of which Kubernetes keeps no more
_OF_OTHERS = ("LOCAL_RANK", "SLURM_JOB_ID")  # this is a worker of a launcher, or a job of SLURM
_SOURCES = ("hosts", "hostfile", "hosts_script", "simulate", "standalone", "print_commands")
_PYTORCHJOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_INDEX = "JOB_COMPLETION_INDEX"
_VARIABLES = {  # by option; those of one option must agree
    "nnodes": ("PET_NNODES", "WORLD_SIZE"),
    "nproc_per_node": ("PET_NPROC_PER_NODE",),
    "node_rank": ("PET_NODE_RANK", "RANK", _INDEX),
    "master_addr": ("PET_MASTER_ADDR", "MASTER_ADDR"),
    "master_port": ("PET_MASTER_PORT", "MASTER_PORT"),
}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def with_pod_variables(options: Options, env: Mapping[str, str]) -> Options:
    """Return the options with those that are not given set by the pod's variables; unchanged outside of a pod.

    A flag or a DTRAIN_* variable gives an option. Raises UsageError if two variables contradict each other, or, for
    `dtrain run`, a variable and a flag. In `dtrain-torchrun` flags win, as in torchrun.
    """
    if not in_pod(env) or any(name in env for name in _OF_OTHERS) or any(getattr(options, s) for s in _SOURCES):
        return options
    found = _found(env)
    origins = dict(options.origins)
    given = {name for name, origin in origins.items() if origin == "command line" or origin.startswith("DTRAIN_")}
    if options.rdzv_endpoint or options.rdzv_backend == "c10d":  # the nodes find each other by these
        given |= {"node_rank", "master_addr", "master_port"}
    nnodes = options.nnodes if "nnodes" in given or "nnodes" not in found else found["nnodes"][0]
    if not options.as_torchrun:
        _check_flags(options, found, alone=nnodes is None)
    if nnodes is None or nnodes[1] == 1:  # each pod has a run of its own
        found = {name: value for name, value in found.items() if name in ("nnodes", "nproc_per_node")}
    elif "master_addr" not in found and env.get("RANK") == "0" and env.get("MASTER_ADDR") in _LOOPBACK:
        found["master_addr"] = env.get("HOSTNAME"), "HOSTNAME"  # some PyTorchJobs give their first pod `localhost`
    filled = {name: value for name, value in found.items() if name not in given}
    origins |= {name: variable for name, (_, variable) in filled.items()}
    return replace(options, **{name: value for name, (value, _) in filled.items()}, origins=tuple(origins.items()))


def write_termination_message(text: str) -> None:
    """Write a line for `kubectl describe pod` where Kubernetes reads it; do nothing outside of a container of it."""
    with contextlib.suppress(OSError):  # it does not exist, or cannot be written: it is a copy
        descriptor = os.open(TERMINATION_LOG, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "replace")[:_MESSAGE_BYTES])


def _found(env: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Return by option the value and the variable that has it. Raises UsageError."""
    is_pytorchjob = all(env.get(name) for name in _PYTORCHJOB)
    found: dict[str, tuple[Any, str]] = {}
    for option, names in _VARIABLES.items():
        for name in names:
            text = env.get(name)
            if not text or (name in _PYTORCHJOB and not is_pytorchjob):
                continue
            if option == "master_addr" and text in _LOOPBACK:
                continue
            value = _value(option, name, text)
            first, variable = found.setdefault(option, (value, name))
            if first != value and not (name == "WORLD_SIZE" and _counts_workers(first, value, env)):
                raise UsageError(f"{variable}={env[variable]} and {name}={text} contradict each other; unset one")
    if "nnodes" in found and found["nnodes"][1] == "WORLD_SIZE" and env.get("PET_NPROC_PER_NODE", "1") != "1":
        raise UsageError(
            f"WORLD_SIZE={env['WORLD_SIZE']} may count pods or workers (PET_NPROC_PER_NODE="
            f"{env['PET_NPROC_PER_NODE']}); set PET_NNODES to the number of pods"
        )
    return found


def _value(option: str, variable: str, text: str) -> Any:
    if option == "nnodes":
        try:
            return parse_nnodes(text)
        except UsageError as error:
            raise UsageError(f"{variable}: {error}") from error
    if option in ("node_rank", "master_port"):
        if not (text.isascii() and text.isdigit()):
            raise UsageError(f"{variable} is {text!r}; it must be a number")
        return int(text)
    return text


def _counts_workers(nnodes: tuple[int, int], world: tuple[int, int], env: Mapping[str, str]) -> bool:
    """Return whether WORLD_SIZE is the number of workers of all pods, which depends on the operator's version."""
    per_node = env.get("PET_NPROC_PER_NODE", "")
    return nnodes[0] < nnodes[1] or not per_node.isdigit() or world[0] == nnodes[1] * int(per_node)


def _check_flags(options: Options, found: Mapping[str, tuple[Any, str]], *, alone: bool) -> None:
    """Raise UsageError if a flag contradicts a variable. Each node may choose its own number of workers."""
    for name in options.typed & {"nnodes", "node_rank", "master_addr", "master_port"} & found.keys():
        (value, variable), typed = found[name], getattr(options, name)
        if typed == value or (alone and variable == _INDEX):
            continue
        if name == "nnodes" and typed[0] <= value[0] and value[1] <= typed[1]:  # an elastic run on these pods
            continue
        flag = f"--{name.replace('_', '-')}"
        raise UsageError(
            f"{flag} is {_text(typed)}, but {variable} is {_text(value)} in this pod; leave out {flag}, or add "
            "--standalone for a run of this pod alone"
        )


def _text(value: Any) -> str:
    return ":".join(map(str, dict.fromkeys(value))) if isinstance(value, tuple) else str(value)
