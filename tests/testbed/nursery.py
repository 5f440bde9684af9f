"""Starts worlds of real processes with real gloo for the tests of `ddp`.

Importing torch takes seconds, so one process (the nursery) imports it once for all of pytest's processes, and forks
the ranks of every world from there, before it has any thread. Each world has a deadline; its ranks are gone when
`run` returns. `program` forks a process that is what `python -c` starts, but for the imports.

    with Nursery(folder) as nursery:
        results = nursery.run(3, mean_equals_whole_batch, steps=5)
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar, overload

from _pytest.assertion import install_importhook
from _pytest.config import get_config

from testbed.fork_memory import share_memory
from testbed.processes import TIMED_OUT, Result

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
DEADLINE_S = 200.0  # of a world
BACKEND = os.environ.get("DDP_TEST_BACKEND", "gloo")  # of every world
_kept: list[Any] = []  # by a rank until it exits
_NO_FAULT = (  # what some versions say, and no one can mend
    "Guards may run slower on Python",
    "Sparse invariant checks are implicitly disabled",
    "Validating sparse tensor invariants because weights_only=True",
)
_SHOW_STACKS, _STACKS_S = signal.SIGRTMAX, 0.5
_GRACE_S = 3.0  # what the other ranks may still say after one has failed


class WorldFailed(AssertionError):
    """A rank failed; the message has the traceback of every rank that did."""


class Nursery:
    """A connection to the process with torch imported from which worlds are forked.

    Who comes first starts it and all who name the same folder share it; it ends when the last has left the context.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Nursery:
        address = self._folder / "socket"
        with _locked(self._folder):
            if not address.exists():
                _start(self._folder, address)
            self._connection = Client(str(address))
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @overload
    def run(
        self, ranks: int, case: str, *, deadline_s: float = DEADLINE_S, group: str = BACKEND, **arguments: Any
    ) -> list[Any]: ...

    @overload
    def run(
        self,
        ranks: int,
        case: Callable[..., T],
        *,
        deadline_s: float = DEADLINE_S,
        group: str = BACKEND,
        **arguments: Any,
    ) -> list[T]: ...

    def run(
        self, ranks: int, case: Any, *, deadline_s: float = DEADLINE_S, group: str = BACKEND, **arguments: Any
    ) -> list[Any]:
        """Run a function of a module on each of some ranks; return what the calls returned, by rank.

        A function that this process cannot import is "module:name". `group` is the backend of the default group.
        """
        __tracebackhide__ = True  # a failure has the ranks' tracebacks
        if not isinstance(case, str):
            case = f"{case.__module__}:{case.__qualname__}"
        with tempfile.TemporaryDirectory(prefix="ddp-world-") as folder:
            self._connection.send(("world", ranks, case, group, arguments, deadline_s, folder))
            failure = self._connection.recv()
            if failure is not None:
                raise WorldFailed(f"{case} with {ranks} ranks {arguments}:\n{failure}")
            return [pickle.loads((Path(folder) / f"result.{rank}").read_bytes()) for rank in range(ranks)]

    def program(self, text: str, cwd: Path, *, deadline_s: float = 100.0, **variables: str) -> Result:
        """Run a program as `python -c` does, to the end of its interpreter; torch and ddp are imported already.

        After `deadline_s` it is killed, and the return code is `TIMED_OUT`.
        """
        return self.programs(text, cwd, [variables], deadline_s=deadline_s)[0]

    def programs(
        self, text: str, cwd: Path, every_variables: Sequence[Mapping[str, str]], *, deadline_s: float = 100.0
    ) -> list[Result]:
        """Run a program several times at once, as `program` does: with each of these variables."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ddp-program-") as parent:
            environments = [{**os.environ, **variables} for variables in every_variables]
            self._connection.send(("programs", text, str(cwd), environments, deadline_s, parent))
            codes: list[int] = self._connection.recv()
            wall_s = time.monotonic() - began
            folders = [Path(parent) / str(number) for number in range(len(codes))]
            return [Result(code, *_said(folder), wall_s) for code, folder in zip(codes, folders, strict=True)]


def _said(folder: Path) -> tuple[str, str]:
    """What a program has written to stdout and stderr."""
    out, err = ((folder / name).read_text(errors="backslashreplace") for name in ("stdout", "stderr"))
    return out, err


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No one connects while the nursery leaves, and no one starts a second one."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start(folder: Path, address: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        listener.set_inheritable(True)
        argv = [sys.executable, "-m", "testbed.nursery", str(folder), str(listener.fileno())]
        os.posix_spawn(sys.executable, argv, env, setsid=True)  # it may outlive this process


def _serve(folder: Path, listener: socket.socket) -> None:
    """Serve each connection in a process of its own; leave when the last one is closed."""
    gc.disable()  # a quarter of the time of the imports
    install_importhook(get_config())  # assertions of test modules show their values on ranks, too
    import torch._dynamo  # noqa: F401  # which the first step of an optimizer imports, in seconds

    import testbed.training  # noqa: F401  # imports torch and ddp, before the first fork

    share_memory()
    gc.enable()
    clients: set[int] = set()
    while True:
        while select.select([listener], [], [], 0.1)[0]:
            connection = Connection(listener.accept()[0].detach())
            if pid := os.fork():
                connection.close()
                clients.add(pid)
            else:
                listener.close()
                _serve_client(connection)
        clients = {pid for pid in clients if not os.waitpid(pid, os.WNOHANG)[0]}
        if not clients:
            with contextlib.suppress(FileNotFoundError), _locked(folder):  # the folder may be gone already
                if select.select([listener], [], [], 0)[0]:
                    continue
                (folder / "socket").unlink()
            return


def _serve_client(connection: Connection) -> None:
    while True:
        try:
            kind, *request = connection.recv()
        except EOFError:
            os._exit(0)
        if kind == "programs":
            text, cwd, environments, deadline_s, folder = request
            forked: list[int] = []
            for number, environment in enumerate(environments):
                forked.append(os.fork())
                if not forked[-1]:
                    connection.close()
                    raise _Program(text, cwd, environment, Path(folder) / str(number))
            end = time.monotonic() + deadline_s
            connection.send(_codes_of(forked, end))
            continue
        world_size, case, group, arguments, deadline_s, folder = request
        _import_ahead(case.partition(":")[0])
        pids = {_fork(rank, world_size, case, group, arguments, Path(folder)): rank for rank in range(world_size)}
        connection.send(_watch(pids, deadline_s, Path(folder)))


def _import_ahead(module: str) -> None:
    """Import it once, here, and not in every rank: torch's fsdp and tensor take a second of CPU."""
    if module not in sys.modules:
        with warnings.catch_warnings(), contextlib.suppress(ImportError):  # which the ranks meet as well
            _make_warnings_errors()
            importlib.import_module(module)
        share_memory()
    threads = os.listdir("/proc/self/task") if sys.platform == "linux" else [1]
    assert len(threads) == 1, f"{module} starts a thread when it is imported, after which nothing may be forked"


def _make_warnings_errors() -> None:
    warnings.simplefilter("error")
    for message in _NO_FAULT:
        warnings.filterwarnings("ignore", message)


@dataclass
class _Program(BaseException):
    """Raised in the process that shall become this program, out of all that the nursery does."""

    text: str
    cwd: str
    environment: dict[str, str]
    folder: Path

    def prepare(self) -> CodeType:
        """Make this process what `python -c` would be before it runs the program."""
        os.setsid()
        self.folder.mkdir()
        for descriptor, path in enumerate((Path(os.devnull), self.folder / "stdout", self.folder / "stderr")):
            file = os.open(path, os.O_WRONLY | os.O_CREAT if descriptor else os.O_RDONLY)
            os.dup2(file, descriptor)
            os.close(file)
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv = ["-c"]
        sys.path.insert(0, "")
        sys.modules["__main__"] = ModuleType("__main__")
        return compile(self.text, "<string>", "exec")


def _codes_of(pids: Sequence[int], end: float) -> list[int]:
    """Wait for processes; return their exit codes, or `TIMED_OUT` for one that had to be killed.

    Those that have stopped themselves are killed when the others are gone.
    """
    codes: dict[int, int] = {}
    stopped: set[int] = set()
    while len(codes) < len(pids):
        for pid in {*pids} - {*codes}:
            waited, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if waited and os.WIFSTOPPED(status):
                stopped.add(pid)
            elif waited:
                codes[pid] = os.waitstatus_to_exitcode(status)
        is_late = time.monotonic() > end
        if is_late or len(codes) + len(stopped) == len(pids):
            for pid in {*pids} - {*codes}:
                os.kill(pid, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                codes[pid] = TIMED_OUT if is_late else code
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def _fork(rank: int, world_size: int, case: str, group: str, arguments: dict[str, Any], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    faulthandler.register(_SHOW_STACKS, (folder / f"stacks.{rank}").open("w"))
    try:
        _make_warnings_errors()
        result = _run_rank(rank, world_size, case, group, arguments, folder)
        (folder / f"result.{rank}").write_bytes(pickle.dumps(result))
        status = 0
    except BaseException:
        (folder / f"failure.{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _run_rank(rank: int, world_size: int, case: str, group: str, arguments: dict[str, Any], folder: Path) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.manual_seed(1000 + rank)
    store = dist.FileStore(str(folder / "store"), world_size)
    if "shm" in group:
        from ddp.comm.shm.backend import register

        register()
    dist.init_process_group(group, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    _wait_for_all(store, rank, world_size)
    kept = dist.group.WORLD  # a thread of gloo that drops a future's callback must not be the last that holds it
    module, _, function = case.partition(":")
    named = getattr(importlib.import_module(module), function)
    result = getattr(named, "on_rank", named)(**arguments)
    dist.destroy_process_group()
    _kept.append(kept)
    return result


def _wait_for_all(store: Any, rank: int, world_size: int) -> None:
    """Wait until each rank is connected: a case may end at once, which a rank that still connects takes for a crash."""
    store.set(f"connected.{rank}", b"")
    store.wait([f"connected.{other}" for other in range(world_size)])


def _watch(pids: dict[int, int], deadline_s: float, folder: Path) -> str | None:
    """Wait for all ranks; text of what went wrong, or None. Once one has failed, the others have a short grace."""
    end = time.monotonic() + deadline_s
    codes: dict[int, int] = {}
    while len(codes) < len(pids) and time.monotonic() < end:
        for pid, rank in pids.items():
            if rank not in codes and (waited := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(waited[1])
                if codes[rank]:
                    end = min(end, time.monotonic() + _GRACE_S)
        time.sleep(0.002)
    late = {pid: rank for pid, rank in pids.items() if rank not in codes}
    for pid in late:
        os.kill(pid, _SHOW_STACKS)
    time.sleep(_STACKS_S if late else 0.0)
    for pid in late:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not late and not any(codes.values()):
        return None
    lines = [
        f"rank {rank} was still running and was killed:\n{(folder / f'stacks.{rank}').read_text()}"
        for rank in late.values()
    ]
    for rank, code in sorted(codes.items()):
        if code:
            said = folder / f"failure.{rank}"
            lines.append(f"rank {rank} ended with {code}\n{said.read_text() if said.exists() else ''}")
    return "\n".join(lines)


if __name__ == "__main__":
    code = None
    try:
        _serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
    except _Program as program:
        code = program.prepare()
    if code:
        exec(code, vars(sys.modules["__main__"]))
