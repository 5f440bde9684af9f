"""`launcher.launch()`: a run whose workers call a function of this process, with the controller of `dtrain run`."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TextIO, TypeVar

from launcher.cli.caller import Caller, Verbosity, error_file, write_all
from launcher.cli.control import control
from launcher.cli.options import Options, unknown_variables
from launcher.cli.request import Request, read_request
from launcher.cli.run_end import Ended, run_at_end
from launcher.errors import LaunchError, UsageError, WorkerError
from launcher.functions.keywords import argv_of, options_of
from launcher.functions.packing import Packed, Returns, pack
from launcher.job.failures.failure import what_happened
from launcher.machine.processes import restore_file_limit
from launcher.placement.job_spec import CommandKind, WorkerCommand
from launcher.runs.housekeeping import Limits, hold

T = TypeVar("T")
_runs, _runs_lock = 0, threading.Lock()


def launch(
    function: Callable[..., T],
    /,
    *args: Any,
    hosts: str | Sequence[str] | None = None,
    nproc_per_node: int | str | None = None,
    **options: Any,
) -> list[T]:
    """Call `function(*args)` in every worker of a run, and return the results by rank.

    The workers are processes of their own, started as `dtrain run` starts a script: with ranks, GPUs and a rendezvous
    store in their environment, on this machine, on `hosts` by SSH, or in a SLURM allocation. Their output appears on
    sys.stdout and sys.stderr. The run is listed in `dtrain ps`, has a folder, and can be stopped like others.

    The options are those of `dtrain run` with the same names, with `_`: `nnodes=2, simulate=True, max_restarts=3`.
    Options not given are read from DTRAIN_* variables, then from the config file. With `max_restarts`, the function is
    called again after a failure.

    `function`, its arguments and its results are sent by cloudpickle: it may be a lambda, a closure, or defined in a
    notebook. At most 256 MiB are sent to the hosts, and 1 GiB is returned by each worker. Modules that it uses must be
    on every host, and so must cloudpickle, with the same minor version of Python.

    Blocks until the run has ended and nothing of it is left, also after an exception or Ctrl-C. In the main thread of
    the process, SIGINT, SIGTERM and SIGHUP end the run, and take effect here after that; in another thread they do not
    affect the run, and `dtrain stop` ends it.

    Raises UsageError, before any host is reached, for options that `dtrain run` would reject and objects that cannot
    be pickled; HostError and its subclasses if the run cannot start; WorkerError if a worker failed; LaunchError if the
    run failed otherwise, or was stopped.
    """
    if "DTRAIN_RUN_KEY" in os.environ:
        raise UsageError(
            f"launch() was called in rank {os.environ.get('RANK', '?')} of a run; call it in the program that starts "
            'the run, under `if __name__ == "__main__":`'
        )
    packed = pack(function, args)
    argv = argv_of({"hosts": hosts, "nproc_per_node": nproc_per_node, **options})
    settings = options_of(argv, packed.name, off=[name for name, value in options.items() if value is False])
    limits = Limits(settings.keep_runs, settings.log_max_size)
    to_file = error_file(settings.error_json)
    request = _request(settings, packed)
    returns = Returns()
    with _file_limit_restored(), _program_streams() as (out, err):
        as_json = settings.log_format == "json"
        say = partial(_say_json if as_json else _say, err)
        verbosity = Verbosity(settings.quiet, settings.verbose, as_json, say, to_file)
        caller = Caller([*argv, "--", packed.name], out, err, function=packed.frames, take=returns.add)
        with hold(request.spec.log_dir, request.spec.run_id):
            if not verbosity.quiet:
                for notice in [*unknown_variables(), *request.notices]:
                    verbosity.say(notice)
            ended = control(request, settings, limits, verbosity, caller)
        run_at_end(ended, settings, verbosity, caller)
    for signum in ended.caught[:1]:
        signal.raise_signal(signum)  # as if received now: KeyboardInterrupt for SIGINT
    if ended.outcome.exit_code != 0:
        _fail(ended, returns)
    found: list[T] = _results(ended, returns)
    return found


@contextmanager
def _file_limit_restored() -> Iterator[None]:
    """Restore the limit of open files after the last run of this process: others may still run in other threads."""
    global _runs
    with _runs_lock:
        _runs += 1
    try:
        yield
    finally:
        with _runs_lock:
            _runs -= 1
            if not _runs:
                restore_file_limit()


def _request(options: Options, packed: Packed) -> Request:
    path = f"PYTHONPATH={os.pathsep.join(packed.path)}"
    request = read_request(replace(options, export=(path, *options.export)), wait=True)
    if request.node_role is not None:
        raise UsageError(
            "launch() starts the workers on all hosts by itself; DTRAIN_NODE_RANK and the like must be unset"
        )
    command = WorkerCommand(CommandKind.FUNCTION, ",".join(packed.modules), (packed.name,))
    return replace(request, spec=replace(request.spec, command=command))


def _say(descriptor: int, text: str) -> None:
    lines = "".join(f"dtrain: {line}\n" for line in text.splitlines())
    write_all(descriptor, lines.encode("utf-8", "backslashreplace"))


def _say_json(descriptor: int, text: str) -> None:
    from launcher.output.json_lines import message

    write_all(descriptor, message(text))


def _results(ended: Ended, returns: Returns) -> list[Any]:
    """Return the results by rank; None for a process that succeeded without one."""
    by_rank: dict[int, Any] = {}
    world_size = 0
    for process in returns.processes:
        try:
            said = returns.read(process)
        except Exception as error:
            problem = f"the result of rank {process} cannot be read here: {type(error).__name__}: {error}"
            raise WorkerError(
                f"{problem}; the modules that it uses must be installed here as well",
                exit_code=1, host=returns.hosts[process], rank=process, type="ResultError", message=problem,
            ) from error  # fmt: skip
        if said is not None and said.ok:
            by_rank[said.rank] = said.value
            world_size = max(world_size, said.world_size)
    return [by_rank.get(rank) for rank in range(world_size or ended.outcome.world_size)]


def _fail(ended: Ended, returns: Returns) -> None:
    outcome, cause = ended.outcome, ended.outcome.cause
    if outcome.error is not None:
        raise outcome.error
    if cause is None or cause.rank is None:
        raise LaunchError(ended.report, exit_code=outcome.exit_code)
    raise WorkerError(
        ended.report,
        exit_code=outcome.exit_code,
        host=cause.host,
        rank=cause.rank,
        type=cause.error_type,
        message=cause.message or what_happened(cause),
        traceback=_traceback(returns, cause.rank),
    ) from _exception(returns, cause.rank)


def _traceback(returns: Returns, rank: int) -> str:
    """Return the traceback from the worker's error file; see launcher/agent/workers/bootstrap.py."""
    try:
        text: str = json.loads(returns.error_files[rank] or "")["message"]["extraInfo"]["py_callstack"]
    except (ValueError, KeyError, TypeError):  # it was killed, or ended by an exit code
        return ""
    return text


def _exception(returns: Returns, rank: int) -> BaseException | None:
    """Return the worker's own exception, if it could be pickled and can be unpickled here."""
    try:
        said = returns.read(rank)
    except Exception:
        return None
    return said.value if said is not None and isinstance(said.value, BaseException) and not said.ok else None


_READ_BYTES = 1 << 16


@contextmanager
def _program_streams() -> Iterator[tuple[int, int]]:
    """Yield descriptors that lead to sys.stdout and sys.stderr; at the end all output has arrived there."""
    with ExitStack() as stack:
        yield stack.enter_context(_leading_to(sys.stdout)), stack.enter_context(_leading_to(sys.stderr))


def descriptor_of(stream: TextIO | None) -> int | None:
    """Return the descriptor of a plain file, pipe or terminal; None if it only has `write`, as in a notebook.

    The stream of a notebook has a descriptor too: that of the terminal where the notebook was started.
    """
    if type(stream) is not io.TextIOWrapper:
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError):  # there is none, or it is closed
        return None


@contextmanager
def _leading_to(stream: TextIO | None) -> Iterator[int]:
    descriptor = descriptor_of(stream)
    if descriptor is not None and stream is not None:
        stream.flush()  # earlier output of the program comes before that of the run
        yield descriptor
        return
    reading, writing = os.pipe()
    end = b"\0" + os.urandom(16).hex().encode()
    arrived = threading.Event()
    args = (reading, stream, end, arrived)
    threading.Thread(target=_pass_on, args=args, name="notebook output", daemon=True).start()
    try:
        yield writing
    finally:
        # Background processes of --on-end may hold the pipe as well, so its end may come much later.
        with contextlib.suppress(OSError):
            os.write(writing, end)
        os.close(writing)
        arrived.wait()


def _pass_on(reading: int, stream: TextIO | None, end: bytes, arrived: threading.Event) -> None:
    """Copy data to the stream; set `arrived` after `end`, which is not written, and continue."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held = b""
    try:
        with open(reading, "rb", buffering=0) as pipe:
            while data := pipe.read(_READ_BYTES):
                before, found, after = (held + data).partition(end)
                data = before + after
                at = data.rfind(b"\0")
                held = data[at:] if at >= 0 and end.startswith(data[at:]) else b""  # perhaps the first part of `end`
                text = decoder.decode(data.removesuffix(held))
                try:
                    if text and stream is not None and not stream.closed:
                        stream.write(text)
                        stream.flush()
                except (OSError, ValueError):  # just closed, or no longer read: the log files have all output
                    stream = None  # drop the output, so that the run does not wait
                if found:
                    arrived.set()
    finally:
        arrived.set()
