"""AMD's GPUs: what is found on a machine that has them, by the kernel's files, and who gets which."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from testbed.gpu_machine import GpuMachine
from testbed.processes import Result, run_program

from launcher.errors import UsageError
from launcher.machine.gpus import amd
from launcher.machine.processors import cores

pytestmark = pytest.mark.ordinary_user

LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE",
         "OMP_NUM_THREADS")  # fmt: skip
UNSET: dict[str, str | None] = dict.fromkeys(LISTS)

FIND = """
import json, sys
from dataclasses import asdict
from launcher.machine.gpus.visible import find_gpus
from launcher.errors import UsageError
for env in json.loads(sys.argv[1]):
    try:
        print(json.dumps(asdict(find_gpus(env))))
    except UsageError as error:
        print(json.dumps(str(error)))
"""
SHOW = """
import os
names = ("RANK", "LOCAL_RANK", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
print(*(os.environ.get(name, "unset") for name in names), flush=True)
"""
SHOW_CORES = """
import json, os
rank, visible = int(os.environ["LOCAL_RANK"]), os.environ["HIP_VISIBLE_DEVICES"]
print(json.dumps([rank, visible, sorted(os.sched_getaffinity(0))]), flush=True)
"""


@pytest.fixture
def machine(tmp_path: Path) -> GpuMachine:
    return GpuMachine(tmp_path / "machine")


@pytest.fixture
def mi300(machine: GpuMachine) -> GpuMachine:
    """Four GPUs on two NUMA nodes. KFD's order is not that of the PCI addresses."""
    machine.add_cpu_node()
    for node, bus in enumerate(("c1", "85", "05", "41"), start=1):
        bus_id = f"0000:{bus}:00.0"
        machine.add_amd(node, bus_id, unique_id=0xA0 + node, numa_node=(node - 1) // 2, product_name="MI300X")
    return machine


def _find(machine: GpuMachine, *envs: Mapping[str, str], built: str | None) -> list[object]:
    argv = machine.run_in(sys.executable, "-c", FIND, json.dumps(envs))
    found = run_program(*argv, env={**UNSET, "PYTHONPATH": str(machine.built_for(built))})
    assert (found.returncode, found.stderr) == (0, "")
    return [json.loads(line) for line in found.stdout.splitlines()]


def _ids(machine: GpuMachine, *envs: Mapping[str, str], built: str | None) -> list[object]:
    """Return what is found, each as `VARIABLE ids`, or the error."""
    found = _find(machine, *envs, built=built)
    return [" ".join([one["variable"], *one["ids"]]) if isinstance(one, dict) else one for one in found]


# ---- AMD -----------------------------------------------------------------------------------------------------


def test_amd_s_gpus_are_found_in_the_kernel_s_order(mi300: GpuMachine) -> None:
    found = amd.list_cards({}, mi300.sys, mi300.dev)
    assert [(card.name, card.bus_id) for card in found] == [
        ("0", "0000:c1:00.0"), ("1", "0000:85:00.0"), ("2", "0000:05:00.0"), ("3", "0000:41:00.0"),
    ]  # fmt: skip
    assert {card.model for card in found} == {"MI300X"}
    assert found[0].uuid == "GPU-00000000000000a1"


def test_ten_and_more_nodes_are_in_the_order_of_their_numbers(machine: GpuMachine) -> None:
    machine.add_cpu_node()
    for node in range(1, 13):
        machine.add_amd(node, f"0000:{node:02x}:00.0")
    assert [card.bus_id[5:7] for card in amd.list_cards({}, machine.sys, machine.dev)] == [
        f"{node:02x}" for node in range(1, 13)
    ]


def test_partitions_of_one_card_are_gpus_at_one_address(machine: GpuMachine) -> None:
    machine.add_cpu_node()
    for node in (1, 2):
        machine.add_amd(node, "0001:c1:00.0", partition=node - 1)
    found = amd.list_cards({}, machine.sys, machine.dev)
    assert [(card.name, card.bus_id) for card in found] == [("0", "0001:c1:00.0"), ("1", "0001:c1:00.0")]
    assert {card.model for card in found} == {"AMD gfx942"}


def test_gpus_that_a_container_does_not_get_are_not_counted(mi300: GpuMachine) -> None:
    (mi300.dev / "dri/renderD129").unlink()
    mi300.write("class/kfd/kfd/topology/nodes/3/gpu_id", "")  # what the kernel refuses to say reads as nothing
    found = amd.list_cards({}, mi300.sys, mi300.dev)
    assert [(card.name, card.bus_id) for card in found] == [("0", "0000:c1:00.0"), ("1", "0000:41:00.0")]


@pytest.mark.parametrize("text", ["", "rubbish", "drm_render_minor\nlocation_id x y\n"])
def test_a_topology_that_cannot_be_read_is_no_gpu(machine: GpuMachine, text: str) -> None:
    machine.add_cpu_node()
    machine.write("class/kfd/kfd/topology/nodes/1/gpu_id", 7)
    machine.write("class/kfd/kfd/topology/nodes/1/properties", text)
    assert amd.list_cards({}, machine.sys, machine.dev) == []


def test_a_list_of_hip_s_counts_in_what_rocr_s_leaves(mi300: GpuMachine) -> None:
    everything = {
        "": "0 1 2 3",
        "HIP_VISIBLE_DEVICES=3,1": "3 1",
        "HIP_VISIBLE_DEVICES=GPU-00000000000000a2,0": "1 0",
        "HIP_VISIBLE_DEVICES=": "",
        "HIP_VISIBLE_DEVICES=-1": "",
        "ROCR_VISIBLE_DEVICES=2,3": "0 1",
        "ROCR_VISIBLE_DEVICES=GPU-00000000000000a4": "0",
        "ROCR_VISIBLE_DEVICES=1,2,3 HIP_VISIBLE_DEVICES=2": "2",
        "ROCR_VISIBLE_DEVICES=2,3 CUDA_VISIBLE_DEVICES=2,3": "0 1",  # as SLURM sets both
        "HIP_VISIBLE_DEVICES=1 CUDA_VISIBLE_DEVICES=0": "1",
        "CUDA_VISIBLE_DEVICES=2": "2",
    }
    envs = [dict(pair.split("=") for pair in said.split()) for said in everything]
    found = _ids(mi300, *envs, built="hip")
    assert found == [f"HIP_VISIBLE_DEVICES {ids}".strip() for ids in everything.values()]


def test_of_a_filtered_list_the_addresses_are_those_of_its_gpus(mi300: GpuMachine) -> None:
    (found,) = _find(mi300, {"ROCR_VISIBLE_DEVICES": "3,0", "HIP_VISIBLE_DEVICES": "1,0"}, built="hip")
    assert isinstance(found, dict)
    assert (found["bus_ids"], found["verified"]) == (["0000:c1:00.0", "0000:41:00.0"], True)


def test_a_list_of_which_rocm_would_drop_a_part_is_an_error(mi300: GpuMachine) -> None:
    with pytest.raises(UsageError, match="ROCR_VISIBLE_DEVICES=0,7 names GPU 7, but this host has: 0, 1, 2, 3"):
        amd.list_cards({"ROCR_VISIBLE_DEVICES": "0,7"}, mi300.sys, mi300.dev)
    envs = [{"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2"}, {"HIP_VISIBLE_DEVICES": "1,1"}]
    first, second = _ids(mi300, *envs, built="hip")
    assert first == "HIP_VISIBLE_DEVICES=2 names GPU 2, but this host has: 0, 1"
    assert "names GPU 1 twice" in str(second)


# ---- which vendor --------------------------------------------------------------------------------------------


def test_torch_decides_whose_gpus_are_handed_out(mi300: GpuMachine) -> None:
    for built, found in (("hip", "HIP_VISIBLE_DEVICES 0 1 2 3"),
                         (None, "CUDA_VISIBLE_DEVICES"), ("cuda", "CUDA_VISIBLE_DEVICES")):  # fmt: skip
        assert _ids(mi300, {}, built=built) == [found]


def test_lists_without_a_driver_are_believed(machine: GpuMachine) -> None:
    slurm = {"CUDA_VISIBLE_DEVICES": "2,3", "ROCR_VISIBLE_DEVICES": "2,3"}
    for built, found in ((None, "CUDA_VISIBLE_DEVICES 2 3"), ("cuda", "CUDA_VISIBLE_DEVICES 2 3"),
                         ("hip", "HIP_VISIBLE_DEVICES 0 1")):  # fmt: skip
        assert _ids(machine, slurm, built=built) == [found]
    assert _ids(machine, {"ROCR_VISIBLE_DEVICES": "4,5"}, built=None) == ["HIP_VISIBLE_DEVICES 0 1"]


# ---- what the commands do with them --------------------------------------------------------------------------


def _dtrain(machine: GpuMachine, built: str, *args: str, show: str = SHOW, **env: str) -> Result:
    folder = machine.sys.parent
    (folder / "show.py").write_text(show)
    argv = machine.run_in(sys.executable, "-m", "launcher", *args, "show.py")
    return run_program(*argv, env={**UNSET, "PYTHONPATH": str(machine.built_for(built)), **env}, cwd=folder)


def _seen(result: Result) -> dict[int, list[str]]:
    assert result.returncode == 0, result
    words = [line.partition("] ")[2].split(" ") for line in result.stdout.splitlines()]
    return {int(rank): rest for rank, *rest in words}


def test_workers_see_amd_s_gpus_through_hip_s_list(mi300: GpuMachine) -> None:
    everything = _seen(_dtrain(mi300, "hip", "run"))
    assert everything == {rank: [str(rank), "0,1,2,3", "unset"] for rank in range(4)}
    pairs = _seen(_dtrain(mi300, "hip", "run", "--gpus-per-proc", "2", ROCR_VISIBLE_DEVICES="3,2,1,0"))
    assert pairs == {0: ["0", "0,1", "3,2,1,0"], 1: ["1", "2,3", "3,2,1,0"]}
    none = _seen(_dtrain(mi300, "hip", "run", "--nproc-per-node", "cpu", CUDA_VISIBLE_DEVICES="0"))
    assert {tuple(rest[1:]) for rest in none.values()} == {("-1", "unset")}


def test_workers_are_bound_near_the_gpu_that_they_get(mi300: GpuMachine) -> None:
    usable = cores()
    if len(usable) < 2:
        pytest.skip("two NUMA nodes need two processors")
    mi300.add_processors([usable[:1], usable[1:2]])
    words = ["--hosts", "localhost", "--include", "localhost:1,3", "--numa-binding", "node"]
    result = _dtrain(mi300, "hip", "run", "-q", *words, show=SHOW_CORES)
    assert result.returncode == 0, result
    found = sorted(json.loads(line.partition("] ")[2]) for line in result.stdout.splitlines())
    assert found == [[0, "1,3", [usable[0]]], [1, "1,3", [usable[1]]]], (
        "GPU 1 is on the first node, GPU 3 on the second"
    )


def test_plan_shows_them(mi300: GpuMachine) -> None:
    result = _dtrain(mi300, "hip", "plan", "--json", "--gpus-per-proc", "2")
    assert [(row["gpus"], row["visible"], row["gpu_variable"]) for row in json.loads(result.stdout)] == [
        (["0", "1"], "0,1", "HIP_VISIBLE_DEVICES"), (["2", "3"], "2,3", "HIP_VISIBLE_DEVICES"),
    ]  # fmt: skip
    table = _dtrain(mi300, "hip", "plan", "--nproc-per-node", "cpu").stdout
    assert " none " in table
    assert table.splitlines()[-1] == "workers get their GPUs by HIP_VISIBLE_DEVICES"
