"""Random faults in a realistic training cost one restart each, and no bit: scripts/bench/faults.py, with new seeds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from testbed.processes import run_program

BENCH = Path(__file__).parents[3] / "scripts" / "bench" / "faults.py"


@pytest.mark.parametrize(("faults", "epochs"), [(1, 4), (24, 10)])
@pytest.mark.timeout(600)  # a busy machine takes several times as long
def test_random_faults_cost_one_restart_each_and_no_bit(faults: int, epochs: int) -> None:
    result = run_program(sys.executable, BENCH, "--faults", str(faults), "--epochs", str(epochs), timeout=560)
    assert result.returncode == 0, result
    assert result.stdout.endswith(": 0 not as promised\n"), result.stdout
