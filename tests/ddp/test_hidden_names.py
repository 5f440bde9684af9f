"""A private name that a newer torch lacks costs what needs it, with a message that names it; never `import ddp`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from programs.hidden_names import FILE, GONE, torchs_names
from testbed.once import once
from testbed.processes import run_program

ROOT = Path(__file__).resolve().parents[2]
ALL = torchs_names(FILE.read_text(encoding="utf-8"))
# Each takes a second.
SOME = ALL[::32]
OTHERS = [name for name in ALL if name not in SOME]
PARTS = [SOME, *(pytest.param(OTHERS[turn::5], marks=pytest.mark.slow(turn=turn)) for turn in range(5))]
# What no one says, since ddp does without it or cannot know whether torch has it under another name.
SILENT = {
    "_torchdynamo_disable": "set, not read: torch.compile would look into the wrapper",
    "_opt_called": "set, not read: schedulers would warn",
    "_active_ddp_module": "torch.compile would not divide graphs at buckets",
    "compiled_autograd": "one that is not loaded looks the same",
    "_cdata": "gradients are copied into their buckets",
    "_storage_Use_Count": "gradients are copied into their buckets",
    "_use_count": "gradients are copied into their buckets",
    "_foreach_add_": "tensors are added one by one",
    "_foreach_copy_": "tensors are copied one by one",
    "_foreach_div_": "tensors are divided one by one",
    "_flatten_dense_tensors": "tensors are put together one by one",
    "_device_types": "the limit of a stall is torch's default",
    "_device": "the scale of a GradScaler in a replaced process is made on the CPU",
    "_timeout": "limits are torch's defaults",
    "_in_backward_optimizers": "a parameter without any looks the same",
    "_ddp_params_and_buffers_to_ignore": "a module without any looks the same",
    **dict.fromkeys(
        ("_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout"),
        "read of a folder of torch.distributed.checkpoint, which is refused then with the name of the class",
    ),
    **dict.fromkeys(
        ("_distributed_c10d", "_dump_nccl_trace_json"), "torch's watchdog is left on, as where NCCL records nothing"
    ),
    "_comm_hooks": "replicas of torch's own class are compared before a save, also under a hook",
    **dict.fromkeys(("_group_start", "_group_end"), "communicators of NCCL are aborted one after the other"),
    **dict.fromkeys(("OpType", "_get_op_type"), "each wait of a resilient function has a thread, as for messages"),
    "Future": "torch.futures.Future is asked for, which torch's own futures are",
}


@pytest.fixture(scope="module", params=PARTS, ids=" ".join)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    def run() -> dict[str, Any]:
        argv = (sys.executable, "-m", "programs.hidden_names", str(tmp_path_factory.mktemp("worlds")), *request.param)
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        ran = run_program(*argv, env=env, cwd=ROOT, timeout=1500)
        assert ran.returncode == 0, ran.stderr
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])  # gloo of torch 2.9 prints before
        return found

    return once(tmp_path_factory, f"hidden names {request.param[0]}", run)


@pytest.mark.control
@pytest.mark.timeout(600)
@pytest.mark.parametrize("outcomes", [SOME], ids=["some"], indirect=True)
def test_everything_works_with_every_name(outcomes: dict[str, Any]) -> None:
    assert {outcome for found in outcomes[""] for outcome in found.values()} == {"works"}
    assert {"_C", "_parameters", "_current_graph_task_id", "queue_callback", "_optimizer_"} <= {*ALL}


@pytest.mark.timeout(600)
def test_no_hidden_name_fails_the_import(outcomes: dict[str, Any]) -> None:
    wrong = {}
    for name, found in [(hidden, each) for hidden in outcomes if hidden for each in outcomes[hidden]]:
        if not isinstance(found, dict) or found["import"] != "works":
            wrong[name] = found
            continue
        said = {feature: outcome for feature, outcome in found.items() if outcome != "works"}
        message = re.compile(rf"torch \S+ has no \S*{name}{GONE}\S*, which this needs: install")
        unclear = {feature: outcome for feature, outcome in said.items() if not message.search(outcome)}
        if unclear or (name in SILENT) == bool(said):
            wrong[name] = unclear or said or "nothing says that it is missing"
    assert wrong == {}
