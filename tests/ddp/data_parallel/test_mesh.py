"""Data parallelism with other kinds of parallelism: along one dimension of a mesh, or not at all and with an error."""

from __future__ import annotations

import pytest
from testbed.nursery import Nursery


@pytest.mark.parametrize("case", ["replicas_along_one_dimension_are_exact", "distributed_tensors_are_refused_by_all"])
def test_two_by_two_ranks(nursery: Nursery, case: str) -> None:
    nursery.run(4, f"ddp_worlds.mesh_cases:{case}")
