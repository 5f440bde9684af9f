"""`ddp.init()` in processes of its own: alone, under the launchers of others, and with an environment that is wrong."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.processes import Result
from testbed.require import require
from torch.distributed import HashStore, TCPStore

import ddp
from ddp import device_choice, world
from ddp.environment import ALONE, read_placement
from ddp.errors import ArgumentError, LaunchEnvironmentError
from ddp.group_store import store_at_address

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")

# Each rank trains one step on its row, and says what it sees as one line of JSON.
REPORT = """
    import json, warnings
    warnings.simplefilter("error")
    import torch
    import ddp
    world = ddp.init()
    assert ddp.init() is world and ddp.init("gloo") is world
    model = torch.nn.Linear(2, 1).to(world.device)
    model = ddp.DistributedDataParallel(model)
    model(torch.full((1, 2), float(world.rank))).sum().backward()
    print(json.dumps({
        "rank": world.rank, "world_size": world.world_size, "local_rank": world.local_rank,
        "local_world_size": world.local_world_size, "device": str(world.device), "backend": world.backend,
        "is_main": world.is_main, "grad": model.module.weight.grad[0, 0].item(),
    }), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "report.py"
    path.write_text(textwrap.dedent(REPORT))
    return path


def run(command: Sequence[str | Path], **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return subprocess.run(
        command,
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=200,
    )


def reports(result: subprocess.CompletedProcess[str] | Result) -> list[dict[str, Any]]:
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in re.findall(r"\{.*?\}", result.stdout)]  # lines of two ranks may run together
    return sorted(lines, key=lambda line: line["rank"])


def test_alone_it_is_a_world_of_one_and_ends_quietly(nursery: Nursery, tmp_path: Path) -> None:
    result = nursery.program(textwrap.dedent(REPORT), tmp_path)
    (report,) = reports(result)
    assert report == {
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "local_world_size": 1,
        "device": "cpu",
        "backend": "gloo",
        "is_main": True,
        "grad": 0.0,
    }
    assert result.stderr == ""


def test_importing_it_changes_nothing_in_torch() -> None:
    script = """
        import ddp, torch.distributed as dist
        assert "shm" not in dist.Backend.backend_list
        dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.group.WORLD.name() == "gloo"
        dist.group.WORLD._get_sequence_number_for_group()
        dist.destroy_process_group()
    """
    result = run([sys.executable, "-c", textwrap.dedent(script)])
    assert result.returncode == 0, result.stderr


def test_a_backend_that_is_named_is_known_to_torch(nursery: Nursery, tmp_path: Path) -> None:
    script = "import ddp; assert ddp.init('shm').backend == 'shm'; import torch.distributed as dist; dist.barrier()"
    result = nursery.program(script, tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("backend", ["shm", "cpu:shm", "gloo"])
def test_a_script_that_imports_it_may_ask_torch_for_shm(nursery: Nursery, tmp_path: Path, backend: str) -> None:
    script = f"""
        import ddp, torch, torch.distributed as dist
        dist.init_process_group("{backend}", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD if "shm" in "{backend}" else dist.new_group(backend="shm")
        dist.all_reduce(torch.ones(1), group=group)
        assert "Shm" in type(group._get_backend(torch.device("cpu"))).__name__
        dist.destroy_process_group()
    """
    result = nursery.program(textwrap.dedent(script), tmp_path)
    assert result.returncode == 0, result.stderr


def test_under_torchrun(script: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = run([*torchrun, script], TMPDIR=str(tmp_path))  # it leaves a folder there
    first, second = reports(result)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert (first["is_main"], second["is_main"]) == (True, False)
    assert first["grad"] == second["grad"] == 0.5
    assert "destroy_process_group" not in result.stderr


def test_under_mpirun_on_one_host_without_a_master_address(script: Path, tmp_path: Path) -> None:
    require(shutil.which("mpirun"), "mpirun", "apt-get install openmpi-bin")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = run(["mpirun", "--oversubscribe", "-np", "2", sys.executable, script], **as_root, TMPDIR=str(tmp_path))
    assert [report["grad"] for report in reports(result)] == [0.5, 0.5]
    assert [report["local_rank"] for report in reports(result)] == [0, 1]
    (meeting_place,) = tmp_path.glob("ddp-*")
    assert meeting_place.stat().st_mode & 0o777 == 0o700
    assert not list(meeting_place.iterdir())


def two_tasks(folder: Path) -> list[dict[str, str]]:
    """The variables of `srun -n 2`, set by hand: what SLURM does to start the tasks is not what is tested here."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    return [{**step, "TMPDIR": str(folder), "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]


def test_two_tasks_of_an_srun_step_on_one_host_meet(nursery: Nursery, tmp_path: Path) -> None:
    results = nursery.programs(textwrap.dedent(REPORT), tmp_path, two_tasks(tmp_path))
    said = [report for result in results for report in reports(result)]
    assert [(line["rank"], line["world_size"], line["grad"]) for line in said] == [(0, 2, 0.5), (1, 2, 0.5)]


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 in a world of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set MASTER_ADDR"),
        (
            {
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "set MASTER_ADDR",
        ),
    ],
)
def test_a_wrong_environment_is_named(env: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchEnvironmentError, match=says):
        ddp.init()


def test_a_group_that_someone_else_made_is_used_and_left_alone(nursery: Nursery, tmp_path: Path) -> None:
    result = nursery.program(
        "import ddp, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "world = ddp.init()\n"
        "print(world.rank, world.world_size, world.device, world.backend)\n"
        "dist.destroy_process_group()\n"
        "ddp.init()\n",
        tmp_path,
        RANK="7",
    )
    assert result.returncode == 1  # the second init() found RANK without WORLD_SIZE
    assert result.stdout == "0 1 cpu gloo\n"
    assert "WORLD_SIZE is not set" in result.stderr


def test_a_rank_that_cannot_meet_the_others_says_where(nursery: Nursery, tmp_path: Path) -> None:
    env: dict[str, Any] = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    result = nursery.program("import ddp; ddp.init(timeout_s=1)", tmp_path, **env)
    assert result.returncode == 1
    assert "RendezvousError: rank 1 of 2 could not join the others at 127.0.0.1:1" in result.stderr


def test_a_script_that_keeps_its_model_ends_well(nursery: Nursery, tmp_path: Path) -> None:
    """The group's threads must end before the interpreter does, though the script's globals hold the group."""
    script = """
        import atexit, importlib, weakref, torch, torch.distributed as dist, torch.distributed.nn.functional, ddp
        from torch import nn
        from ddp import world
        ddp.init("gloo")
        importlib.reload(dist.nn.functional)  # an optimizer's first step imports it, with the group as a default
        group = weakref.ref(dist.group.WORLD)
        model = ddp.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
        atexit.unregister(world.leave)
        world.leave()
        assert not hasattr(model, "process_group")
        assert group() is None
        print(model(torch.randn(4, 8)).shape)  # the module is still of use
    """
    for result in nursery.programs(textwrap.dedent(script), tmp_path, two_tasks(tmp_path)):
        assert result.returncode == 0, result.stderr
        assert result.stdout == "torch.Size([4, 8])\n"


class Devices:
    """In the place of `torch.accelerator`: some devices of one type."""

    def __init__(self, kind: str, count: int) -> None:
        self._kind = kind
        self._count = count
        self.current: int | None = None

    def is_available(self) -> bool:
        return self._count > 0

    def current_accelerator(self) -> torch.device:
        return torch.device(self._kind)

    def device_count(self) -> int:
        return self._count

    def set_device_index(self, index: int) -> None:
        self.current = index

    def current_device_index(self) -> int:
        assert self.current is not None
        return self.current


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `init_process_group` is called with, in the place of a call; local rank 1 of two."""
    options: dict[str, Any] = {}
    for name, value in {**dict.fromkeys(LAUNCHERS, "1"), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setattr(atexit, "register", lambda _: None)
    monkeypatch.setattr(world, "store_at_address", lambda _, timeout: options.update(meeting=timeout) or HashStore())
    monkeypatch.setattr(
        device_choice, "agree", lambda store, rank, size, value, decide, _: decide([value] * size)[rank]
    )
    monkeypatch.setattr(device_choice, "sharing", lambda *_: [(0,), (1,)])
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: options.update(given, backend=backend))
    return options


@pytest.mark.parametrize(
    ("kind", "count", "backend", "device", "made", "eager"),
    [
        ("cuda", 2, None, "cuda:1", "cpu:gloo,cuda:nccl", True),
        ("cuda", 2, "nccl", "cuda:1", "nccl", True),
        ("cuda", 2, "cpu:gloo,cuda:gloo", "cuda:1", "cpu:gloo,cuda:gloo", False),
        ("cuda", 2, "gloo", "cpu", "gloo", False),
        ("cuda", 1, None, "cuda:0", "cpu:gloo,cuda:nccl", False),  # perhaps shared
        ("xpu", 2, None, "xpu:1", "cpu:gloo,xpu:xccl", True),
        ("mps", 1, None, "cpu", "gloo", False),
        ("cuda", 0, None, "cpu", "gloo", False),
    ],
)
def test_the_accelerator_decides_on_device_and_backend(
    kind: str, count: int, backend: str | None, device: str, made: str, eager: bool,
    joined: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    devices = Devices(kind, count)
    monkeypatch.setattr(torch, "accelerator", devices)
    here = world.init(backend)
    assert (str(here.device), here.backend, joined["backend"]) == (device, made, made)
    assert joined.get("device_id") == (here.device if eager else None)
    assert devices.current == here.device.index
    assert joined["meeting"] == timedelta(minutes=10 if backend == "nccl" else 30)


@pytest.mark.parametrize(("local_world_size", "is_eager"), [("2", False), ("1", True)])
def test_ranks_that_see_one_device_may_share_it(
    joined: dict[str, Any], monkeypatch: pytest.MonkeyPatch, local_world_size: str, is_eager: bool
) -> None:
    monkeypatch.setattr(torch, "accelerator", Devices("cuda", 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    monkeypatch.setenv("LOCAL_RANK", "1" if local_world_size == "2" else "0")
    world.init()
    assert joined.get("device_id") == (torch.device("cuda", 0) if is_eager else None)


def test_all_ranks_connect_at_once_or_none_does(joined: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host has two ranks that see one device each, and may share it."""
    monkeypatch.setattr(torch, "accelerator", Devices("cuda", 1))
    for name, value in (("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        device_choice, "agree", lambda store, rank, size, value, decide, _: decide([[*value[:3], False], value])[rank]
    )
    world.init()
    assert joined["device_id"] is None


@pytest.mark.parametrize(("run", "device"), [("mine", "cuda:0"), ("another", "cuda:1")])
def test_a_worker_with_devices_of_its_own_takes_the_first(
    joined: dict[str, Any], monkeypatch: pytest.MonkeyPatch, run: str, device: str
) -> None:
    """As with --gpus-per-proc 2, for a model on both of them; another launcher passes the variable on."""
    monkeypatch.setattr(torch, "accelerator", Devices("cuda", 2))
    monkeypatch.setenv("DTRAIN_OWN_GPUS", "mine")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    assert str(world.init().device) == device
    assert (joined["device_id"] is None) == (run == "mine")


@pytest.mark.parametrize(
    ("kind", "count", "backend", "says"),
    [
        ("xpu", 1, "nccl", "needs CUDA"),
        ("cuda", 0, "cpu:gloo,xpu:xccl", "needs XPU"),
    ],
)
def test_a_backend_without_its_device_is_named(
    kind: str, count: int, backend: str, says: str, joined: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "accelerator", Devices(kind, count))
    with pytest.raises(ArgumentError, match=says):
        world.init(backend)
    assert not joined


@pytest.mark.parametrize(("kind", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("xpu", "ZE_AFFINITY_MASK")])
def test_more_ranks_than_devices_are_an_error(
    kind: str, variable: str, joined: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "accelerator", Devices(kind, 2))
    for name, value in (("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "3"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchEnvironmentError, match=rf"2 {kind.upper()} devices .*{variable}=not set"):
        world.init()
    assert not joined


def test_another_store_at_the_same_address_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of the store was lost, and is back before the others meet again."""
    opened = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = opened.port
    here = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    placement = read_placement(os.environ)
    client = store_at_address(placement, timedelta(seconds=30))
    member = world._Membership(placement, client, "gloo", None, None, can_be_ended=False)
    world._take_place(member, {})
    assert member.store is client
    world._take_place(member, here)
    assert member.store is not client, "a connection to a host that lost its power looks as if it were there"
    del opened
    opened = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    world._take_place(member, here)
    assert opened.check(["ddp/backend"]), "those that start later find it there"


def test_a_group_not_made_again_leaves_no_excepthook_of_torch(nursery: Nursery, tmp_path: Path) -> None:
    script = """
        import sys
        import ddp
        from ddp import world
        from ddp.generation.device_collectives import DeviceCollectives

        def connect(*_):
            raise RuntimeError("no NCCL")

        ddp.init()
        hook = sys.excepthook
        DeviceCollectives.connect = connect
        world._membership.store.set("exception_dump", "of a watchdog of NCCL's in the last group")
        try:
            world.rejoin(1, {}, lambda: False)
        except ddp.errors.RendezvousError as error:
            assert str(error).endswith("could not join the others in generation 1: no NCCL"), error
            assert sys.excepthook is hook
            assert not world._membership.store.check(["exception_dump"])
            print("as before")
    """
    variables = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0")
    variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1") | {"MASTER_ADDR": "127.0.0.1"}
    (result,) = nursery.programs(textwrap.dedent(script), tmp_path, [variables])
    assert (result.returncode, result.stdout) == (0, "as before\n"), result.stderr


def test_connections_are_broken_before_a_backend_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend for several hosts waits for what hangs in them."""
    seen: list[str] = []
    monkeypatch.setattr(world, "_membership", member := world._Membership(ALONE, HashStore(), "shm", None, None, False))
    monkeypatch.setattr(member.connections, "break_all", lambda: seen.append("connections"))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=object()))
    monkeypatch.setattr(world, "device_types_of", lambda _: [])
    monkeypatch.setattr(world, "backend_of", lambda *_: SimpleNamespace(abort=lambda: seen.append("backend")))
    world.break_connections()
    assert seen == ["connections", "backend"]


def test_a_silent_store_holds_no_rank_that_meets_the_others(nursery: Nursery, tmp_path: Path) -> None:
    """The host of the store freezes while this rank waits there for the other; the next generation has another."""
    script = """
        import os, signal, subprocess, sys, threading, time
        import ddp
        from ddp import world
        server = "import sys, time, torch.distributed as dist\\n"
        server += "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\\n"
        server += "print(store.port, flush=True)\\ntime.sleep(600)"
        store = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, text=True)
        os.environ.update(MASTER_PORT=store.stdout.readline().strip(), TORCHELASTIC_USE_AGENT_STORE="True")
        ddp.init("gloo")
        over = []
        meets = world.meet

        def meet(*arguments):
            threading.Thread(target=freeze, daemon=True).start()
            return meets(*arguments)

        def freeze():
            time.sleep(0.2)
            os.kill(store.pid, signal.SIGSTOP)
            time.sleep(0.5)
            over.append(time.monotonic())
            world.break_connections()

        world.meet = meet
        assert not world.rejoin(1, {"WORLD_SIZE": "2"}, lambda: bool(over))
        print("is free", time.monotonic() - over[0] < 30, flush=True)
        store.kill()
        os._exit(0)
    """
    variables = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0")
    variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1") | {"MASTER_ADDR": "127.0.0.1"}
    (result,) = nursery.programs(textwrap.dedent(script), tmp_path, [variables])
    assert (result.returncode, result.stdout) == (0, "is free True\n"), result.stderr


def test_a_process_that_leaves_a_group_waits_for_no_rank(nursery: Nursery, tmp_path: Path) -> None:
    """Nor does it at its end. gloo's threads sometimes go on waiting though all connections of the group are broken."""
    script = """
        import os, pathlib, sys, time, torch, torch.distributed as dist, ddp
        from ddp import world
        place = ddp.init("gloo")
        dist.barrier()
        left = pathlib.Path("left")
        if place.rank == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            began = time.monotonic()
            world.leave()
            left.with_suffix(".tmp").write_text(f"{os.getpid()} {time.monotonic() - began}")
            left.with_suffix(".tmp").rename(left)
            sys.exit()
        deadline = time.monotonic() + 60
        while not left.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        pid, took_s = left.read_text().split()
        while time.monotonic() < deadline:
            state = pathlib.Path(f"/proc/{pid}/stat")
            if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
                print("has ended", float(took_s) < 30)
                break
            time.sleep(0.05)
    """
    first, second = nursery.programs(textwrap.dedent(script), tmp_path, two_tasks(tmp_path))
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, "has ended True\n"), (first, second)
