"""Scripts of libraries resume after a restart by the lines that ddp/README.md shows, to the weights of a whole run."""

import re
from pathlib import Path

import pytest

from testbed import REPOSITORY
from testbed.processes import Result, run_dtrain

LIMIT_S = 150.0
# Sums in another order are other numbers; and nothing may be fetched.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
NEVER = "-1"


def assert_resumes(program: str, dies_at: str, resumes_at: str, folder: Path) -> None:
    """Run tests/programs/resume_PROGRAM.py undisturbed, and with rank 1 killed at `dies_at` (a step or an epoch)."""
    whole = _train(program, folder / "whole", NEVER)
    assert _began(whole) == ["0"] * 2
    killed = _train(program, folder / "killed", dies_at)
    assert "rank 1 on " in killed.stderr
    assert "was killed by SIGKILL" in killed.stderr
    assert _began(killed) == ["0"] * 2 + [resumes_at] * 2
    assert _weights(killed) == pytest.approx(_weights(whole), abs=1e-6, rel=0)


def _train(program: str, folder: Path, dies_at: str) -> Result:
    folder.mkdir()
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "-x", "OMP_NUM_THREADS", "-x", "HF_HUB_OFFLINE"]
    script = REPOSITORY / f"tests/programs/resume_{program}.py"
    result = run_dtrain("run", *options, script, "out", dies_at, cwd=folder, env=ENVIRONMENT, timeout=LIMIT_S)
    assert result.returncode == 0, result
    return result


def _began(result: Result) -> list[str]:
    return re.findall(r"\bresult begins at (\d+)", result.stdout)


def _weights(result: Result) -> list[float]:
    weights = re.findall(r"\bresult weights (\S+)", result.stdout)
    assert len(weights) == 2, result
    return [float(weight) for weight in weights]
