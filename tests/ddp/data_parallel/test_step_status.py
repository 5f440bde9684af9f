"""A rank that fails, skips, drifts or changes its module: every rank learns it in the same step, and can go on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.nursery import Nursery

from ddp.data_parallel.buckets.step_status import HEADER_NUMEL, RankStatus, read, used_among, write


@pytest.mark.parametrize(
    ("fails_in", "said"),
    [("forward", "ValueError: a bad batch"), ("backward", "its backward pass raised"), ("hook", "its backward pass")],
)
@pytest.mark.parametrize(("views", "cap_mb"), [(False, None), (True, 1e-3), (False, 1e-6)])
def test_a_failure_on_one_rank_is_everybodys_in_the_same_step(
    nursery: Nursery, fails_in: str, said: str, views: bool, cap_mb: float | None
) -> None:
    *others, (own, _) = nursery.run(
        3, "ddp_worlds.step_status_cases:failure_is_shared", fails_in=fails_in, views=views, cap_mb=cap_mb
    )
    assert own.startswith("a bad")
    for text, took_s in others:
        assert "step 2 failed on rank 2" in text
        assert said in text
        assert took_s < 20, "what the group's own timeout of 30 s ends takes 27"


@pytest.mark.parametrize("fails_in", ["forward", "backward", "hook"])
def test_failures_change_no_bit_of_later_steps(nursery: Nursery, fails_in: str) -> None:
    nursery.run(3, "ddp_worlds.step_status_cases:failures_change_no_bit", group="gloo", fails_in=fails_in)


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("fails_in", ["inputs", "inputs, join", "module", "output", "forward, hook", "hook"])
def test_a_failure_beside_a_collective_of_forward_leaves_all_ranks_in_step(
    nursery: Nursery, fails_in: str, who: int
) -> None:
    nursery.run(3, "ddp_worlds.step_status_cases:failure_around_forward", fails_in=fails_in, who=who)


@pytest.mark.parametrize(("count", "which"), [(1, "1 other rank,"), (3, "3 other ranks,")])
def test_a_failure_without_a_reason_says_how_many_failed(nursery: Nursery, count: int, which: str) -> None:
    (text,) = nursery.run(1, "ddp_worlds.step_status_cases:failed_without_a_word", count=count)
    assert f"step 1 failed on {which} so nothing was averaged. Why is not known here: " in text


def test_a_failure_on_every_rank_leaves_them_in_step(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.step_status_cases:all_fail_and_go_on")


def test_a_skipped_backward_is_reported_in_the_next_reduction(nursery: Nursery) -> None:
    for text in nursery.run(2, "ddp_worlds.step_status_cases:skipped_backward_is_told"):
        assert "rank 1 made 1" in text
        assert "the others 0" in text
    for text in nursery.run(3, "ddp_worlds.step_status_cases:skipped_backward_is_told"):
        assert "rank 1 made 1" in text


@pytest.mark.parametrize(("kind", "parameter"), [("bit", "layers.2.weight"), ("step", "layers.0.weight")])
def test_drift_names_parameter_step_and_rank(nursery: Nursery, kind: str, parameter: str) -> None:
    for text, named, step, ranks in nursery.run(3, "ddp_worlds.step_status_cases:drift_is_named", kind=kind):
        assert (named, step, ranks) == (parameter, 5, (1,))
        assert "before step 5" in text
        assert "on rank 1 of 3" in text


def test_equal_replicas_have_equal_checksums(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.step_status_cases:no_drift_with_checksum")


@pytest.mark.parametrize(("how", "name"), [("replaced", "layers.2.weight"), ("added", "extra")])
def test_a_parameter_that_came_after_wrapping_is_refused_everywhere(nursery: Nursery, how: str, name: str) -> None:
    for text in nursery.run(2, "ddp_worlds.step_status_cases:replaced_parameter_is_refused", how=how):
        assert f"parameter '{name}' was added or replaced" in text


def test_a_pass_that_is_dropped_late_cannot_fail_the_next_one(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.step_status_cases:a_failed_pass_is_dropped_late")


def test_a_pass_that_is_dropped_in_another_thread_is_over_before_the_next_begins(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.step_status_cases:a_failed_pass_is_dropped_while_the_next_begins")


def test_a_pass_of_an_optimizer_that_is_dropped_late_cannot_fail_the_next_one(nursery: Nursery) -> None:
    nursery.run(2, "ddp_worlds.step_status_cases:a_failed_pass_of_an_optimizer_is_dropped_late")


@pytest.mark.parametrize(
    "status", [RankStatus(failed=True), RankStatus(joined=True), RankStatus(failed=True, joined=True)]
)
def test_a_rank_that_failed_or_joined_counts_as_a_user_of_no_parameter(status: RankStatus) -> None:
    written = torch.full((HEADER_NUMEL + 3,), 99.0)
    write(status, written, ())
    assert written[HEADER_NUMEL:].tolist() == [0, 0, 0]
    assert used_among(written, [0, 1, 2]) == frozenset()


def test_digests_that_differ_in_one_bit_differ() -> None:
    for bit in range(48):
        sums = torch.zeros(HEADER_NUMEL)
        for digest in (0, 1 << bit):
            mine = torch.empty_like(sums)
            write(RankStatus(digest=digest, hashed=True, hash=digest), mine, ())
            sums += mine
        assert not read(sums, 2).same_digest, bit
        assert not read(sums, 2).same_hash, bit


def test_sums_over_4000_ranks_are_exact() -> None:
    """The largest digits in float32: equal digests stay equal, and one rank that differs by the least is seen."""
    most, other = torch.empty(HEADER_NUMEL), torch.empty(HEADER_NUMEL)
    write(RankStatus(digest=(1 << 48) - 1, number=63, open_forwards=63, steps=63), most, ())
    write(RankStatus(digest=(1 << 48) - 2, number=62, open_forwards=62, steps=62), other, ())
    sums = torch.zeros(HEADER_NUMEL)
    for _ in range(3999):
        sums += most
    same, different = read(sums + most, 4000), read(sums + other, 4000)
    assert (same.same_digest, same.same_number, same.same_forwards, same.same_steps) == (True,) * 4
    assert (different.same_digest, different.same_number, different.same_forwards, different.same_steps) == (False,) * 4
    assert HEADER_NUMEL == 49  # what travels: 17 numbers, twice 8 digits of 6 bits, and their squares


_statuses = st.builds(
    RankStatus,
    failed=st.booleans(),
    joined=st.just(False),
    weight=st.none() | st.integers(0, 1000).map(float),
    open_forwards=st.integers(0, 3),
    unfrozen=st.integers(0, 2),
    digest=st.integers(0, (1 << 48) - 1) | st.just(5),
    steps=st.integers(0, 2),
    kept=st.booleans(),
    emptied=st.booleans(),
    nonfinite=st.booleans(),
    warned=st.booleans(),
    hashed=st.just(True),
    hash=st.integers(0, (1 << 48) - 1) | st.just(5),
)


@settings(deadline=None)
@given(ranks=st.lists(_statuses, min_size=1, max_size=40), joined=st.integers(0, 3), dtype=st.sampled_from([0, 1]))
def test_every_rank_reads_what_all_have_said(ranks: list[RankStatus], joined: int, dtype: int) -> None:
    everybody = [*ranks, *[RankStatus(joined=True, steps=7, kept=True, emptied=True)] * joined]
    sums = torch.zeros(HEADER_NUMEL + 3, dtype=(torch.float32, torch.float64)[dtype])
    for rank, status in enumerate(everybody):
        mine = torch.full_like(sums, 99.0)
        write(status, mine, [0] if rank else [0, 2])
        sums += mine
    statuses = read(sums, len(everybody))
    assert statuses.active == len(ranks)
    assert statuses.failed == sum(status.failed for status in ranks)
    assert statuses.weighted == sum(status.weight is not None for status in ranks)
    assert statuses.weight == sum(status.weight or 0 for status in ranks)
    assert statuses.unfrozen == sum(status.unfrozen for status in ranks)
    assert statuses.same_forwards == (len({status.open_forwards for status in ranks}) == 1)
    assert statuses.same_digest == (len({status.digest for status in ranks}) == 1)
    assert statuses.same_steps == (len({status.steps for status in ranks}) == 1)
    assert statuses.hashed == len(ranks)
    assert statuses.same_hash == (len({status.hash for status in ranks}) == 1)
    kept, emptied = (any(getattr(status, name) for status in ranks) for name in ("kept", "emptied"))
    assert statuses.same_start == (not (kept and emptied))
    assert statuses.nonfinite == sum(status.nonfinite for status in ranks)
    assert statuses.warned == sum(status.warned for status in ranks)
    if not any(status.failed for status in ranks):
        assert used_among(sums, [0, 1, 2]) == ({1, 2} if len(ranks) > 1 else {1})
