"""Roles: processes besides the ordinary workers, such as parameter servers, and which of them a run waits for. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import UsageError

DEFAULT_ROLE = "default"  # role of the ordinary workers, as in torchrun
MAX_COUNT = 100_000
_NAME = r"[A-Za-z][A-Za-z0-9_.-]*"


@dataclass(frozen=True)
class Role:
    """`count` processes over all hosts; `command` is the argv of their own command, empty for the run's."""

    name: str
    count: int
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Roles:
    """The roles of a run. `worker` is that of ordinary workers, `first` that of the first of them if it has its own.

    The run has ended when the processes of the roles in `waits_for` have succeeded (empty: all roles); the others are
    then stopped, which is no failure.
    """

    worker: str = DEFAULT_ROLE
    first: str = ""
    others: tuple[Role, ...] = ()
    waits_for: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = self.names
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"--role {name} is given twice; add the counts up")
        for name in self.waits_for:
            if name not in names:
                raise UsageError(f"--ends-with {name}: there is no such role; there are: {', '.join(names)}")

    @property
    def names(self) -> list[str]:
        return [*([self.first] if self.first else []), self.worker, *(role.name for role in self.others)]

    def needs(self, name: str) -> bool:
        """Return whether the run waits for the end of a role's processes."""
        return not self.waits_for or name in self.waits_for

    def command(self, name: str) -> tuple[str, ...]:
        """Return the argv of a role's own command, empty for the run's."""
        return next((role.command for role in self.others if role.name == name), ())


def parse_role(text: str) -> Role | str:
    """Parse `--role`: NAME for the ordinary workers, or NAME:COUNT[:COMMAND] for other processes.

    >>> parse_role("ps:2:serve.py --port 0")
    Role(name='ps', count=2, command=('serve.py', '--port', '0'))
    """
    match = re.fullmatch(rf"({_NAME})(?::([0-9]+)(?::(.*))?)?", text, re.DOTALL)
    if match is None:
        raise UsageError(f"--role is {text!r}; write NAME for the workers, or NAME:COUNT or NAME:COUNT:COMMAND")
    name, count, command = match.groups()
    if count is None:
        return name
    if not 1 <= int(count) <= MAX_COUNT:
        raise UsageError(f"--role {name}: its count is {count}; it must be 1 to {MAX_COUNT}")
    try:
        argv = tuple(shlex.split(command)) if command is not None else ()
    except ValueError as error:
        raise UsageError(f"--role {name}: its command {command!r} cannot be read: {error}") from error
    if command is not None and not argv:
        raise UsageError(f"--role {name}: its command is empty; omit the last ':' to use the run's command")
    return Role(name, int(count), argv)


def roles_of(
    given: Sequence[str],
    *,
    chief: bool = False,
    ps: int = 0,
    evaluator: bool = False,
    ends_with: str | None = None,
) -> Roles:
    """Return the roles of a run from its options. TensorFlow's imply when the run ends, unless `ends_with` is given.

    Its parameter servers and evaluators never end by themselves, nor do workers that use parameter servers: in that
    case the run ends with the chief, which leads them.
    """
    parsed = [parse_role(text) for text in given]
    named = [role for role in parsed if isinstance(role, str)]
    if len(named) > 1:
        raise UsageError(f"--role names the workers {' and '.join(named)}; for others write NAME:COUNT")
    if not 0 <= ps <= MAX_COUNT:
        raise UsageError(f"--ps is {ps}; it must be 0 to {MAX_COUNT}")
    for_tensorflow = chief or ps > 0 or evaluator
    worker = named[0] if named else "worker" if for_tensorflow else DEFAULT_ROLE
    others = [role for role in parsed if isinstance(role, Role)]
    others += [Role("ps", ps)] if ps else []
    others += [Role("evaluator", 1)] if evaluator else []
    waits_for: tuple[str, ...] = ()
    if ends_with is not None:
        waits_for = tuple(name.strip() for name in ends_with.split(","))
    elif for_tensorflow:
        leaders = ["chief"] if chief else []
        followers = [] if chief and ps else [worker]
        servers = ("ps", "evaluator")
        waits_for = (*leaders, *followers, *(role.name for role in others if role.name not in servers))
    return Roles(worker=worker, first="chief" if chief else "", others=tuple(others), waits_for=waits_for)
