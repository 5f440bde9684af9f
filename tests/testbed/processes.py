"""Runs `dtrain` as a real process and finds whatever a test left running.

Every test runs under a mark of its own, an environment variable that all its descendants inherit, even those
that changed their parent, group or session. SSH sessions inherit nothing: `testbed.sshd` gives them a mark.
What each program has left is looked for when its exit is collected (left.py), and once more after the test.
"""

import contextlib
import functools
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from testbed.forked_dtrain import MARK as MARK
from testbed.forked_dtrain import DtrainServer, ForkedDtrain
from testbed.left import TEST_CHARS, Start, Watch
from testbed.left import Program as Program

_variables = dict(os.environ)
by_exec = False  # start `dtrain` as users do
TIMED_OUT = 124  # as timeout(1) has it
_OTHERS = re.compile(r"^dtrain: removed what .* killed had left on .*\n", re.MULTILINE)
TIMEOUT_S = 100.0  # more than anything takes, also beside other work, and less than a test may
LEASE_S = 4.0  # --heartbeat-timeout-s of runs that lose hosts: a busy machine keeps agents from their turn for seconds
LEASE = ("--heartbeat-timeout-s", f"{LEASE_S:g}")


@dataclass(frozen=True)
class Result:
    """How a finished `dtrain` ended. Bytes that are no UTF-8 read as `\\xNN` in the output."""

    returncode: int
    stdout: str
    stderr: str
    wall_s: float

    @property
    def timed_out(self) -> bool:
        return self.returncode == TIMED_OUT


def run_dtrain(*args: str | Path, outlived: bool = False, **options: Any) -> Result:
    """Run `dtrain ARGS` to its end, in a session of its own, as `run_program` does, with the same options.

    What it says of runs that other tests have killed is left out, unless it has a TMPDIR of its own.
    """
    result = _run(partial(started_dtrain, *args, outlived=outlived), **options)
    if "TMPDIR" in (options.get("env") or {}):
        return result
    return replace(result, stderr=_OTHERS.sub("", result.stderr))


def run_program(
    *argv: str | Path,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    timeout: float = TIMEOUT_S,
    outlived: bool = False,
) -> Result:
    """Run a program to its end, in a session of its own; after `timeout` seconds kill its tree.

    `env` is laid over this process's environment, a None in it removes the name. A program that had to be
    killed has the return code `TIMED_OUT` and what it printed until then. With `outlived`, what it leaves is no
    failure of the test if it is gone soon after the test.
    """
    return _run(partial(started, *argv, outlived=outlived), env=env, cwd=cwd, stdin=stdin, timeout=timeout)


def _run(
    start: Callable[..., contextlib.AbstractContextManager[Program]],
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    timeout: float = TIMEOUT_S,
) -> Result:
    began = time.monotonic()
    with start(env=env, cwd=cwd, stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE) as process:
        data = None if stdin is None else stdin.encode()
        try:
            out, err = process.communicate(data, timeout=timeout)
            returncode = process.returncode
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            out, err = _drain(process)
            returncode = TIMED_OUT
    wall_s = time.monotonic() - began
    return Result(returncode, _text(out), _text(err), wall_s)


def started_dtrain(
    *args: str | Path,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    outlived: bool = False,
) -> contextlib.AbstractContextManager[Program]:
    """Yield a running `dtrain ARGS`, for tests that signal it or read it live; `started` says what the options are.

    It is forked from a process that has imported it, where that makes no difference (forked_dtrain.py).
    """
    argv = [sys.executable, "-m", "launcher", *(os.fspath(arg) for arg in args)]

    def start(environment: dict[str, str]) -> Program:
        if by_exec or (request := dtrain_server().request(argv, environment, cwd)) is None:
            return _executed(argv, environment, cwd=cwd, stdin=stdin)
        return _ForkedProgram(dtrain_server(), request, argv, stdin)

    return _until_its_end(watched(start, argv, env, outlived=outlived))


class _ForkedProgram(Program, ForkedDtrain):
    pass


@functools.cache
def dtrain_server() -> DtrainServer:
    """The process from which this one's `dtrain` are forked."""
    return DtrainServer(_variables)


def keep_variables() -> None:
    """Have that process get what variables there are now, not those of the test that first needs it."""
    _variables.clear()
    _variables.update(os.environ)


def dtrain_server_if_started() -> DtrainServer | None:
    return dtrain_server() if dtrain_server.cache_info().currsize else None


def started(
    *argv: str | Path,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    outlived: bool = False,
) -> contextlib.AbstractContextManager[Program]:
    """Yield a running program with its output in pipes; kill its tree if it still runs at the end."""
    words = [os.fspath(arg) for arg in argv]
    start = partial(_executed, words, cwd=cwd, stdin=stdin)
    return _until_its_end(watched(start, words, env, outlived=outlived))


def _executed(argv: Sequence[str], env: dict[str, str], *, cwd: Path | None, stdin: int) -> Program:
    return Program(
        argv, env=env, cwd=cwd, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def watched(
    start: Callable[[dict[str, str]], Program],
    words: Sequence[str],
    env: Mapping[str, str | None] | None = None,
    *,
    outlived: bool = False,
) -> Program:
    """Start a program by a function that takes its variables, and have what it leaves looked for when it has ended."""
    variables = _environment(env or {})
    if Watch.current is None or MARK not in variables:
        return start(variables)
    watching = Start(Watch.current, words, variables, outlived=outlived)
    try:
        program = start({**variables, MARK: watching.mark})
    except BaseException:
        watching.failed()
        raise
    program.watching = watching
    return program


@contextlib.contextmanager
def _until_its_end(process: Program) -> Iterator[Program]:
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                kill_tree(process.pid)


def wait_until(condition: Callable[[], object], what: str, timeout: float = TIMEOUT_S) -> None:
    """Poll `condition` until it is truthy; raise TimeoutError naming `what` after `timeout` seconds.

    One that looks at every process or runs a program is polled less often, so that waiting takes a fifth of a core.
    """
    deadline = time.monotonic() + timeout
    used_s = _cpu_s()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        time.sleep(max(0.02, 4 * (_cpu_s() - used_s)))
        used_s = _cpu_s()


def _cpu_s() -> float:
    """CPU time of this process, of its children that have ended, and of each `dtrain` forked for it."""
    return ForkedDtrain.used_s + sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def wait_up(process: Program, workers: int = 2) -> None:
    """Read a run's output until so many workers have said `up`."""
    seen = 0
    while seen < workers:
        line = process.stdout.readline()
        assert line, "it ended before its workers were up"
        seen += line.endswith(b"up\n")


def kill_tree(pid: int) -> None:
    """Kill a process and everything under it now. What has left the tree is for `left_behind` to find."""
    if Watch.current is not None:
        Watch.current.killed_whole = True
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        kill([root, *root.children(recursive=True)])  # it first, or it still writes how the others ended


def kill(processes: Collection[psutil.Process]) -> None:
    """Kill processes and wait until they run no more. psutil compares start times: a reused pid is spared."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_until(lambda: not any(_runs(process) for process in processes), "killed processes are gone")


def everyone() -> set[psutil.Process]:
    """All processes there are, each known by pid and start time."""
    return set(psutil.process_iter())


def left_behind(
    before: Collection[psutil.Process], marks: Collection[str], servers: Collection[int] = ()
) -> list[psutil.Process]:
    """The live processes that were not there `before` and that carry a mark, are children of this process,
    or run under one of the `servers` (pids, themselves never counted)."""
    return [p for p in everyone().difference(before) if p.pid not in servers and _is_ours(p, marks, servers)]


def marked(marks: Collection[str], **also: str) -> list[psutil.Process]:
    """The processes whose environment holds one of the marks, or one of a start by their tests, and every NAME=VALUE of
    `also`."""
    return [p for p in everyone() if _carries(p, marks, also)]


def _runs(process: psutil.Process) -> bool:
    try:
        # A zombie has ended; when its parent, often pid 1, removes the entry is not ours to wait for.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_ours(process: psutil.Process, marks: Collection[str], servers: Collection[int]) -> bool:
    try:
        if not _runs(process):
            return False
        if process.ppid() == os.getpid() or _carries(process, marks, {}):
            return True
        return any(parent.pid in servers for parent in process.parents())
    except psutil.Error:
        return False


def _carries(process: psutil.Process, marks: Collection[str], also: Mapping[str, str]) -> bool:
    try:
        environment = process.environ()
        for _ in range(3):
            if environment:
                break
            time.sleep(0.001)  # in the middle of an exec a process has none for a moment
            environment = process.environ()
    except (psutil.Error, OSError):
        return False  # gone, or another user's
    ours = environment.get(MARK, "")[:TEST_CHARS] in {mark[:TEST_CHARS] for mark in marks}
    return ours and all(environment.get(k) == v for k, v in also.items())


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _drain(process: Program) -> tuple[bytes, bytes]:
    # A stray that left the tree may hold the pipes open for ever.
    try:
        return process.communicate(timeout=2)
    except subprocess.TimeoutExpired as late:
        return late.output or b"", late.stderr or b""


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
