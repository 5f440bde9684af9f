"""How a command's help is laid out: its options under headings, in the order in which they are declared."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["Command", "Option"]

_OTHERS = "Options"


class Option(click.Option):
    """An option that the config file may set; `group` is the heading under which help lists it."""

    def __init__(self, *args: Any, group: str = _OTHERS, **more: Any) -> None:
        super().__init__(*args, **more)
        self.group = group


class Command(click.Command):
    """A command of which the help lists the options by their groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(param, "group", _OTHERS), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)
