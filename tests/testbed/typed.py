"""Reads a command line as `dtrain run` does, and runs commands that start nothing, in this process."""

import click
from click.testing import CliRunner

from launcher.cli.main import cli
from launcher.cli.options import Options, takes_options
from launcher.errors import UsageError


def typed(*argv: str) -> Options:
    """Return the options; raise click's error for what is none."""
    found: list[Options] = []
    command = click.command(context_settings={"allow_interspersed_args": False})(takes_options(found.append))
    command.main(list(argv), standalone_mode=False)
    return found[0]


def output_of(*argv: str, **env: str) -> str:
    """Return what a command writes to stdout; raise its error."""
    result = CliRunner().invoke(cli, argv, env=env, obj=False, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def message_of(error: BaseException) -> str:
    """Return the text of an error that ends the command with 2."""
    assert isinstance(error, UsageError | click.UsageError)
    assert error.exit_code == 2
    return error.format_message() if isinstance(error, click.UsageError) else str(error)
