"""Who waits in init_process_group, by two looks at all ranks."""

from testbed.present import present

from launcher.hangs.watch import HangPolicy, MeetingWatch
from launcher.protocol.reports import Evidence

TORCH = "/site-packages/torch/distributed"
OWN = '  File "/home/me/train.py", line 7 in main\n'
WAITS = f'  File "{TORCH}/distributed_c10d.py", line 2 in init_process_group\n{OWN}'
CONNECTS = f'  File "{TORCH}/rendezvous.py", line 1 in _create_c10d_store\n{WAITS}'


def look(*stacks: str) -> list[Evidence]:
    return [
        Evidence(1, 0, rank, 100 + rank, "S", "", 1, 0.0, f"Thread 0x1 (most recent call first):\n{stack}")
        for rank, stack in enumerate(stacks)
    ]


def test_looks_become_rarer_and_end_with_torch_s_own_limit() -> None:
    watch = MeetingWatch(HangPolicy())
    assert [now for now in range(10_000) if watch.wants_look(now)] == [30, 60, 120, 240, 480, 960]


def test_who_waits_at_two_looks_is_reported_once() -> None:
    watch = MeetingWatch(HangPolicy())
    assert watch.looked(look(CONNECTS, OWN, WAITS, ""), range(5), 30.0) is None
    waiting = present(watch.looked(look(CONNECTS, OWN, CONNECTS, ""), range(5), 60.0))
    assert (waiting.ranks, waiting.connecting, waiting.waited_s) == ((0, 2), (0, 2), 30.0)
    assert (waiting.absent, waiting.unknown, waiting.ended) == ((1,), (3,), (4,))
    assert not any(watch.wants_look(now) for now in range(10_000))


def test_who_has_just_come_has_not_waited() -> None:
    watch = MeetingWatch(HangPolicy())
    assert watch.looked(look(WAITS, OWN, OWN), range(3), 30.0) is None
    waiting = present(watch.looked(look(WAITS, CONNECTS, OWN), range(3), 60.0))
    assert (waiting.ranks, waiting.connecting, waiting.absent) == ((0,), (), (2,))


def test_when_the_last_one_has_just_come_no_one_is_reported() -> None:
    watch = MeetingWatch(HangPolicy())
    assert watch.looked(look(WAITS, OWN), range(2), 30.0) is None
    assert watch.looked(look(WAITS, WAITS), range(2), 60.0) is None
    waiting = present(watch.looked(look(WAITS, WAITS), range(2), 90.0))
    assert (waiting.ranks, waiting.absent) == ((0, 1), ())


def test_who_begins_to_wait_late_is_looked_at_again_soon() -> None:
    watch = MeetingWatch(HangPolicy())
    looks = []
    for now in range(10_000):
        if watch.wants_look(now):
            looks.append(now)
            if watch.looked(look(WAITS if now >= 500 else OWN, OWN), range(2), now):
                break
    assert looks == [30, 60, 120, 240, 480, 960, 990]


def test_a_look_without_an_answer_changes_nothing() -> None:
    watch = MeetingWatch(HangPolicy())
    assert watch.looked(look(WAITS, OWN), range(2), 30.0) is None
    assert watch.looked((), range(2), 60.0) is None
    assert watch.looked(look(WAITS, OWN), range(2), 120.0) is not None


def test_a_process_in_the_place_of_one_that_waited_has_not() -> None:
    watch = MeetingWatch(HangPolicy())
    assert watch.looked(look(OWN, WAITS), range(2), 30.0) is None
    assert watch.looked(look(WAITS, OWN), range(2), 60.0) is None


def test_once_a_step_is_made_no_one_looks() -> None:
    watch = MeetingWatch(HangPolicy())
    watch.end()
    assert not watch.wants_look(60.0)
