"""A rank dies in Trainer.fit under dtrain: it alone is replaced, and history, callbacks and weights keep their bits."""

from pathlib import Path

import pytest
from testbed.once import once
from testbed.resilient import run, said

SCRIPT = Path(__file__).parents[2] / "ddp_worlds" / "resilient_fit.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The results of a fit that does not go on after a failure, and has none."""
    return once(
        tmp_path_factory,
        "undisturbed fit",
        lambda: said(run(SCRIPT, tmp_path_factory.mktemp("fit"), "plain"), "result"),
    )


def test_failures_change_neither_weights_nor_history_nor_what_callbacks_see(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    words = ("1.on_step_end.5", "0.on_step_begin.7", "1.on_evaluate_begin.1", "0.on_epoch_end.2", "1.on_fit_end.0")
    result = run(SCRIPT, tmp_path, *words, restarts=len(words))
    assert result.returncode == 0, result
    assert {each.name for each in tmp_path.iterdir()} >= {*words}, "each rank failed where it was to"
    assert result.stderr.count("only this worker restarts") == len(words), result.stderr
    assert said(result, "result") == undisturbed
    assert len(undisturbed) == 2


def test_a_fit_that_is_told_not_to_starts_again_as_a_whole(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    result = run(SCRIPT, tmp_path, "plain", "1.on_step_begin.7", restarts=1)
    assert "attempt 1 begins" in result.stderr, result
    assert "only this worker restarts" not in result.stderr
    assert said(result, "result").keys() == undisturbed.keys()
