"""A save in the background outlives the worker that made it: its file is written, and the next attempt needs none."""

import re
import zipfile
from pathlib import Path

import pytest
import torch
from testbed.checkpoints import listed
from testbed.processes import Result, run_dtrain

from ddp.checkpoint import file as checkpoint_file

pytestmark = pytest.mark.usefixtures("warm")
SCRIPT = Path(__file__).parents[2] / "programs" / "kept_copy.py"
HERE, TWO_HOSTS = ("--nproc-per-node", "2"), ("--simulate", "--nnodes", "2", "--nproc-per-node", "1")


def run(folder: Path, what: str, *options: str, restarts: int = 1) -> Result:
    return run_dtrain("run", *options, "--max-restarts", str(restarts), SCRIPT, what, cwd=folder)


def said(result: Result, word: str) -> list[str]:
    """What the ranks printed after `word`, in the order in which it came."""
    return re.findall(rf"^\[\S+:\d+\] {word} (.*)$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("what", ["one killed", "all killed"])
def test_the_file_of_a_worker_killed_after_its_save_is_written(tmp_path: Path, what: str) -> None:
    result = run(tmp_path, what, *HERE, restarts=0)
    assert result.returncode == 137, result
    assert sorted(listed(tmp_path / "saved")) == ["step-0000000003.pt", "step-0000000004.pt"]
    path = tmp_path / "saved/step-0000000004.pt"
    with open(path, "rb") as file:
        assert checkpoint_file.verify(file).step == 4
    assert zipfile.ZipFile(path).testzip() is None
    state = torch.load(path, weights_only=True)
    weights = [tensor.double().sum().item().hex() for tensor in state["model"].values()]
    (digest,) = {line for line in said(result, "saved") if line.startswith("4 ")}
    assert digest.split()[1:5] == weights


@pytest.mark.parametrize("options", [HERE, TWO_HOSTS], ids=["one host", "two hosts"])
def test_the_next_attempt_goes_on_from_memory(tmp_path: Path, options: tuple[str, ...]) -> None:
    """All workers were killed, and the file is not there."""
    result = run(tmp_path, "file removed", *options)
    assert result.returncode == 0, result
    (saved,) = {line for line in said(result, "saved") if line.startswith("4 ")}
    assert said(result, "loaded")[2:] == 2 * [f"{saved} step-0000000004.pt {{'best': 0.5}}"]
    assert "step-0000000009.pt" in listed(tmp_path / "saved")  # the memory is used again


def test_a_worker_killed_in_a_copy_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    result = run(tmp_path, "killed in a copy", *HERE)
    assert result.returncode == 0, result
    (saved,) = {line for line in said(result, "saved") if line.startswith("3 ")}
    assert said(result, "loaded")[2:] == 2 * [f"{saved} step-0000000003.pt {{'best': 0.5}}"]
    assert sorted(listed(tmp_path / "saved")) == ["step-0000000003.pt", "step-0000000009.pt"]


def test_another_process_of_the_worker_leaves_the_memory_alone(tmp_path: Path) -> None:
    result = run(tmp_path, "second process", *HERE)
    assert result.returncode == 0, result
    assert said(result, "other") == ["None"]


def test_without_memory_it_saves_as_elsewhere_and_says_so_once(tmp_path: Path) -> None:
    result = run(tmp_path, "no memory", *HERE)
    assert result.returncode == 0, result
    assert result.stderr.count("no copy of a checkpoint outlives this process") == 1
    assert said(result, "note") == ["None", "None"]
    assert sorted(listed(tmp_path / "saved")) == ["step-0000000001.pt", "step-0000000002.pt"]
