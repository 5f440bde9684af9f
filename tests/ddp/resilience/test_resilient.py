"""A rank fails in training under dtrain: it alone is replaced, and the run ends with the bits of an undisturbed one."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from testbed.processes import Result, run_dtrain

SCRIPT = Path(__file__).parents[2] / "ddp_worlds" / "resilient_script.py"


def run(
    folder: Path, ranks: int, *failures: str, restarts: int = 9, backend: str = "", script: Path = SCRIPT
) -> Result:
    options = ("--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
    return run_dtrain("run", *options, script, *failures, cwd=folder, env={"DTRAIN_BACKEND": backend})


def said(result: Result, word: str) -> dict[int, str]:
    """What each rank printed last after `word`."""
    lines = re.findall(rf"^\[\S+:(\d+)\] {word} (.*)$", result.stdout, re.MULTILINE)
    return {int(rank): text for rank, text in lines}


Results = dict[int, str]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Results]:
    """Returns the results of a run without failures."""

    @cache
    def results(ranks: int, backend: str) -> Results:
        return said(run(tmp_path_factory.mktemp("undisturbed"), ranks, backend=backend), "result")

    return results


@pytest.mark.parametrize(
    ("ranks", "backend", "failures"),
    [
        (3, "", ("1.2.forward.kill", "0.4.backward.kill", "2.6.step.kill", "0.9.commit.raise", "1.11.load.exit")),
        (3, "gloo", ("1.0.load.kill", "0.4.step.kill", "2.5.commit.kill", "1.7.forward.raise", "1.24.end.kill")),
        (2, "", ("0.0.backward.kill", "0.12.load.kill", "1.24.commit.kill", "1.36.end.kill")),
        # Rank 2 dies when its gradients are on their way; rank 0 has stepped with them, rank 1 has not.
        (3, "", ("2.5.backward.kill", "1.5.backward.hear")),
    ],
)  # fmt: skip
def test_failures_change_no_bit(
    tmp_path: Path, undisturbed: Callable[[int, str], Results], ranks: int, backend: str, failures: tuple[str, ...]
) -> None:
    result = run(tmp_path, ranks, *failures, restarts=len(failures), backend=backend)
    assert result.returncode == 0, result
    assert {each.name for each in tmp_path.iterdir()} >= {*failures}, "each rank failed where it was to"
    assert said(result, "result") == undisturbed(ranks, backend)
    replaced = [failure for failure in failures if not failure.endswith("hear")]
    assert result.stderr.count("only this worker restarts") == len(replaced), result.stderr
    assert said(result, "entered").keys() == {*range(ranks)}


def test_collectives_before_the_function_let_all_start_again(tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    text = SCRIPT.read_text()
    script.write_text(text.replace("entered = 0\n", "entered = 0\ndist.barrier()\n"))
    result = run(tmp_path, 2, "1.2.forward.kill", restarts=3, script=script)
    assert result.returncode == 0, result
    assert "barrier() before the function of @ddp.resilient: this process replaces rank 1" in result.stderr
    assert "attempt 1" in result.stderr
    assert said(result, "result").keys() == {0, 1}


def test_a_second_resilient_function_lets_all_start_again(tmp_path: Path) -> None:
    script = tmp_path / "twice.py"
    text = SCRIPT.read_text()
    script.write_text(text.replace("said = train(state)\n", "train(state)\nstate.epoch = 0\nsaid = train(state)\n"))
    result = run(tmp_path, 2, "0.50.forward.kill", restarts=3, script=script)
    assert result.returncode == 0, result
    assert "comes to the first such function of the script only" in result.stderr
