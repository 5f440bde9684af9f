"""A rank dies in Trainer.fit under dtrain: it alone is replaced, and history, callbacks and weights keep their bits."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from testbed.once import once
from testbed.resilient import run, said
from testbed.slow import slow

pytestmark = pytest.mark.usefixtures("warm")
SCRIPT = Path(__file__).parents[2] / "programs" / "resilient_fit.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The results of a fit that does not go on after a failure, and has none."""
    return once(
        tmp_path_factory,
        "undisturbed fit",
        lambda: said(run(SCRIPT, tmp_path_factory.mktemp("fit"), "plain"), "result"),
    )


@pytest.mark.parametrize(
    "words",
    [
        ("1.on_step_end.5", "0.on_epoch_end.2"),
        slow(("0.on_step_begin.7", "1.on_evaluate_begin.1", "1.on_fit_end.0")),
    ],
)
def test_failures_change_no_weights_history_or_callbacks(
    tmp_path: Path, undisturbed: dict[int, str], words: Sequence[str]
) -> None:
    result = run(SCRIPT, tmp_path, *words, restarts=len(words))
    assert {each.name for each in tmp_path.iterdir()} >= {*words}, "each rank failed where it was to"
    assert result.stderr.count("only this worker restarts") == len(words), result.stderr
    assert said(result, "result") == undisturbed
    assert len(undisturbed) == 2


def test_a_rank_that_dies_in_a_micro_batch_changes_nothing_either(tmp_path: Path) -> None:
    """The other rank has counted its own micro-batch of that step."""
    results = []
    for folder, words in (("disturbed", ["1.train_step.4"]), ("undisturbed", ["plain"])):
        (tmp_path / folder).mkdir()
        result = run(SCRIPT, tmp_path / folder, "steps", *words, restarts=1)
        results.append(said(result, "result"))
        assert result.stderr.count("only this worker restarts") == (folder == "disturbed"), result.stderr
    assert results[0] == results[1]
    assert len(results[0]) == 2


def test_a_fit_that_is_not_resilient_starts_again_as_a_whole(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    result = run(SCRIPT, tmp_path, "plain", "1.on_step_begin.7", restarts=1)
    assert "attempt 1 begins" in result.stderr, result
    assert "only this worker restarts" not in result.stderr
    assert said(result, "result").keys() == undisturbed.keys()


BEGINS_LATE = """
import torch, ddp
nn, Callback = torch.nn, ddp.callbacks.Callback

class BeginsLate(Callback):
    def on_fit_begin(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count if ddp.init().rank else 0}

torch.manual_seed(1)
net = nn.Linear(6, 3)
data = torch.utils.data.TensorDataset(torch.randn(8, 6), torch.randint(3, (8,)))
trainer = ddp.Trainer(net, torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss(), callbacks=[BeginsLate()])
trainer.fit(data, epochs=1, global_batch_size=4)
print("steps", trainer.step, flush=True)
"""


def test_a_callback_without_a_state_makes_the_fit_ordinary(tmp_path: Path) -> None:
    """On one rank: the fit is an ordinary one on all."""
    script = tmp_path / "late.py"
    script.write_text(BEGINS_LATE)
    result = run(script, tmp_path)
    assert said(result, "steps") == {0: "2", 1: "2"}, result
    words = "after a failure all processes of this fit() will start again: "
    reason = "AttributeError: 'BeginsLate' object has no attribute 'count'"
    assert f"{words}{reason}" in result.stderr
    assert f"{words}rank 1: {reason}" in result.stderr
