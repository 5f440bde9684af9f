"""What torch.distributed promises on the CPU, by each backend: one world for all cases."""

from __future__ import annotations

import pytest
from ddp_worlds.nursery import Nursery

BACKENDS = ["gloo", "shm"]
SIZES = [2, 3]


def _names() -> list[str]:
    from ddp_worlds.collective_cases import CASES

    return list(CASES)


@pytest.fixture(scope="module", params=[(backend, size) for backend in BACKENDS for size in SIZES], ids=str)
def said(request: pytest.FixtureRequest, nursery: Nursery) -> list[dict[str, str]]:
    """What went wrong in each case, by rank."""
    backend, size = request.param
    found: list[dict[str, str]] = nursery.run(
        size, "ddp_worlds.collective_cases:run_cases", backend=backend, deadline_s=180.0
    )
    return found


@pytest.mark.parametrize("name", _names())
def test_collective(said: list[dict[str, str]], name: str) -> None:
    wrong = [f"rank {rank}:\n{each[name]}" for rank, each in enumerate(said) if each[name]]
    assert not wrong, "\n".join(wrong)
