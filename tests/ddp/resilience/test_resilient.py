"""A rank fails in training under dtrain: it alone is replaced, and the run ends with the bits of one without failures."""

import re
from pathlib import Path

import pytest
from testbed.processes import Result, run_dtrain

SCRIPT = Path(__file__).parents[2] / "ddp_worlds" / "resilient_script.py"


def run(folder: Path, ranks: int, *failures: str, restarts: int = 9, backend: str = "", script: Path = SCRIPT) -> Result:
    options = ("--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
    return run_dtrain("run", *options, script, *failures, cwd=folder, env={"DTRAIN_BACKEND": backend})


def said(result: Result, word: str) -> dict[int, str]:
    """What each rank printed last after `word`."""
    lines = re.findall(rf"^\[\S+:(\d+)\] {word} (.*)$", result.stdout, re.MULTILINE)
    return {int(rank): text for rank, text in lines}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[int, str]]:
    """The results of runs without failures, by the number of ranks."""
    results = {ranks: run(tmp_path_factory.mktemp("undisturbed"), ranks) for ranks in (2, 3)}
    return {ranks: said(result, "result") for ranks, result in results.items()}


@pytest.mark.parametrize(
    ("ranks", "backend", "failures"),
    [
        (3, "", ("1.2.forward.kill", "0.4.backward.kill", "2.6.step.kill", "0.9.commit.raise", "1.11.load.exit")),
        (3, "gloo", ("1.0.load.kill", "0.4.step.kill", "2.5.commit.kill", "1.7.forward.raise", "1.24.end.kill")),
        (2, "gloo", ("0.0.backward.kill", "1.36.end.kill")),
        # Rank 2 dies when its gradients are on their way; rank 0 has stepped with them, rank 1 has not.
        (3, "", ("2.5.backward.kill", "1.5.backward.hear")),
    ],
)  # fmt: skip
def test_failures_change_no_bit(
    tmp_path: Path, undisturbed: dict[int, dict[int, str]], ranks: int, backend: str, failures: tuple[str, ...]
) -> None:
    result = run(tmp_path, ranks, *failures, restarts=len(failures), backend=backend)
    assert result.returncode == 0, result
    assert {each.name for each in tmp_path.iterdir()} >= {*failures}, "each rank failed where it was to"
    assert said(result, "result") == undisturbed[ranks]
    replaced = [failure for failure in failures if not failure.endswith("hear")]
    assert result.stderr.count("only this worker restarts") == len(replaced), result.stderr
    assert said(result, "entered").keys() == {*range(ranks)}
