"""What else works in a resilient function: several models, torch's wrapper, Horovod's style, LocalSGD, checkpoints."""

from pathlib import Path

import pytest
from testbed.resilient import run, said

SCRIPT = Path(__file__).parents[2] / "ddp_worlds" / "resilient_kinds.py"


@pytest.mark.parametrize(
    ("kind", "failures"),
    [
        ("adversarial", ("1.2.critic", "0.4.generator", "1.7.backward", "0.9.save", "0.12.saved")),
        ("torch", ("1.2.forward", "0.4.backward", "1.9.step", "0.11.commit")),
        ("horovod", ("1.2.forward1", "0.4.backward", "1.9.step")),
    ],
)
def test_failures_change_no_bit(tmp_path: Path, kind: str, failures: tuple[str, ...]) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    expected = said(run(SCRIPT, undisturbed, kind), "result")
    result = run(SCRIPT, disturbed, kind, *failures, restarts=len(failures))
    assert result.returncode == 0, result
    assert {each.name for each in disturbed.iterdir()} >= {*failures}, "each rank failed where it was to"
    assert result.stderr.count("only this worker restarts") == len(failures), result.stderr
    assert said(result, "result") == expected
    assert expected.keys() == {0, 1}


def test_replicas_that_step_by_themselves_go_on_equal(tmp_path: Path) -> None:
    result = run(SCRIPT, tmp_path, "local", "1.4.backward", "0.7.forward", restarts=2)
    assert result.returncode == 0, result  # its ranks compare their weights at the end
    assert result.stderr.count("only this worker restarts") == 2, result.stderr
    assert said(result, "result").keys() == {0, 1}
