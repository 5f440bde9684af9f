"""The plan of the buckets: every gradient travels once, in an order that all share, and the step status is last."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from testbed.present import present

from ddp.data_parallel.buckets.bucket_plan import BucketLimits, GradSpec, plan_buckets, slot_view, spec_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
CPU = torch.device("cpu")


def spec(index: int, rows: int, dtype: torch.dtype = torch.float32) -> GradSpec:
    return spec_of(index, torch.empty(rows, dtype=dtype))


@given(
    gradients=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), min_size=1, max_size=30),
    cap=st.integers(1, 400),
    first_cap=st.integers(1, 400),
    own=st.integers(1, 400),
)
def test_every_gradient_has_one_place_and_the_status_is_last(
    gradients: list[tuple[int, torch.dtype]], cap: int, first_cap: int, own: int
) -> None:
    specs = [spec(index, rows, dtype) for index, (rows, dtype) in enumerate(gradients)]
    plans = plan_buckets(specs, BucketLimits(cap, (first_cap,), own), status_numel=7)
    assert sorted(slot.spec.index for plan in plans for slot in plan.slots) == list(range(len(specs)))
    *others, last = plans
    assert not last.is_own
    assert last.status_numel == 7
    assert last.dtype in (torch.float32, torch.float64)
    assert all(plan.status_numel == 0 for plan in others)
    assert all(plan.slots for plan in others)
    for plan in plans:
        taken = [0] * plan.numel
        for slot in plan.slots:
            assert (slot.spec.flat_dtype, slot.spec.device) == (plan.dtype, plan.device)
            for element in range(slot.offset, slot.offset + slot.spec.flat_numel):
                taken[element] += 1
        assert max(taken, default=0) <= 1
        assert taken.count(0) <= len(plan.slots)  # alignment of complex numbers
        assert not plan.is_own or len(plan.slots) == 1


def test_buckets_are_sent_in_the_order_of_completion() -> None:
    specs = [spec(index, 10) for index in range(10)]
    plans = plan_buckets(specs, BucketLimits(cap_bytes=120, first_caps_bytes=(40,), own_bytes=1000), status_numel=1)
    assert [[slot.spec.index for slot in plan.slots] for plan in plans] == [[0], [1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_a_large_gradient_travels_alone_before_small_ones() -> None:
    specs = [spec(0, 1), spec(1, 500), spec(2, 1)]
    own, flat = plan_buckets(
        specs, BucketLimits(cap_bytes=1000, first_caps_bytes=(1000,), own_bytes=1000), status_numel=1
    )
    assert (own.is_own, [slot.spec.index for slot in own.slots]) == (True, [1])
    assert [slot.spec.index for slot in flat.slots] == [0, 2]


def test_without_small_gradients_the_step_status_travels_alone() -> None:
    *_, last = plan_buckets(
        [spec(0, 500)], BucketLimits(cap_bytes=1000, first_caps_bytes=(1000,), own_bytes=1000), status_numel=1
    )
    assert (last.slots, last.numel, last.status_numel) == ((), 0, 1)


def test_views_have_the_layout_that_autograd_gives() -> None:
    parameters = [
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 6)[:, ::2],
        torch.randn(()),
        torch.randn(0, 2),
        torch.randn(3, 2, dtype=torch.complex64),
    ]
    specs = [spec_of(index, parameter) for index, parameter in enumerate(parameters)]
    for plan in plan_buckets(specs, BucketLimits(1 << 20, (), 1 << 20), status_numel=1):
        flat = torch.zeros(plan.numel)
        for slot in plan.slots:
            leaf = parameters[slot.spec.index].detach().requires_grad_()
            leaf.abs().sum().backward()
            view = slot_view(flat, slot)
            assert (view.shape, view.dtype, view.stride()) == (leaf.shape, leaf.dtype, present(leaf.grad).stride())
