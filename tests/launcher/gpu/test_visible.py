"""Which GPUs a worker really sees: CUDA's own answer against what NVML told the launcher."""

import json
import os
import sys
from pathlib import Path

import pytest
from testbed.processes import run_dtrain, run_program

pytestmark = pytest.mark.gpu

# Numbers are NVML's then, also where the cards differ.
IN_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
FIND = """
import json, os
from launcher.machine import devices, nvidia
ids = devices.find_gpus(os.environ).ids
print(json.dumps([ids, {card.name: card.uuid for card in nvidia.list_cards(os.environ)}]))
"""
SHOW = """
import json, os, torch
seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
torch.zeros(1, device=0)
print(json.dumps([int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), seen]), flush=True)
"""


def _found() -> tuple[list[str], dict[str, str]]:
    found = run_program(sys.executable, "-c", FIND, env=IN_ORDER)
    assert found.returncode == 0, found
    ids, uuids = json.loads(found.stdout)
    return ids, uuids


def _seen(folder: Path, *args: str) -> list[tuple[int, int, list[str]]]:
    (folder / "show.py").write_text(SHOW)
    result = run_dtrain("run", *args, "show.py", env=IN_ORDER, cwd=folder)
    assert result.returncode == 0, result
    lines = [json.loads(line[line.index("] ") + 2 :]) for line in result.stdout.splitlines()]
    return sorted((rank, local_rank, seen) for rank, local_rank, seen in lines)


def test_a_worker_s_device_is_the_one_that_it_was_given(tmp_path: Path) -> None:
    ids, uuids = _found()
    if "CUDA_VISIBLE_DEVICES" in os.environ or any(name not in uuids for name in ids):
        pytest.skip("CUDA_VISIBLE_DEVICES is set, or a GPU is lost: the names are not NVML's numbers")
    if any(name.startswith("MIG-") for name in ids):
        seen = _seen(tmp_path)
        assert [(local_rank, len(devices)) for _, local_rank, devices in seen] == [(0, 1)] * len(ids)
        return
    expected = [uuids[name].removeprefix("GPU-") for name in ids]
    whole = _seen(tmp_path)
    assert [(local_rank, devices) for _, local_rank, devices in whole] == [(r, expected) for r in range(len(ids))]
    alone = _seen(tmp_path, "--gpus-per-proc", "1")
    assert [devices for _, _, devices in alone] == [[uuid] for uuid in expected]


def test_the_gpus_of_this_host_have_places_and_are_described(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("print('ran')\n")
    bound = run_dtrain(
        "run", "-q", "--nproc-per-node", "1", "--numa-binding", "node", "x.py", env=IN_ORDER, cwd=tmp_path
    )
    assert (bound.returncode, "ran" in bound.stdout) == (0, True), bound
    report = json.loads(run_dtrain("env", "--json").stdout)
    assert report["hardware"]["GPUs"]
    assert "nccl" in report["torch"]["backends"]
    assert "cuda" in report["torch"]["devices that it sees"]
