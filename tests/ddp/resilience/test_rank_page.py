"""What a process has left in the page of its rank is what its successor finds there."""

import contextlib
import itertools
import random
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from testbed.interrupts import Died, Interrupt

from ddp import rng
from ddp.errors import ReplacementError, UnsupportedError
from ddp.resilience.rank_page import RankPage


def drawn() -> list[float]:
    """What each generator draws next, from both of its kinds of numbers."""
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    return [*numbers, torch.rand(1).item(), torch.randn(1).item()]


def _is_in_the_page(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith("rank_page.py")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Buffers of a model, whose page is a file."""
    path = tmp_path / "page"
    path.touch()
    monkeypatch.setenv("DTRAIN_STATE_FILE", str(path))
    return [torch.arange(5.0), torch.tensor(7), torch.empty(0, 3)]


@pytest.mark.parametrize("draws", [0, 1, 2, 3])
def test_a_successor_goes_on_with_the_same_numbers_and_buffers(page: list[torch.Tensor], draws: int) -> None:
    first = RankPage(lambda: page, lambda: b"its own")
    for step in range(4):
        for _ in range(draws):
            drawn()
            np.random.randn()
        page[0] += 1
        first.sent(step)
        first.commit(step)
        found = RankPage(lambda: page, None).at(step)
        assert found is not None
        state, own = found
        assert own == b"its own"
        after = drawn()
        rng.restore(state)
        assert drawn() == after
    assert RankPage(lambda: page, None).at(1) is None  # the records of steps 2 and 3 are there instead
    page[0].zero_()
    page[1].zero_()
    RankPage(lambda: page, None).restore_buffers(3)
    assert page[0].tolist() == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert int(page[1]) == 7


def test_a_commit_that_a_signal_interrupts_can_be_repeated(page: list[torch.Tensor]) -> None:
    """At each line of it."""
    first = RankPage(lambda: page, None)
    for line in itertools.count(1):
        drawn(), drawn()  # NumPy keeps no number of a pair then, and its state need not be read twice
        interrupt = Interrupt(line, _is_in_the_page)
        with contextlib.suppress(Died), interrupt:
            first.commit(0)
        assert torch.is_grad_enabled(), line
        first.commit(0)
        found = RankPage(lambda: page, None).at(0)
        assert found is not None
        expected = drawn()
        rng.restore(found[0])
        assert drawn() == expected, line
        if not interrupt.has_come:
            break
    assert line > 30


def test_what_was_there_when_gradients_left_is_kept(page: list[torch.Tensor]) -> None:
    first = RankPage(lambda: page, None)
    first.commit(0)
    first.sent(1)
    expected = drawn()
    found = RankPage(lambda: page, None).at(1)
    assert found is not None
    rng.restore(found[0])
    assert drawn() == expected


def test_late_buffers_are_those_of_the_commit_before(
    page: list[torch.Tensor],
) -> None:
    """They change after the gradients have left."""
    late = [torch.zeros(3), torch.tensor(1.0)]
    first = RankPage(lambda: page, None, lambda: late)
    first.commit(0)
    page[0].fill_(2.0)
    first.sent(1)
    late[0].fill_(5.0)
    found = RankPage(lambda: page, None, lambda: late)
    page[0].zero_()
    found.restore_buffers(1)
    assert page[0].tolist() == [2.0] * 5
    assert late[0].tolist() == [5.0] * 3
    assert [value.tolist() for value in found.before(1, late)] == [[0.0] * 3, 1.0]
    first.commit(1)
    found.restore_buffers(1)
    assert late[0].tolist() == [5.0] * 3
    assert found.before(1, late) == []


def test_what_is_a_rank_s_own_may_take_up_to_1_mib(page: list[torch.Tensor]) -> None:
    own = bytes(range(256)) * 4096
    first = RankPage(lambda: page, lambda: own)
    first.commit(3)
    found = RankPage(lambda: page, None).at(3)
    assert found is not None
    assert found[1] == own
    own += b"."
    with pytest.raises(UnsupportedError, match=r"1048577 bytes.*resilient=False"):
        first.commit(4)
    assert RankPage(lambda: page, None).at(4) is None


def test_a_buffer_that_is_assigned_again_comes_back(page: list[torch.Tensor]) -> None:
    first = RankPage(lambda: list(page), None)
    page[0] = torch.full((5,), 3.0)
    first.commit(0)
    page[0] = torch.zeros(5)
    first.restore_buffers(0)
    assert page[0].tolist() == [3.0] * 5
    page[0].resize_(6)
    first.commit(1)
    page[0] = torch.zeros(5)
    for one in (first, RankPage(lambda: list(page), None)):
        with pytest.raises(ReplacementError, match="another shape or dtype"):
            one.restore_buffers(1)
