"""What the live readers of a run's times get."""

from launcher.timeline.records import NEWEST, Record, Span, StepTimes, Timeline


def _step(rank: int, step: int) -> StepTimes:
    return StepTimes(0, rank, step, 1, float(step), (0.0, 1.0, 0.0, 0.0, 0.0, 0.0))


def test_every_subscriber_gets_every_record_in_order() -> None:
    timeline, first, second = Timeline(), list[Record](), list[Record]()
    timeline.subscribe(first.append)
    timeline.subscribe(second.append)
    records: list[Record] = [_step(1, 1), Span(0, 1, "save", 1.0, 2.0), _step(0, 1)]
    for record in records:
        timeline.add(record)
    assert first == second == records


def test_only_the_newest_steps_of_each_rank_are_kept() -> None:
    timeline = Timeline()
    for step in range(NEWEST + 5):
        timeline.add(_step(3, step))
    assert [times.step for times in timeline.newest(3)] == [*range(5, NEWEST + 5)]
    assert timeline.newest(0) == []
    timeline.begin_attempt()
    assert timeline.newest(3) == []
