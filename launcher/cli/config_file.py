"""The config file: `dtrain.toml`, or `[tool.dtrain]` in pyproject.toml, in the current folder.

It sets defaults of the command line's options, with the same names: flag > environment (DTRAIN_*) > file.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from launcher.cli import torchrun
from launcher.cli.options import CONFIG_SOURCE, Command, Listed, Option, Options, takes_options
from launcher.errors import UsageError
from launcher.frozen import dataclass


@dataclass(frozen=True)
class ConfigFile:
    """The values by option name (with `_`), and their origin, for messages."""

    values: Mapping[str, Any]
    source: str


class Group(click.Group):
    """Sets defaults of commands with the options of `dtrain run`, from the config file, for dtrain-torchrun also from
    PET_* variables. The others do not read it: an error in the file does not keep a user from looking at runs.
    """

    command_class = Command
    folder: Path | None = None  # that has the config file; None: the current one

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None and _settings_of(command) and not ctx.resilient_parsing:
            config_file = self.read_config_file()
            ctx.meta[CONFIG_SOURCE] = config_file.source
            defaults = _defaults(command, config_file, ctx)
            ctx.default_map = {name: torchrun.defaults(os.environ, defaults) if ctx.obj else defaults}
        return name, command, rest

    def options_of_run(self, argv: Sequence[str], *, as_torchrun: bool = False) -> Options:
        """Parse arguments of `dtrain run` as that command does, with the environment and the config file."""
        found: list[Options] = []

        def keep(options: Options) -> None:
            found.append(options)

        command = click.command("run", context_settings={"allow_interspersed_args": False})(takes_options(keep))
        group = Group("dtrain", commands={**self.commands, "run": command})
        group.main(["run", *argv], standalone_mode=False, obj=as_torchrun)
        return found[0]

    def read_config_file(self) -> ConfigFile:
        """Read the config file of the folder."""
        known = {param.name for command in self.commands.values() for param in _settings_of(command) if param.name}
        return read_config_file(self.folder or current_folder(), known)


def _settings_of(command: click.Command) -> list[Option]:
    """Return the options of a command that the file may set: all of class Option."""
    return [param for param in command.params if isinstance(param, Option)]


def _defaults(command: click.Command, config_file: ConfigFile, ctx: click.Context) -> dict[str, Any]:
    """Check the values for a command's options; the error for an invalid value names the file."""
    defaults = {}
    for param in _settings_of(command):
        if param.name not in config_file.values:
            continue
        value = config_file.values[param.name]
        if isinstance(param, Listed) and isinstance(value, list):
            value = ",".join(map(str, value))
        if param.multiple and isinstance(value, str):
            value = [value]
        try:
            if param.is_flag and not isinstance(value, bool):
                raise click.BadParameter("must be true or false")
            if not param.is_flag and isinstance(value, bool | dict):
                raise click.BadParameter(f"{value!r} is not a value for it")
            if isinstance(value, list) and not param.multiple:
                raise click.BadParameter(f"it is {value!r}; it must be one value")
            defaults[param.name] = value if isinstance(value, list | bool) else str(value)
            param.type_cast_value(ctx, defaults[param.name])
        except (click.ClickException, UsageError) as error:
            reason = error.message if isinstance(error, click.ClickException) else str(error)
            raise UsageError(f"{config_file.source}: {param.name}: {reason}") from error
    return defaults


def current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder no longer exists; change to another one") from error


def read_config_file(folder: Path, known: Collection[str]) -> ConfigFile:
    """Read the config file of `folder`; without one, the values are empty.

    Raises UsageError for a file that is not TOML, for an unknown key (naming the closest known one), and if both files
    have settings.
    """
    own, project = folder / "dtrain.toml", folder / "pyproject.toml"
    tables: dict[str, Any] = {}  # by origin
    if own.is_file():
        tables[str(own)] = _load(own)
    if project.is_file():
        tools = _load(project).get("tool", {})
        if isinstance(tools, dict) and "dtrain" in tools:
            tables[f"[tool.dtrain] in {project}"] = tools["dtrain"]
    if len(tables) > 1:
        raise UsageError(f"settings are in {' and in '.join(tables)}; keep one of them")
    values: dict[str, Any] = {}
    for source, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"{source} is {table!r}; it must be a table of settings")
        for key, value in table.items():
            name = key.replace("-", "_")
            if name not in known:
                raise UsageError(f"{source}: unknown key {key!r}{nearest(name, known)}")
            if name in values:
                raise UsageError(f"{source}: {name!r} is set twice, once with '-' and once with '_'")
            values[name] = value
    return ConfigFile(values, "".join(tables))


def nearest(name: str, known: Collection[str]) -> str:
    """Return `; did you mean ...?` with the closest known name, or a list of all."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; the keys are: {', '.join(sorted(known))}"


def _load(file: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        values: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    return values
