"""Scripts of libraries resume after a restart by the lines that ddp/README.md shows, to an undisturbed run's weights.

nanogpt needs torch alone: `pytest tests/full/test_resume.py` in the ordinary environment runs it too.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from testbed.processes import Result, run_dtrain
from testbed.require import require

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 150.0
# Sums in another order are other numbers; and nothing is to be fetched.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
NEVER = "-1"

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    ("program", "library", "dies_at", "resumes_at"),
    [
        ("nanogpt", "torch", "6", "4"),  # steps; it saves every 4
        ("accelerate", "accelerate", "2", "2"),  # epochs
        ("lightning", "lightning", "2", "2"),
        ("transformers", "transformers", "6", "4"),
    ],
)
def test_a_killed_run_resumes_after_a_restart(
    program: str, library: str, dies_at: str, resumes_at: str, tmp_path: Path
) -> None:
    require(find_spec(library), library, "scripts/test --full")
    whole = _train(program, tmp_path / "whole", NEVER)
    assert _began(whole) == ["0"] * 2
    killed = _train(program, tmp_path / "killed", dies_at)
    assert "rank 1 on " in killed.stderr
    assert "was killed by SIGKILL" in killed.stderr
    assert _began(killed) == ["0"] * 2 + [resumes_at] * 2
    assert _weights(killed) == pytest.approx(_weights(whole), abs=1e-6, rel=0)


def _train(program: str, folder: Path, dies_at: str) -> Result:
    folder.mkdir()
    words = ["--nproc-per-node", "2", "--max-restarts", "1", "-x", "OMP_NUM_THREADS", "-x", "HF_HUB_OFFLINE"]
    script = PROGRAMS / f"resume_{program}.py"
    result = run_dtrain("run", *words, script, "out", dies_at, cwd=folder, env=ENVIRONMENT, timeout=LIMIT_S)
    assert result.returncode == 0, result
    return result


def _began(result: Result) -> list[str]:
    return re.findall(r"\bresult begins at (\d+)", result.stdout)


def _weights(result: Result) -> list[float]:
    weights = re.findall(r"\bresult weights (\S+)", result.stdout)
    assert len(weights) == 2, result
    return [float(weight) for weight in weights]
