"""Starts worlds of real processes with real gloo for the tests of `ddp`.

Importing torch takes seconds, so one process (the nursery) imports it once for all of pytest's processes, and forks
the ranks of every world from there, before it has any thread. Each world has a deadline; its ranks are gone when
`run` returns.

    with Nursery(folder) as nursery:
        results = nursery.run(3, "ddp_worlds.data_parallel_cases:mean_equals_whole_batch", steps=5)
"""

from __future__ import annotations

import contextlib
import fcntl
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
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BACKEND = os.environ.get("DDP_TEST_BACKEND", "gloo")  # of every world
_kept: list[Any] = []  # by a rank until it exits
_NO_FAULT = (  # what some versions say, and nobody can mend
    "Guards may run slower on Python",
    "Sparse invariant checks are implicitly disabled",
    "Validating sparse tensor invariants because weights_only=True",
)
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

    def run(
        self, world_size: int, case: str, *, deadline_s: float = 100.0, group: str = BACKEND, **arguments: Any
    ) -> list[Any]:
        """Run `case` ("module:function") on `world_size` ranks; return what each rank's call returned, by rank.

        `group` is the backend of the default group.
        """
        with tempfile.TemporaryDirectory(prefix="ddp-world-") as folder:
            self._connection.send((world_size, case, group, arguments, deadline_s, folder))
            failure = self._connection.recv()
            if failure is not None:
                raise WorldFailed(f"{case} with {world_size} ranks {arguments}:\n{failure}")
            return [pickle.loads((Path(folder) / f"result.{rank}").read_bytes()) for rank in range(world_size)]

    def in_turn(self, world_size: int, module: str, cases: Sequence[str], *, group: str = BACKEND) -> None:
        """Run several functions of a module in one world."""
        self.run(world_size, "ddp_worlds.nursery:call_in_turn", module=module, cases=cases, group=group)


def call_in_turn(module: str, cases: Sequence[str]) -> None:
    for case in cases:
        with warnings.catch_warnings():
            getattr(importlib.import_module(module), case)()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody connects while the nursery leaves, and nobody starts a second one."""
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
        argv = [sys.executable, "-m", "ddp_worlds.nursery", str(folder), str(listener.fileno())]
        os.posix_spawn(sys.executable, argv, env, setsid=True)  # it may outlive this process


def _serve(folder: Path, listener: socket.socket) -> None:
    """Serve each connection in a process of its own; leave when the last one is closed."""
    import torch._dynamo  # noqa: F401  # which the first step of an optimizer imports, in seconds
    from ddp_worlds import data_parallel_cases  # noqa: F401  # imports torch and ddp, before the first fork

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
            world_size, case, group, arguments, deadline_s, folder = connection.recv()
        except EOFError:
            os._exit(0)
        pids = {_fork(rank, world_size, case, group, arguments, Path(folder)): rank for rank in range(world_size)}
        connection.send(_watch(pids, deadline_s, Path(folder)))


def _fork(rank: int, world_size: int, case: str, group: str, arguments: dict[str, Any], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        warnings.simplefilter("error")
        for message in _NO_FAULT:
            warnings.filterwarnings("ignore", message)
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
    kept = dist.group.WORLD  # a thread of gloo that drops a future's callback must not be the last that holds it
    module, _, function = case.partition(":")
    result = getattr(importlib.import_module(module), function)(**arguments)
    dist.destroy_process_group()
    _kept.append(kept)
    return result


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
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not late and not any(codes.values()):
        return None
    lines = [f"rank {rank} was still running and was killed" for rank in late.values()]
    for rank, code in sorted(codes.items()):
        if code:
            said = folder / f"failure.{rank}"
            lines.append(f"rank {rank} ended with {code}\n{said.read_text() if said.exists() else ''}")
    return "\n".join(lines)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
