"""What `dtrain env` says of torch, GPUs' links, RDMA devices, SLURM and py-spy: on this machine, and with stand-ins."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from testbed import REPOSITORY
from testbed.gpu_machine import GpuMachine
from testbed.processes import run_dtrain, run_program
from testbed.require import require

from launcher.cli.env import report
from launcher.cli.env.cluster import ptrace, slurm_job
from launcher.cli.env.torch_question import TorchQuestion
from launcher.machine import rdma
from launcher.machine.gpus.card import Card
from launcher.machine.gpus.links import find_links
from launcher.machine.gpus.vendors import vendor_named
from launcher.machine.packages import TESTED_TORCH, how_tested

if TYPE_CHECKING:
    from ddp_worlds.nursery import Nursery

LISTS = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"))


# ---- torch ---------------------------------------------------------------------------------------------------


def test_this_machine_s_torch_tells_its_backends(nursery: "Nursery", tmp_path: Path) -> None:
    result = run_dtrain("env", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["torch"]["tested"] == how_tested(found["versions"]["torch"])
    assert "ptrace" in found["system"]
    code = "import torch.distributed as d; print(d.is_gloo_available(), d.is_nccl_available(), d.is_mpi_available())"
    there = nursery.program(code, tmp_path).stdout.split()
    with TorchQuestion(found["versions"]["torch"]) as question:
        answer = question.answer(100.0)  # beside other work torch may take longer than dtrain env waits
    named = [name.split()[0] for name in answer["backends"].split(", ")]
    assert [str(name in named) for name in ("gloo", "nccl", "mpi")] == there


def test_a_version_of_torch_is_tested_newer_or_older() -> None:
    everything = ", ".join(TESTED_TORCH)
    assert {how_tested(version) for version in (*TESTED_TORCH, "2.13.1+cu126", "2.15.0a0+git1")} == {"yes"}
    assert how_tested("2.16.0.dev20261101+cpu") == how_tested("3.0.0") == f"no: newer than any of {everything}"
    assert how_tested("2.8.0") == how_tested("1.13.1") == f"no: older than any of {everything}"
    assert how_tested("2.12.0") == f"no: none of {everything}"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a `torch` that the process which is asked imports."""
    file = tmp_path / "torch/__init__.py"
    file.parent.mkdir()
    (file.parent / "distributed.py").write_text("is_available = lambda: False\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return file


def _asked(limit_s: float = 60.0) -> dict[str, str]:
    with TorchQuestion("2.13.0") as question:
        return question.answer(limit_s)


def test_what_torch_tells_is_shown(stand_in: Path) -> None:
    stand_in.write_text(
        "class cuda:\n  device_count = lambda: 8\n"
        "  class nccl:\n    version = lambda: (2, 27, 5)\n"
        "class xpu:\n  device_count = lambda: 0\n"
        "print('hello from a plugin')\n"
    )
    (stand_in.parent / "distributed.py").write_text(
        "is_available = is_gloo_available = is_nccl_available = lambda: True\nis_mpi_available = lambda: False\n"
    )
    assert _asked() == {"tested": "yes", "backends": "nccl 2.27.5, gloo", "devices that it sees": "8 cuda"}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "torch cannot be imported: ImportError: libcudart.so.12"),
        ("import os; os._exit(9)", "torch cannot be imported: exit code 9"),
        ("import os; print('[1, 2]', flush=True); os._exit(0)", "torch cannot be imported: exit code 0"),
    ],
)
def test_a_torch_that_does_not_work_is_named(stand_in: Path, code: str, said: str) -> None:
    stand_in.write_text(code)
    assert _asked()["backends"].startswith(f"not known: {said}")


def test_nothing_of_the_current_folder_is_imported(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.write_text("")
    project = tmp_path / "project"
    (project / "torch").mkdir(parents=True)
    (project / "json.py").write_text("raise SystemExit('the wrong json')\n")
    (project / "torch/__init__.py").write_text("raise SystemExit('the wrong torch')\n")
    monkeypatch.chdir(project)
    assert _asked()["backends"] == "none"


def test_a_torch_that_hangs_is_not_waited_for(stand_in: Path) -> None:
    marker = stand_in.with_name("pid")
    stand_in.write_text(f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)\n")
    with TorchQuestion("2.13.0") as question:
        until = time.monotonic() + 60
        while not (marker.exists() and marker.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        assert question.answer(0.1)["backends"] == "not known: torch was not imported within 0 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_without_torch_nothing_is_asked() -> None:
    with TorchQuestion(None) as question:
        assert question.answer() == {}


# ---- links and RDMA ------------------------------------------------------------------------------------------


def test_links_are_of_their_own_or_by_the_place_in_the_tree(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path)
    below = ["pci0000:00/0000:00:01.0/0000:01:00.0"] * 2 + ["pci0000:00/0000:00:02.0", "pci0000:40", "pci0000:80"]
    cards = []
    for index, place in enumerate(below):
        machine.add_pci(f"0000:1{index}:00.0", below=place, numa_node=index // 4)
        cards.append(Card(str(index), index, bus_id=f"00000000:1{index}:00.0"))
    found = find_links(vendor_named("Intel"), cards, machine.sys)
    assert found == {
        "same PCIe switch": [(0, 1)],
        "same PCIe root": [(0, 2), (1, 2)],
        "same NUMA node": [(0, 3), (1, 3), (2, 3)],
        "across NUMA nodes": [(0, 4), (1, 4), (2, 4), (3, 4)],
    }
    unknown = [Card("0", 0, bus_id="0000:aa:00.0"), Card("1", 1, bus_id="0000:bb:00.0"), Card("2", 2)]
    assert find_links(vendor_named("Intel"), unknown, machine.sys) == {"PCIe": [(0, 1)]}


def test_ports_that_do_not_work_are_shown_as_such(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path)
    machine.add_rdma("mlx5_1", state="1: DOWN", layer="Ethernet")
    machine.add_rdma("mlx5_0")
    (machine.sys / "class/infiniband/odd/ports/1").mkdir(parents=True)
    ports = rdma.list_rdma_ports(machine.sys)
    assert [(port.device, port.state, port.link_layer) for port in ports] == [
        ("mlx5_0", "ACTIVE", "InfiniBand"), ("mlx5_1", "DOWN", "Ethernet"), ("odd", "", ""),
    ]  # fmt: skip
    assert ports[0].rate == "400 Gb/sec (4X NDR)"


# ---- SLURM, py-spy -------------------------------------------------------------------------------------------


def test_slurm_s_job_is_told_without_names() -> None:
    assert slurm_job({}) == {}
    env = {
        "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "secret[1-2]", "SLURM_JOB_NUM_NODES": "2",
        "SLURMD_NODENAME": "secret1", "SLURM_GPUS_ON_NODE": "4",
    }  # fmt: skip
    found = slurm_job(env)
    assert found["allocation"] == "job 17, 2 nodes, 2 tasks; we are on one of its nodes"
    assert found["GPUs on this node"] == "4"
    assert slurm_job({"SLURM_JOB_ID": "17"})["allocation"].startswith("cannot be read: ")


@pytest.mark.parametrize(
    ("scope", "capabilities", "permitted"),
    [("0", 0, True), ("1", 0, False), ("1", 1 << 19, True), ("2", 1 << 19, True), ("3", 1 << 19, False), ("", 0, True)],
)
def test_ptrace_is_as_the_kernel_allows_it(tmp_path: Path, scope: str, capabilities: int, permitted: bool) -> None:
    yama, status = tmp_path / "sys/kernel/yama/ptrace_scope", tmp_path / f"{os.getpid()}/status"
    for file in (yama, status):
        file.parent.mkdir(parents=True)
    if scope:
        yama.write_text(f"{scope}\n")
    status.write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
    assert (ptrace(tmp_path) == "permitted") is permitted


def test_a_program_that_hangs_or_prints_nonsense_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "ASK_S", 0.5)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    bodies = {
        "hangs": "sleep 1000 & wait", "tells": "echo starting; echo 'tool 1.2'", "binary": "printf '\\377\\000'",
    }  # fmt: skip
    for name, body in bodies.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "broken").write_text("#!/no/such/interpreter\n")
    (tmp_path / "broken").chmod(0o755)
    assert report._version("hangs", "-v") == "does not say: no answer within 0.5 s"
    assert report._version("binary", "-v") is None
    assert report._version("missing", "-v") is None
    assert report._version("broken", "-v") == "does not say: No such file or directory"
    monkeypatch.setattr(report, "ASK_S", 60.0)
    assert report._version("tells", "-v") == "tool 1.2"


# ---- all of it -----------------------------------------------------------------------------------------------


def test_a_machine_with_amd_s_gpus_and_rdma_is_described(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path / "machine")
    machine.add_cpu_node()
    for node in range(1, 5):
        machine.add_amd(node, f"0000:0{node}:00.0", numa_node=(node - 1) // 2, product_name="MI300X")
    for one, other in ((1, 2), (2, 1), (3, 4), (4, 3)):
        machine.connect_amd(one, other, xgmi=True)
    machine.connect_amd(1, 3, xgmi=False)
    machine.connect_amd(1, 0, xgmi=False)
    machine.add_rdma("mlx5_0")
    machine.write("module/amdgpu/version", "6.12.12")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in (("srun", "echo slurm 25.05.1"), ("mpirun", "echo nonsense"), ("ssh", "exit 3")):
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    env = {**LISTS, "PYTHONPATH": str(machine.built_for("hip")), "PATH": f"{programs}:{os.environ['PATH']}"}
    argv = machine.run_in(sys.executable, "-m", "launcher", "env", "--json")
    result = run_program(*argv, env={**env, "ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "1,2"})
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["GPU topology"] == {
        "XGMI": "0-1, 2-3",
        "across NUMA nodes": "0-2, 0-3, 1-2, 1-3",
        "NUMA nodes": "0 on 0, 1 on 0, 2 on 1, 3 on 1",
    }
    assert found["RDMA"] == {
        "mlx5_0 port 1": "InfiniBand, ACTIVE, 400 Gb/sec (4X NDR), firmware 28.39.1002, NUMA node 1"
    }
    assert found["hardware"]["GPUs"] == ["MI300X"] * 4
    assert found["hardware"]["GPUs for workers"] == "2 (HIP_VISIBLE_DEVICES)"
    versions = found["versions"]
    assert (versions["AMD driver"], versions["SLURM"]) == ("6.12.12", "slurm 25.05.1")
    assert (versions["Open MPI"], versions["OpenSSH"]) == (None, None)
    assert found["torch"]["backends"] == "not known: torch cannot be imported: ImportError: a stand-in"
    assert found["variables"]["HIP_VISIBLE_DEVICES"] == "1,2"


@pytest.mark.parametrize(
    ("built", "said"), [(None, "none: AMD's need a torch that is built for ROCm"), ("hip", "none")]
)
def test_why_workers_get_no_gpus_is_told(tmp_path: Path, built: str | None, said: str) -> None:
    machine = GpuMachine(tmp_path / "machine")
    machine.add_cpu_node()
    machine.add_amd(1, "0000:01:00.0", product_name="MI300X")
    env = {**LISTS, "PYTHONPATH": str(machine.built_for(built)), "HIP_VISIBLE_DEVICES": "-1" if built else None}
    result = run_program(*machine.run_in(sys.executable, "-m", "launcher", "env", "--json"), env=env)
    hardware = json.loads(result.stdout)["hardware"]
    assert (hardware["GPUs"], hardware["GPUs for workers"]) == (["MI300X"], said)


def test_nvidia_s_links_are_told(stand_in: Path, tmp_path: Path) -> None:
    stand_in.write_text("")
    compiler = shutil.which("cc")
    require(compiler, "a C compiler", "apt-get install gcc libc6-dev")
    argv = [str(compiler), "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1")]
    subprocess.run([*argv, str(REPOSITORY / "tests/testbed/fake_nvml.c")], check=True)
    env = {**LISTS, "LD_LIBRARY_PATH": str(tmp_path), "FAKE_GPUS": "3"}
    every = json.loads(run_dtrain("env", "--json", env={**env, "FAKE_NVLINK": "0,1,2"}).stdout)
    assert every["GPU topology"]["NVLink"] == "every pair"
    some = json.loads(run_dtrain("env", "--json", env={**env, "FAKE_NVLINK": "0,2"}).stdout)
    assert some["GPU topology"]["NVLink"] == "0-2"
    assert some["hardware"]["GPUs for workers"] == "3 (CUDA_VISIBLE_DEVICES)"
