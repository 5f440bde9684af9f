"""Processors near a GPU, on machines of many nodes, sockets and caches: as the kernel describes them in sysfs."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.processes import run_dtrain

from launcher.errors import DtrainError
from launcher.machine.gpus.visible import Gpus
from launcher.machine.numa import Topology, choose_cores, nodes_of_gpus, read_topology

GPUS = [0, 0, 1, 3]  # the NUMA nodes of four GPUs; node 2 has none


def _machine(root: Path) -> Path:
    """Two sockets of two NUMA nodes of four cores with two threads each; two cores share a last cache."""
    for cpu in range(32):
        core = cpu % 16
        pair = core // 2 * 2
        folder = root / f"devices/system/cpu/cpu{cpu}"
        files = {
            "topology/physical_package_id": str(core // 8),
            "topology/thread_siblings_list": f"{core},{core + 16}",
            "cache/index0/level": "1",
            "cache/index0/type": "Instruction",
            "cache/index0/shared_cpu_list": f"{core},{core + 16}",
            "cache/index3/level": "3",
            "cache/index3/type": "Unified",
            "cache/index3/shared_cpu_list": f"{pair}-{pair + 1},{pair + 16}-{pair + 17}",
        }
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text + "\n")
    for node in range(4):
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
        (root / f"devices/system/node/node{node}/cpulist").write_text(
            f"{4 * node}-{4 * node + 3},{4 * node + 16}-{4 * node + 19}\n"
        )
    for gpu, node in enumerate(GPUS):
        folder = root / f"bus/pci/devices/0000:{gpu}a:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return root


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    return read_topology(range(32), _machine(tmp_path))


@pytest.mark.parametrize(
    ("mode", "cores"),
    [
        ("node", ["0-3 16-19", "0-3 16-19", "4-7 20-23", "12-15 28-31"]),
        ("socket", ["0-7 16-23", "0-7 16-23", "0-7 16-23", "8-15 24-31"]),
        ("exclusive", ["0-1 16-17", "2-3 18-19", "4-7 20-23", "12-15 28-31"]),
        ("core-complex", ["0-1 16-17", "2-3 18-19", "4-5 20-21", "12-13 28-29"]),
    ],
)
def test_each_worker_is_near_its_gpu(topology: Topology, mode: str, cores: list[str]) -> None:
    for gpu, text in enumerate(cores):
        ranges = [part.split("-") for part in text.split()]
        expected = {cpu for first, last in ranges for cpu in range(int(first), int(last) + 1)}
        assert set(choose_cores(mode, topology, GPUS, gpu, 4)) == expected


def test_without_gpus_the_workers_share_the_nodes(topology: Topology) -> None:
    firsts = [choose_cores("node", topology, [], rank, 8)[0] for rank in range(8)]
    assert firsts == [0, 0, 4, 4, 8, 8, 12, 12]
    alone = [set(choose_cores("exclusive", topology, [], rank, 8)) for rank in range(8)]
    assert len(set().union(*alone)) == 32
    assert sum(map(len, alone)) == 32


def test_only_processors_that_may_be_used_are_chosen(tmp_path: Path) -> None:
    topology = read_topology([1, 2, 17, 30], _machine(tmp_path))
    assert choose_cores("node", topology, GPUS, 0, 4) == (1, 2, 17)
    assert choose_cores("node", topology, GPUS, 2, 4) == (1, 2, 17), "its own node has none for us"
    assert choose_cores("exclusive", topology, [0, 0], 1, 2) == (2,)
    with pytest.raises(DtrainError, match="node 0 has 2 cores for 3 GPUs"):
        choose_cores("exclusive", topology, [0, 0, 0], 2, 3)


def test_a_gpu_s_node_is_its_pci_device_s(tmp_path: Path) -> None:
    root = _machine(tmp_path)
    both = Gpus(("0", "1"), bus_ids=("00000000:0A:00.0", "0000:2a:00.0"))  # as NVML and as the kernel writes them
    assert nodes_of_gpus(both, root) == [0, 1]
    with pytest.raises(DtrainError, match=r"the kernel does not know the GPU at 00000000:FF:00\.0"):
        nodes_of_gpus(Gpus(("0",), bus_ids=("00000000:FF:00.0",)), root)


def test_numbers_that_may_mean_another_card_are_no_place(tmp_path: Path) -> None:
    root = _machine(tmp_path)
    apart = Gpus(("0", "1"), bus_ids=("0000:0a:00.0", "0000:2a:00.0"), numbers_are_certain=False)
    with pytest.raises(DtrainError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        nodes_of_gpus(apart, root)
    assert nodes_of_gpus(replace(apart, bus_ids=("0000:0a:00.0", "0000:1a:00.0")), root) == [0, 0]


def test_a_kernel_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DtrainError, match="reports no topology of the processors"):
        read_topology([0], tmp_path)


def test_workers_are_really_bound(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(
        "import json, os\n"
        "print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS']]), flush=True)"
    )
    words = ["run", "-q", "--nproc-per-node", "2", "--numa-binding", "exclusive", "show.py"]
    result = run_dtrain(*words, cwd=tmp_path)
    shown = [json.loads(line.partition("] ")[2]) for line in result.stdout.splitlines()]
    usable = len(os.sched_getaffinity(0))
    if usable < 2:
        assert "--numa-binding exclusive" in result.stderr
        return
    (first, threads), (second, _) = shown
    assert not set(first) & set(second)
    assert int(threads) <= max(len(first), len(second))
