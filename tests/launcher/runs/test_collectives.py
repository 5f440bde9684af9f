"""Which rank keeps the others waiting in a collective, and in which one, is said of scripts that know only torch."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from testbed.processes import run_dtrain, started_dtrain, wait_until
from testbed.typed import dtrain
from testbed.warm import HEADER

pytestmark = pytest.mark.usefixtures("warm")

SCRIPT = (
    HEADER
    + """\
import sys, time
from datetime import timedelta
case, limit_s = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
rank = dist.get_rank()
pair = dist.new_group([0, 1], group_desc="pair")
values = torch.ones(10)
for _ in range(3):
    dist.all_reduce(values)
if case == "late":
    if rank == 1:
        time.sleep(600)
    dist.all_reduce(values)
elif case == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    if rank == 1:
        time.sleep(600)
    model(torch.ones(3, 4)).sum().backward()
elif case == "fsdp":
    from torch.distributed.fsdp import fully_shard
    model = torch.nn.Linear(6, 6)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (3,)))
    model(torch.ones(2, 6)).sum().backward()
    if rank == 1:
        time.sleep(600)
    model(torch.ones(2, 6)).sum().backward()
elif case == "operation":
    dist.broadcast(values, 0) if rank == 1 else dist.all_reduce(values)
    time.sleep(600)
elif case == "left out":
    if rank != 1:
        dist.all_reduce(values)
    dist.barrier()
elif case == "pair":
    if rank == 0:
        dist.all_reduce(values, group=pair)
    elif rank == 1:
        time.sleep(600)
    dist.all_reduce(values)
elif case == "shape":
    dist.all_reduce(torch.ones(20 if rank == 1 else 10))
elif case == "raises":
    if rank == 1:
        raise ValueError("bad batch")
    dist.all_reduce(values)
"""
)
OTHERS = "group default_pg is not the same: "
# What is said of a run that hangs, and with the time limit of a group that is shorter, of one that fails.
SAID = {
    "late": ("rank 1 has not called all_reduce 4 (Float[10]) of group default_pg; ranks 0, 2 have", 600),
    "ddp": ("rank 1 has not called all_reduce", 600),
    "fsdp": ("rank 1 has not called all_gather", 600),
    "pair": ("rank 1 has not called all_reduce 1 (Float[10]) of group pair (1); rank 0 has", 600),
    "left out": (f"collective 4 of {OTHERS}ranks 0, 2 called all_reduce of Float[10], rank 1 called barrier", 600),
    "operation": (
        f"collective 4 of {OTHERS}ranks 0, 2 called all_reduce of Float[10], rank 1 called broadcast of Float[10]",
        2,
    ),
    "shape": ("called all_reduce of Float[20]", 600),
    "raises": ("rank 1 has not called all_reduce 4 (Float[10]) of group default_pg; ranks 0, 2 have", 600),
}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("case", ["late", "ddp", "fsdp", "pair", "left out"])
def test_a_hanging_run_s_rank_and_collective_are_named(case: str, script: Path) -> None:
    said, limit_s = SAID[case]
    with started_dtrain("run", "--nproc-per-node", "3", "--run-id", "r", script, case, str(limit_s)):
        wait_until(lambda: said in dtrain("stacks", "r").stdout, said)
        one = run_dtrain("stacks", "r", "--rank", "2").stdout
    assert "its last collectives:\n  all_reduce 1 (Float[10]) of group default_pg\n" in one
    assert one.endswith(", not done\n")


@pytest.mark.parametrize("case", ["operation", "shape", "raises"])
def test_of_a_run_that_fails_they_are_in_the_report(case: str, script: Path) -> None:
    said, limit_s = SAID[case]
    argv: list[str | Path] = [
        "--nproc-per-node",
        "3",
        "--run-id",
        "r",
        "--error-json",
        "e.json",
        script,
        case,
        str(limit_s),
    ]
    result = run_dtrain("run", *argv)
    assert result.returncode != 0
    lines = [line.removeprefix("dtrain:   ") for line in result.stderr.splitlines() if said in line]
    assert json.loads(Path("e.json").read_text())["collectives"] == lines != []


# As torch's watchdog for NCCL ends a process, after it has written a pickle.
WATCHDOG = """
import os, pickle, sys, time
rank = int(os.environ["RANK"])
last = 7 if rank == 1 else 8
work = f"WorkNCCL(SeqNum={last}, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000)"
entry = {
    "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": last, "is_p2p": False, "retired": rank == 1,
    "profiling_name": "nccl:all_reduce", "input_sizes": [[4]], "input_dtypes": ["Float"], "state": "started",
}
config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb") as file:
    pickle.dump({"pg_config": config, "entries": [entry]}, file, protocol=2)
print(f"Watchdog caught collective operation timeout: {work} ran for 600021 milliseconds", file=sys.stderr)
print(f"at work: {last}, last enqueued NCCL work: {last}, last completed NCCL work: 6", file=sys.stderr, flush=True)
os.abort()
"""


def test_if_the_watchdog_ends_all_ranks_its_files_are_compared(script: Path) -> None:
    script.write_text(WATCHDOG)
    result = run_dtrain("run", "--nproc-per-node", "3", "--run-id", "r", script)
    assert result.returncode == 128 + signal.SIGABRT
    assert "rank 1 on " in result.stderr
    assert "it aborted itself: NCCL timed out in allreduce 7 after 600 s" in result.stderr
    assert (
        "dtrain:   rank 1 has not called all_reduce 8 (Float[4]) of group default_pg; ranks 0, 2 have" in result.stderr
    )


def test_with_off_torch_is_left_as_it_is_and_not_asked(script: Path) -> None:
    script.write_text(SCRIPT.replace('"bad batch"', "[name for name in __import__('os').environ if '_FR_' in name]"))
    argv: list[str | Path] = [
        "--flight-recorder",
        "off",
        "--nproc-per-node",
        "2",
        "--run-id",
        "r",
        script,
        "raises",
        "600",
    ]
    result = run_dtrain("run", *argv)
    assert "ValueError: []" in result.stderr
    assert "has not called" not in result.stderr


def test_a_program_gets_the_variables_and_no_more() -> None:
    shown = 'env | grep -E "^TORCH_(FR|NCCL_D)" | cut -d= -f1 | sort; ls -d "$TORCHELASTIC_ERROR_FILE"*'
    result = run_dtrain("run", "--no-python", "sh", "-c", shown, env={"TORCH_FR_BUFFER_SIZE": None})
    words = [line.split()[-1] for line in result.stdout.splitlines()]
    assert words[:3] == ["TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"]
    assert not any(word.endswith(".asked") for word in words)
