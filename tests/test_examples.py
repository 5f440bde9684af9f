"""The examples train, and to the same losses under every launcher."""

import os
import re
import runpy
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from testbed.nursery import Nursery
from testbed.once import once
from testbed.present import present
from testbed.processes import Result, run_program
from testbed.require import require

EXAMPLES = Path(__file__).parents[1] / "scripts" / "examples"
GPT = EXAMPLES / "train_gpt.py"
DIGITS = EXAMPLES / "train_digits.py"
STEPS = EXAMPLES / "train_steps.py"
PS = EXAMPLES / "train_ps.py"
NAN = EXAMPLES / "rare_nan.py"

# Small, and odd on purpose: 99 blocks for training and 25 for validation divide neither by the batch nor by
# the world; 15 steps go on into a second epoch.
TINY = shlex.split("--layers 1 --width 32 --heads 2 --block-size 32 --text-kb 4 --eval-blocks 25")
SHORT = shlex.split("--batch-size 8 --steps 15 --warmup-steps 5 --log-every 1 --eval-every 5 --sample-length 9")

# A batch that is split is summed in another order. float32 rounds at 6e-8 of a value, which 15 steps of Adam
# do not raise to 1e-5 here; losses are printed with 4 decimals, so they may differ by one in the last.
TOLERANCE = 1.01e-4

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MPIRUN = ["mpirun", "--oversubscribe", "-np", "2", sys.executable]
DTRAIN = [sys.executable, "-m", "launcher", "run", "--nproc-per-node", "2"]  # of which one process imports torch


# Runs a script in this process, and kills one rank of it before the optimizer's N-th step.
DYING = """
import os, runpy, signal, sys, torch
at, sys.argv = int(sys.argv[1]), sys.argv[2:]
step, calls = torch.optim.AdamW.step, iter(range(1, 1000))
def dying_step(*args, **kwargs):
    if next(calls) == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*args, **kwargs)
if os.environ.get("RANK", "1") == "1":
    torch.optim.AdamW.step = dying_step
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# Neither divides the other: sums for the next printed loss are in most checkpoints.
RESUMING = shlex.split("--log-every 2 --checkpoint-every 3 --out out/gpt.pt")


class Printed(NamedTuple):
    """A finished run and where it ran."""

    folder: Path
    result: Result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Printed:
    """A run of one process."""

    def run() -> Printed:
        folder = tmp_path_factory.mktemp("alone")
        return Printed(folder, _run_well(nursery, [GPT, *TINY, *SHORT, "--out", "out/gpt.pt"], folder))

    return once(tmp_path_factory, "gpt alone", run)


@pytest.fixture(scope="module")
def losses_alone(alone: Printed) -> dict[str, float]:
    return _losses(alone.result)


@pytest.mark.parametrize("launcher", [TORCHRUN, MPIRUN, DTRAIN], ids=["torchrun", "mpirun", "dtrain"])
def test_losses_are_those_of_one_process(launcher: list[str], losses_alone: dict[str, float], tmp_path: Path) -> None:
    if launcher is MPIRUN:
        require(shutil.which("mpirun"), "mpirun", "apt-get install openmpi-bin")
    result = _train_gpt(launcher, tmp_path)
    assert "2 workers on cpu, 4 blocks each" in result.stdout
    assert _losses(result) == pytest.approx(losses_alone, abs=TOLERANCE, rel=0)


def test_the_loss_falls(losses_alone: dict[str, float]) -> None:
    assert len(losses_alone) == 15 + 3
    assert losses_alone["15 validation"] < losses_alone["5 validation"] < losses_alone["1"] - 0.1


def test_the_checkpoint_is_whole(alone: Printed) -> None:
    assert os.listdir(alone.folder / "out") == ["gpt.pt"]
    checkpoint = torch.load(alone.folder / "out" / "gpt.pt")
    module = runpy.run_path(str(GPT))["GPT"](**checkpoint["shape"])
    assert module.load_state_dict(checkpoint["model"])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Printed:
    """A run of one process, with checkpoints that it did not need."""

    def run() -> Printed:
        folder = tmp_path_factory.mktemp("uninterrupted")
        result = _run_well(nursery, [GPT, *TINY, *SHORT, *RESUMING, "--checkpoint-dir", "kept"], folder)
        assert "resuming" not in result.stdout
        return Printed(folder, result)

    return once(tmp_path_factory, "gpt uninterrupted", run)


# Restarts under dtrain, of a world that stays and of one that shrinks: test_resume.py.
def test_a_killed_run_that_is_restarted_goes_on_to_the_same_bits(
    nursery: Nursery, uninterrupted: Printed, tmp_path: Path
) -> None:
    argv: list[str | Path] = [GPT, *TINY, *SHORT, *RESUMING]
    launcher_says = {"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_MAX_RESTARTS": "3"}
    killed = _run_plainly(nursery, [_dying(tmp_path), "14", *argv], tmp_path, **launcher_says)
    assert killed.returncode == -signal.SIGKILL, killed
    assert not (tmp_path / "out").exists()
    rest = _run_well(nursery, argv, tmp_path, **launcher_says)
    # The last of them is written beside the next steps, and may not be whole yet.
    assert re.search(rf"resuming after step (9|12), from {tmp_path}/runs/gpt-checkpoints/mine/", rest.stdout)
    _assert_same_losses([killed, rest], uninterrupted)
    _assert_same_model(tmp_path, uninterrupted.folder)


@pytest.mark.parametrize(
    ("run_id", "max_restarts", "folder"),
    [
        (None, None, None),  # plain python, mpirun, srun: another run is a new one
        ("none", "3", None),  # torchrun without an id
        ("mine", "0", None),
        ("mine", "3", Path("runs/gpt-checkpoints/mine")),
    ],
)
def test_only_restarts_of_one_run_share_a_folder_by_default(
    run_id: str | None, max_restarts: str | None, folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", run_id), ("TORCHELASTIC_MAX_RESTARTS", max_restarts)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert runpy.run_path(str(GPT))["default_checkpoint_dir"]() == folder


def test_a_run_that_no_one_restarts_leaves_no_checkpoints(alone: Printed) -> None:
    assert os.listdir(alone.folder) == ["out"]


def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    result = run_program(*DTRAIN, GPT, "--batch-size", "7", cwd=tmp_path)
    assert result.returncode == 1
    assert "--batch-size 7 does not divide by the 2 workers" in result.stderr


def test_digits_are_recognised(nursery: Nursery, tmp_path: Path) -> None:
    result = _run_well(nursery, [DIGITS, "--epochs", "8"], tmp_path)
    accuracy = float(re.findall(r"test accuracy ([\d.]+)%", result.stdout)[-1])
    assert accuracy > 95


def test_digits_without_scikit_learn_say_what_to_install(nursery: Nursery, tmp_path: Path) -> None:
    result = _run_plainly(nursery, [DIGITS], tmp_path, before="sys.modules['sklearn'] = None")
    assert result.returncode == 1
    assert "pip install scikit-learn" in result.stderr


def test_losses_with_parameter_servers_are_drawn_over_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(PS), "--epochs", "2"])
    runpy.run_path(str(PS), run_name="__main__")
    servers = [sys.executable, "-m", "launcher", "run", "--ps", "2", "--nproc-per-node", "2"]
    result = _run([*servers, str(PS), "--mode", "async", "--epochs", "3", "--plot", "ps.png"], tmp_path)
    found = present(re.search(r"async, 2 workers: test loss ([\d.]+)", result.stdout))
    assert float(found[1]) < 0.5
    runs = [line.rpartition(",")[0].rpartition(",")[0] for line in Path("runs/train_ps.csv").read_text().splitlines()]
    assert set(runs) == {'"sync, 1 worker"', '"async, 2 workers"'}
    assert Path("ps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("example", ["train_fit.py", "train_horovod_style.py"])
def test_other_styles_train_the_digits(example: str, tmp_path: Path) -> None:
    found = _run([*DTRAIN, str(EXAMPLES / example), "--epochs", "1"], tmp_path).stdout
    if example == "train_fit.py":  # the weights are saved, and loaded in plain PyTorch
        first, second = re.findall(r"(?:replicas|plain PyTorch): +accuracy ([\d.]+)%", found)
        assert first == second
        assert float(first) > 50
        assert "exported program" in found
    else:
        assert re.search(r"epoch +1 .*accuracy", found), found


def test_steps_have_equal_losses_on_other_ranks_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = _step_losses(_run([sys.executable, str(STEPS), "--steps", "14", "--log-every", "2"], tmp_path / "alone"))
    assert len(alone) == 7
    words = [str(STEPS), "--log-every", "2", "--checkpoint-dir", "saved", "--steps"]
    first = _step_losses(_run([*DTRAIN[:-1], "3", *words, "10"], tmp_path))
    rest = _step_losses(_run([*DTRAIN, *words, "14"], tmp_path))
    assert [*first, *rest] == alone


def _step_losses(result: Result) -> list[tuple[str, str]]:
    return re.findall(r"step +(\d+)  loss (\S+)", result.stdout)


def _train_gpt(launcher: list[str], folder: Path) -> Result:
    return _run([*launcher, str(GPT), *TINY, *SHORT, "--out", "out/gpt.pt"], folder)


def _dying(folder: Path) -> Path:
    (folder / "dying.py").write_text(DYING)
    return folder / "dying.py"


def _assert_same_losses(parts: list[Result], whole: Printed) -> None:
    """The parts of an interrupted run printed the losses of the whole one, those of repeated steps each time."""
    expected = _losses(whole.result)
    for found in map(_losses, parts):
        assert found == {name: expected[name] for name in found}
    assert {name for part in parts for name in _losses(part)} == set(expected)


def _assert_same_model(folder: Path, other: Path) -> None:
    weights, expected = (torch.load(where / "out" / "gpt.pt")["model"] for where in (folder, other))
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name])


def _run(argv: list[str], folder: Path) -> Result:
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = run_program(*argv, cwd=folder, env={"OMP_NUM_THREADS": "1", **as_root}, timeout=250)
    assert result.returncode == 0, result
    return result


def _run_plainly(
    nursery: Nursery, argv: list[str | Path], folder: Path, *, before: str = "", **variables: str
) -> Result:
    """Run a script without a launcher, in a process that has torch imported."""
    words = [str(word) for word in argv]
    text = f"import runpy, sys; sys.argv = {words}; {before}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    return nursery.program(text, folder, deadline_s=250, **variables)


def _run_well(nursery: Nursery, argv: list[str | Path], folder: Path, **variables: str) -> Result:
    result = _run_plainly(nursery, argv, folder, **variables)
    assert result.returncode == 0, result
    return result


def _losses(result: Result) -> dict[str, float]:
    """The printed losses by step: "3" is the training loss of step 3, "5 validation" the other."""
    found = re.findall(r"step +(\d+)  (?:(validation) )?loss ([\d.]+)", result.stdout)
    return {f"{step} {kind}".strip(): float(loss) for step, kind, loss in found}


def test_the_rare_nan_is_found_by_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run, replay = ([sys.executable, "-m", "launcher", name] for name in ("run", "replay"))
    options = ["--simulate", "--nnodes", "2", "--nproc-per-node", "2", "--on-nonfinite", "stop"]
    failed = run_program(*run, *options, str(NAN), cwd=tmp_path)
    assert failed.returncode == 1
    assert "NonFiniteError: in step 44, gradients of rank 2 (micro-batch 5) were infinite or NaN" in failed.stderr
    words = ["--step", "44", "--micro-batch", "5", "--pdb"]
    again = run_program(*replay, *words, cwd=tmp_path, stdin="n\np loss\np x.isnan().any(1)\nq\n")
    assert again.returncode == 0, again
    assert "before micro-batch 5 of step 44; steps 1 to 43 have the same bits" in again.stderr
    for shown in ("-> loss = nn.functional.mse_loss(model(x), y)", "tensor(nan, ", "False,  True, False"):
        assert shown in again.stdout
