"""`dtrain sbatch`: prints or submits a batch script for SLURM that runs `dtrain run`.

    dtrain sbatch [OPTIONS OF sbatch] [--print] -- [OPTIONS OF dtrain run] SCRIPT [ARGS]

The arguments after `--` are those of `dtrain run`. The options before it become #SBATCH lines; `--print` shows the
script instead of submitting it. With `--requeue` the job receives USR1 two minutes before its end, `dtrain run` gets
--requeue as well, and the output of all starts goes to one file; a typed --signal goes to the batch script, too. With
`--nnodes MIN:MAX` of `dtrain run` the job gets --no-kill. Called by main.py with the arguments as typed.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher import __version__
from launcher.errors import DtrainError, UsageError

if TYPE_CHECKING:
    from launcher.cli.options import Options

USAGE = """\
Usage: dtrain sbatch [OPTIONS OF sbatch] [--print] -- [OPTIONS OF dtrain run] SCRIPT [ARGS]...

  Submit a job to SLURM that runs SCRIPT on all its nodes, as dtrain run does.

  dtrain sbatch --nodes=2 --gpus-per-node=4 --time=4:00:00 -- train.py --lr 1e-3
  dtrain sbatch --nodes=2 --requeue --print -- --max-restarts 3 train.py

  --print shows the batch script instead of submitting it. If SCRIPT does not exist here, nothing is submitted; if
  only the nodes have it: dtrain sbatch --print ... | sbatch. With --requeue, every worker receives USR1 two minutes
  before the job's end; once a checkpoint is saved, the job is requeued.
"""
AHEAD_S = 120  # from USR1 to the end of the job
_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]~^-]+")
_SHORT = {"-A": "account", "-C": "constraint", "-D": "chdir", "-G": "gpus", "-J": "job-name", "-M": "clusters",
          "-e": "error", "-k": "no-kill", "-o": "output", "-p": "partition", "-q": "qos", "-t": "time"}  # fmt: skip
_VARIABLES = {"time": "TIMELIMIT"}  # options whose variable has another name
# Of the job in which dtrain sbatch was typed: SLURM leaves them as they are if the new job has none of its own.
_OUTER = tuple(f"SLURM_{name}" for name in ("NTASKS", "NPROCS", "ARRAY_", "RESTART_COUNT", "STEP_", "STEPID", "PTY_"))


def run_sbatch(args: Sequence[str], cli: click.Group) -> int:
    """Show or submit the job; return sbatch's exit code. Blocks while sbatch runs.

    `cli` is the command `dtrain`.

    Raises UsageError for invalid arguments, DtrainError if there is no sbatch.
    """
    ours, theirs = _split(args)
    if {"-h", "--help"} & set(ours):
        print(USAGE, end="")
        return 0
    options = [arg for arg in ours if arg != "--print"]
    is_shown = len(options) < len(ours)  # perhaps for another machine that has the files
    if not theirs:
        raise UsageError("nothing to run: name a script after --, as in `dtrain sbatch --nodes=2 -- train.py`")
    run = _check(theirs, cli, Path(_named(options).get("chdir") or "."), is_submitted=not is_shown)
    if run is None:
        return 0
    is_elastic = run.nnodes is not None and run.nnodes[0] < run.nnodes[1]
    script = os.fsencode(batch_script(options, theirs, dtrain=_dtrain(), is_elastic=is_elastic))
    if is_shown:
        sys.stdout.flush()
        os.write(1, script)
        return 0
    return _submit(script, options)


def batch_script(
    options: Sequence[str], args: Sequence[str], *, dtrain: Sequence[str], is_elastic: bool = False
) -> str:
    """Return a script with sbatch's `options` that runs `dtrain run ARGS`; `dtrain` is the command for dtrain here.

    An `is_elastic` run goes on without a node that fails, so the job does too. Raises UsageError for options that
    cannot be in a script.
    """
    names = _named(options)
    if "requeue" in names:
        options = _to_batch_script(options)
    if "wrap" in names:
        raise UsageError("dtrain sbatch does what --wrap does; leave it out, and name the script after --")
    added = [] if "job-name" in names else [f"--job-name={_job_name(args)}"]
    if is_elastic and "no-kill" not in names:
        added.append("--no-kill")
    run = list(args)
    if "requeue" in names:
        if "open-mode" not in names:
            added.append("--open-mode=append")
        if "signal" not in names:
            added.append(f"--signal=B:USR1@{_ahead_s(names.get('time'))}")
        run.insert(0, "--requeue")
    lines = ["#!/bin/bash"]
    for arg in [*options, *added]:
        if arg == ":":  # between the parts of a heterogeneous job
            lines.append("#SBATCH hetjob")
        elif arg.startswith("-") or lines[-1] in ("#!/bin/bash", "#SBATCH hetjob"):
            lines.append(f"#SBATCH {_directive(arg)}")
        else:
            lines[-1] += f" {_directive(arg)}"
    lines += [
        f"# Written by dtrain {__version__} (dtrain sbatch).",
        "",
        "# exec: dtrain then receives SLURM's signals to the batch script, such as USR1 before the end.",
        f"exec {shlex.join([*dtrain, 'run', *run])}",
    ]
    return "\n".join(lines) + "\n"


def _check(args: Sequence[str], cli: click.Group, folder: Path, *, is_submitted: bool) -> Options | None:
    """Raise the errors that `dtrain run ARGS` would raise in the job, started in `folder`.

    Return the options that it would have there; None for --help.
    """
    from launcher.cli.config_file import Group
    from launcher.cli.options import takes_options
    from launcher.cli.request import check_script, check_values, parse_command, workdir_of

    found: list[Options] = []

    def keep(options: Options) -> None:
        found.append(options)

    command = click.command("run", context_settings=cli.commands["run"].context_settings)(takes_options(keep))
    group = Group("dtrain", commands={**cli.commands, "run": command}, context_settings=cli.context_settings)
    group.folder = workdir_of(None) / folder
    group.main(["run", *args], "dtrain", standalone_mode=False)
    for options in found:
        script = parse_command(options)
        check_values(options)
        workdir = group.folder / Path(options.workdir or "").expanduser()
        check_script(script, workdir, is_seen=False)
        if not is_submitted:
            continue
        try:
            check_script(script, workdir, is_seen=True)
        except UsageError as error:
            raise UsageError(
                f"{error}\nnothing was submitted; if only the nodes have it, use --print | sbatch"
            ) from error
    return found[0] if found else None


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    before = list(args)
    if "--" in before:
        at = before.index("--")
        return before[:at], before[at + 1 :]
    if {"-h", "--help"} & set(before):
        return before, []
    raise UsageError(
        "write -- between the options of sbatch and those of dtrain run, as in "
        "`dtrain sbatch --nodes=2 -- train.py`; see dtrain sbatch --help"
    )


def _named(options: Sequence[str]) -> dict[str, str | None]:
    """Return the given options by their long names, with their probable values."""
    found: dict[str, str | None] = {}
    for at, arg in enumerate(options):
        following = options[at + 1] if at + 1 < len(options) else None
        if arg.startswith("--"):
            name, equals, value = arg[2:].partition("=")
            found[name] = value if equals else following
        elif arg[:2] in _SHORT:
            found[_SHORT[arg[:2]]] = arg[2:] or following
    return found


def _to_batch_script(options: Sequence[str]) -> list[str]:
    """Return the options with `B:` in --signal: without it, SLURM signals steps only, not dtrain."""
    words = list(options)
    for at, word in enumerate(words):
        head = "--signal=" if word.startswith("--signal=") else ""
        flags, _, sent = word.removeprefix(head).rpartition(":")
        if (head or (at and words[at - 1] == "--signal")) and "B" not in flags.upper():
            words[at] = f"{head}{flags}B:{sent}"
    return words


def _directive(arg: str) -> str:
    """Quote an argument for a #SBATCH line, which sbatch does not parse like a shell."""
    if any(character in arg for character in "\n\r\0"):
        raise UsageError(f"{arg!r}: an option of sbatch cannot have more than one line")
    if _SAFE.fullmatch(arg):
        return arg
    option = re.match("--[A-Za-z0-9-]*=", arg)
    head = option[0] if option else ""
    escaped = arg.removeprefix(head).replace("\\", "\\\\").replace('"', '\\"')
    return f'{head}"{escaped}"'


def _job_name(args: Sequence[str]) -> str:
    """Return a name for the job: that of the script, recognized by its suffix."""
    script = next((arg for arg in args if arg.endswith(".py")), "dtrain")
    return re.sub(r"[^A-Za-z0-9._-]", "_", Path(script).stem) or "dtrain"


def _ahead_s(limit: str | None) -> int:
    """Return how many seconds before the end of the job to send USR1: not in the first half of a short one."""
    limit_s = _limit_s(limit or "")
    return AHEAD_S if limit_s is None else max(1, min(AHEAD_S, limit_s // 2))


def _limit_s(text: str) -> int | None:
    """Parse a time limit of sbatch: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None for anything else."""
    match = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", text)
    if match is None:
        return None
    days, *rest = (int(group) if group else None for group in match.groups())
    numbers = [number for number in rest if number is not None]
    if days is not None or len(numbers) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((((days or 0) * 24 + hours) * 60) + minutes) * 60 + seconds


def _dtrain() -> list[str]:
    """Return the command that starts this dtrain on another machine, for any PATH and working directory."""
    typed = Path(sys.argv[0])
    if typed.name == "dtrain":
        return [str(typed.absolute())]
    beside = Path(sys.executable).with_name("dtrain")
    return [str(beside)] if os.access(beside, os.X_OK) else [sys.executable, "-m", "launcher"]


def _submit(script: bytes, options: Sequence[str]) -> int:
    import subprocess

    try:
        return subprocess.run(["sbatch"], input=script, env=_without_defaults(os.environ, options)).returncode
    except OSError as error:
        raise DtrainError(
            f"sbatch cannot be run here ({error.strerror}); type this on a machine with SLURM, or use --print"
        ) from error


def _without_defaults(env: Mapping[str, str], options: Sequence[str]) -> dict[str, str]:
    """Return the environment without variables of an outer job, and without defaults for typed options.

    sbatch prefers the environment to its script.
    """
    typed = {f"SBATCH_{_VARIABLES.get(name, name.replace('-', '_').upper())}" for name in _named(options)}
    return {name: value for name, value in env.items() if name not in typed and not name.startswith(_OUTER)}
