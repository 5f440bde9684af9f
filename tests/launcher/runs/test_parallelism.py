"""Sharded and tensor-parallel training runs under dtrain as under torchrun, to the numbers of one process."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from testbed import REPOSITORY
from testbed.processes import Result, run_dtrain, run_program

PROGRAM = REPOSITORY / "tests/programs/parallel_meshes.py"
LIMIT_S = 250.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
KINDS = ["alone", "fsdp", "hsdp", "tensor_parallel", "tensor_parallel_and_fsdp"]

pytestmark = pytest.mark.timeout(600)


def test_every_kind_of_parallelism_trains_as_under_torchrun(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(PROGRAM)]
    expected = _results(run_program(sys.executable, *words, cwd=tmp_path, env=ENVIRONMENT, timeout=LIMIT_S))
    hosts = ["--simulate", "--nnodes", "2", "--nproc-per-node", "2"]
    found = _results(run_dtrain("run", *hosts, PROGRAM, cwd=tmp_path, env=ENVIRONMENT, timeout=LIMIT_S))
    assert found == expected
    assert list(found) == KINDS
    assert all(numbers == found["alone"] for numbers in found.values())


def _results(result: Result) -> Mapping[str, set[str]]:
    """What the ranks printed, which must be the same on all four: the numbers by kind."""
    assert result.returncode == 0, result
    lines = re.findall(r"\bresult (\w+) ([^\n]*)", result.stdout)
    assert len(lines) == 4 * len(KINDS), result
    return {kind: {numbers for name, numbers in lines if name == kind} for kind in sorted({name for name, _ in lines})}
