"""What stands before the agent on its host: the user's shell line (--setup) and a program around it (--agent-prefix).

The line may contain a secret, and argv is visible to every user of the host. So it is the first line on the standard
input of a fixed program for the shell, which runs it and becomes the agent. Its output goes to stderr: stdout is the
protocol's.
"""

from __future__ import annotations

import os
import shlex

from launcher.placement.job_spec import JobSpec

_FAILED = "dtrain: --setup ended with status"
_LINES = 4  # of its output in an error
_CHOOSE = 'exec "$(command -v bash || command -v sh)" -c "$1"'
# Not in a function, where `declare` would make local variables, nor in an AND-OR list, where `set -e` has no effect. In
# one line, since csh, which may be the login shell, allows no more in quotes.
_PROGRAM = "; ".join((
    "IFS= read -r dtrain_setup",
    f"trap 'echo \"{_FAILED} $?\" >&2' EXIT",
    'eval "$(printf %b "$dtrain_setup")" </dev/null >&2',
    "dtrain_setup=$?",
    '[ "$dtrain_setup" = 0 ] || exit "$dtrain_setup"',
    "trap - EXIT",
    "unset dtrain_setup",
    "cd /",
    "exec ",
))  # fmt: skip


def host_command(spec: JobSpec, *args: str) -> list[str]:
    """Return the command that runs `python -m ARGS` on a host of a run, for its agent; `first_bytes` are its input."""
    return after_setup(spec, [*spec.agent_prefix, spec.python, "-m", *args])


def after_setup(spec: JobSpec, command: list[str]) -> list[str]:
    """Return the command that runs --setup before another one, whose input then follows `first_bytes`."""
    return ["sh", "-c", _CHOOSE, "sh", _PROGRAM + shlex.join(command)] if spec.setup else command


def first_bytes(spec: JobSpec) -> bytes:
    """Return what the command must read first, with its escapes doubled: the line, in the workers' folder.

    A folder that is sent (--sync) is not there yet: the line runs where the shell starts.
    """
    if not spec.setup:
        return b""
    is_there = "code" not in spec.sync or spec.names_workdir
    line = f"cd {shlex.quote(str(spec.workdir))}\n{spec.setup}" if is_there else spec.setup
    return os.fsencode(line.replace("\\", "\\\\").replace("\n", "\\n")) + b"\n"


def why_setup_failed(words: str) -> str:
    """Return why the line failed, from the stderr of the command; empty if it did not."""
    said, failed, status = words.rpartition(_FAILED)
    if not failed:
        return ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reason = "; ".join(lines[-_LINES:]) or "it said nothing"
    if "module: " in reason and "not found" in reason:
        reason += "; to have the command module, write --setup 'source /etc/profile; module load ...'"
    return f"--setup ended there with status {status.split()[0]}: {reason}"
