"""What ranks say to each other in a step, as numbers that are added up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp.data_parallel.buckets.step_status import HEADER_NUMEL, RankStatus, read, used_among, write


@pytest.mark.parametrize(
    "status", [RankStatus(failed=True), RankStatus(joined=True), RankStatus(failed=True, joined=True)]
)
def test_a_rank_that_failed_or_joined_uses_no_parameter(status: RankStatus) -> None:
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
