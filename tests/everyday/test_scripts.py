"""Scripts as people write them train under dtrain, and each failure is named, with nothing that looks wrong."""

from pathlib import Path

import pytest
from testbed.everyday import WAYS, Script, check

SCRIPTS = [
    Script("torch_tqdm"),
    Script("torch_checkpoint", restarts="all"),
    Script("ddp_tqdm", ("sklearn",)),
    Script("resilient", ("sklearn",), restarts="worker"),
    Script("trainer_fit", ("sklearn",), restarts="worker"),
    Script("late_imports"),
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_its_user_sees_what_happened_and_nothing_else(script: Script, way: str, tmp_path: Path) -> None:
    check(script, way, tmp_path)
