"""One worker process, as its agent knows it: started here, its pipes, how it ended.

The agent is single-threaded, so a worker is made by fork and exec: between the two it gets its own session, dies with
its agent, and has nothing inherited but its three standard streams.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher import processes
from launcher.protocol import Exited

__all__ = ["Worker", "spawn"]


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: str,
    stdout: int,
    stderr: int,
    keep: Sequence[int] = (),
    stdin: int | None = None,
) -> int:
    """Start a program in a session of its own and return its pid; it is killed when this process ends.

    `keep` are further descriptors that it inherits under their numbers. Raises OSError if it cannot be executed.
    """
    parent = os.getpid()
    failed_read, failed_write = os.pipe()  # both close on exec: end of file means that exec went well
    pid = os.fork()
    if pid == 0:
        try:
            _become(argv, env, cwd, (stdin, stdout, stderr), keep, parent)
        except OSError as error:
            os.write(failed_write, f"{error.errno}".encode())
        finally:
            os._exit(127)
    os.close(failed_write)
    with os.fdopen(failed_read, "rb") as failed:
        errno = failed.read()
    if errno:
        os.waitpid(pid, 0)
        raise OSError(int(errno), os.strerror(int(errno)), argv[0])
    return pid


def _become(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    streams: tuple[int | None, int, int],
    keep: Sequence[int],
    parent: int,
) -> None:
    os.setsid()
    processes.die_with_parent(parent)
    processes.restore_file_limit()
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    stdin, stdout, stderr = streams
    os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in keep:
        os.set_inheritable(descriptor, True)
    os.chdir(cwd)
    os.execvpe(argv[0], list(argv), dict(env))


class Worker:
    """A running or ended worker. The agent reads `pipes` (descriptor to stream number) until they end."""

    def __init__(self, rank: int, argv: Sequence[str], env: Mapping[str, str], *, cwd: str, error_file: Path) -> None:
        self.rank = rank
        self.provoked = False  # whether the agent has signalled it
        self.status: int | None = None
        self.reported = False
        self.ended = 0.0
        self._error_file = error_file
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        self.pipes = {out_read: 1, err_read: 2}
        self.began = time.monotonic()
        try:
            self.pid = spawn(argv, env, cwd=cwd, stdout=out_write, stderr=err_write)
        except OSError:
            self.close()
            raise
        finally:
            os.close(out_write)
            os.close(err_write)
        for descriptor in self.pipes:
            os.set_blocking(descriptor, False)

    def ended_with(self, wait_status: int) -> None:
        self.status = os.waitstatus_to_exitcode(wait_status)
        self.ended = time.monotonic()

    def signal(self, signum: int, *, stop: bool) -> None:
        """Signal the worker itself, not its children: they are the worker's to end, and swept after it."""
        if self.status is None:  # not reaped yet, so the pid is still its own
            os.kill(self.pid, signum)
            self.provoked |= stop

    def exited(self) -> Exited:
        """Return the report of its end; call once its status is known and its pipes are drained."""
        assert self.status is not None
        facts = _read_json(self._error_file.with_name(self._error_file.name + ".facts"))
        text = _read_text(self._error_file)
        raised_at = float(facts["time"]) if facts else None
        return Exited(
            rank=self.rank,
            pid=self.pid,
            status=self.status,
            ran_s=self.ended - self.began,
            provoked=self.provoked,
            error=facts or _elastic_error(text),
            error_file=text,
            time=self.ended if raised_at is None else raised_at,
        )

    def close(self) -> None:
        for descriptor in self.pipes:
            os.close(descriptor)
        self.pipes = {}


def _read_text(path: Path) -> str | None:
    try:
        return path.read_bytes()[: 1 << 20].decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return None


def _read_json(path: Path) -> dict[str, str] | None:
    text = _read_text(path)
    try:
        return {str(k): str(v) for k, v in json.loads(text).items()} if text else None
    except (ValueError, AttributeError):  # cut short by a full disk, or killed while writing
        return None


def _elastic_error(text: str | None) -> dict[str, str] | None:
    """Read what torch elastic's `record` wrote: `message` is a string, or holds one."""
    try:
        message = json.loads(text)["message"] if text else None
    except (ValueError, KeyError, TypeError):
        return None
    if isinstance(message, dict):
        message = message.get("message")
    if not isinstance(message, str):
        return None
    name, _, rest = message.partition(": ")
    return {"type": name, "message": rest, "where": ""}
