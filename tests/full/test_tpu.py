"""Strategy "tpu" with the real torch_xla, on four virtual devices of the CPU, trains to the numbers of one process.

torch_xla needs a torch of its own version: the programs run in .venv-tpu, the tests with another torch.
"""

import re
from pathlib import Path

import pytest
import torch
from testbed.imports import ROOT
from testbed.processes import Result, run_dtrain, run_program
from testbed.require import require

PROGRAM = ROOT / "tests/programs/tpu_training.py"
PYTHON = ROOT / ".venv-tpu/bin/python"
LIMIT_S = 250.0  # nearly all of it is compiling
ENVIRONMENT = {
    "DTRAIN_STRATEGY": "tpu",
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "4",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def _environment() -> None:
    require(PYTHON.exists(), ".venv-tpu", "scripts/test --full")


def test_four_devices_train_to_the_numbers_of_one_process(tmp_path: Path) -> None:
    results = _results(_run("--nproc-per-node", "1", PROGRAM, "numbers", cwd=tmp_path))
    assert len(results) == 4
    for result, model in zip(results, ("mlp", "odd", "norm"), strict=False):
        assert re.fullmatch(rf"{model} 4 devices, error (\d)e-1\d|{model} 4 devices, error 0e\+00", result)
    assert results[3] == "sharding {devices=[4,1]0,1,2,3}"


def test_a_training_goes_on_under_another_strategy_and_back(tmp_path: Path) -> None:
    """From a checkpoint of four devices on two ranks of another torch, and from theirs on four devices."""
    folder = tmp_path / "checkpoints"
    (first,) = _results(_run("--nproc-per-node", "1", PROGRAM, "fit", folder, "1", cwd=tmp_path))
    assert first == "tpu made 5 steps, epoch 1"
    saved = torch.load(max(folder.glob("step-*.pt")), weights_only=True)
    tensors = [
        *saved["model"].values(),
        *(value for state in saved["optimizer"]["state"].values() for value in state.values()),
    ]
    assert {(type(tensor), tensor.device.type) for tensor in tensors} == {(torch.Tensor, "cpu")}
    options = {**ENVIRONMENT, "DTRAIN_STRATEGY": "all_reduce"}
    words: list[str | Path] = ["--nproc-per-node", "2", PROGRAM, "fit", folder, "2"]
    (second,) = _results(run_dtrain("run", *words, cwd=tmp_path, env=options, timeout=LIMIT_S))
    assert second == "all_reduce made 5 steps, epoch 2"
    (third,) = _results(_run("--nproc-per-node", "1", PROGRAM, "fit", folder, "3", cwd=tmp_path))
    assert third == "tpu made 5 steps, epoch 3"


def test_an_example_for_all_strategies_runs_unchanged(tmp_path: Path) -> None:
    words = [str(ROOT / "scripts/examples/train_fit.py"), "--epochs", "1", "--folder", str(tmp_path / "fit")]
    result = _run("--nproc-per-node", "1", *words, cwd=tmp_path)
    assert result.returncode == 0, result
    ours, plain = re.findall(r"accuracy ([\d.]+)%", result.stdout)[-2:]
    assert ours == plain
    assert float(ours) > 50
    (reported, by_program) = re.findall(r"\[\d(?:, \d)*\]", result.stdout)[-2:]
    assert reported == by_program


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--nproc-per-node", "2"], "2 processes were started on this host"),
        (
            ["--simulate", "--nnodes", "2", "--nproc-per-node", "1"],
            "the runtime for PJRT_DEVICE=CPU joins the devices of 1",
        ),
    ],
)
def test_processes_that_cannot_be_one_mesh_are_refused(options: list[str], reason: str, tmp_path: Path) -> None:
    result = _run(*options, PROGRAM, "numbers", cwd=tmp_path)
    assert result.returncode == 1, result
    assert "LaunchEnvironmentError: strategy 'tpu': " in result.stderr
    assert reason in result.stderr


def _run(*words: str | Path, cwd: Path) -> Result:
    return run_program(PYTHON, "-m", "launcher", "run", *words, cwd=cwd, env=ENVIRONMENT, timeout=LIMIT_S)


def _results(result: Result) -> list[str]:
    assert result.returncode == 0, result
    return re.findall(r"\bresult ([^\n]*)", result.stdout)
