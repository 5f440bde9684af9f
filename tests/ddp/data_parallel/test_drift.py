"""Replicas that would differ are reported on every rank, and what keeps them equal is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testbed.nursery import Nursery

from ddp.comm.fingerprint import Digest


@pytest.mark.parametrize("who", [[0, 1], [1]])
def test_an_optimizer_that_steps_in_a_hook_before_the_average_is_an_error(nursery: Nursery, who: list[int]) -> None:
    reported = nursery.run(2, "ddp_worlds.drift_cases:optimizer_steps_in_a_hook", who=who)
    for rank, (kind, text) in enumerate(reported):
        assert kind == ("BackwardError" if rank in who else "PeerFailedError")
        assert "SGD stepped 'layers." in text
        assert "within backward, before its gradient was averaged" in text


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("no_sync", "DriftError", "stepped 1 time on rank 0, 2 times on rank 1"),
        ("twice", "BackwardError", "rank 0 began this backward pass with the averaged gradients of the last one"),
        ("twice, by hand", "BackwardError", "rank 0 began this backward pass with the averaged gradients"),
        ("empties", "BackwardError", "still in .grad, and rank 1 without"),
    ],
)
def test_a_step_of_one_rank_is_an_error_of_all(nursery: Nursery, how: str, kind: str, said: str) -> None:
    for reported in nursery.run(2, "ddp_worlds.drift_cases:one_rank_steps_alone", how=how):
        assert reported[0] == kind
        assert said in reported[1]


@pytest.mark.parametrize("static_graph", [False, True])
def test_what_keeps_replicas_equal_is_no_error(nursery: Nursery, static_graph: bool) -> None:
    nursery.run(2, "ddp_worlds.drift_cases:what_is_right_goes_on", static_graph=static_graph)


def test_replicas_are_compared_on_demand_and_before_a_save(nursery: Nursery, tmp_path: Path) -> None:
    first, *others = nursery.run(2, "ddp_worlds.drift_cases:compared_on_demand", folder=str(tmp_path))
    assert others == [first]
    buffers, state, *weights = first
    assert buffers.startswith("buffer 1.running_mean: ")
    assert state.startswith("exp_avg of 0.layers.2.weight: ")
    names = [text.partition(":")[0] for text in weights]
    assert names == ["0.layers.2.weight", "0.0.layers.2.weight", "0.layers.2.weight"]
    assert "first parameter that differs, on rank 1 of 2" in weights[0]
    assert ["check_replicas=False" in text for text in weights] == [False, False, True]


def test_a_save_does_not_compare_replicas_that_a_hook_lets_differ(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, "ddp_worlds.drift_cases:saved_with_a_hook_that_averages_nothing", folder=str(tmp_path))


def test_an_optimizer_whose_step_has_raised_hides_no_other_after_the_next_pass(nursery: Nursery) -> None:
    for reported in nursery.run(2, "ddp_worlds.drift_cases:one_rank_steps_alone_after_a_step_that_raised"):
        assert reported[0] == "DriftError"
        assert "stepped 1 time on rank 0, 2 times on rank 1" in reported[1]


_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.complex64]


@given(st.lists(st.tuples(st.sampled_from(_DTYPES), st.integers(0, 40)), min_size=1, max_size=6), st.data())
def test_a_digest_changes_with_each_bit_and_with_the_order(
    forms: list[tuple[torch.dtype, int]], data: st.DataObject
) -> None:
    tensors = [torch.zeros(count, dtype=dtype) for dtype, count in forms]
    digest = Digest(tensors)
    before = digest.start()()
    assert before == Digest([tensor.clone() for tensor in tensors]).start()()
    flat = [tensor.view(torch.uint8) if tensor.numel() else tensor for tensor in tensors]
    if not any(tensor.numel() for tensor in tensors):
        return
    which = data.draw(st.sampled_from([index for index, tensor in enumerate(tensors) if tensor.numel()]))
    at = data.draw(st.integers(0, len(flat[which]) - 1))
    bit = 0 if tensors[which].dtype == torch.bool else data.draw(st.integers(0, 7))
    flat[which][at] ^= 1 << bit
    assert digest.start()() != before
    assert digest.start()() % ((1 << 48) - 59) != before % ((1 << 48) - 59)


@pytest.mark.parametrize("shape", [(3, 100_000), (20_000,), (130, 2, 9_001)])
def test_a_digest_of_large_tensors_sees_their_last_bit_and_their_order(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    views = [tensor, tensor.view(-1)[3:], tensor.transpose(0, -1), torch.randn(20_000)]
    before = Digest(views).start()()
    assert before != Digest(views[::-1]).start()()
    assert before == Digest([view.contiguous() for view in views]).start()()
    tensor.view(-1).view(torch.int32)[-1] ^= 1
    assert before != Digest(views).start()()
