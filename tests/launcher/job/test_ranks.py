"""The table of ranks: a rank has one state, and all that is asked of the table follows from the rows."""

from hypothesis import given
from hypothesis import strategies as st
from testbed.present import present

from launcher.job.failures.failure import Failure, FailureKind
from launcher.job.ranks import ENDED, JOINS, MAKE_UP, Ranks, RankState
from launcher.placement.placement import HostOffer, WorkerPlace, place
from launcher.protocol.reports import Exited

FAILURE = Failure(kind=FailureKind.EXITED, host="a", at=5.0, ran_s=5.0, rank=0, status=7)
EXITED = Exited(0, 1, 1, 0, 1.0, False, "", None, None, 0.0)


def workers(*hosts: str) -> tuple[WorkerPlace, ...]:
    return place([HostOffer(host, 2, (), False, "", (0,), 1) for host in hosts], nproc=None).workers


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(RankState), st.booleans()), max_size=30))
def test_every_answer_follows_from_the_rows(moves: list[tuple[int, RankState, bool]]) -> None:
    ranks = Ranks(workers("a", "b"))
    rows = {row.number: row for row in ranks}
    for number, state, awaited in moves:
        if rows[number].state is not RankState.GONE:
            ranks.move(rows[number], state, FAILURE if awaited else None)
    states = [row.state for row in rows.values()]
    assert {state: ranks.count(state) for state in RankState} == {state: states.count(state) for state in RankState}
    assert list(ranks) == [row for row in rows.values() if row.state in MAKE_UP]
    assert ranks.on("a") == [row for row in (rows[0], rows[1]) if row.state in MAKE_UP]
    assert {row.number for row in ranks.awaited} == {number for number, row in rows.items() if row.is_awaited}
    assert {row.number for row in ranks.of(*ENDED)} == {number for number, row in rows.items() if row.state in ENDED}
    joining = {row.host for row in rows.values() if row.state in JOINS}
    assert {*ranks.by_host(*JOINS)} == joining
    over = (RankState.DONE, RankState.LEFT_OUT, *JOINS, RankState.LEAVING, RankState.GONE)
    assert ranks.finished is all(state in over for state in states)


def test_a_host_reports_its_own_ranks_only() -> None:
    ranks = Ranks(workers("a", "b"))
    assert present(ranks.get(1, "a")).host == "a"
    assert (ranks.get(1, "b"), ranks.get(4)) == (None, None)


def test_a_number_that_another_worker_gets_counts_as_restarted() -> None:
    ranks = Ranks(workers("a", "b"))
    lost = present(ranks.get(2))
    ranks.move(lost, RankState.DONE, exited=EXITED, at=3.0)
    for row in ranks.on("b"):
        ranks.move(row, RankState.LOST, FAILURE)
    assert ranks.lost_hosts == {"b": FAILURE}
    starts = ranks.compose(workers("a", "c"), FAILURE)
    assert [(row.number, row.host, row.restarts, row.is_awaited) for row in starts] == [
        (2, "c", 1, True), (3, "c", 1, True),
    ]  # fmt: skip
    assert ranks.lost_hosts == {}
    assert [row.worker for row in ranks] == [*workers("a", "c")], "those that stay have their new places"
    assert ranks.exits() == {2: EXITED}
    assert (ranks.on("b"), present(ranks.get(0)).restarts) == ([], 0)
    ranks.move(starts[0], RankState.RUNNING)
    ranks.move(starts[0], RankState.WAITING)
    ranks.move(starts[0], RankState.RESTARTING)
    assert [ranks.restarts_of(number) for number in (2, 0, 9, None)] == [2, 0, 0, 0]
