"""One script, the same words after `torchrun` and `dtrain-torchrun`: its workers see the same, and end the same.

torchrun flattens every exit code of a worker to 1; dtrain keeps it. Everything else is compared.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from testbed import REPOSITORY
from testbed.ports import free_port
from testbed.present import present
from testbed.processes import Result, run_program

PROGRAMS = REPOSITORY / "tests/programs"
WORKER = "torchrun_worker.py"
TORCHRUN = "from torch.distributed.run import main; main()"
DTRAIN_TORCHRUN = "from launcher.__main__ import torchrun; torchrun()"
LIMIT_S = 90.0
MASTER = "--master-addr localhost --master-port FREE"  # other tests run beside this one
TWO = "--standalone --nproc-per-node 2"

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (f"{WORKER} show", {}),
        (f"{TWO} {WORKER} sum env", {}),
        (f"--nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 --rdzv-id=j7 {WORKER} sum tcp", {}),
        (f"--nnodes=1:1 --nproc-per-node=cpu --max_restarts=3 --role trainer --tee 3 {WORKER} sum none", {}),
        (
            f"--nnodes 1 --node-rank 0 {MASTER} --nproc-per-node 2 -r 3 --log-dir l {WORKER} show",
            {},
        ),
        (f"{TWO} --max-restarts 1 {WORKER} once", {}),
        (f"{TWO} {WORKER} spawn", {}),
        (f"{TWO} -m torchrun_worker show x", {}),
        (f"{TWO} --no-python python {WORKER} show x", {}),
        (f"{TWO} --run-path {WORKER} show -- --help --nnodes 9", {}),
        (f"{TWO} --virtual-local-rank {WORKER} show", {}),
        (f"{WORKER} show", {"PET_NPROC_PER_NODE": "2", "PET_STANDALONE": "1", "PET_MAX_RESTARTS": "2"}),
        (f"--nproc-per-node 1 {WORKER} show", {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "seen"}),
    ],
)
def test_workers_see_what_torchrun_s_see(words: str, variables: Mapping[str, str], tmp_path: Path) -> None:
    seen, results = {}, {}
    for name, program in (("torchrun", TORCHRUN), ("dtrain", DTRAIN_TORCHRUN)):
        folder = _folder(tmp_path / name)
        results[name] = _launch(program, words, folder, variables)
        seen[name] = _seen(folder)
    assert {name: result.returncode for name, result in results.items()} == {"torchrun": 0, "dtrain": 0}, results
    assert seen["torchrun"], "they wrote something"
    assert seen["dtrain"] == seen["torchrun"]


def test_scripts_for_torch_distributed_launch_get_their_argument(tmp_path: Path) -> None:
    old, ours = _folder(tmp_path / "old"), _folder(tmp_path / "ours")
    launch = "from torch.distributed.launch import main; main()"
    assert _launch(launch, f"--nproc_per_node 2 {WORKER} show x", old, {}).returncode == 0
    words = f"--nproc_per_node 2 --pass-local-rank {WORKER} show x"
    assert _launch(DTRAIN_TORCHRUN, words, ours, {}).returncode == 0
    assert _seen(ours) == _seen(old)
    assert {rank: reported["local_rank"] for (rank, _), reported in _seen(ours).items()} == {"0": 0, "1": 1}


def test_a_recorded_error_is_in_its_file(tmp_path: Path) -> None:
    messages = {}
    for name, program in (("torchrun", TORCHRUN), ("dtrain", DTRAIN_TORCHRUN)):
        folder = _folder(tmp_path / name)
        result = _launch(program, f"{TWO} --log-dir logs {WORKER} record", folder, {})
        assert result.returncode == 1, result
        (file,) = (folder / "logs").glob("*/attempt_0/1/error.json")
        messages[name] = json.loads(file.read_text())["message"]["message"]
    assert messages["dtrain"] == messages["torchrun"] == "ValueError: recorded by the second"


def _folder(path: Path) -> Path:
    path.mkdir()
    (path / WORKER).write_bytes((PROGRAMS / WORKER).read_bytes())
    return path


def _launch(program: str, words: str, folder: Path, variables: Mapping[str, str]) -> Result:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"  # --no-python finds the same interpreter
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PATH": path, **variables}
    words = words.replace("FREE", str(free_port()))
    return run_program(sys.executable, "-c", program, *words.split(), cwd=folder, env=environment, timeout=LIMIT_S)


def _seen(folder: Path) -> dict[tuple[str, str], dict[str, object]]:
    """What the workers wrote, by rank and attempt."""
    found = {}
    for path in folder.glob("seen.*"):
        match = present(re.fullmatch(r"seen\.(\d+)\.(\d+)\.json", path.name))
        found[match[1], match[2]] = json.loads(path.read_text())
    return found
