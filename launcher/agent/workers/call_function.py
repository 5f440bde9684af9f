"""A worker of launcher.launch(): load the function, call it, and write its result for the agent.

Loaded by bootstrap.py. The function's file, which came over the run's stream from the user's own process, holds two
pickles: the source lines of the user's files, for tracebacks, and `(function, args)`. The result file gets one:
`(True, result, RANK, WORLD_SIZE)` or `(False, exception, RANK, WORLD_SIZE)`. It is complete or does not exist; an
exception that cannot be pickled leaves none, and is only in the error files.
"""

from __future__ import annotations

import io
import os
import pickle
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_RESULT_BYTES = 1 << 30  # for one rank; all of them are in the memory of the process that called launch()


class FunctionError(Exception):
    """The function cannot be loaded in this worker."""


class ResultError(Exception):
    """The result of a function cannot be passed on."""


def call_function(name: str, function_file: str, result_file: str) -> None:
    """Call the function with that name. Raises its exceptions, FunctionError or ResultError."""
    sys.argv = [name]
    pid = os.getpid()
    function, args = _load(name, function_file)
    try:
        result = function(*args)
    except SystemExit as stop:
        if stop.code or os.getpid() != pid:
            raise
        _keep(True, None, result_file)
        raise
    except Exception as error:
        if os.getpid() == pid:
            _keep_exception(error, result_file)
        raise
    if os.getpid() != pid:  # a process forked by the function, which returned as well
        return
    try:
        _keep(True, result, result_file)
    except ResultError:
        raise
    except Exception as error:
        what = f"the result of rank {os.environ['RANK']}, of type {type(result).__qualname__}, cannot be pickled"
        raise ResultError(f"{what}: {type(error).__name__}: {error}; save it to a file and return its path") from None


def _load(name: str, function_file: str) -> Any:
    import linecache

    try:
        with open(function_file, "rb") as file:
            for path, lines in pickle.load(file).items():
                linecache.cache.setdefault(path, (sum(map(len, lines)), None, lines, path))
            return pickle.load(file)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        hint = "the modules that it uses must be on every host, in the same versions"
        raise FunctionError(f"{name} cannot be loaded on {os.environ['DTRAIN_HOST']}: {why}; {hint}") from error


def _keep_exception(error: Exception, result_file: str) -> None:
    try:
        _keep(False, error, result_file)
    except Exception:
        return  # the error files have it


def _keep(ok: bool, value: object, result_file: str) -> None:
    import cloudpickle

    part = f"{result_file}.part"
    try:
        with _Bounded(part) as file:
            cloudpickle.dump((ok, value, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])), file)
        os.replace(part, result_file)
    finally:
        if os.path.exists(part):
            os.unlink(part)


class _Bounded(io.FileIO):
    """A new file of at most MAX_RESULT_BYTES."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "w")
        self._bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._bytes += len(view)
        if self._bytes > MAX_RESULT_BYTES:
            what = f"the result of rank {os.environ['RANK']} is larger than {MAX_RESULT_BYTES >> 20} MiB"
            raise ResultError(f"{what}; save it to a file and return its path")
        rest = view
        while rest:
            rest = rest[super().write(rest) or 0 :]
        return len(view)
