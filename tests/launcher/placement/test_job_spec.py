"""What is checked once where the JobSpec is made, and which variables travel with a job."""

import re
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from launcher.errors import UsageError
from launcher.hangs.watch import HangPolicy
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import (
    CommandKind,
    JobSpec,
    WorkerCommand,
    new_run_id,
    parse_duration,
    parse_exports,
    parse_hang,
    parse_nproc,
)

HERE = {
    "MY_A": "1",
    "MY_B": "x=y",
    "YOURS": "2",
    "EMPTY": "",
    "PATH": "/bin",
    "HOME": "/root",
    "SSH_CONNECTION": "1 2 3 4",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "4",
    "PYTHONPATH": "/lib",
    "HF_HOME": "/hf",
    "WANDB_API_KEY": "secret",
    "CUDA_VISIBLE_DEVICES": "0",
    "CUDA_LAUNCH_BLOCKING": "1",
    "PYTHONHOME": "/usr",
    "TORCH_LOGS": "all",
    "TORCHELASTIC_RUN_ID": "outer",
    "TF_CONFIG": "{}",
    "DTRAIN_AGENT": "run tag",
    "RANK": "3",
    "LD_LIBRARY_PATH": "/opt",
    "PJRT_DEVICE": "TPU",
    "LIBTPU_INIT_ARGS": "--flag=1",
    "PJRT_LOCAL_PROCESS_RANK": "0",  # this and the others are one TPU host's
    "PJRT_LOCAL_PROCESS_COUNT": "4",
    "CCL_LOG_LEVEL": "info",
    "HSA_OVERRIDE_GFX_VERSION": "11.0.0",
    "MIOPEN_FIND_MODE": "1",
    "RCCL_MSCCL_ENABLE": "0",
    "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",
    "ZE_AFFINITY_MASK": "0",  # this and the lists are this host's
    "HIP_VISIBLE_DEVICES": "0",
    "ROCR_VISIBLE_DEVICES": "0",
    "TPU_WORKER_ID": "2",
    "TPU_WORKER_HOSTNAMES": "a,b,c",
    "TPU_PROCESS_BOUNDS": "2,2,1",
    "CLOUD_TPU_TASK_ID": "2",
}
TRAVELLING = {
    "NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONPATH", "HF_HOME", "WANDB_API_KEY", "CUDA_LAUNCH_BLOCKING", "TORCH_LOGS",
    "PJRT_DEVICE", "LIBTPU_INIT_ARGS", "CCL_LOG_LEVEL", "HSA_OVERRIDE_GFX_VERSION", "MIOPEN_FIND_MODE",
    "RCCL_MSCCL_ENABLE", "ZE_FLAT_DEVICE_HIERARCHY",
}  # fmt: skip


def _spec(**changes: Any) -> JobSpec:
    command = WorkerCommand(CommandKind.SCRIPT, "train.py")
    given = {"command": command, "hosts": (Host("a", HostKind.LOCAL),), "run_id": "r1", **changes}
    return JobSpec(**given)


@pytest.mark.parametrize(
    ("text", "nproc"),
    [("1", 1), ("007", 7), ("999999", 999999), ("auto", "auto"), ("gpu", "gpu"), ("cpu", "cpu"), (None, None)],
)
def test_nproc_is_a_number_or_a_word(text: str | None, nproc: int | str | None) -> None:
    assert parse_nproc(text) == nproc


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1.5", "2 ", "+2", "1e3", "²", "٣", "GPU", "9" * 7, "9" * 5000])
def test_any_other_nproc_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--nproc-per-node is {text!r}; it must be a number from 1, or")):
        parse_nproc(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"hosts": ()},
        {"run_id": ""},
        {"run_id": ".."},
        {"run_id": "a/b"},
        {"run_id": "a\n"},
        {"run_id": "a" * 129},
        {"start_timeout_s": 0.0},
        {"start_timeout_s": float("nan")},
        {"start_timeout_s": float("inf")},
        {"grace_s": -1.0},
        {"grace_s": 1e300},
        {"grace_s": float("nan")},
        {"gpus_per_proc": 0},
        {"master_port": 0},
        {"master_port": 65536},
        {"keep_warm_s": 0.9},
        {"keep_warm_s": 60.0, "start_method": "exec"},
        {"keep_warm_s": 60.0, "command": WorkerCommand(CommandKind.PROGRAM, "train")},
        {"keep_warm_s": 60.0, "hosts": (Host("a", HostKind.SRUN),)},
        {"keep_warm_s": 60.0, "hosts": (Host("a", HostKind.JOINED),)},
        {"setup": "x" * 20000},
    ],
)
def test_a_spec_that_cannot_be_run_is_never_made(changes: dict[str, Any], snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UsageError) as refused:
        _spec(**changes)
    assert str(refused.value) == snapshot


def test_the_ends_of_every_range_are_allowed() -> None:
    for changes in ({"run_id": "a" * 128}, {"grace_s": 0.0}, {"gpus_per_proc": 1}, {"master_port": 65535}):
        _spec(**changes)
    _spec(keep_warm_s=1.0)


def test_run_ids_sort_by_time_and_differ() -> None:
    ids = [new_run_id(1e9 + second) for second in range(0, 100000, 5000)]
    assert sorted(ids) == ids
    assert len({new_run_id(1e9) for _ in range(20)}) > 10
    _spec(run_id=ids[0])


# ---- variables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ((), {}),
        (("MY_A",), {"MY_A": "1"}),
        (("MY_A=7",), {"MY_A": "7"}),
        (("NEW=a=b=c",), {"NEW": "a=b=c"}),
        (("NEW=",), {"NEW": ""}),
        (("EMPTY",), {"EMPTY": ""}),
        (("NEW=*",), {"NEW": "*"}),
        (("NEW=two\nlines",), {"NEW": "two\nlines"}),
        (("MY_*",), {"MY_A": "1", "MY_B": "x=y"}),
        (("MY_[AX]", "YOUR?"), {"MY_A": "1", "YOURS": "2"}),
        (("NONE_*",), {}),
        (("MY_*", "MY_A=9"), {"MY_A": "9", "MY_B": "x=y"}),
        (("MY_A=9", "MY_A"), {"MY_A": "1"}),
    ],
)
def test_exports_are_names_assignments_or_globs(wanted: tuple[str, ...], chosen: dict[str, str]) -> None:
    assert parse_exports(wanted, HERE, remote=False) == chosen


@pytest.mark.parametrize("item", ["", "=x", "9A=x", "A B=x", "MY-A=x", "MY_*=x", "Ä=x"])
def test_what_cannot_be_a_variable_s_name_is_refused(item: str) -> None:
    with pytest.raises(UsageError, match=r"--export '.*' is not the name of a variable"):
        parse_exports((item,), HERE, remote=False)


def test_a_name_that_is_not_set_here_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"--export GONE: it is not set here; write GONE=VALUE, or set it first"):
        parse_exports(("GONE",), HERE, remote=True)


def test_a_value_never_appears_in_an_error() -> None:
    with pytest.raises(UsageError) as raised:
        parse_exports(("MY-KEY=secret",), HERE, remote=True)
    assert "secret" not in str(raised.value)


def test_settings_of_known_libraries_travel_but_not_this_host_s() -> None:
    assert set(parse_exports((), HERE, remote=True)) == TRAVELLING
    assert parse_exports((), HERE, remote=False) == {}


def test_what_stays_by_default_travels_when_it_is_named() -> None:
    chosen = parse_exports(("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES=1", "NCCL_DEBUG=WARN"), HERE, remote=True)
    assert {name: chosen[name] for name in chosen.keys() - TRAVELLING} == {
        "LD_LIBRARY_PATH": "/opt",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    assert chosen["NCCL_DEBUG"] == "WARN"


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("0", 0)])
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text, "--keep-warm") == seconds


@pytest.mark.parametrize("text", ["", "m", "10x", "-1m", "1e3", "10 m", "nan", "1h30m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--keep-warm is .*; write a time such as 90s, 10m or 1h"):
        parse_duration(text, "--keep-warm")


def test_what_is_done_about_a_hang_is_a_word_or_a_time() -> None:
    assert parse_hang("off") == HangPolicy(watches=False)
    assert parse_hang("report") == HangPolicy(acts=False)
    assert parse_hang("auto") == HangPolicy(acts=True)
    assert parse_hang("10m") == HangPolicy(acts=True, quiet_s=600)
    with pytest.raises(UsageError, match=r"--hang is 'soon'; write off, report, auto, or a time such as 30s or 10m"):
        parse_hang("soon")
    with pytest.raises(UsageError, match=r"--hang is 0s; it must be 1 second or more"):
        parse_hang("0s")
