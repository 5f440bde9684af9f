"""The agent's side of the fork server: workers are forked from a process that has imported their packages.

A forked worker must be equal to one started by exec. If that is not certain, a worker is started by exec; `why_not` is
the reason. Once the first workers have trained, another process is forked from the server, which also makes the late
imports of those workers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launcher.agent.cleanup.run_tag import RunTag
from launcher.agent.host_facts import find_cores
from launcher.agent.warm.kept import extend, new_socket, stop
from launcher.agent.workers.worker import Files, spawn
from launcher.errors import SocketError
from launcher.frozen import dataclass, field
from launcher.machine.variables import may_be_secret
from launcher.protocol.commands import Prepare, StartWorker

PROGRAM = Path(__file__).with_name("fork_server.py")
_ANSWER_S = 4.0  # a fork takes milliseconds, and the agent is blocked meanwhile
_LATE_S = 100.0  # for all late imports
_LATE_TRIES = 5  # each leaves out one more import
_MESSAGE_BYTES = 1 << 16
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST; ast itself takes milliseconds to import
# Prefixes of variables that may differ between the workers of a host: libraries read them after their import.
_PER_WORKER = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "DTRAIN_", "TF_CONFIG",
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "OMPI_", "PMI_", "PMIX_", "SLURM_", "HOROVOD_",
    "CROSS_", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT",
)  # fmt: skip
_OWN_NAMES = (
    *(name for name in _PER_WORKER if not name.endswith("_")), *Files("", 0, 0).variables, "DTRAIN_GENERATION",
    "DTRAIN_DEFAULTS", "DTRAIN_STATE_FILE", "DTRAIN_TIMELINE_FILE", "DTRAIN_COPY_FILE", "DTRAIN_COPY_NOTE",
)  # fmt: skip  # set by the agent for a worker, besides those in its order
# Prefixes of variables that C libraries read when loaded, or the interpreter at its start. The fork server records
# those that Python code reads.
_READ_BY_LIBRARIES = (
    "LD_", "MALLOC_", "GLIBC_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "TORCH",
    "PYTORCH_", "ATEN_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "HIP_", "HSA_", "MIOPEN_", "CCL_", "UCX_",
    "FI_", "TF_", "XLA_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "LANG", "LC_", "TZ",
)  # fmt: skip
_SECRET_VALUE = re.compile("://[^/@]*:[^/@]*@")  # a password in an address


def _why_not_script(path: str) -> str:
    """Return why nothing can be imported for a script; empty if it imports more than the standard library."""
    if not os.path.isfile(path):  # a folder, or a pipe, which can be read only once
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


def _why_not(message: Prepare) -> str:
    """Return why no worker of a run can be forked before one has trained."""
    if message.through == "function":
        return "" if message.target else "the function uses only the standard library"
    return _why_not_script(os.path.join(message.workdir, message.target)) if message.through == "script" else ""


def _what_may_stay(env: Mapping[str, str], exported: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that outlives its run: no secrets, and exported ones if libraries read them."""
    return {
        name: value
        for name, value in env.items()
        if not (may_be_secret(name) or _SECRET_VALUE.search(value))
        and (name not in exported or name.startswith(_READ_BY_LIBRARIES))
    }


def _in_memory(order: Mapping[str, Any]) -> int:
    """Return the descriptor of a memory file that contains an order."""
    request = os.memfd_create("dtrain-order", os.MFD_CLOEXEC)
    data = json.dumps(order).encode()
    while data:
        data = data[os.write(request, data) :]
    return request


@dataclass(frozen=True)
class Warmth:
    """Start values of an agent: name prefix of a process that may stay warm, and surroundings that must match.

    If the agent was forked from a process kept warm: the path of that one's socket, and the pid and control socket of
    the fork server that it forked for this run.
    """

    prefix: str = ""
    surroundings: Mapping[str, str] = field(default_factory=dict)
    cold: str = ""  # why an existing warm process cannot be used
    kept: str = ""
    forked: tuple[int, socket.socket] | None = None


class ForkServer:
    """The process of fork_server.py, kept for all attempts of a run. Owned by the agent.

    `why_not` is the reason why workers cannot be forked; empty if they can, or while it `is_loading`, which ends in a
    callback of the selector, or in `step`. `pid` is None if there is no such process.

    If a process kept warm has forked one that does not fit, `cold` is the reason, and another is started.

    Late imports of its workers are made in a process of their own, `_late`: if that fails, nothing has changed.
    """

    def __init__(self, run_tag: RunTag, selector: selectors.BaseSelector, warmth: Warmth) -> None:
        self.pid: int | None = None
        self.stays = False  # stays when the agent ends
        self.was_warm = False  # workers can be forked from a process of an earlier run
        self.cold = warmth.cold
        self._warmth = warmth
        self._is_checking = False  # waits for the answer whether the one forked for this run fits
        self._is_filtered = False  # its variables, so that they may stay
        self._read: set[str] | None = None  # variables that its imports read; None: any
        self._begins: tuple[str, ...] = ()  # prefixes that its imports looked for among all variables
        self._names: set[str] | None = None  # a worker's own variables that its imports may have looked for; None: none
        self.costs_s = 0.0  # time spent on imports until it was found unfit
        self._start_one: Callable[[], None] = lambda: None
        self.why_not = "there is no fork server"
        self.has_torch = False
        self.is_loading = False
        self._run_tag = run_tag
        self._selector = selector
        self._program = ("", "")  # as named in a worker's order
        self._env: dict[str, str] = {}
        self._control: socket.socket | None = None
        if warmth.forked is not None:  # from now on this agent must end it
            self.pid, self._control = warmth.forked
        self._was_forked = warmth.forked is not None
        self._limit = math.inf
        self._late: ForkServer | None = None
        self._command: tuple[Sequence[str], str, Sequence[int]] = ((), "", ())  # argv, working directory and processors
        self._records: list[str] = []  # files with the late imports
        self._left_out: list[str] = []  # late imports left out
        self.unfit_import = ""  # the import that made it unfit, if it is a late one or was not tried

    def prepare(self, message: Prepare, workers: int) -> None:
        """Start the process for this number of workers, if they can be forked from one at all."""
        if message.start_method == "exec" or not message.through or message.behind:
            self.kill()
            reason = "--launch-prefix is set" if message.behind else "--start-method is exec"
            self.why_not = reason if message.through else "there is no fork server"
            return
        target = message.target
        if message.through == "script":
            target = os.path.join(message.workdir, target)
        cores, limit = find_cores(message.part, message.parts)
        cores = cores if message.parts > 1 else ()
        shared = {"OMP_NUM_THREADS": str(max(1, limit // workers)), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        self._program = (message.through, message.target)
        self.stays = message.keep_warm_s > 0
        self._is_filtered = self.stays or self._was_forked
        self._env = {**shared, **os.environ, **self._run_tag.variables}
        if self._is_filtered:
            self._env = _what_may_stay({**shared, **os.environ}, message.export)
        names = sorted({*message.names, *_OWN_NAMES, *self._run_tag.variables, *shared, *os.environ} - {*self._env})
        argv = [
            sys.executable,
            "-u",
            str(PROGRAM),
            message.through,
            target,
            json.dumps([_PER_WORKER, names]),
            str(int(self.stays)),
        ]
        self._command = (argv, message.workdir, cores)
        self._start_one = partial(self._start, *self._command)
        if why_not := _why_not(message):
            self.kill()
            self.why_not = why_not
        elif self._control is None:
            self._start_one()
        elif self.pid is not None and cores and os.sched_getaffinity(self.pid) != set(cores):
            self._start_cold("the processors of a simulated host are not what they were")
        else:
            order = {"kind": message.through, "target": target, "cwd": message.workdir, "env": self._env}
            self._check({**order, "names": names})

    def _start(self, argv: Sequence[str], cwd: str, cores: Sequence[int]) -> None:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self.pid = spawn(
                argv, self._env, cwd=cwd, stdin=theirs.fileno(), stdout=nowhere, stderr=nowhere, cores=cores
            )
        except OSError as error:  # the start of workers will fail for the same reason
            control.close()
            self.why_not = f"its process cannot be started: {error.strerror}"
            return
        finally:
            theirs.close()
            os.close(nowhere)
        self._control = control
        self._await_answer()

    def _check(self, order: Mapping[str, Any]) -> None:
        """Ask the process that was forked for this run whether it fits."""
        self._is_checking = True
        request = _in_memory({**order, "read_by_libraries": _READ_BY_LIBRARIES})
        try:
            assert self._control is not None
            socket.send_fds(self._control, [b"c"], [request])
            self._await_answer()
        except OSError:
            self._start_cold("its fork server has ended")
        finally:
            os.close(request)

    def _await_answer(self) -> None:
        assert self._control is not None
        self._control.settimeout(_ANSWER_S)
        self._selector.register(self._control, selectors.EVENT_READ, self._read_answer)
        self.why_not, self.is_loading, self.has_torch = "", True, False

    def _start_cold(self, why: str) -> None:
        """Start our own process in place of the one that was forked for this run."""
        self.cold, self._is_checking = why, False
        self.kill()
        self._start_one()

    def learns_from(self, message: StartWorker) -> bool:
        """Return whether the late imports of such a worker are still wanted."""
        return self._late is None and not self.is_loading and self._is_of_program(message)

    def learn(self, records: Sequence[str]) -> None:
        """Make late imports of workers early for those that follow. `records` are files of workers."""
        self._records, self._left_out = [*records], []
        self._start_late()

    def _start_late(self) -> None:
        self._late = late = ForkServer(self._run_tag, self._selector, Warmth())
        late._program, late._env, late._is_filtered = self._program, self._env, self._is_filtered
        late._limit = time.monotonic() + _LATE_S
        order = {
            "agent": os.getpid(),
            "records": self._records,
            "left_out": self._left_out,
            "read_by_libraries": _READ_BY_LIBRARIES,
        }
        if self._control is None:
            argv, cwd, cores = self._command
            late._start([*argv, json.dumps(order)], cwd, cores)
            return
        late._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = _in_memory(order)
        try:
            late.pid = self._ask(b"l", [request, theirs.fileno()])
            late._await_answer()
        except OSError:
            late.kill("it cannot be forked")
        finally:
            os.close(request)
            theirs.close()

    def wait_s(self, duration_s: float) -> None:
        """Note that a worker waits for the imports, and may do so for this long."""
        self._limit = min(self._limit, time.monotonic() + duration_s)

    @property
    def processes(self) -> list[ForkServer]:
        """All servers that have a process, which the agent reaps."""
        return [server for server in (self, self._late) if server is not None and server.pid is not None]

    def pause_s(self, now: float) -> float:
        """Return how long the agent may wait before it calls `step` again."""
        late_s = math.inf if self._late is None else self._late.pause_s(now)
        return min(self._limit - now if self.is_loading else math.inf, late_s)

    def step(self, now: float) -> None:
        """Stop imports that take too long; try again without a late import that cannot be made early."""
        if self.is_loading and now >= self._limit:
            self.kill("the imports of its process take too long")
        if (late := self._late) is None:
            return
        late.step(now)
        if late.unfit_import and len(self._left_out) < _LATE_TRIES:
            self._left_out.append(late.unfit_import)
            self._start_late()

    def _read_answer(self) -> None:
        """Read its answer once its imports are done."""
        if self._control is None or not self.is_loading:  # it was ended after the selector reported it
            return
        try:
            said = json.loads(self._control.recv(_MESSAGE_BYTES))
        except (OSError, ValueError):  # it has ended, and is reaped as well
            said = {"reason": "its process has ended", "costs_s": 0.0, "module": ""}
        if said["reason"] and self._is_checking:
            self._start_cold(said["reason"])
            return
        if said["reason"]:
            self.costs_s = said["costs_s"]
            self.unfit_import = said["module"]
            self.kill(said["reason"])
            return
        self.has_torch = said["has_torch"]
        self._read = {*said["read"]} if self._is_filtered else None
        self._begins = tuple(said["begins"])
        self._names = None if said["names"] is None else {*said["names"]}
        self.was_warm, self._is_checking = self._is_checking, False
        self._end_loading()

    def _end_loading(self) -> None:
        assert self._control is not None
        self._selector.unregister(self._control)
        self.is_loading = False

    def why_not_for(self, message: StartWorker, env: Mapping[str, str], cores: Sequence[int]) -> str:
        """Return why a worker with these variables and processors cannot be forked; empty if it can."""
        if not message.through:
            return "it is no Python script"
        if self._is_of_program(message) and not cores and self._late_for(env) is not None:
            return ""
        if self.why_not or self.is_loading:
            return self.why_not or "the imports of its process are not done"
        if not self._is_of_program(message):
            return "it runs another program than most workers"
        if cores:
            return "--numa-binding is set, and libraries look at their processors when they are imported"
        return self._differing(env)

    def _is_of_program(self, message: StartWorker) -> bool:
        return bool(message.through) and (message.through, message.argv[0]) == self._program

    def _late_for(self, env: Mapping[str, str]) -> ForkServer | None:
        """Return the process with the late imports, if a worker with these variables can be forked from it."""
        late = self._late
        is_fit = late is not None and not (late.why_not or late.is_loading or late._differing(env))
        return late if is_fit else None

    def _differing(self, env: Mapping[str, str]) -> str:
        """Return a reason if a variable that may matter to the imports has another value; empty if none has."""
        names = {name for name, _ in env.items() ^ self._env.items()}
        differing = sorted(filter(self._matters, names))
        return f"{differing[0]} is not what the fork server has" if differing else ""

    def _matters(self, name: str) -> bool:
        """Return whether the imports depend on a variable whose value differs."""
        if name.startswith(self._begins) or (self._names is not None and name not in self._names):
            return True
        if name.startswith(_PER_WORKER):
            return False
        by_libraries = name.startswith(_READ_BY_LIBRARIES) and not may_be_secret(name)
        return self._read is None or name in self._read or by_libraries

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
        """Do the same as `spawn`, for a command that begins with the interpreter, its option -u and bootstrap.py.

        Raises OSError if it cannot be forked, or if the server does not answer, which is ended then. A server that was
        found dead is replaced.
        """
        if (late := self._late_for(env)) is not None:
            with contextlib.suppress(OSError):
                return late.fork(
                    argv, env, cwd=cwd, stdout=stdout, stderr=stderr, stdin=stdin, run_tag=run_tag, number=number,
                    cores=cores,
                )  # fmt: skip
        order = {"agent": os.getpid(), "argv": [*argv], "env": {**env}, "cwd": cwd, "has_input": stdin is not None}
        opened: list[int] = []
        try:
            opened.append(_in_memory(order))
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            opened.extend(os.pipe())
            request, nothing, go_read, go_write = opened
            pid = self._ask(b"f", [request, nothing if stdin is None else stdin, stdout, stderr, go_read])
            if run_tag is not None:
                run_tag.put_on(number, pid)
            if cores:
                os.sched_setaffinity(pid, cores)
            os.write(go_write, b"1")
            return pid
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def fork_or_spawn(self, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> int:
        """Start a program of dtrain's own that imports torch, by `fork` if possible, else by `spawn`."""
        if self.has_torch and not self.why_not:
            with contextlib.suppress(OSError):
                return self.fork(argv, env, **options)
        return spawn(argv, env, **options)

    def keep(self, message: Prepare) -> str:
        """Keep the process when this agent ends, or the one that forked it; return why it cannot stay.

        It stays only if its imports are done and workers can be forked from it.
        """
        kept, prefix = self._warmth.kept, self._warmth.prefix
        if self.is_loading or self.why_not or self._control is None:
            return self.why_not or "its imports are not done"
        if "SLURM_JOB_ID" in os.environ:
            return "the host is in a SLURM job, whose processes end with it"
        described = {"script": message.target, "interpreter": sys.executable, "workdir": message.workdir}
        order = {
            "keep_s": message.keep_warm_s,
            "surroundings": {**self._warmth.surroundings},
            "described": described,
        }
        try:
            if kept and not self.cold and extend(os.path.basename(kept), message.keep_warm_s):
                return ""
            with new_socket(prefix) as (path, listening):
                request = _in_memory({**order, "path": path})
                try:
                    self._ask(b"k", [request, listening.fileno()])
                finally:
                    os.close(request)
            stop(prefix, before=os.path.basename(path))  # replaced by this one
        except (OSError, SocketError) as error:
            return f"its process cannot stay: {error}"
        self.pid = None  # it no longer belongs to this agent
        self.kill("it stays warm")
        return ""

    def _ask(self, request: bytes, descriptors: Sequence[int]) -> int:
        if self._control is None:
            raise TimeoutError("it has no process")
        try:
            socket.send_fds(self._control, [request], descriptors)
            pid = int(json.loads(self._control.recv(_MESSAGE_BYTES))["pid"])
        except (OSError, ValueError) as error:
            why = "its process does not answer"
            self._end(why)
            if request != b"k" and not isinstance(error, TimeoutError):  # it is dead, but not reaped yet
                self._replace()
            raise TimeoutError(why) from error
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def ended(self) -> None:
        """Record that its process ended by itself and was reaped. Start another if that one was fit."""
        was_fit = not (self.why_not or self.is_loading)
        self.pid = None
        self._end("its process has ended")
        if was_fit:
            self._replace()

    def _replace(self) -> None:
        """Start another process in place of one that was fit and has died; workers set the limit of the wait again."""
        self._limit = math.inf
        self._start_one()

    def kill(self, why: str = "it was ended") -> list[int]:
        """End all processes, and return the pids of children to reap. No worker is forked any more."""
        return [*self.kill_late(), *self._end(why)]

    def kill_late(self) -> list[int]:
        """End the process with the late imports, and return its pid if it must be reaped."""
        return [] if self._late is None else self._late.kill()

    def _end(self, why: str) -> list[int]:
        """End only its own process, and return its pid if it must be reaped."""
        killed = [] if self.pid is None else [self.pid]
        self.pid = None
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        self.why_not = self.why_not or why
        if self.is_loading:
            self._end_loading()
        if self._control is not None:
            self._control.close()
            self._control = None
        return killed
