"""From what each rank recorded of its collectives follows which rank did not come to one, or came with another call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from launcher.hangs.collectives import compare, last_calls
from launcher.protocol.reports import Collective, Collectives

DONE, WAITS = True, False


def call(
    number: int, operation: str = "all_reduce", *, group: str = "default_pg", size: int = 10, done: bool = DONE,
    dtype: str = "Float",
) -> Collective:  # fmt: skip
    return Collective(group, number, operation, f"{dtype}[{size}]", size, done)


def record(*calls: Collective, groups: Sequence[str] = ("default_pg",)) -> Collectives:
    return Collectives([*groups], [*calls])


def waits(number: int, operation: str = "all_reduce", group: str = "default_pg", size: int = 10) -> Collective:
    return call(number, operation, group=group, size=size, done=WAITS)


BOTH = ("default_pg", "tp")
OTHERS = "group default_pg is not the same: "
CASES: dict[str, tuple[dict[int, Collectives], list[int], list[str]]] = {
    "all are at the same call": ({rank: record(call(1), waits(2)) for rank in range(3)}, [], []),
    "nothing was recorded": ({0: record(), 1: record()}, [], []),
    "a rank is late": (
        {0: record(call(4), waits(5)), 1: record(call(4)), 2: record(waits(5))},
        [],
        ["rank 1 has not called all_reduce 5 (Float[10]) of group default_pg; ranks 0, 2 have"],
    ),
    "a rank has called nothing": (
        {0: record(waits(1)), 1: record()},
        [],
        ["rank 1 has not called all_reduce 1 (Float[10]) of group default_pg; rank 0 has"],
    ),
    "the latest rank is named with the call that it lacks": (
        {0: record(*map(waits, (5, 6, 7))), 1: record(call(4)), 2: record(waits(5))},
        [],
        ["rank 1 has not called all_reduce 5 (Float[10]) of group default_pg; ranks 0, 2 have"],
    ),
    "no one waits for a rank that is behind": ({0: record(call(1), call(2)), 1: record(call(1))}, [], []),
    "one that was ahead has ended": (
        {0: record(call(1), call(2)), 1: record(call(1))},
        [0],
        ["rank 1 has not called all_reduce 2 (Float[10]) of group default_pg; rank 0 has"],
    ),
    "another operation": (
        {0: record(waits(7)), 1: record(waits(7, "broadcast")), 2: record(waits(7))},
        [],
        [
            f"collective 7 of {OTHERS}ranks 0, 2 called all_reduce of Float[10], rank 1 called "
            "broadcast of Float[10]"
        ],
    ),
    "another number of elements": (
        {0: record(waits(7)), 1: record(waits(7)), 2: record(waits(7, size=11))},
        [],
        [
            f"collective 7 of {OTHERS}ranks 0, 1 called all_reduce of Float[10], rank 2 called "
            "all_reduce of Float[11]"
        ],
    ),
    "another dtype": (
        {0: record(call(7, dtype="Double")), 1: record(waits(7)), 2: record(waits(7))},
        [],
        [
            f"collective 7 of {OTHERS}ranks 1, 2 called all_reduce of Float[10], rank 0 called "
            "all_reduce of Double[10]"
        ],
    ),
    "a rank that left one out comes with the next one": (
        {0: record(call(6), waits(7, size=1), waits(8)), 1: record(call(6), waits(7))},
        [],
        [
            f"collective 7 of {OTHERS}rank 0 called all_reduce of Float[1], rank 1 called "
            "all_reduce of Float[10]"
        ],
    ),
    "gather takes what each rank has": ({0: record(waits(1, "gather", size=3)), 1: record(waits(1, "gather"))}, [], []),
    "a rank waits in another group for the one that is late": (
        {
            0: record(waits(2, group="tp"), groups=BOTH),
            1: record(call(1, group="tp"), groups=BOTH),
            2: record(waits(9)),
        },
        [],
        ["rank 1 has not called all_reduce 2 (Float[10]) of group tp; rank 0 has"],
    ),
    "two wait for each other in two groups": (
        {0: record(waits(1, group="tp"), groups=BOTH), 1: record(waits(1), groups=BOTH)},
        [],
        [
            "rank 0 has not called all_reduce 1 (Float[10]) of group default_pg; rank 1 has",
            "rank 1 has not called all_reduce 1 (Float[10]) of group tp; rank 0 has",
        ],
    ),
    "a rank is in no other group": ({0: record(waits(1, group="tp"), groups=BOTH), 1: record()}, [], []),
    "many ranks": (
        {rank: record(*([waits(1)] if rank else [])) for rank in range(12)},
        [],
        [
            "rank 0 has not called all_reduce 1 (Float[10]) of group default_pg; ranks 1, 2, 3, 4, 5, 6, 7, 8, ... have"
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_the_ranks_disagree_in_is_said(case: str) -> None:
    records, ended, lines = CASES[case]
    assert list(compare(records, ended)) == lines


def test_the_last_calls_of_a_rank_are_listed() -> None:
    barrier = Collective("tp (3)", 2, "barrier", "", 0, done=False)
    assert last_calls(record(call(1), call(2), barrier), 2) == [
        "all_reduce 2 (Float[10]) of group default_pg",
        "barrier 2 of group tp (3), not done",
    ]
