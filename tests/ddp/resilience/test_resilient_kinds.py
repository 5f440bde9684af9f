"""What else works in a resilient function: several models, torch's wrapper, Horovod's style, LocalSGD, checkpoints."""

from pathlib import Path

import pytest
from testbed.resilient import run, said

pytestmark = pytest.mark.usefixtures("warm")
SCRIPT = Path(__file__).parents[2] / "programs" / "resilient_kinds.py"


@pytest.mark.parametrize(
    ("kind", "ranks", "failures"),
    [
        ("adversarial", 2, ("1.2.critic", "0.4.generator", "1.7.backward", "0.9.save", "0.12.saved")),
        ("torch", 2, ("1.2.forward", "0.4.backward", "1.9.step", "0.11.commit")),
        # With three ranks, gloo's order of sums depends on the buckets.
        ("horovod", 3, ("1.1.forward1", "2.4.backward", "1.9.step")),
        ("unfreezing", 3, ("1.3.backward", "0.5.forward", "2.9.backward")),
        ("inside", 2, ("1.2.forward", "0.4.backward")),
    ],
)
def test_failures_change_no_bit(tmp_path: Path, kind: str, ranks: int, failures: tuple[str, ...]) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    backend = "" if ranks == 2 else "gloo"
    expected = said(run(SCRIPT, undisturbed, kind, ranks=ranks, backend=backend), "result")
    result = run(SCRIPT, disturbed, kind, *failures, ranks=ranks, restarts=len(failures), backend=backend)
    assert {each.name for each in disturbed.iterdir()} >= {*failures}, "each rank failed where it was to"
    assert result.stderr.count("only this worker restarts") == len(failures), result.stderr
    assert said(result, "result") == expected
    assert expected.keys() == {*range(ranks)}
    assert said(result, "left") == dict.fromkeys(range(ranks), "[]"), (
        "models and the State go with their last reference"
    )


def test_replicas_that_step_by_themselves_go_on_equal(tmp_path: Path) -> None:
    result = run(SCRIPT, tmp_path, "local", "1.4.backward", "0.7.forward", restarts=2)
    assert result.returncode == 0, result  # its ranks compare their weights at the end
    assert result.stderr.count("only this worker restarts") == 2, result.stderr
    assert said(result, "result").keys() == {0, 1}
    assert said(result, "left") == {0: "[]", 1: "[]"}


def test_a_hand_over_that_fails_leaves_no_mixture(tmp_path: Path) -> None:
    """Of the weights of one rank and the momenta of another: no rank has a whole state then."""
    result = run(SCRIPT, tmp_path, "local", "1.4.backward", "hand-over", ranks=3, restarts=4)
    assert (tmp_path / "handed over").exists()
    assert "attempt 1 begins" in result.stderr, result.stderr


def test_central_storage_is_refused_with_what_to_do(tmp_path: Path) -> None:
    result = run(SCRIPT, tmp_path, "central", restarts=0, code=1)
    assert "UnsupportedError: central storage in a resilient function" in result.stderr
    assert 'Take strategy "all_reduce"' in result.stderr


def test_a_broadcast_model_outside_of_the_state_starts_all_again(tmp_path: Path) -> None:
    """It would not come back."""
    result = run(SCRIPT, tmp_path, "foreign", "1.4.forward", restarts=3)
    assert "a Tensor was broadcast before the resilient function, and its ddp.State does not hold it" in result.stderr
    assert "attempt 1 begins" in result.stderr


def test_a_checkpoint_before_the_commit_is_refused(tmp_path: Path) -> None:
    result = run(SCRIPT, tmp_path, "uncommitted", restarts=0, code=1)
    assert "ArgumentError: checkpoint.save() between optimizer.step() and state.commit()" in result.stderr
