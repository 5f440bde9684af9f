"""The agent's side of the fork server: workers start from a process that has their packages imported already.

A start by fork must give what a start by exec gives. Where that is not certain, a worker is started by exec; `why_not`
says why.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.agent.host_facts import find_cores
from launcher.agent.run_tag import RunTag
from launcher.agent.workers.worker import spawn
from launcher.protocol import Prepare, StartWorker

__all__ = ["PROGRAM", "ForkServer"]

PROGRAM = Path(__file__).with_name("fork_server.py")
_ANSWER_S = 4.0  # a fork takes milliseconds, and the agent does nothing else meanwhile
_MESSAGE_BYTES = 1 << 12
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST; ast itself takes milliseconds to import
# How the variables begin that may differ between the workers of a host: libraries read them after their import.
_PER_WORKER = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "DTRAIN_", "TF_CONFIG",
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "OMPI_", "PMI_", "PMIX_", "SLURM_", "HOROVOD_",
    "CROSS_",
)  # fmt: skip


def _why_not_script(path: str) -> str:
    """Return why there is nothing to import for a script; empty if it imports more than the standard library."""
    if not os.path.isfile(path):  # a folder; or a pipe, which can be read only once
        return "the script is no plain file"
    try:
        with open(path, "rb") as file:
            tree = compile(file.read(), path, "exec", _ONLY_AST, dont_inherit=True)
    except (OSError, SyntaxError, ValueError, RecursionError):  # also an archive
        return "the script cannot be read as Python"
    named = (name.partition(".")[0] for statement in tree.body for name in _imported_names(statement))
    return (
        ""
        if any(name not in sys.stdlib_module_names for name in named)
        else ("the script imports only the standard library")
    )


def _imported_names(statement: Any) -> list[str]:
    match type(statement).__name__:
        case "Import":
            return [alias.name for alias in statement.names]
        case "ImportFrom":
            return [statement.module or "."]
    return []


class ForkServer:
    """The process of fork_server.py, kept for all attempts of a run. Owned by the agent.

    `why_not` says why workers cannot be forked; empty where they can, or while it `is_loading`, which ends in a
    callback of the selector, or in `step`. `pid` is None where there is no such process.
    """

    def __init__(self, run_tag: RunTag, selector: selectors.BaseSelector) -> None:
        self.pid: int | None = None
        self.why_not = "there is no fork server"
        self.has_torch = False
        self.is_loading = False
        self._run_tag = run_tag
        self._selector = selector
        self._program = ("", "")  # as a worker's order names it
        self._env: dict[str, str] = {}
        self._control: socket.socket | None = None
        self._limit = math.inf

    def prepare(self, message: Prepare, workers: int) -> None:
        """Start the process for so many workers, if those can be forked from one at all."""
        target = message.target
        if message.through == "script":
            target = os.path.join(message.workdir, target)
        if not message.through:
            return
        if message.start_method == "exec":
            self.why_not = "--start-method is exec"
            return
        if message.through == "script" and (why_not := _why_not_script(target)):
            self.why_not = why_not
            return
        cores, limit = find_cores(message.part, message.parts)
        shared = {"OMP_NUM_THREADS": str(max(1, limit // workers)), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        self._program = (message.through, message.target)
        self._env = {**shared, **os.environ, **self._run_tag.variables}
        try:
            self._start(message.through, target, message.workdir, cores if message.parts > 1 else ())
        except OSError as error:  # the start of the workers will find the same
            self.why_not = f"its process cannot be started: {error.strerror}"

    def _start(self, kind: str, target: str, cwd: str, cores: Sequence[int]) -> None:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self.pid = spawn(
                [sys.executable, "-u", str(PROGRAM), kind, target, ",".join(_PER_WORKER)],
                self._env,
                cwd=cwd,
                stdin=theirs.fileno(),
                stdout=nowhere,
                stderr=nowhere,
                cores=cores,
            )
        finally:
            theirs.close()
            os.close(nowhere)
            if self.pid is None:
                control.close()
        control.settimeout(_ANSWER_S)
        self._control = control
        self._selector.register(control, selectors.EVENT_READ, self._read_answer)
        self.why_not, self.is_loading = "", True

    def wait_s(self, duration_s: float) -> None:
        """Note that a worker waits for the imports, and may do so for this long."""
        self._limit = min(self._limit, time.monotonic() + duration_s)

    def pause_s(self, now: float) -> float:
        """How long the agent may wait before it calls `step` again."""
        return self._limit - now if self.is_loading else math.inf

    def step(self, now: float) -> None:
        """Wait no longer for imports that take too long."""
        if self.is_loading and now >= self._limit:
            self.kill("the imports of its process take too long")

    def _read_answer(self) -> None:
        """Read what it says once its imports are done."""
        if self._control is None or not self.is_loading:  # it was ended since the selector looked
            return
        try:
            said = json.loads(self._control.recv(_MESSAGE_BYTES))
        except (OSError, ValueError):  # its end, which is reaped as well
            said = {"reason": "its process has ended", "has_torch": False}
        if said["reason"]:
            self.kill(said["reason"])
            return
        self.has_torch = said["has_torch"]
        self._end_loading()

    def _end_loading(self) -> None:
        assert self._control is not None
        self._selector.unregister(self._control)
        self.is_loading = False

    def why_not_for(self, message: StartWorker, env: Mapping[str, str], cores: Sequence[int]) -> str:
        """Return why a worker cannot be forked that is to have these variables and processors; empty if it can."""
        if not message.through:
            return "it is no Python script"
        if self.why_not:
            return self.why_not
        if (message.through, message.argv[0]) != self._program:
            return "it runs another program than most"
        if cores:
            return "--numa-binding, for libraries look at their processors when they are imported"
        names = {name for name, _ in env.items() ^ self._env.items()}
        differing = sorted(name for name in names if not name.startswith(_PER_WORKER))
        return f"{differing[0]} is not what the fork server has" if differing else ""

    def fork(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: str,
        stdout: int,
        stderr: int,
        stdin: int | None = None,
        run_tag: RunTag | None = None,
        number: int = 0,
        cores: Sequence[int] = (),
    ) -> int:
        """Do what `spawn` does, for a command that begins with the interpreter, its option -u and bootstrap.py.

        Raises OSError if it cannot be forked, or if the server does not answer, which is ended then.
        """
        order = json.dumps({"agent": os.getpid(), "argv": [*argv], "env": {**env}, "cwd": cwd}).encode()
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        request = os.memfd_create("dtrain-start", os.MFD_CLOEXEC)
        go_read, go_write = os.pipe()
        try:
            os.write(request, order)
            pid = self._ask([request, nothing if stdin is None else stdin, stdout, stderr, go_read])
            if run_tag is not None:
                run_tag.put_on(number, pid)
            if cores:
                os.sched_setaffinity(pid, cores)
            os.write(go_write, b"1")
            return pid
        finally:
            for descriptor in (nothing, request, go_read, go_write):
                os.close(descriptor)

    def fork_or_spawn(self, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> int:
        """Start a program of dtrain's own that imports torch, by `fork` where that is possible, else by `spawn`."""
        if self.has_torch and not self.why_not:
            with contextlib.suppress(OSError):
                return self.fork(argv, env, **options)
        return spawn(argv, env, **options)

    def _ask(self, descriptors: Sequence[int]) -> int:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [b"f"], descriptors)
            pid = int(json.loads(self._control.recv(_MESSAGE_BYTES))["pid"])
        except (OSError, ValueError) as error:
            self.kill("its process does not answer")
            raise TimeoutError(self.why_not) from error
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def ended(self) -> None:
        """Take note that its process ended by itself and was reaped."""
        self.pid = None
        self.kill("its process has ended")

    def kill(self, why: str = "it was ended") -> int | None:
        """End its process, and return the pid of a child that is to be reaped. Nothing is forked any more."""
        killed, self.pid = self.pid, None
        if killed is not None:
            os.kill(killed, signal.SIGKILL)
        self.why_not = self.why_not or why
        if self.is_loading:
            self._end_loading()
        if self._control is not None:
            self._control.close()
            self._control = None
        return killed
