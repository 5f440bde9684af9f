"""Deliberate faults of a run: `--chaos "kill worker every 30s, kill host every 5m, seed 7"`. Pure."""

from __future__ import annotations

import os
import re

from launcher.errors import UsageError
from launcher.frozen import dataclass

GRAMMAR = (
    "write `kill worker every 30s`, `stop worker every 5m` or `kill host every 10m`, several separated by commas, "
    "optionally with `seed 7`"
)
_FAULT = re.compile(r"(\w+)(?:\s+(\w+))?\s+every\s+([0-9]{1,9}(?:\.[0-9]{1,3})?)([smh])")
_SEED = re.compile(r"seed\s+([0-9]{1,9})")
_UNIT_S = {"s": 1, "m": 60, "h": 3600}
_KINDS = (("kill", "worker"), ("stop", "worker"), ("kill", "host"))


@dataclass(frozen=True)
class Fault:
    """A worker is killed (SIGKILL) or stopped (SIGSTOP), or a simulated host is lost with all its processes."""

    action: str
    target: str
    every_s: float


@dataclass(frozen=True)
class ChaosPlan:
    """`seed` determines the target of each fault."""

    faults: tuple[Fault, ...]
    seed: int


def parse_chaos(text: str) -> ChaosPlan:
    """Parse `--chaos`. Raises UsageError with the grammar."""
    faults: list[Fault] = []
    seed = int.from_bytes(os.urandom(2), "big")
    for part in (part.strip() for part in text.split(",")):
        if given := _SEED.fullmatch(part):
            seed = int(given[1])
        else:
            faults.append(_fault(part))
    if not faults:
        raise UsageError(f"--chaos {text!r} contains no fault: {GRAMMAR}")
    return ChaosPlan(tuple(faults), seed)


def _fault(part: str) -> Fault:
    if part.partition(" ")[0] in ("cut", "slow"):
        raise UsageError(
            f"--chaos: {part!r} is a fault of the network, which needs a separate network for each host; the hosts of "
            f"--simulate share the network of this machine. {GRAMMAR[0].upper()}{GRAMMAR[1:]}"
        )
    found = _FAULT.fullmatch(part)
    # `host every 5m` kills a host; `stop every 5m` stops a worker.
    action, target = ("", "") if found is None else (found[1], found[2] or "")
    if not target:
        action, target = ("kill", action) if action in ("worker", "host") else (action, "worker")
    if found is None or (action, target) not in _KINDS:
        raise UsageError(f"--chaos: {part!r} is not a fault: {GRAMMAR}")
    every_s = float(found[3]) * _UNIT_S[found[4]]
    if not 1 <= every_s <= 86400:
        raise UsageError(f"--chaos: {part!r}: the time must be 1s to 24h")
    return Fault(action, target, every_s)
