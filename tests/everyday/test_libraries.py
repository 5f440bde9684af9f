"""As test_scripts.py, for what needs the packages of .venv-full. Collected only where this folder is named."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from testbed import REPOSITORY
from testbed.everyday import WAYS, Script, check
from testbed.processes import run_dtrain
from testbed.require import require

SCRIPTS = [
    Script("ddp_wandb", ("wandb", "matplotlib")),
    Script("hf_trainer", ("transformers", "accelerate", "datasets")),
    Script("lightning_ddp", ("lightning",)),
    Script("accelerate_loop", ("accelerate",)),
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_its_user_sees_what_happened_and_nothing_else(script: Script, way: str, tmp_path: Path) -> None:
    check(script, way, tmp_path)


@pytest.mark.parametrize("example", ["train_digits", "train_fit", "train_horovod_style"])
def test_the_examples_train_here_too(example: str, tmp_path: Path) -> None:
    """The first command of README.md is among them."""
    require(find_spec("transformers"), "transformers", "scripts/test --everyday")
    script = REPOSITORY / f"scripts/examples/{example}.py"
    result = run_dtrain("run", "--nproc-per-node", "2", script, "--epochs", "2", cwd=tmp_path)
    assert result.returncode == 0, result
    ended = r"(dtrain: goodput .*\n)?dtrain: all 2 workers finished successfully after .*\n"
    assert re.fullmatch(ended, result.stderr), result
