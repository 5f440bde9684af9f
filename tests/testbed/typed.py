"""Reads a command line as `dtrain run` does, in this process."""

import click

from launcher.cli.options import Options, takes_options


def typed(*argv: str) -> Options:
    """Return the options; raise click's error for what is none."""
    found: list[Options] = []
    command = click.command(context_settings={"allow_interspersed_args": False})(takes_options(found.append))
    command.main(list(argv), standalone_mode=False)
    return found[0]
