"""What a failure means where collectives are queued on a device. No GPU: see testbed.simulated_device."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.processes import run_dtrain
from testbed.resilient import run as run_script
from testbed.resilient import said
from testbed.seeds import Seeds

from ddp import device_choice, torch_internals
from ddp.errors import CollectiveError
from ddp.generation import device_collectives
from ddp.generation.device_collectives import DeviceCollectives, can_be_ended

PROGRAMS = Path(__file__).parents[2] / "programs"
CUDA = torch.device("cuda", 0)


def device_script(folder: Path, *, has_norm: bool = False) -> Path:
    """The resilient script on the simulated device; its ranks have no buffers, or do not share them."""
    text = (PROGRAMS / "resilient.py").read_text()
    for old, new in (
        ("import torch\n\nimport ddp\n",
         "import torch\n\nimport ddp\n"
         f"sys.path.append({str(PROGRAMS.parent)!r})\n"
         "from testbed.simulated_device import simulated_device\n\n"
         "device = simulated_device(int(os.environ['SEED']) + int(os.environ['RANK']))\ndevice.__enter__()\n"),
        ("Parallel(net)", "Parallel(net, broadcast_buffers=False)") if has_norm else ("nn.BatchNorm1d(16), ", ""),
        ("nn.Dropout(0.3), ", ""),
        ("nn.Linear(16, 3))\n", "nn.Linear(16, 3)).to(world.device)\nassert world.device.type == 'sim'\n"),
        ("        for x, y in loader:\n",
         "        for x, y in loader:\n            x, y = x.to(world.device), y.to(world.device)\n"),
    ):  # fmt: skip
        assert old in text, old
        text = text.replace(old, new)
    script = folder / "on_device.py"
    script.write_text(text)
    return script


def test_a_step_whose_averages_never_came_is_made_again(
    tmp_path: Path, seeds: Seeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host comes back from each wait without an error, and with nan: no optimizer steps with that."""
    script = device_script(tmp_path)
    monkeypatch.setenv("SEED", str(seeds(1)[0]))
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # ddp sets it where there is CUDA
    undisturbed = run_script(script, tmp_path, ranks=3)
    expected = said(undisturbed, "result")
    assert expected.keys() == {0, 1, 2}
    assert "nan" not in str(expected)
    failures = ("1.2.load.kill", "2.6.step.kill", "0.13.forward.raise")
    result = run_script(script, tmp_path, *failures, ranks=3, restarts=len(failures))
    assert {each.name for each in tmp_path.iterdir()} >= {*failures}, "each rank failed where it was to"
    assert result.stderr.count("only this worker restarts") == len(failures), result.stderr
    assert said(result, "result") == expected


def test_ranks_that_live_keep_their_buffers(tmp_path: Path, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    script = device_script(tmp_path, has_norm=True)
    monkeypatch.setenv("SEED", str(seeds(1)[0]))
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    expected = said(run_script(script, tmp_path, ranks=3), "result")
    assert expected[0] != expected[2]
    result = run_script(script, tmp_path, "1.2.load.kill", ranks=3, restarts=1)
    assert "only this worker restarts" in result.stderr
    found = said(result, "result")
    assert [found[rank] for rank in (0, 2)] == [expected[rank] for rank in (0, 2)]


class Devices:
    """In the place of a device: `end` is called while the host waits for it.

    Not the simulated device: what ends its collectives is a timer, and here it is the wait itself.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.aborted = 0
        self.end: Any = lambda: None
        self.is_stuck = False  # until they are aborted
        event = SimpleNamespace(query=lambda: (self.end(), not self.is_stuck)[1])
        stream = SimpleNamespace(record_event=lambda: event)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
        monkeypatch.setattr(device_collectives, "abort_on_devices", self._abort)
        monkeypatch.setattr(dist, "get_rank", lambda: 3)

    def _abort(self) -> None:
        self.aborted += 1


def test_collectives_ended_while_the_host_waits_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, collectives = Devices(monkeypatch), DeviceCollectives()
    collectives.settle([CUDA])
    devices.end = lambda: collectives.end(0)
    with pytest.raises(CollectiveError, match="the collectives of rank 3 on its devices were ended"):
        collectives.settle([CUDA])
    collectives.end(0)
    assert devices.aborted == 1


def test_the_wait_for_a_rank_ends_at_the_timeout_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices, collectives = Devices(monkeypatch), DeviceCollectives()
    devices.is_stuck = True
    monkeypatch.setattr(device_collectives, "_TIMEOUT_S", 0.3)
    with pytest.raises(CollectiveError, match=r"rank 3 has waited for a collective on cuda:0 for longer than 0.3 s"):
        collectives.settle([CUDA])
    assert devices.aborted == 1


def test_that_wait_has_no_end_while_a_debugger_holds_a_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices, collectives = Devices(monkeypatch), DeviceCollectives()
    devices.is_stuck = True
    until = time.monotonic() + 1.0

    def end() -> None:
        devices.is_stuck = time.monotonic() < until

    devices.end = end
    (tmp_path / "debugger").write_text("open")
    monkeypatch.setenv("DTRAIN_DEBUGGER_FILE", str(tmp_path / "debugger"))
    monkeypatch.setattr(device_collectives, "_TIMEOUT_S", 0.1)  # many times
    assert collectives.settle([CUDA])
    assert devices.aborted == 0


def test_the_end_of_one_group_does_not_end_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, collectives = Devices(monkeypatch), DeviceCollectives()
    collectives.begin()
    collectives.end(0)
    assert collectives.settle([CUDA])
    assert devices.aborted == 0


def test_the_host_does_not_wait_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, collectives = Devices(monkeypatch), DeviceCollectives()
    devices.end = lambda: pytest.fail("a synchronization spoils the capture")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not collectives.settle([CUDA])


def test_what_gloo_moves_on_devices_is_not_aborted_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain gloo group has one backend, for the host and for devices."""
    aborted: list[str] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        assert {each.type for each in torch_internals.device_types_of(dist.group.WORLD)} > {"cpu"}
        backend = SimpleNamespace(name=lambda: "gloo", abort=lambda: aborted.append("gloo"))
        monkeypatch.setattr(torch_internals, "backend_of", lambda group, device: backend)
        torch_internals.abort_on_devices()
    finally:
        dist.destroy_process_group()
    assert aborted == []


def test_ranks_that_leave_errors_to_others_or_to_torch_are_named() -> None:
    assert device_choice.difference([("nccl", "cuda", True), ("nccl", "cuda", True)]) is None
    assert device_choice.difference([(None, "cuda", False), (None, "cuda", False)]) is None
    said = device_choice.difference([(None, "cuda", False), (None, "cuda", True)])
    assert said is not None
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 on rank 1 and not on rank 0" in said


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        ("torch.ones = lambda *_, **__: fail()", "no longer works: CUDA error"),
        ("device_collectives.abort_on_devices = lambda: time.sleep(60)", "its collectives on devices do not end"),
        ("torch.accelerator.synchronize = lambda *_: time.sleep(60)", "cpu does not answer"),
    ],
)
def test_a_process_ends_whose_device_does_not_come_back(
    nursery: Nursery, tmp_path: Path, breaks: str, says: str
) -> None:
    """As if it had died: the launcher replaces it."""
    script = f"""if True:
        import time, torch
        from ddp.generation import device_collectives
        def fail(): raise RuntimeError("CUDA error: unspecified launch failure")
        torch.accelerator.synchronize = lambda *_: None
        device_collectives.abort_on_devices = lambda: None
        device_collectives._LIMIT_S = 0.5
        {breaks}
        device_collectives.DeviceCollectives().let_go([torch.device("cpu")])
        print("goes on")"""
    ended = nursery.program(script, tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert says in ended.stderr
    assert "this process ends, to be replaced" in ended.stderr


def test_all_groups_are_aborted_within_one_call_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def backend(name: str) -> Any:
        return SimpleNamespace(
            _group_start=lambda: calls.append("start"),
            _group_end=lambda: calls.append("end"),
            abort=lambda: calls.append(name),
        )

    backends = {"one": backend("one"), "other": backend("other")}
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(backends)))
    monkeypatch.setattr(torch_internals, "device_types_of", lambda group: [torch.device("cpu"), CUDA])
    monkeypatch.setattr(torch_internals, "backend_of", lambda group, device: backends[group])
    torch_internals.abort_on_devices()
    assert calls == ["start", "one", "other", "end"]


@pytest.mark.parametrize(
    ("words", "handling", "can"),
    [
        (("cpu", "gloo", "cuda", "nccl"), "0", True),
        (("cpu", "gloo", "cuda", "nccl"), "1", False),  # torchrun's, and dtrain's
        (("cpu", "gloo", "cuda", "nccl"), "", False),
        (("nccl",), "0", False),  # what ranks tell each other would travel on the device
        (("cpu", "gloo", "xpu", "xccl"), "0", False),
    ],
)  # fmt: skip
def test_nccl_can_be_ended_where_torch_leaves_that_to_others(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], handling: str, can: bool
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", handling)
    assert can_be_ended(words) is can


ON_CUDA = """
import os, sys, time
import torch
import ddp
from ddp import world

recorded = torch._C._distributed_c10d._dump_fr_trace_json  # gloo's, in the form of NCCL's
torch._C._distributed_c10d._dump_nccl_trace_json = recorded
if "chosen" in sys.argv:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
world.choose_device = lambda *_: torch.device("cuda", 0)  # as if there were a GPU
world.agree_on_backend = lambda *_: ("cpu:gloo,cuda:nccl", False)
connect = world._connect
def connect_by_gloo(member, store):
    member.backend = "gloo"
    connect(member, store)
    member.backend = "cpu:gloo,cuda:nccl"
world._connect = connect_by_gloo
"""
SHOWS = """
ddp.init(timeout_s=60)
print("result", os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"], world.current_generation(), flush=True)
@ddp.resilient
def train(state):
    pass
train(ddp.State())
torch.distributed.all_reduce(torch.ones(1))  # all are connected
os._exit(0)
"""


@pytest.mark.parametrize(
    ("given", "words", "expected"),
    [
        ({}, (), "0 0"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, (), "1 None"),
        ({}, ("chosen",), "3 None"),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, (), "1 None"),  # then nothing could watch in the place of torch
    ],
)
def test_ddp_handles_errors_of_nccl_unless_the_user_has_chosen(
    tmp_path: Path, given: dict[str, str], words: tuple[str, ...], expected: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ON_CUDA + SHOWS)
    result = run_dtrain("run", "--nproc-per-node", "2", script, *words, cwd=tmp_path, env=given)
    assert result.returncode == 0, result
    assert said(result, "result") == dict.fromkeys(range(2), expected)
    assert ("a failure in train() will end the attempt: on CUDA" in result.stderr) is (expected != "0 0")


STUCK = """
import datetime
from ddp.monitoring import device_watch
device_watch._LATER_S = 0.5
device_watch.timeouts_on_devices = lambda: {} if not torch.distributed.is_initialized() else {
    torch.distributed.group.WORLD.group_name: 3.0
}
def of_a_short_timeout(*arguments):
    return recorded(*arguments).replace(b'"timeout_ms":60000', b'"timeout_ms":3000')
torch._C._distributed_c10d._dump_nccl_trace_json = of_a_short_timeout
place = ddp.init(timeout_s=60)
tensor = torch.ones(2)
for _ in range(30):
    torch.distributed.all_reduce(tensor)
    time.sleep(0.1)
gone = torch.distributed.new_group(timeout=datetime.timedelta(seconds=60))
if place.rank == 0:
    left = torch.distributed.all_reduce(tensor, group=gone, async_op=True)
    torch.distributed.destroy_process_group(gone)
time.sleep(6)
print("result alive", flush=True)
if place.rank == 0:
    work = torch.distributed.all_reduce(tensor, async_op=True)
    time.sleep(50)
time.sleep(60)
"""


def test_a_collective_beyond_its_timeout_ends_the_process(tmp_path: Path) -> None:
    """Not while all come, nor for what was left in a group that is gone."""
    script = tmp_path / "script.py"
    script.write_text(ON_CUDA + STUCK)
    result = run_dtrain("run", "--nproc-per-node", "2", script, cwd=tmp_path)
    assert result.returncode == 1, result
    assert said(result, "result") == {0: "alive", 1: "alive"}
    says = r"ddp: rank (\d) has waited ([\d.]+) s for gloo:all_reduce, collective 31 of group 'default_pg', longer"
    ended = set(re.findall(says, result.stderr))
    assert [rank for rank, _ in ended] == ["0"], result.stderr
    assert 3.5 <= float(ended.pop()[1]) < 30
    assert "rank 1 is at" in result.stderr  # who has not come
    assert "longer than its timeout of 3 s, and is at script.py:" in result.stderr
