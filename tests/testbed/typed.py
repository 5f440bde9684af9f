"""Reads a command line as `dtrain run` does, and runs commands that start nothing, in this process."""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import click
from click.testing import CliRunner

from launcher.cli.main import _main, cli
from launcher.cli.options import Options, takes_options
from launcher.errors import UsageError
from testbed.processes import Result


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


def dtrain(*argv: str) -> Result:
    """Run a command about runs, such as `dtrain ps`, as `run_dtrain` does, but in this process."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with _written_to(out, 1), _written_to(err, 2), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = _main([*argv], as_torchrun=False)
        out.seek(0)
        err.seek(0)
        return Result(status, out.read(), err.read(), time.monotonic() - began)


@contextlib.contextmanager
def _written_to(file: IO[str], descriptor: int) -> Iterator[None]:
    """Let what is written to a descriptor go to a file, too."""
    before = os.dup(descriptor)
    os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        file.flush()
        os.dup2(before, descriptor)
        os.close(before)
