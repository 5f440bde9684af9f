"""What users do to parameters, graphs and gradients: the same as one process with the sum of all losses, to 1e-12."""

from __future__ import annotations

import pytest
from testbed.nursery import Nursery
from testbed.programs import PROGRAMS, follow
from testbed.slow import slow

# Each in two worlds of other sizes, so in two ways.
ONCE = [(name, 2 + at % 2) for at, name in enumerate(PROGRAMS)]
AGAIN = [(name, (1, 4, 3, 2)[at % 4]) for at, name in enumerate(PROGRAMS)]


@pytest.mark.parametrize(("name", "ranks"), [*ONCE, *(slow(*each) for each in AGAIN)])
def test_a_program_equals_one_process(nursery: Nursery, name: str, ranks: int) -> None:
    nursery.run(ranks, follow, names=[name])
