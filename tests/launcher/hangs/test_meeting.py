"""Who waits in init_process_group, by two looks at all ranks."""

from launcher.hangs.meeting import MeetingWatch
from launcher.hangs.watch import HangPolicy
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


def test_who_waits_at_two_looks_is_told_of_once() -> None:
    watch = MeetingWatch(HangPolicy())
    assert watch.looked(look(WAITS, OWN, OWN), 30.0) is None
    apart = watch.looked(look(WAITS, CONNECTS, OWN), 60.0)
    assert apart is not None
    assert (apart.waiting, apart.connecting, apart.waited_s) == ((0, 1), (1,), 30.0)
    assert not any(watch.wants_look(now) for now in range(10_000))


def test_a_process_that_took_the_place_of_one_that_waited_has_not_waited() -> None:
    watch = MeetingWatch(HangPolicy())
    assert watch.looked(look(OWN, WAITS), 30.0) is None
    assert watch.looked(look(WAITS, OWN), 60.0) is None


def test_once_a_step_is_made_nobody_looks() -> None:
    watch = MeetingWatch(HangPolicy())
    watch.end()
    assert not watch.wants_look(60.0)
