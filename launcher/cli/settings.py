"""Settings from files: `dtrain.toml`, or `[tool.dtrain]` in pyproject.toml, of the current folder.

They are defaults of the command line's options, under the same names: flag > environment (DTRAIN_*) > file.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import UsageError

__all__ = ["Settings", "nearest", "read_settings"]


class Settings:
    """The values of one file by option name (with `_`), and where they came from for messages."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = dict(values)
        self.source = source


def read_settings(folder: Path, known: Collection[str]) -> Settings:
    """Read the settings that apply in `folder`; empty where there is no file.

    Raises UsageError for a file that is no TOML, for an unknown key (naming the nearest right one), and where both
    files have settings.
    """
    own = folder / "dtrain.toml"
    project = folder / "pyproject.toml"
    found: list[Settings] = []
    if own.is_file():
        found.append(Settings(_load(own), str(own)))
    if project.is_file():
        tools = _load(project).get("tool", {})
        source = f"[tool.dtrain] in {project}"
        table = tools.get("dtrain") if isinstance(tools, dict) else None
        if table is not None and not isinstance(table, dict):
            raise UsageError(f"{source} is {table!r}; it must be a table of settings")
        if table is not None:
            found.append(Settings(table, source))
    if len(found) == 2:
        raise UsageError(f"settings are in {found[0].source} and in {found[1].source}; keep one of them")
    if not found:
        return Settings({}, "")
    values: dict[str, Any] = {}
    for key, value in found[0].values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise UsageError(f"{found[0].source}: unknown key {key!r}{nearest(name, known)}")
        if name in values:
            raise UsageError(f"{found[0].source}: {name!r} is set twice, once with '-' and once with '_'")
        values[name] = value
    return Settings(values, found[0].source)


def nearest(name: str, known: Collection[str]) -> str:
    """Return `; did you mean ...?` for the closest known name, or the list of all."""
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
