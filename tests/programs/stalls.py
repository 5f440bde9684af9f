"""What ranks do in which one is missing: programs of `Nursery.programs`, for tests/ddp/monitoring/test_stall_report.py.

These ranks end as a user's do, through the end of the interpreter, where the last words are said; those of
`Nursery.run` leave with os._exit. Each case runs on every rank, and returns what the test asserts on.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import BACKEND
from testbed.present import present

import ddp
from ddp.comm.failures import failing_together
from ddp.comm.sums import small_sum
from ddp.comm.sums.small_sum import SmallAdder
from ddp.data_parallel.buckets import gradient_sums, unbucketed
from ddp.errors import CollectiveError
from ddp.monitoring import stall_report as stall_report_module
from ddp.monitoring.stall_report import StallReport

kept: object = None
DEADLINE_S = 90.0  # less than the group's own timeout
GROUP_TIMEOUT_S = 180.0
STALL_S = 0.6
DEVICE = torch.device("meta")  # of which gloo moves nothing, as of CUDA with NCCL


def until(is_so: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def make(timeout_s: float | None = STALL_S, group: dist.ProcessGroup | None = None) -> StallReport:
    made = StallReport(present(group or dist.group.WORLD), timeout_s=timeout_s)
    made.at("user code")
    return made


def reduce(stall_report: StallReport, what: str = "all-reduce of bucket 1 of 1", **options: Any) -> None:
    """A step that ends well, however slow the machine is."""
    limit_s, stall_report._own_timeout_s = stall_report._own_timeout_s, DEADLINE_S
    stall_report.wait(dist.all_reduce(torch.ones(3), async_op=True, **options), what)
    stall_report._own_timeout_s = limit_s
    stall_report.step += 1


def stall(stall_report: StallReport, what: str = "all-reduce of bucket 1 of 1", **options: Any) -> str:
    """The report of a wait that must fail."""
    with pytest.raises(CollectiveError) as caught:
        stall_report.wait(dist.all_reduce(torch.ones(3), async_op=True, **options), what)
    assert (caught.value.rank, caught.value.what) == (stall_report.rank, what)
    return str(caught.value)


def stall_and_tell(stall_report: StallReport, folder: Path) -> str:
    """The report of a wait that must fail; `others_wait` sees when all ranks wait that do so."""
    thread = when_waiting(stall_report, (folder / f"waits.{os.getpid()}").touch)
    report = stall(stall_report)
    thread.join()
    return report


def others_wait(folder: Path, size: int) -> None:
    until(lambda: len(list(folder.glob("waits.*"))) == size - 1)


def all_come(folder: Path, name: str, size: int) -> None:
    """Meet without a collective and without the store."""
    (folder / f"{name}.{os.getpid()}").touch()
    until(lambda: len(list(folder.glob(f"{name}.*"))) == size)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def when_waiting(stall_report: StallReport, act: Callable[[], object]) -> threading.Thread:
    """Call `act` in a thread as soon as this rank waits for a collective."""

    def run() -> None:
        until(lambda: stall_report.position().is_waiting)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def interrupt_when_waiting(stall_report: StallReport) -> threading.Thread:
    """Send Ctrl-C as soon as this rank waits."""
    return when_waiting(stall_report, lambda: os.kill(os.getpid(), signal.SIGINT))


# Cases


class _Slow(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Four samples, before each of which `hang` is called."""

    def __init__(self, hang: Callable[[], object]) -> None:
        self._hang = hang

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._hang()
        return torch.ones(2), torch.ones(1)


def _joins_at_once(model: ddp.DistributedDataParallel) -> None:
    with model.join():
        pass


def _fails_with_others(model: Any) -> None:
    with failing_together(model._reducer.channel, "its pass"):
        pass


def hangs_elsewhere(folder: Path, size: int, where: str) -> str | None:
    """Rank 1 hangs where the ranks meet outside of a model's passes; the error of rank 0."""

    def hang() -> None:
        (folder / "hangs").touch()
        until((folder / "seen").exists)
        leave()

    def comes() -> None:
        until((folder / "hangs").exists)
        report = (trainer.model if where == "evaluation" else model)._reducer.report
        report._own_timeout_s = stall_report_module._limits_s[id(report)] = STALL_S

    options: dict[str, Any] = {"stall_timeout_s": DEADLINE_S, "measure": False}
    is_late = dist.get_rank() == 1
    if where == "evaluation":
        strategy = ddp.strategy("all_reduce", **options)
        net = torch.nn.Linear(2, 1)
        trainer = ddp.Trainer(
            net, torch.optim.SGD(net.parameters(), lr=0.1), torch.nn.functional.mse_loss, strategy=strategy
        )
        before = hang if is_late else comes
        act: Callable[[], object] = lambda: trainer.evaluate(_Slow(before))  # noqa: E731  # where it hangs
        is_late = False
    else:
        sparse = where == "sparse gradients"
        net = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=sparse), torch.nn.Linear(2, 1))
        model = ddp.DistributedDataParallel(net, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        act = {
            "save": lambda: ddp.Checkpoint(folder / "checkpoints").save(1, model=model),
            "load": lambda: ddp.Checkpoint(folder / "checkpoints").load(model=model),
            "gather_metrics": lambda: ddp.gather_metrics({"loss": 1.0}),
            "LocalSGD": lambda: ddp.LocalSGD(model, optimizer, every=2).sync(),
            "check_replicas": lambda: ddp.check_replicas(model),
            "join": lambda: _joins_at_once(model),
            "failures": lambda: _fails_with_others(model),
            "sparse gradients": lambda: model(torch.tensor([dist.get_rank()])).sum().backward(),
        }[where]
        if sparse and is_late:
            gradient_sums.average_sparse = lambda *_: hang()  # type: ignore[attr-defined]  # replaced in this process
            is_late = False
    if is_late:
        hang()
    if where == "sparse gradients":
        exchange = unbucketed._average
        if dist.get_rank() == 0:
            unbucketed._average = lambda *given: (comes(), exchange(*given))  # type: ignore[func-returns-value]
    elif where != "evaluation":
        comes()
    with pytest.raises(CollectiveError) as caught:
        act()
    (folder / "seen").touch()
    return str(caught.value)


def comes_late(folder: Path, size: int) -> str | None:
    """The others end with the error while rank 1 sleeps in its script, and then it comes."""
    stall_report = make()
    reduce(stall_report)
    if dist.get_rank() == 1:
        stall_report.at("backward", lambda: "parameters not ready: a.weight, b\x1b.bias")
        others = until(lambda: [path for path in folder.glob("waits.*") if len(list(folder.glob("waits.*"))) == 2])
        until(lambda: all(is_gone(int(path.suffix[1:])) for path in others))  # the line that the others name
        stall_report.at("user code")
        if dist.get_backend() == "shm":  # what the others gave before they left is there
            stall_report.wait(dist.all_reduce(torch.ones(3), async_op=True), "all-reduce of bucket 1 of 1")
        return stall(stall_report)
    (folder / f"waits.{os.getpid()}").touch()
    stall_report.wait(dist.all_reduce(torch.ones(3), async_op=True), "all-reduce of bucket 1 of 1")
    return None


def exits_early(folder: Path, size: int) -> str | None:
    stall_report = make(30.0)
    for _ in range(2):
        reduce(stall_report)
    if dist.get_rank() == size - 1:
        others_wait(folder, size)
        return None
    report = stall_and_tell(stall_report, folder)
    all_come(folder, "end", size - 1)
    return report


def returns_from_main_early(folder: Path, size: int) -> str | None:
    """As a script with a main(): its model is gone before the interpreter ends."""
    stall_report = make(5.0)
    reduce(stall_report)
    if dist.get_rank() == size - 1:
        del stall_report
        until(lambda: not monitors())
        others_wait(folder, size)
        return None
    report = stall_and_tell(stall_report, folder)
    all_come(folder, "end", size - 1)
    return report


def raises(folder: Path, size: int) -> str | None:
    stall_report = make(30.0)
    reduce(stall_report)
    if dist.get_rank() == 1:
        others_wait(folder, size)
        raise ValueError("no such sample: 17\nand more")
    report = stall_and_tell(stall_report, folder)
    all_come(folder, "end", size - 1)
    return report


def fails_one_after_the_other(folder: Path, size: int) -> str | None:
    """Rank 1 is gone. Rank 0 has its error, and goes on, before rank 2 gets its own.

    The errors are not gloo's: a rank in its ring sees that another is gone only once the third has come as well.
    """
    stall_report = make(30.0)
    reduce(stall_report)
    if (rank := dist.get_rank()) == 1:
        return None
    if rank == 2:
        until((folder / "failed").exists)
    with pytest.raises(CollectiveError) as caught, stall_report.waiting("all-reduce of bucket 1 of 1"):
        raise RuntimeError("Connection closed by peer")
    (folder / ("failed" if rank == 0 else "done")).touch()
    until((folder / "done").exists)
    return str(caught.value)


def signalled(folder: Path, size: int, number: int, who: int) -> str | None:
    """Rank `who` signals itself when the others wait for it, and these wait long enough for each other's answers."""
    stall_report = make(2.0)
    stall_report._patience_s = lambda: 4.0
    reduce(stall_report)
    if dist.get_rank() == who:
        others_wait(folder, size)
        os.kill(os.getpid(), number)
    report = stall_and_tell(stall_report, folder)
    all_come(folder, "end", size - 1)
    return report


def sums_with_one_gone(folder: Path, size: int, who: int) -> str | None:
    """Rank `who` is gone when the others add up a small vector over many ranks, in which not all hear of it."""
    small_sum._LEAST_RANKS = 2
    stall_report = make()
    stall_report._patience_s = lambda: 4.0
    reduce(stall_report)
    if dist.get_rank() == who:
        others_wait(folder, size)
        os.kill(os.getpid(), signal.SIGKILL)
    work = SmallAdder(present(dist.group.WORLD)).start(torch.ones(30))
    thread = when_waiting(stall_report, (folder / f"waits.{os.getpid()}").touch)
    with pytest.raises(CollectiveError) as caught:
        stall_report.wait(work, "step status")
    thread.join()
    all_come(folder, "end", size - 1)
    return str(caught.value)


def writes(folder: Path, size: int) -> list[int]:
    """Keys in the store before, after steps without a stall, and after a question."""
    global kept
    stall_report = kept = make(1.0)  # alive until the interpreter ends
    store = dist.distributed_c10d._get_default_store()
    seen = [store.num_keys()]
    dist.barrier()
    end = time.monotonic() + 3 * stall_report.interval_s
    while True:
        stall_report.at("forward")
        reduce(stall_report)
        dist.all_reduce(stop := torch.tensor(float(time.monotonic() > end)))
        if stop:
            break
    seen.append(store.num_keys())
    dist.barrier()
    return seen


def monitors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ddp-stall-report"]


def forks(folder: Path, size: int) -> None:
    """A child has neither thread nor connection, and neither its objects' end nor its own touches the parent's."""
    stall_report = make()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            assert not monitors()
            stall_report.tell_failure(1, "from a child")
            assert "forked" in str(stall_report.error("all-reduce", ""))
            stall_report.close()
            del stall_report
            gc.collect()
            status = 0
        finally:
            if status:
                os._exit(status)
        sys.exit(0)  # through the end of the interpreter, unlike a worker of DataLoader
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    all_come(folder, "forked", size)
    if dist.get_rank() == 1:
        report = stall(stall_report)
        assert "rank 0 is missing" in report
        assert "user code" in report
        (folder / "asked").touch()
    until((folder / "asked").exists)
    assert stall_report.failures(1, patience_s=0.1) == {}


def blocks(folder: Path, size: int) -> str | None:
    """A collective that blocks: the report goes to stderr while it does, and into its error when it fails."""
    stall_report = make()
    if dist.get_rank() == 1:
        until(lambda: "missing" in (folder / "stderr.0").read_text())
        return None
    with pytest.raises(CollectiveError) as caught, stall_report.waiting("broadcast of the plan"):
        dist.all_reduce(torch.ones(1))
    assert caught.value.what == "broadcast of the plan"
    return str(caught.value)


def wraps_alone(folder: Path, size: int) -> str | None:
    """Rank 1 does not come to the comparison of the modules."""
    if dist.get_rank() == 1:
        time.sleep(2 * STALL_S)
        return None
    with pytest.raises(CollectiveError) as caught:
        ddp.DistributedDataParallel(torch.nn.Linear(2, 1), stall_timeout_s=STALL_S)
    return str(caught.value)


def iterates_alone(folder: Path, size: int) -> str | None:
    """Rank 1 leaves in the middle of a loop with uneven inputs."""
    model = ddp.DistributedDataParallel(torch.nn.Linear(2, 1), stall_timeout_s=STALL_S)

    def train() -> None:
        with model.join():
            model(torch.ones(1, 2)).sum().backward()
            if dist.get_rank() == 1:
                sys.exit()
            model(torch.ones(1, 2))

    with pytest.raises(CollectiveError) as caught:
        train()
    return str(caught.value)


def verifies_alone(folder: Path, size: int) -> str | None:
    """Rank 1 does not call ddp.verify."""
    if dist.get_rank() == 1:
        until((folder / "joined").exists)  # or gloo would fail to connect them
        return None
    (folder / "joined").touch()
    with pytest.raises(CollectiveError) as caught:
        ddp.verify(torch.nn.Linear(2, 1), lambda model, batch: model(batch).sum(), torch.ones(4, 2))
    return str(caught.value)


class OnDevice:
    """A work of gloo that waits as one of NCCL does: not at all."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.is_completed = work.is_completed

    def wait(self) -> bool:
        return True


def interrupted_in_a_step(folder: Path, size: int) -> str | None:
    """Ctrl-C ends a backward pass that waits for the other rank; a forward pass says so; then the process ends."""
    model = ddp.DistributedDataParallel(torch.nn.Linear(2, 1), stall_timeout_s=10 * DEADLINE_S)
    loss = model(torch.ones(1, 2)).sum()
    if dist.get_rank() == 1:
        until((folder / "seen").exists)
        (other,) = [int(path.suffix[1:]) for path in folder.glob("first.*")]
        until(lambda: is_gone(other))
        return None
    (folder / f"first.{os.getpid()}").touch()
    thread = interrupt_when_waiting(model._reducer.report)
    try:
        loss.backward()
    except KeyboardInterrupt:
        thread.join()
        with pytest.raises(CollectiveError, match="was interrupted in the "):
            model(torch.ones(1, 2))
        (folder / "seen").touch()
        raise
    raise AssertionError


def on_device(folder: Path, size: int) -> None:
    debugger_file = folder / "debugger"
    debugger_file.write_text("open")
    os.environ["DTRAIN_DEBUGGER_FILE"] = str(debugger_file)
    stall_report = StallReport(present(dist.group.WORLD), timeout_s=STALL_S, device=DEVICE)
    stall_report.at("user code")
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        on_device: Any = OnDevice(work)
        stall_report.wait(on_device, "all-reduce of bucket 1 of 1")
        stall_report.at("loss.item()")
        time.sleep(4 * STALL_S)
        assert "missing" not in (folder / "stderr.0").read_text(), "a debugger is open"
        debugger_file.write_text(repr(time.monotonic()))
        until(lambda: "missing" in (folder / "stderr.0").read_text())
        (folder / "seen").touch()
        work.wait()
        until(lambda: stall_report._newest is None)
    else:
        until((folder / "seen").exists)
        dist.all_reduce(torch.ones(1))
    dist.barrier()


def run_rank(
    rank: int,
    into: str,
    case: str,
    size: int,
    store: str,
    whole_end: bool = False,
    backend: str = BACKEND,
    **arguments: Any,
) -> None:
    folder = Path(into)
    os.dup2(os.open(folder / f"stderr.{rank}", os.O_WRONLY | os.O_CREAT, 0o600), 2)  # which the others may read
    if not whole_end:
        atexit.register(leave)  # comes last
    warnings.simplefilter("error")
    torch.manual_seed(rank)
    group_store = tcp_store(rank, size, folder) if store == "tcp" else dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        backend, store=group_store, rank=rank, world_size=size, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    del group_store
    result = globals()[case](folder, size, **arguments)
    (folder / f"result.{rank}").write_text(json.dumps(result))


def leave() -> None:
    """Spare the teardown of torch's modules, half a second for each rank."""
    sys.stderr.flush()
    os._exit(1 if hasattr(sys, "last_value") else 0)


def tcp_store(rank: int, size: int, folder: Path) -> dist.Store:
    """Rank 0 hosts it, as with torchrun's static rendezvous; the port that it got is in a file."""
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port)
        return store
    until(port.exists)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), size, is_master=False, wait_for_workers=False)
