"""Which GPUs a worker really sees: CUDA's own answer against what NVML reported to the launcher."""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from testbed.processes import Result, run_dtrain, run_program

from launcher.machine.gpus.card import pci_folder
from launcher.machine.system_files import SYSFS

pytestmark = pytest.mark.gpu

DEADLINE_S = 240.0  # a first use of the device loads kernels
# Numbers are NVML's then, also where the cards differ.
IN_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
FIND = """
import json, os
from launcher.machine.gpus import nvidia, visible
gpus = visible.find_gpus(os.environ)
print(json.dumps([gpus.ids, gpus.bus_ids, {card.name: card.uuid for card in nvidia.list_cards(os.environ)}]))
"""
SHOW = """
import json, os, torch
seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
torch.zeros(1, device=0)
print(json.dumps([int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), seen]), flush=True)
"""
SUM = """
import json, os, sys, torch, ddp
world = ddp.init()
total = torch.ones(3, device=world.device)
torch.distributed.all_reduce(total)
said = {"device": str(world.device), "backend": world.backend, "sum": total.tolist(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
open(f"{sys.argv[1]}/{world.rank}.json", "w").write(json.dumps(said))
"""


class Found(NamedTuple):
    """What the launcher finds: `uuids` by the names of all cards."""

    ids: list[str]
    bus_ids: list[str]
    uuids: dict[str, str]

    @property
    def are_slices(self) -> bool:
        return any(name.startswith("MIG-") for name in self.ids)


def _found() -> Found:
    found = run_program(sys.executable, "-c", FIND, env=IN_ORDER)
    assert found.returncode == 0, found
    return Found(*json.loads(found.stdout))


def _run(folder: Path, text: str, *options: str, args: tuple[Path, ...] = ()) -> Result:
    (folder / "script.py").write_text(text)
    return run_dtrain("run", *options, "script.py", *args, env=IN_ORDER, cwd=folder, timeout=DEADLINE_S)


def _seen(folder: Path, *options: str) -> list[tuple[int, int, list[str]]]:
    result = _run(folder, SHOW, *options)
    assert result.returncode == 0, result
    lines = [json.loads(line[line.index("] ") + 2 :]) for line in result.stdout.splitlines()]
    return sorted((rank, local_rank, seen) for rank, local_rank, seen in lines)


def test_a_worker_s_device_is_the_one_that_it_was_given(tmp_path: Path) -> None:
    found = _found()
    if "CUDA_VISIBLE_DEVICES" in os.environ or any(name not in found.uuids for name in found.ids):
        pytest.skip("CUDA_VISIBLE_DEVICES is set, or a GPU is lost: the names are not NVML's numbers")
    if found.are_slices:
        seen = _seen(tmp_path)
        assert [(local_rank, len(devices)) for _, local_rank, devices in seen] == [(0, 1)] * len(found.ids)
        return
    expected = [found.uuids[name].removeprefix("GPU-") for name in found.ids]
    whole = _seen(tmp_path)
    assert [(local_rank, devices) for _, local_rank, devices in whole] == [(r, expected) for r in range(len(expected))]
    alone = _seen(tmp_path, "--gpus-per-proc", "1")
    assert [devices for _, _, devices in alone] == [[uuid] for uuid in expected]


def test_workers_with_a_device_each_add_up_over_nccl(tmp_path: Path) -> None:
    found = _found()
    if found.are_slices:
        pytest.skip("NCCL refuses slices of one device")
    count = len(found.ids)
    done = _run(tmp_path, SUM, "--nproc-per-node", str(count), args=(tmp_path,))
    assert done.returncode == 0, done
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]
    assert [each["sum"] for each in said] == [[float(count)] * 3] * count
    assert all("nccl" in each["backend"] for each in said)
    assert len({(each["device"], each["visible"]) for each in said}) == count


def test_more_workers_than_devices_are_refused(tmp_path: Path) -> None:
    count = len(_found().ids)
    done = _run(tmp_path, "print('started')", "--nproc-per-node", str(count + 1))
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert f"it has {count} (" in done.stderr, done


def test_a_worker_is_bound_near_its_device(tmp_path: Path) -> None:
    reported = [pci_folder(bus_id) / "numa_node" for bus_id in _found().bus_ids]
    reported += [SYSFS / "devices/system/node", SYSFS / "devices/system/cpu/cpu0/topology/thread_siblings_list"]
    if missing := [str(path) for path in reported if not path.exists()]:
        pytest.skip(f"this kernel does not say how the processors and GPUs lie: no {missing[0]}")
    bound = _run(tmp_path, "print('ran')", "-q", "--nproc-per-node", "1", "--numa-binding", "node")
    assert (bound.returncode, "ran" in bound.stdout) == (0, True), bound


def test_env_describes_the_devices() -> None:
    import torch

    done = run_dtrain("env", "--json")
    assert done.returncode == 0, done
    report = json.loads(done.stdout)
    name = torch.cuda.get_device_name(0).partition(" MIG ")[0]
    assert any(name in gpu for gpu in report["hardware"]["GPUs"]), (name, report)
    assert "nccl" in report["torch"]["backends"]
    assert "cuda" in report["torch"]["devices that it sees"]
