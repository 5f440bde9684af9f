"""Deadlines in one table: what is next, what is due, and a time in which no one listened."""

from launcher.job.timers import NEVER, Timer, Timers


def test_the_next_deadline_is_the_first_that_no_tick_has_seen() -> None:
    timers = Timers()
    assert timers.next_deadline() == NEVER
    timers.set(Timer.PHASE, 20.0)
    timers.set((Timer.RESTART, 3), 10.0)
    assert timers.next_deadline() == 10.0
    assert timers.due(9.9) == frozenset()
    assert timers.due(10.0) == {(Timer.RESTART, 3)}
    assert timers.next_deadline() == 20.0
    assert timers.over((Timer.RESTART, 3), 10.0), "until it is cancelled"
    timers.cancel((Timer.RESTART, 3), Timer.STOP)
    assert not timers.over((Timer.RESTART, 3), 1e9)
    assert timers.due(20.0) == {Timer.PHASE}
    assert timers.next_deadline() == NEVER


def test_a_deadline_that_is_set_again_holds_for_the_later_time() -> None:
    timers = Timers()
    timers.set(Timer.STALL, 10.0)
    timers.set(Timer.STALL, 15.0)
    assert (timers.at(Timer.STALL), timers.over(Timer.STALL, 14.9), timers.over(Timer.STALL, 15.0)) == (15, False, True)


def test_after_a_suspension_all_but_hosts_clocks_have_as_long() -> None:
    timers = Timers()
    runs_on = {Timer.BEAT, Timer.LOOK, Timer.RETRY, Timer.FENCE, Timer.PAUSE}
    for name in (*Timer, (Timer.RESTART, 3)):
        timers.set(name, 10.0)
    timers.slept(5.0)
    assert timers.due(14.9) == runs_on
    assert timers.due(15.0) == {*Timer, (Timer.RESTART, 3)}
