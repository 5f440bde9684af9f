"""The options of `dtrain run` as keywords of a Python function: parsed, checked and completed like arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import click

from launcher.cli.config_file import nearest
from launcher.cli.main import cli
from launcher.cli.options import Options
from launcher.errors import UsageError

_WAITS = "launch() waits for the end of the run and returns the results of the workers"
_CALLS = "launch() calls a function"
# Options without a meaning there, and why.
_NOT_HERE = {
    "detach": _WAITS,
    "requeue": _WAITS,
    "replayable": "dtrain replay starts scripts",
    "print_commands": _WAITS,
    "module": _CALLS,
    "no_python": _CALLS,
    "run_path": _CALLS,
    "stdin": "a function called by launch() has an empty standard input",
    "node_rank": "launch() starts the workers on all hosts by itself",
}


def argv_of(keywords: Mapping[str, Any]) -> list[str]:
    """Return options as typed after `dtrain run`.

    None is the default, True a flag, False no flag (see options_of); a list is several values, a mapping variables.
    Raises UsageError for an unknown name.

    >>> argv_of({"nnodes": (1, 2), "hosts": ["a", "b"], "simulate": True, "export": {"A": "1"}})
    ['--nnodes', '1:2', '--hosts', 'a,b', '--simulate', '--export', 'A=1']
    """
    known = {
        param.name: param for param in cli.commands["run"].params if isinstance(param, click.Option) and param.name
    }
    argv = []
    for name, value in keywords.items():
        option = known.get(name)
        if option is None:
            raise UsageError(f"launch() has no option {name!r}{nearest(name, known)}")
        if value is None:
            continue
        if option.is_flag != isinstance(value, bool):
            raise UsageError(
                f"{name} is {value!r}; it {'must be True or False' if option.is_flag else 'needs a value'}"
            )
        flag = f"--{name.replace('_', '-')}"
        argv += [flag] * value if option.is_flag else [each for text in _texts(option, value) for each in (flag, text)]
    return argv


def _texts(option: click.Option, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        value = [f"{name}={text}" for name, text in value.items()]
    if not isinstance(value, list | tuple):
        return [str(value)]
    if option.multiple:
        return [str(each) for each in value]
    return [(":" if option.name == "nnodes" else ",").join(map(str, value))]


def options_of(argv: list[str], name: str, *, off: Collection[str] = ()) -> Options:
    """Parse these arguments, together with the environment and the config file.

    The flags `off` are not set, even if those set them.

    Raises UsageError if `dtrain run` would exit with 2.
    """
    try:
        options = cli.options_of_run([*argv, "--", name])
    except click.ClickException as error:
        raise UsageError(error.format_message()) from error
    origins = tuple(origin for origin in options.origins if origin[0] not in off)
    unset: dict[str, Any] = dict.fromkeys(off, False)
    options = replace(options, **unset, origins=origins)
    for option in _NOT_HERE:
        value = getattr(options, option)
        if value is not None and value is not False:
            origin = dict(options.origins).get(option)
            where = f" ({origin})" if origin and option not in options.typed else ""
            raise UsageError(f"launch() does not accept {option}{where}: {_NOT_HERE[option]}")
    return options
