"""Starts worlds of real processes with real gloo for the tests of `ddp`.

Importing torch takes seconds, so one process (the nursery) imports it once and forks the ranks of every
world from there, before it has any thread. Each world has a deadline; its ranks are gone when `run`
returns.

    with Nursery() as nursery:
        results = nursery.run(3, "ddp_worlds.data_parallel_cases:mean_equals_whole_batch", steps=5)
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 3.0  # what the other ranks may still say after one has failed


class WorldFailed(AssertionError):
    """A rank failed; the message has the traceback of every rank that did."""


class Nursery:
    """One process with torch imported, from which worlds are forked. Leaving the context ends it."""

    def __enter__(self) -> Nursery:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            env.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ddp_worlds.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=env,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # its end of input: the nursery leaves
        try:
            self._process.wait(timeout=10)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process.stdout.close()

    def run(self, world_size: int, case: str, *, deadline_s: float = 100.0, **arguments: Any) -> list[Any]:
        """Run `case` ("module:function") on `world_size` ranks; return what each rank's call returned, by rank."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="ddp-world-") as folder:
            pickle.dump((world_size, case, arguments, deadline_s, folder), self._process.stdin)
            self._process.stdin.flush()
            failure = pickle.load(self._process.stdout)
            if failure is not None:
                raise WorldFailed(f"{case} with {world_size} ranks {arguments}:\n{failure}")
            return [pickle.loads((Path(folder) / f"result.{rank}").read_bytes()) for rank in range(world_size)]

    def in_turn(self, world_size: int, module: str, cases: Sequence[str]) -> None:
        """Run several functions of a module in one world."""
        self.run(world_size, "ddp_worlds.nursery:call_in_turn", module=module, cases=cases)


def call_in_turn(module: str, cases: Sequence[str]) -> None:
    for case in cases:
        with warnings.catch_warnings():
            getattr(importlib.import_module(module), case)()


def _serve() -> None:
    import torch._dynamo  # noqa: F401  # which the first step of an optimizer imports, in seconds
    from ddp_worlds import data_parallel_cases  # noqa: F401  # imports torch and ddp, before the first fork

    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a rank prints must not get among the replies
    while True:
        try:
            world_size, case, arguments, deadline_s, folder = pickle.load(requests)
        except EOFError:
            return
        pids = {_fork(rank, world_size, case, arguments, Path(folder)): rank for rank in range(world_size)}
        pickle.dump(_watch(pids, deadline_s, Path(folder)), replies)
        replies.flush()


def _fork(rank: int, world_size: int, case: str, arguments: dict[str, Any], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        warnings.simplefilter("error")
        result = _run_rank(rank, world_size, case, arguments, folder)
        (folder / f"result.{rank}").write_bytes(pickle.dumps(result))
        status = 0
    except BaseException:
        (folder / f"failure.{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _run_rank(rank: int, world_size: int, case: str, arguments: dict[str, Any], folder: Path) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.manual_seed(1000 + rank)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    module, _, function = case.partition(":")
    result = getattr(importlib.import_module(module), function)(**arguments)
    dist.destroy_process_group()
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
    _serve()
