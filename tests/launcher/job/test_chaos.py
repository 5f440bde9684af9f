"""Faults on purpose: when they come, whom they hit, what they cost, and that no restart is counted for them."""

import signal
from typing import Any

import pytest
from testbed.job_drive import Drive, messages, notices, receivers, running
from testbed.present import present

from launcher.hangs.watch import HangPolicy
from launcher.hosts.host import Host, HostKind
from launcher.job.events import Command, Lost
from launcher.job.failures.failure import FailureKind
from launcher.job.run import Phase
from launcher.placement.chaos_plan import parse_chaos
from launcher.protocol.commands import EndAttempt, KillWorker, LoseHost, OpenStore, RestartWorker, StartWorker
from launcher.protocol.reports import Started, Stepped, StoreOpened
from launcher.protocol.two_way import Heartbeat


def training(text: str, **options: Any) -> Drive:
    drive = running("a", "b", chaos=parse_chaos(text), **options)
    for rank in range(4):
        drive.say(drive.host_of(rank), Stepped(0, rank))
    return drive


def fault(drive: Drive, after_s: float) -> KillWorker:
    (order,) = messages(drive.wait(after_s, heard="ab"), KillWorker)
    return order


def ends(drive: Drive, order: KillWorker, **changes: Any) -> list[Command]:
    host = drive.host_of(order.rank)
    return drive.say(host, drive.exited(host, order.rank, -order.signum, **changes))


def test_a_killed_worker_is_replaced_and_its_cost_known() -> None:
    drive = training("kill worker every 30s, seed 1")
    assert "--chaos: the faults begin, with seed 1" in notices(drive.commands)
    assert messages(drive.wait(29, heard="ab"), KillWorker) == []
    order = fault(drive, 1)
    assert (order.attempt, order.signum) == (0, signal.SIGKILL)
    drive.wait(0.5)
    commands = ends(drive, order, restart_policy=3, steps=50)
    assert notices(commands)[0].endswith("only this worker restarts (by --chaos, no restart is counted)")
    assert [restart.rank for restart in messages(commands, RestartWorker)] == [order.rank]
    host = drive.host_of(order.rank)
    drive.say(host, Started(0, order.rank, 999, drive.time(host)), after_s=1)
    drive.say(host, Stepped(0, order.rank), after_s=1)
    drive.wait(100, heard="ab")  # the next one, which is not over at the end
    drive.end_well()
    first, second = drive.outcome.faults
    assert (first.action, first.target) == ("kill", f"rank {order.rank} on {host}")
    assert (first.detection_s, first.recovery_s, first.steps_lost) == (0.5, 2.5, 0)
    assert (second.at_s - first.at_s, second.recovery_s) == (32.5, None), "time stands still until training goes on"


def test_the_seed_decides_whom_they_hit() -> None:
    def hit(seed: int) -> list[int]:
        drive = training(f"kill worker every 10s, seed {seed}")
        ranks = []
        for _ in range(8):
            order = fault(drive, 10)
            ranks.append(order.rank)
            ends(drive, order, restart_policy=3, steps=50)
            host = drive.host_of(order.rank)
            drive.say(host, Started(0, order.rank, 999, drive.time(host)), Stepped(0, order.rank))
        return ranks

    assert hit(7) == hit(7)
    assert hit(7) != hit(8)


@pytest.mark.parametrize(("saves", "lost"), [({0: (2, 7), 1: (1, 30)}, 7), ({}, 57), (None, None)])
def test_a_new_attempt_loses_steps_since_the_newest_checkpoint(
    saves: dict[int, tuple[int, int]] | None, lost: int | None
) -> None:
    """Without ddp (None) what was saved is not known."""
    drive = training("kill worker every 30s, seed 1", max_restarts=0)
    order = fault(drive, 30)

    def exited(rank: int) -> dict[str, int | None]:
        saved, unsaved = (0, None) if saves is None else saves.get(rank, (0, 57))
        return {"steps": 57, "saved": saved, "unsaved": unsaved}

    ends(drive, order, **exited(order.rank))
    assert receivers(drive.collected(), EndAttempt) == ["a", "b"]
    for rank in {*range(4)} - {order.rank}:
        host = drive.host_of(rank)
        drive.say(host, drive.exited(host, rank, -15, provoked=True, **exited(rank)))
    drive.swept()
    assert drive.number == 1, "no restart was needed"
    drive.begin()
    for rank in range(4):
        assert drive.job.outcome is None
        drive.say(drive.host_of(rank), Stepped(1, rank), after_s=1)
    drive.end_well()
    (cost,) = drive.outcome.faults
    assert (cost.steps_lost, cost.recovery_s) == (lost, 4.0)
    assert drive.outcome.exit_code == 0


def test_a_simulated_host_is_lost_with_all_that_is_on_it() -> None:
    hosts = tuple(Host(name, HostKind.SIMULATED, slots=2, part=part, parts=2) for part, name in enumerate("ab"))
    drive = training("kill host every 10s, seed 4", hosts=hosts)
    commands = drive.wait(10, heard="ab")
    (host,) = receivers(commands, LoseHost)
    link = drive.job.fleet.states[host].link
    drive.event(Lost(host, link, "its agent ended with status -9"), after_s=0.25)
    drive.collected("b" if host == "a" else "a")
    failure = present(drive.job.attempt).failures[0]
    assert (failure.kind, failure.host, failure.injected) == (FailureKind.HOST_LOST, host, True)
    assert drive.job.phase is Phase.ENDING
    drive.stop_all()


def test_no_one_is_hit_once_a_worker_has_finished() -> None:
    drive = training("kill worker every 30s")
    drive.say("a", drive.exited("a", 0))
    assert messages(drive.wait(100, heard="ab"), KillWorker) == []


def test_a_worker_that_finished_before_the_signal_is_no_fault() -> None:
    drive = training("kill worker every 30s")
    order = fault(drive, 30)
    host = drive.host_of(order.rank)
    drive.say(host, drive.exited(host, order.rank))
    drive.end_well()
    assert drive.outcome.exit_code == 0
    assert [cost.detection_s for cost in drive.outcome.faults] == [None]


def test_a_stopped_worker_goes_on_once_another_has_finished() -> None:
    drive = training("stop worker every 30s, seed 1", hang=HangPolicy(acts=True))
    order = fault(drive, 30)
    other = (order.rank + 1) % 4
    host = drive.host_of(other)
    (goes_on,) = messages(drive.say(host, drive.exited(host, other)), KillWorker)
    assert (goes_on.rank, goes_on.signum) == (order.rank, signal.SIGCONT)
    for rank in {0, 1, 2, 3} - {other}:
        drive.say(drive.host_of(rank), drive.exited(drive.host_of(rank), rank))
    drive.stop_all()
    assert drive.outcome.exit_code == 0


def test_a_worker_is_stopped_before_its_first_step() -> None:
    drive = running("a", "b", chaos=parse_chaos("stop worker every 5s, seed 1"), hang=HangPolicy(acts=True))
    assert fault(drive, 5).signum == signal.SIGSTOP


def test_a_worker_that_is_alone_is_not_stopped() -> None:
    chaos, hosts = parse_chaos("stop worker every 5s, seed 1"), (Host("a", HostKind.SSH, slots=1),)
    drive = running("a", hosts=hosts, chaos=chaos, hang=HangPolicy(acts=True))
    commands = drive.wait(11, heard="a")
    assert messages(commands, KillWorker) == []
    assert len([text for text in notices(commands) if "no worker is stopped this time" in text]) == 2


def test_a_job_that_starts_slowly_comes_to_a_step_between_faults() -> None:
    drive = running("a", "b", chaos=parse_chaos("kill worker every 10s, seed 1"), max_restarts=0)
    hit_at: list[float] = []
    began = drive.now
    while drive.now - began < 200:
        for order in messages(drive.wait(1, heard="ab"), KillWorker):
            hit_at.append(drive.now - began)
            ends(drive, order, restart_policy=3, steps=0)
            drive.say(drive.host_of(order.rank), Started(0, order.rank, 999, drive.time(drive.host_of(order.rank))))
    assert hit_at == pytest.approx([10, 20, 40, 80, 160], abs=5)


def test_before_all_workers_run_nothing_is_made() -> None:
    drive = Drive("a", "b", chaos=parse_chaos("kill worker every 1s"))
    drive.join()
    drive.check()
    drive.say("a", StoreOpened(0, "10.0.0.9", 29500))
    assert messages(drive.wait(20, heard="ab"), KillWorker) == []


def simulated(*names: str) -> tuple[Host, ...]:
    return tuple(Host(name, HostKind.SIMULATED, slots=2) for name in names)


def lost(drive: Drive, hosts: str) -> str:
    """Let hosts of resilient workers send heartbeats until one of them is lost on purpose."""
    for _ in range(20):
        for name in hosts:
            drive.say(name, Heartbeat(drive.time(name), resilient=True))
        if ordered := receivers(drive.wait(1.0), LoseHost):
            drive.lose(ordered[0])
            return ordered[0]
    raise AssertionError("no host was lost")


def test_lost_hosts_cost_no_restart_and_are_not_excluded() -> None:
    drive = training("kill host every 5s, seed 1", max_restarts=0, hosts=simulated("a", "b"))
    hit = []
    for _ in range(4):
        hit.append(lost(drive, "ab"))
        assert drive.job.phase is Phase.RUNNING
        drive.wait(0.1)
        other = "b" if hit[-1] == "a" else "a"
        drive.say(other, Heartbeat(drive.time(other), resilient=True))
        commands = drive.back(hit[-1])
        for host in receivers(commands, OpenStore):
            commands += drive.say(host, StoreOpened(0, "127.0.0.1", 1234))
        starts = messages(commands, StartWorker)
        assert len(starts) == 2
        for start in starts:
            drive.say(hit[-1], Started(0, start.rank, 500 + start.rank, drive.time(hit[-1])), Stepped(0, start.rank))
    assert max(map(hit.count, hit)) >= 2
    assert {state.failed_attempts for state in drive.job.fleet} == {0}
    assert [text for text in notices(drive.commands) if "excluded" in text] == []


def test_a_host_whose_workers_chaos_kills_is_not_excluded() -> None:
    drive = training("kill worker every 5s, seed 1", max_restarts=0, nnodes=(1, 2))
    hit = []
    for _ in range(5):
        order = fault(drive, 30)
        hit.append(drive.host_of(order.rank))
        ends(drive, order)
        drive.collected()
        for rank in {*range(4)} - {order.rank}:
            drive.say(drive.host_of(rank), drive.exited(drive.host_of(rank), rank, -15, provoked=True))
        drive.swept()
        drive.wait(4, heard="ab")
        assert drive.members == ("a", "b")
        drive.begin()
        for rank in range(4):
            drive.say(drive.host_of(rank), Stepped(drive.number, rank))
    assert hit[0] == hit[1] or hit[1] == hit[2] or hit[2] == hit[3] or hit[3] == hit[4]
    assert [text for text in notices(drive.commands) if "excluded" in text] == []
