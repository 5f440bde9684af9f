"""What users do to parameters, graphs and gradients: the same as one process with the sum of all losses, to 1e-12."""

from __future__ import annotations

import pytest
from testbed.nursery import Nursery
from testbed.programs import PROGRAMS, follow


@pytest.mark.parametrize(("at", "name"), [*enumerate(PROGRAMS)])
def test_a_program_equals_one_process(nursery: Nursery, at: int, name: str) -> None:
    """In two worlds of other sizes, so in two ways."""
    for ranks in {2 + at % 2, 1 + at % 4}:
        nursery.run(ranks, follow, names=[name])
