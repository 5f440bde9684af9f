"""Scripts of libraries resume after a restart by the lines that ddp/README.md shows."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from testbed.require import require
from testbed.resumes import assert_resumes


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("library", "dies_at", "resumes_at"),
    [
        ("accelerate", "2", "2"),  # epochs
        ("lightning", "2", "2"),
        ("transformers", "6", "4"),  # steps; it saves every 4
    ],
)
def test_a_killed_run_resumes_after_a_restart(library: str, dies_at: str, resumes_at: str, tmp_path: Path) -> None:
    require(find_spec(library), library, "scripts/test --full")
    assert_resumes(library, dies_at, resumes_at, tmp_path)
