"""What `dtrain env` says of torch, GPUs, SLURM and py-spy: on this machine, and with stand-ins."""

import json
import os
import sys
from pathlib import Path

import pytest
from testbed.gpu_machine import GpuMachine
from testbed.nvml import build_nvml
from testbed.processes import run_dtrain, run_program

from launcher.cli.hosts import env
from launcher.cli.hosts.env import ptrace, slurm_job
from launcher.machine.packages import TESTED_TORCH, how_tested

LISTS = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))


# ---- torch ---------------------------------------------------------------------------------------------------


def test_a_version_of_torch_is_tested_newer_or_older() -> None:
    everything = ", ".join(TESTED_TORCH)
    assert {how_tested(version) for version in (*TESTED_TORCH, "2.13.1+cu126", "2.15.0a0+git1")} == {"yes"}
    assert how_tested("2.16.0.dev20261101+cpu") == how_tested("3.0.0") == f"no: newer than any of {everything}"
    assert how_tested("2.8.0") == how_tested("1.13.1") == f"no: older than any of {everything}"
    assert how_tested("2.12.0") == f"no: none of {everything}"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a `torch.utils.collect_env`, which says who it is."""
    file = tmp_path / "torch/utils/collect_env.py"
    file.parent.mkdir(parents=True)
    file.write_text("import json, sys\nprint('Is CUDA available:', 'no', sys.argv[1:], file=sys.stderr)\n")
    for folder in (file.parent, file.parent.parent):
        (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return file


def test_torch_s_own_report_is_added_on_demand_without_names(stand_in: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "torch").mkdir(parents=True)
    (project / "torch/__init__.py").write_text("raise SystemExit('the wrong one')\n")
    result = run_dtrain("env", "--json", "--torch", cwd=project)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["torch"] == {"collect_env": ["Is CUDA available: no []"]}
    stand_in.write_text(f"print({str(Path.home())!r} + '/torch')\nraise ImportError('libcudart.so.12')\n")
    text = run_dtrain("env", "--torch", cwd=project).stdout
    assert "~/torch" in text
    assert "ImportError: libcudart.so.12" in text
    assert "torch" not in json.loads(run_dtrain("env", "--json", cwd=project).stdout)


def test_this_machine_s_torch_reports() -> None:
    found = json.loads(run_dtrain("env", "--json", "--torch").stdout)
    assert f"PyTorch version: {found['versions']['torch']}" in found["torch"]["collect_env"]
    assert found["versions"]["torch is tested"] == how_tested(found["versions"]["torch"])
    assert "ptrace" in found["system"]


def test_a_torch_that_hangs_is_not_waited_for(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = stand_in.with_name("pid")
    stand_in.write_text(f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)\n")
    monkeypatch.setattr(env, "TORCH_S", 5.0)
    assert env._collect_env() == ["no answer within 5 s"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


# ---- SLURM, py-spy -------------------------------------------------------------------------------------------


def test_slurm_s_job_is_notified_without_names() -> None:
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
    yama, status = tmp_path / "sys/kernel/yama/ptrace_scope", tmp_path / "self/status"
    for file in (yama, status):
        file.parent.mkdir(parents=True)
    if scope:
        yama.write_text(f"{scope}\n")
    status.write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
    assert (ptrace(tmp_path) == "permitted") is permitted


def test_a_program_that_hangs_or_prints_nonsense_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "ASK_S", 0.5)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    bodies = {
        "hangs": "sleep 1000 & wait", "tells": "echo starting; echo 'tool 1.2'", "binary": "printf '\\377\\000'",
    }  # fmt: skip
    for name, body in bodies.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "broken").write_text("#!/no/such/interpreter\n")
    (tmp_path / "broken").chmod(0o755)
    assert env._version("hangs", "-v") == "unknown: no answer within 0.5 s"
    assert env._version("binary", "-v") is None
    assert env._version("missing", "-v") is None
    assert env._version("broken", "-v") == "unknown: No such file or directory"
    monkeypatch.setattr(env, "ASK_S", 60.0)
    assert env._version("tells", "-v") == "tool 1.2"


# ---- all of it -----------------------------------------------------------------------------------------------


def test_a_machine_with_amd_s_gpus_is_described(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path / "machine")
    machine.add_cpu_node()
    for node in range(1, 5):
        machine.add_amd(node, f"0000:0{node}:00.0", numa_node=(node - 1) // 2, product_name="MI300X")
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
    assert found["hardware"]["GPUs"] == ["MI300X"] * 4
    assert found["hardware"]["GPUs for workers"] == "2 (HIP_VISIBLE_DEVICES)"
    versions = found["versions"]
    assert (versions["AMD driver"], versions["SLURM"]) == ("6.12.12", "slurm 25.05.1")
    assert (versions["Open MPI"], versions["OpenSSH"]) == (None, None)
    assert found["variables"]["HIP_VISIBLE_DEVICES"] == "1,2"


@pytest.mark.parametrize(("built", "said"), [(None, "none: AMD's need a torch built for ROCm"), ("hip", "none")])
def test_why_workers_get_no_gpus_is_reported(tmp_path: Path, built: str | None, said: str) -> None:
    machine = GpuMachine(tmp_path / "machine")
    machine.add_cpu_node()
    machine.add_amd(1, "0000:01:00.0", product_name="MI300X")
    env = {**LISTS, "PYTHONPATH": str(machine.built_for(built)), "HIP_VISIBLE_DEVICES": "-1" if built else None}
    result = run_program(*machine.run_in(sys.executable, "-m", "launcher", "env", "--json"), env=env)
    hardware = json.loads(result.stdout)["hardware"]
    assert (hardware["GPUs"], hardware["GPUs for workers"]) == (["MI300X"], said)


def test_nvidia_s_gpus_are_counted(tmp_path: Path) -> None:
    env = {**LISTS, "LD_LIBRARY_PATH": str(build_nvml(tmp_path)), "FAKE_GPUS": "3"}
    result = run_dtrain("env", "--json", env=env)
    assert json.loads(result.stdout)["hardware"]["GPUs for workers"] == "3 (CUDA_VISIBLE_DEVICES)"
