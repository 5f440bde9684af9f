"""`dtrain check`: what real hosts and a real network are found to lack, before a job does."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from testbed.gpu_machine import GpuMachine
from testbed.left import TEST_CHARS
from testbed.namespaces import run_part
from testbed.network import NetworkHosts
from testbed.nvml import build_nvml
from testbed.processes import MARK, Result, run_dtrain, run_program, started_dtrain
from testbed.sshd import SshHosts

import launcher
from launcher import __version__
from launcher.check.allreduce import allreduce_spec
from launcher.check.examiner import AT_ONCE, all_at_once, listen, probe
from launcher.check.facts import Clock, Gpu, HostFacts, Listening, Probe, Target
from launcher.check.finding import Examined, Finding, fix_in, merged
from launcher.check.hosts import host_findings
from launcher.check.pairs import MOST, pair_findings, targets
from launcher.check.report import Report, report_as_text
from launcher.decode import decode_value
from launcher.errors import ProtocolError
from launcher.hosts.folding import fold
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import CommandKind, JobSpec, WorkerCommand
from launcher.protocol.message import PROTOCOL
from launcher.protocol.reports import Facts, Hello

SCRIPT = "print('trained')\n"


class Found:
    """What `dtrain check --json` said."""

    def __init__(self, result: Result) -> None:
        assert result.stdout, result
        self.result = result
        self.report: dict[str, Any] = json.loads(result.stdout)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [finding for finding in self.report["findings"] if finding["kind"] == kind]

    @property
    def errors(self) -> set[str]:
        return {finding["kind"] for finding in self.report["findings"] if finding["severity"] == "error"}


def check(folder: Path, *args: str | Path, env: Mapping[str, str | None] | None = None) -> Found:
    (folder / "train.py").write_text(SCRIPT)
    return Found(run_dtrain("check", "--json", *args, "train.py", cwd=folder, env=env))


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


# ---- real hosts ----------------------------------------------------------------------------------------------


def test_hosts_that_are_well_are_measured_and_nothing_is_left(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    before = _files(ssh_hosts.folder)
    found = check(tmp_path, "--hosts", "node1,node2", "--ssh-config", ssh_hosts.ssh_config)
    report = found.report
    assert (found.result.returncode, found.errors, report["starts"]) == (0, set(), True)
    assert [host["name"] for host in report["hosts"]] == ["node1", "node2"]
    facts = [host["facts"] for host in report["hosts"]]
    assert facts[0]["torch"].startswith("2.")
    assert len({one["script"] for one in facts}) == len({one["code"] for one in facts}) == 1
    assert all(abs(host["clock"]["offset_s"]) < 5 for host in report["hosts"])
    ways = {(pair["from"], pair["to"], pair["address"], pair["problem"]) for pair in report["network"]["pairs"]}
    assert {("node1", "node2", "127.0.0.3", ""), ("node2", "node1", "127.0.0.2", "")} <= ways
    assert all(0 < pair["round_trip_s"] < 5 and pair["mtu"] > 1000 for pair in report["network"]["pairs"])
    measured = report["allreduce"]
    assert (measured["backend"], measured["hosts"], measured["figures"]["ranks"]) == ("gloo", 2, 2)
    assert all(size["correct"] and size["bus_mb_s"] > 0 for size in measured["figures"]["sizes"])
    assert len(found.of("same-machine")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert _files(ssh_hosts.folder) <= before | {ssh_hosts.folder / name / "sshd.log" for name in ssh_hosts.names}


def test_an_unusable_host_is_named_with_the_fix(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    ssh_hosts.stop(2)
    ssh_hosts.change_host_key(3)
    config = ssh_hosts.config("unknown_node4", unknown=[4])
    noisy = ssh_hosts.folder / "node1" / "home" / ".bashrc"
    noisy.write_text('echo welcome to node1; echo {\\"is\\": 1}\n')
    found = check(tmp_path, "--hosts", "node[1-4]", "--ssh-config", config)
    noisy.unlink()
    assert found.result.returncode == 1
    unusable = {finding["hosts"][0]: finding for finding in found.of("unusable")}
    assert {*unusable} == {"node2", "node3", "node4"}
    assert "refused" in unusable["node2"]["message"]
    assert "CHANGED" in unusable["node3"]["message"]
    assert "ssh-keygen" in unusable["node3"]["fixes"][0]
    assert unusable["node4"]["fixes"] == [f"ssh -F {config} node4 true"]
    assert [host["facts"] is not None for host in found.report["hosts"]] == [True, False, False, False]
    assert found.report["allreduce"] is None


def test_a_check_that_is_stopped_leaves_nothing(ssh_hosts: SshHosts) -> None:
    argv = ["check", "--hosts", "node1,node2", "--ssh-config", str(ssh_hosts.ssh_config)]

    def stopped_while(program: str, signum: int) -> int | None:
        """Stop a check while `program` runs on a host; None if the check was over before that was seen."""

        def runs_it(folder: Path) -> bool:  # looks quickly: an examiner lives for tenths of a second
            with contextlib.suppress(OSError):
                if program.encode() in (folder / "cmdline").read_bytes():
                    environment = (folder / "environ").read_bytes()
                    return any(mark[:TEST_CHARS].encode() in environment for mark in (ssh_hosts.mark, os.environ[MARK]))
            return False

        with started_dtrain(*argv) as process:
            while process.poll() is None:
                if any(map(runs_it, Path("/proc").glob("[0-9]*"))):
                    process.send_signal(signum)
                    return process.wait(60)
        return None

    for program, signum in (("launcher.check.examiner", signal.SIGKILL), ("allreduce_speed.py", signal.SIGINT)):
        statuses = (stopped_while(program, signum) for _ in range(10))  # a busy machine sees a short program late
        status = next(status for status in statuses if status is not None)
        assert status == (130 if signum == signal.SIGINT else -signum)


def test_the_all_reduce_of_a_check_is_short_and_reads_no_input() -> None:
    spec = JobSpec(WorkerCommand(CommandKind.SCRIPT, "t.py"), (Host("a", HostKind.SSH),), run_id="r", grace_s=600.0)
    made, backend = allreduce_spec(spec, [_examined("a")])
    assert (made.grace_s, backend, made.stdin_rank) == (1.0, "gloo", None)


def test_an_elastic_run_starts_without_the_host_that_is_gone(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    ssh_hosts.stop(3)
    argv = [
        "--hosts",
        "node[1-3]",
        "--nnodes",
        "2:3",
        "--no-allreduce",
        "--ssh-config",
        str(ssh_hosts.ssh_config),
    ]
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run_dtrain("check", *argv, "train.py", cwd=tmp_path)
    assert result.returncode == 0, result
    assert "a run would start without node3: 1 error" in result.stdout
    assert "all-reduce: was skipped" in result.stdout
    assert result.stdout.splitlines()[2].startswith(" node1, node2")


def test_a_missing_script_or_python_and_a_taken_port_are_found(tmp_path: Path) -> None:
    simulated = ["--simulate", "--nnodes", "2"]
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = [*simulated, "--no-allreduce", "--json", "--master-port", str(port), "gone.py"]
        found = Found(run_dtrain("check", *argv, cwd=tmp_path))
    assert (found.result.returncode, found.errors) == (1, {"no-script", "store-port"})
    assert found.of("no-script")[0]["hosts"] == ["sim0", "sim1"]
    assert f"{tmp_path / 'gone.py'} does not exist" in found.of("no-script")[0]["message"]
    assert found.of("store-port")[0]["fixes"] == [f"ss -ltnp 'sport = :{port}'"]
    found = check(tmp_path, *simulated, "--python", "/nowhere/python")
    assert (found.result.returncode, found.errors) == (1, {"no-dtrain"})
    assert "--python" in found.of("no-dtrain")[0]["message"]


def test_ways_that_are_closed_are_named_by_direction_and_port(network_hosts: NetworkHosts, tmp_path: Path) -> None:
    address = network_hosts.address
    pids = {name: network_hosts._touched(name).pid for name in ("far1", "far3")}
    # As firewalls that drop: what far1 answers at the store's port to far2, and whatever far3 sends to far2.
    run_part(
        "ip", "rule", "add", "to", address("far2"), "ipproto", "tcp", "sport", "29500", "blackhole", inside=pids["far1"]
    )
    run_part("ip", "route", "add", "blackhole", address("far2"), inside=pids["far3"])
    argv: list[str | Path] = [
        "--hosts",
        "far1,far2,far3",
        "--interface",
        "eth0",
        "--ssh-config",
        network_hosts.ssh_config,
    ]
    found = check(tmp_path, *argv)
    assert (found.result.returncode, found.errors) == (1, {"no-way"}), found.report["findings"]
    pairs = found.report["network"]["pairs"]
    closed = {(pair["from"], pair["to"], pair["port"] == 29500): pair["problem"] for pair in pairs if pair["problem"]}
    assert closed == {
        ("far2", "far1", True): "no answer",
        ("far2", "far3", False): "no answer",
        ("far3", "far2", False): "no route",
    }
    said = {finding["message"]: finding for finding in found.of("no-way")}
    store = f"far2 does not reach far1 at {address('far1')}, the store's port 29500: it gets no answer; a firewall"
    (finding,) = [finding for message, finding in said.items() if message.startswith(store)]
    assert finding["hosts"] == ["far2", "far1"]
    assert (
        f"ssh -F {network_hosts.ssh_config} far1 'sudo ufw allow proto tcp from {address('far2')}'"
        in finding["fixes"][0]
    )
    (finding,) = [finding for message, finding in said.items() if message.startswith("far3 does not reach far2 at ")]
    assert f"far3 'ip route get {address('far2')}'" in finding["fixes"][0]
    assert {pair["interface"] for pair in pairs if not pair["problem"]} == {"eth0"}


# ---- GPUs ----------------------------------------------------------------------------------------------------

# What fake_nvml.c does not answer: who uses a card, and what is wrong with it.
MORE_NVML = """\
#include <unistd.h>
struct memory { unsigned long long total, free, used; };
struct process { unsigned pid; unsigned long long used; unsigned instance, compute; };
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12040; return OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "550.54.15"); return OK; }
int nvmlDeviceGetMemoryInfo(struct device *d, struct memory *m) {
  m->total = 100ull << 30; m->used = d->card == 1 ? 60ull << 30 : 1 << 20; m->free = m->total - m->used; return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(struct device *d, unsigned *count, struct process *found) {
  if (d->card != 1) { *count = 0; return OK; }
  if (*count < 1) { *count = 1; return 7; }
  *count = 1; found[0] = (struct process){(unsigned)atoi(setting("FAKE_PID")), 60ull << 30, 0, 0}; return OK;
}
int nvmlDeviceGetTotalEccErrors(struct device *d, int type, int counter, unsigned long long *count) {
  *count = d->card == 2 ? 3 : 0; return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *d, unsigned long long *reasons) {
  *reasons = d->card == 0 ? 0x40 | 0x4 : 0x4; return OK;
}
"""


def test_gpus_that_are_lost_broken_or_in_use_are_named(tmp_path: Path) -> None:
    nvml = build_nvml(tmp_path / "nvml", MORE_NVML)
    with subprocess.Popen(["sleep", "60"]) as user:
        env = {"LD_LIBRARY_PATH": str(nvml), "FAKE_GPUS": "4", "FAKE_LOST": "3", "FAKE_PID": str(user.pid)}
        found = check(tmp_path, "--no-allreduce", env=env)
        mine = check(tmp_path, "--no-allreduce", env={**env, "CUDA_VISIBLE_DEVICES": "0"})
        user.kill()
    assert (found.result.returncode, found.errors) == (1, {"gpu-lost", "gpu-memory"})
    facts = found.report["hosts"][0]["facts"]
    assert (facts["driver"], facts["driver_cuda"], facts["gpu_ids"]) == ("550.54.15", "12.4", ["0", "1", "2"])
    (busy,) = found.of("gpu-busy")
    assert f"GPU 1 (NVIDIA H200) is in use: pid {user.pid} (sleep, of " in busy["message"]
    assert "61440 of 102400 MB are used" in busy["message"]
    assert busy["fixes"] == [f"ps -fp {user.pid}"]
    assert "GPU 2 (NVIDIA H200): 3 memory errors" in found.of("gpu-memory")[0]["message"]
    assert "GPU 3 cannot be used: " in found.of("gpu-lost")[0]["message"]
    assert [each["message"] for each in found.of("gpu-slow")] == ["GPU 0 (NVIDIA H200): slowed down by heat"]
    assert (mine.result.returncode, mine.errors) == (0, set()), "what the user has left out is no error"
    assert [finding["severity"] for finding in mine.of("gpu-lost")] == ["note"]


@pytest.mark.parametrize(
    ("fails", "text"), [("mismatch", "Driver/library version mismatch"), ("count", "Unknown Error")]
)
def test_a_driver_that_fails_is_a_finding_and_an_error_if_it_gives_the_number_of_workers(
    tmp_path: Path, fails: str, text: str
) -> None:
    cuda, cpu = (str(GpuMachine(tmp_path / str(built)).built_for(built)) for built in ("cuda", None))
    env = {"LD_LIBRARY_PATH": str(build_nvml(tmp_path / "nvml")), "FAKE_GPUS": "2", "FAKE_FAILS": fails,
           "CUDA_VISIBLE_DEVICES": None, "PYTHONPATH": cuda}  # fmt: skip
    uncounted = check(tmp_path, "--no-allreduce", env=env)
    counted = check(tmp_path, "--no-allreduce", "--nproc-per-node", "2", env=env)
    listed = check(tmp_path, "--no-allreduce", env={**env, "CUDA_VISIBLE_DEVICES": "0,1"})
    assert (uncounted.result.returncode, uncounted.errors) == (1, {"gpu-driver"})
    assert (counted.result.returncode, listed.result.returncode) == (0, 0)
    for found, severity in ((uncounted, "error"), (counted, "warning"), (listed, "warning")):
        (finding,) = found.of("gpu-driver")
        assert (finding["severity"], finding["fixes"]) == (severity, ["nvidia-smi"])
        assert "the driver does not list the GPUs" in finding["message"]
        assert f"NVML says: {text}" in finding["message"]
    for other in ({"FAKE_FAILS": "init"}, {"PYTHONPATH": cpu}):
        assert check(tmp_path, "--no-allreduce", env={**env, **other}).of("gpu-driver") == []


def test_amd_s_gpus_are_examined_by_the_kernel_s_files(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path / "machine")
    machine.add_cpu_node()
    for node, errors in enumerate((0, 2, 0), start=1):
        machine.add_amd(
            node, f"0000:0{node}:00.0", product_name="MI300X", mem_info_vram_total=192 << 30, gpu_busy_percent=node,
            mem_info_vram_used=(90 << 30) if node == 3 else 1 << 20, ras__umc_err_count=f"ue: {errors}\nce: 7",
        )  # fmt: skip
    machine.write("module/amdgpu/version", "6.12.12")
    (tmp_path / "x.py").write_text("")
    with subprocess.Popen(["sleep", "60"]) as user:
        machine.write(f"class/kfd/kfd/proc/{user.pid}/vram_50003", 90 << 30)
        machine.write(f"class/kfd/kfd/proc/{user.pid}/vram_50001", 0)
        argv = machine.run_in(sys.executable, "-m", "launcher", "check", "--json", "--no-allreduce", "x.py")
        reports = {}
        for built in ("hip", None):
            env = {
                "PYTHONPATH": str(machine.built_for(built)),
                "HIP_VISIBLE_DEVICES": None,
                "CUDA_VISIBLE_DEVICES": None,
            }
            result = run_program(*argv, env=env, cwd=tmp_path)
            reports[built] = json.loads(result.stdout)
        user.kill()
    facts = reports["hip"]["hosts"][0]["facts"]
    assert (facts["vendor"], facts["driver"], facts["torch_cuda"]) == ("AMD", "6.12.12", "ROCm 6.4")
    assert (facts["gpu_variable"], facts["gpu_ids"]) == ("HIP_VISIBLE_DEVICES", ["0", "1", "2"])
    said = {finding["kind"]: finding for finding in reports["hip"]["findings"]}
    assert said["gpu-memory"]["message"] == "GPU 1 (MI300X): 2 memory errors that could not be corrected"
    assert said["gpu-memory"]["fixes"] == ["amd-smi bad-pages"]
    assert f"GPU 2 (MI300X) is in use: pid {user.pid} (sleep, of " in said["gpu-busy"]["message"]
    assert "torch-without-rocm" not in said
    (unused,) = [finding for finding in reports[None]["findings"] if finding["kind"] == "torch-without-rocm"]
    assert unused["severity"] == "note"
    assert unused["message"] == "it has GPUs of AMD, but torch 2.13.0 is built without ROCm; a run would not use them"


# ---- what is said of what was found --------------------------------------------------------------------------

OFFERED = Facts([], "CUDA_VISIBLE_DEVICES", False, cores=[0, 1], cpu_limit=2, problems=[], time=0.0)
FACTS = HostFacts(
    hostname="a", machine="m1", system="Debian", kernel="6.1", user="ann", uid=1000, umask="0022", locale="C.UTF-8",
    python="3.11.7", executable="/opt/python", dtrain="0.1.0", code="c0de", ddp="/opt/ddp", torch="2.13.0+cu126",
    torch_cuda="12.6", nccl="2.27.3", numpy="2.1.0", driver=None, driver_cuda=None, gpus=(),
    offered=OFFERED, gpus_inherited=False, cpu_count=8, load=0.0, memory_bytes=64 << 30,
    memory_free_bytes=60 << 30, disks=(), limits=(),
    script="5c819e", workdir_mark="1:1", name_resolves_to=("10.0.0.1",), gloo_interface="", interfaces=(),
)  # fmt: skip


def _spec(*names: str, **more: Any) -> JobSpec:
    hosts = tuple(Host(name, HostKind.SSH) for name in names)
    return JobSpec(WorkerCommand(CommandKind.SCRIPT, "train.py"), hosts, python="/opt/python", run_id="r", **more)


def _examined(name: str, clock_s: float = 0.0, **facts: Any) -> Examined:
    python = "{}.{}.{}".format(*sys.version_info[:3])
    greeting = Hello(PROTOCOL, __version__, python, name, 1, "", 0.0)
    return Examined(
        Host(name, HostKind.SSH), "", greeting, replace(FACTS, machine=name, **facts), Clock(clock_s, 0.001, 0.002)
    )


SAME_MACHINE: dict[str, Any] = {"offered": replace(OFFERED, gpus=["0"], gpus_verified=True)}
SLICES = replace(OFFERED, gpus=["MIG-1", "MIG-2"], gpus_verified=True)
LOGGED = ((7200.0, "Xid 48 of 0000:86:00: DBE"), (300.0, "Xid 79 of 0000:3b:00: GPU has fallen off the bus"))


def _with_gpu(**facts: Any) -> list[Examined]:
    return [_examined("a", **{"gpus": (Gpu(0),), "driver": "1", **facts})]


def _three(clock_s: float = 0.0, **facts: Any) -> list[Examined]:
    """Two equal hosts, and one that differs."""
    return [_examined("a"), _examined("b"), _examined("c", clock_s, **facts)]


EXAMINED = {
    "equal hosts": _three(),
    "many differences": _three(
        90.0, torch="2.12.1+cu126", nccl="2.26.2", script="0ther", python="3.11.2", code="0ld"
    ),
    "a patch of torch": _three(torch="2.13.1+cu126"),
    "another build of torch": _three(torch="2.13.0+cu128"),
    "another user of a shared folder": _three(user="bob", uid=1001),
    "another user of another folder": [_examined("a"), _examined("c", uid=1001, workdir_mark="2:2")],
    "another user of an unknown folder": [
        _examined("a", workdir_mark=""), _examined("c", uid=1001, workdir_mark="")
    ],
    "one machine by two names": [
        replace(_examined(name, **SAME_MACHINE), facts=replace(FACTS, **SAME_MACHINE)) for name in "ab"
    ],
    "a new driver": _with_gpu(driver_cuda="12.8"),
    "an old driver": _with_gpu(driver_cuda="11.8"),
    "torch without CUDA": _with_gpu(torch_cuda=None),
    "CUDA, but GPUs of AMD": _with_gpu(vendor="AMD"),
    "ROCm and GPUs of AMD": _with_gpu(vendor="AMD", torch_cuda="ROCm 6.4"),
    "slices of a GPU": _with_gpu(driver_cuda="12.8", offered=SLICES),
    "errors in the kernel's log": [_examined("a", logged=LOGGED), _examined("b")],
    "an error in the kernel's log": [_examined("a", logged=LOGGED[1:]), _examined("b")],
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMINED)
def test_what_is_found(name: str, snapshot: SnapshotAssertion) -> None:
    examined = EXAMINED[name]
    spec = _spec(*(one.host.name for one in examined))
    found = merged(host_findings(spec, examined, code_here="c0de", script_here="5c819e"))
    lines = [f"{one.severity.value} {one.kind}, {', '.join(one.hosts)}: {one.message} {one.fixes}" for one in found]
    text = re.sub("--no-deps [^']+", "--no-deps SOURCE", "\n".join(lines))
    assert text.replace(str(Path.cwd()), "HERE") == snapshot


def test_the_all_reduce_uses_nccl_only_where_it_is_for_the_gpus() -> None:
    offered = replace(OFFERED, gpus=["0"], gpus_verified=True)
    for vendor, built, backend in (("NVIDIA", "12.6", "nccl"), ("AMD", "ROCm 6.4", "nccl"),
                                   ("NVIDIA", None, "gloo")):  # fmt: skip
        examined = _examined("a", offered=offered, vendor=vendor, torch_cuda=built)
        assert allreduce_spec(_spec("a"), [examined])[1] == backend


def _ways(names: str, closed: Mapping[tuple[str, str], str]) -> list[Probe]:
    return [
        Probe(a, b, f"10.0.0.{b}", 7, closed.get((a, b), ""), "", 1e-4, f"10.0.0.{a}", "eth0", 1500)
        for a in names
        for b in names
        if a != b
    ]


def _network(names: str, closed: Mapping[tuple[str, str], str], **facts: Any) -> list[Finding]:
    examined = [_examined(name, name_resolves_to=("10.0.0.1",), **facts) for name in names]
    listening = {name: Listening(f"10.0.0.{name}", 7) for name in names}
    return merged(pair_findings(examined, listening, _ways(names, closed), {}))


def test_the_line_of_the_network_says_what_it_counts() -> None:
    ways = _ways("12", {})
    ways += [replace(way, port=29500) for way in ways if way.to == "1"]
    report = Report((_examined("1"), _examined("2")), tuple(ways), (), None, False, True, 1.0, 1.0)
    assert "network: 3 of 3 connections between the hosts work, counting 1 to the store's port (eth0" in report_as_text(
        report
    )


def test_a_host_that_no_one_reaches_is_one_finding() -> None:
    assert _network("1234", {}) == []
    (finding,) = _network("1234", {(a, "3"): "refused" for a in "124"})
    assert finding.hosts == ("3",)
    assert finding.message.startswith("no other host reaches it at 10.0.0.3: it is refused")
    (finding,) = _network("1234", {("3", b): "no route" for b in "124"})
    assert (finding.hosts, finding.fixes) == (("3",), ["ssh 3 'ip route get 10.0.0.1'"])
    singles = _network("123456", {(a, b): "no answer" for a in "123" for b in "456"})
    assert len(singles) == 7
    assert singles[-1].message.startswith("3 more connections do not work")


def test_a_large_run_tries_few_ways_and_finds_who_is_cut_off() -> None:
    names = [f"n{k}" for k in range(1000)]
    listening = {
        name: Listening(f"10.0.{k // 250}.{k % 250}", 7, 29500 if k == 0 else 0) for k, name in enumerate(names)
    }
    tried = {name: targets(listening, name) for name in names}
    assert all(len(found) <= MOST + 2 for found in tried.values())
    assert all({("n0", 7), ("n0", 29500)} <= {(one.to, one.port) for one in tried[name]} for name in names[1:])
    reached = Counter(one.to for found in tried.values() for one in found if one.port == 7)
    assert len(reached) == 1000
    assert min(reached.values()) >= MOST
    looked_at = 0

    class Counted(str):
        """A problem that counts how often it is looked at."""

        def __bool__(self) -> bool:
            nonlocal looked_at
            looked_at += 1
            return len(self) > 0

    def way(name: str, one: Target) -> Probe:
        problem = Counted("refused" if one.to == "n500" else "")
        return Probe(**vars(one), problem=problem, round_trip_s=1e-4, local=name, interface="eth0", mtu=1500)

    ways = [way(name, one) for name, found in tried.items() for one in found]
    examined = [_examined(name, name_resolves_to=("10.0.0.1",)) for name in names]
    (finding,) = merged(pair_findings(examined, listening, ways, {}))
    assert finding.message.startswith("no other host reaches it at 10.0.2.0: it is refused")
    assert looked_at < 10 * len(ways)


def test_a_name_that_means_loopback_is_a_warning() -> None:
    examined = [_examined(name, name_resolves_to=("127.0.1.1",)) for name in "12"]
    listening = {name: Listening(f"10.0.0.{name}", 7) for name in "12"}
    ways = _ways("12", {})
    (finding,) = merged(pair_findings(examined, listening, ways, {"2": "eth0"}))
    assert (finding.kind, finding.hosts) == ("own-name", ("1",))
    assert "127.0.1.1" in finding.message


def test_a_reason_s_command_becomes_its_fix() -> None:
    assert fix_in("is sshd running there? Try: ssh a true") == ("is sshd running there?", "ssh a true")
    assert fix_in("accept it by: ssh a true  (or --x)") == ("accept it by", "ssh a true")
    assert fix_in("no such thing") == ("no such thing", "")
    assert [fold(names) for names in (["n1", "n2", "n3"], ["sim0", "sim1", "sim2"], ["n8", "n9", "n10"])] == [
        "n[1-3]", "sim[0-2]", "n[8-10]",
    ]  # fmt: skip


def test_what_a_host_says_is_taken_as_these_fields_only() -> None:
    fields = json.loads(json.dumps(asdict(FACTS)))
    assert decode_value(HostFacts, fields) == FACTS
    wrongs: tuple[object, ...] = (
        {**fields, "more": 1},
        {**fields, "uid": "0"},
        {k: v for k, v in fields.items() if k != "uid"},
        [],
        1,
    )
    for wrong in wrongs:
        with pytest.raises(ProtocolError):
            decode_value(HostFacts, wrong)


# ---- probing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["launcher/decode.py", "launcher/transport/ssh/keys.py", "ddp/comm/codec.py"])
def test_code_that_differs_in_any_folder_has_another_digest(tmp_path: Path, module: str) -> None:
    def digest() -> str:
        code = "from launcher.check.examiner_host import code_digest; print(code_digest())"
        return run_program(sys.executable, "-c", code, cwd=tmp_path).stdout  # the copy's

    source = Path(launcher.__file__).parents[1]
    for package in ("launcher", "ddp"):
        shutil.copytree(source / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / module
    was, content = digest(), file.read_text()
    assert len(was) == 13, "the beginning of a hexadecimal SHA-256"
    file.write_text(content + "# another\n")
    assert digest() != was
    file.write_text(content)
    assert digest() == was
    file.rename(file.with_name("renamed.py"))
    assert digest() != was


def test_only_a_listener_that_knows_the_token_counts() -> None:
    token = b"0123456789abcdef0123456789abcdef"
    listener = listen("127.0.0.1", token, 0)
    here = Target("a", "here", listener.address, listener.port)
    well = all_at_once(lambda target: probe(target, token, 20.0), [here] * 20, most=AT_ONCE)
    assert [(one.problem, one.interface) for one in well] == [("", "lo")] * 20
    assert probe(here, b"f" * 32, 20.0).problem == "stranger"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        over = threading.Event()

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                over.wait(60)

        thread = threading.Thread(target=answer)
        thread.start()
        assert probe(Target("a", "other", "127.0.0.1", port), token, 20.0).problem == "stranger"
        over.set()
        thread.join(60)
    assert probe(Target("a", "gone", "127.0.0.1", port), token, 2.0).problem == "refused"
    assert [target.port for target in targets({"a": listener, "b": Listening("::1", 5, 6)}, "a")] == [5, 6]
